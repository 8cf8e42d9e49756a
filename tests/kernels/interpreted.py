"""A library of GPU kernels that Triton's interpreter runs: for the runtime's own calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from strop.ir.device import Device
from strop.ir.source import KernelSource
from tests.gpus import H100


class Interpreted:
    """Stands where a GPU's kernels are built and bound. Finds tensors by their addresses."""

    def __init__(self, device: Device = H100) -> None:
        self.device = device
        self.ran: list[str] = []
        self.early: list[bool] = []
        self._tensors: dict[int, Tensor] = {}

    def known(self, tensor: Tensor) -> Tensor:
        """The tensor, which kernels may be asked to read or write from now on."""
        self._tensors[tensor.data_ptr()] = tensor
        return tensor

    def at(self, pointer: int) -> Tensor:
        return self._tensors[pointer]

    def build(self, sources: Sequence[KernelSource]) -> None:
        pass

    def bind(
        self,
        source: KernelSource,
        pointers: Sequence[int],
        scalars: Sequence[int],
        stream: int,
        early: bool = False,
        views: Sequence[Any] = (),
    ) -> _Bound:
        self.early.append(early)
        return _Bound(self, source, {f"s{i}": n for i, n in enumerate(scalars)}, views)


class _Bound:
    def __init__(
        self,
        library: Interpreted,
        source: KernelSource,
        scalars: dict[str, int],
        views: Sequence[Any],
    ) -> None:
        self._library, self._source, self._scalars = library, source, scalars
        self._views = list(views)
        self._pointers = [0] * len(source.params)

    def set_pointer(self, place: int, pointer: int) -> None:
        self._pointers[place] = pointer

    def __call__(self) -> None:
        from triton.tools.tensor_descriptor import TensorDescriptor

        from strop.codegen.triton_interpreter import interpret

        views, found = iter(self._views), list[Any]()
        for place, pointer in enumerate(self._pointers):
            tensor = self._library.at(pointer)
            if box := self._source.box(place):
                sizes, strides = next(views)
                flat = tensor.as_strided(sizes, strides)
                found.append(TensorDescriptor.from_tensor(flat, list(box)))
            else:
                found.append(tensor)
        self._library.ran.append(self._source.name)
        interpret(self._source, found, self._scalars)
