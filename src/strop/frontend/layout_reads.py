"""What a forward asks about how its arguments lie in memory.

Arguments are traced dense, and made dense for kernels where they are not. A forward that asks for
strides, of an argument or of what it has computed from some, would be answered for dense ones: such
a program serves arguments that are dense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from strop.frontend.operators import Retarget

READS: dict[Callable[..., Any], str] = {
    Tensor.stride: "stride", Tensor.storage_offset: "storage_offset",
    Tensor.is_contiguous: "is_contiguous", Tensor.as_strided: "as_strided",
    torch.as_strided: "as_strided", Tensor.data_ptr: "data_ptr",
}  # fmt: skip


class LayoutReads(Retarget):
    """``Retarget`` that notes what a forward with these ``arguments`` asks."""

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        super().__init__()
        self._own = {_memory(tensor) for tensor in arguments}
        self.asked: dict[str, None] = {}
        self._is_forward = self._is_made_dense = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._is_forward and func in READS:
            self.asked[READS[func]] = None
        elif self._is_forward and func is Tensor.contiguous:
            self._is_made_dense |= _memory(args[0]) in self._own
        return super().__torch_function__(func, types, args, kwargs)

    @contextmanager
    def of_forward(self) -> Iterator[None]:
        """The body is the forward; before and after it the tracer asks."""
        self._is_forward = True
        try:
            yield
        finally:
            self._is_forward = False

    def results(self, leaves: Sequence[Any]) -> None:
        """An argument that was made dense and then returned is the caller's own tensor only where
        that was dense before."""
        if self._is_made_dense and any(
            isinstance(leaf, Tensor) and _memory(leaf) in self._own for leaf in leaves
        ):
            self.asked["contiguous"] = None


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
