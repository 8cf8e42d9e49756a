"""Kernels of ours for library calls, begun while a module is still being traced.

A trace takes seconds in which no compiler has work to do. What a convolution, a linear or an
attention will be is known when the module calls it: a kernel is printed at once, the same that the
finished program asks for at the sizes of the trace. A batch of 1, which is traced as 2, may need
others; if a pass changes the call, as where linears are merged, a kernel may be built in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.utils import _pair
from torch.overrides import TorchFunctionMode

from strop.ir.device import Device
from strop.ir.dims import const
from strop.ir.graph import Node
from strop.ir.source import KernelSource
from strop.kernels import library

Begin = Callable[[Sequence[KernelSource]], None]


class EarlyBuild(TorchFunctionMode):
    """Give ``begin``, within the body, the kernels that calls of torch's functions will run, once
    each."""

    def __init__(self, begin: Begin, device: Device, off: tuple[str, ...]) -> None:
        super().__init__()
        self._begin, self._device, self._off = begin, device, off
        self._seen = set[KernelSource]()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in CALLS:
            self._foresee(CALLS[func](*args, **(kwargs or {})))
        return result

    def _foresee(self, node: Node | None) -> None:
        if node is None:
            return
        found = library.sources_of(node, {}, self._device, self._off)
        sources = [source for source in found if source not in self._seen]
        self._seen.update(sources)
        if sources:
            self._begin(sources)


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Node | None:
    if isinstance(padding, str) or input.dim() != 4:
        return None
    attrs = {
        "stride": _pair(stride),
        "padding": _pair(padding),
        "dilation": _pair(dilation),
        "groups": groups,
    }
    return _called("conv2d", (input, weight), attrs)  # the bias is the next kernel's


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Node | None:
    if dropout_p or enable_gqa or query.dim() != 4:
        return None
    operands = (query, key, value, *(() if attn_mask is None else (attn_mask,)))
    return _called("attention", operands, {"causal": is_causal, "scale": scale})


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Node | None:
    return _called("linear", (input, weight), {})


def _called(op: str, operands: Sequence[Tensor], attrs: dict[str, Any]) -> Node | None:
    """Return the call at the sizes of the trace; None where these are not known."""
    inputs = []
    for x in operands:
        sizes = [s.node.hint if isinstance(s, torch.SymInt) else s for s in x.shape]
        if None in sizes:
            return None
        inputs.append(Node("input", (), {}, tuple(map(const, sizes)), x.dtype))
    return Node(op, tuple(inputs), attrs, inputs[0].shape, inputs[0].dtype)


CALLS: dict[Any, Callable[..., Node | None]] = {  # of the function's own arguments
    F.conv2d: _convolution,
    F.linear: _linear,
    torch._C._nn.scaled_dot_product_attention: _attention,
}
