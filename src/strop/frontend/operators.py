"""Operators that capture keeps whole: linear, conv2d and attention as one node each.

While a module is traced, the torch.nn.functional calls below are retargeted to these operators.
Their shape rules are plain arithmetic, so tracing never asks a convolution or attention backend,
whose answers would plant guards on batch and size. They also run as ordinary torch operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

_library = torch.library.Library("strop", "DEF")
_library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.define(
    "conv2d(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation,"
    " int groups) -> Tensor"
)
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float? scale) -> Tensor"
)
_library.define(
    "group_norm(Tensor x, int groups, Tensor? weight, Tensor? bias, float eps) -> Tensor"
)


def _conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int],
            padding: list[int], dilation: list[int], groups: int) -> Tensor:  # fmt: skip
    return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool,
               scale: float | None) -> Tensor:  # fmt: skip
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale)


_library.define("nearest(Tensor x, SymInt[] size) -> Tensor")
_library.impl("nearest", lambda x, size: F.interpolate(x, size), "CompositeExplicitAutograd")
_library.impl("linear", F.linear, "CompositeExplicitAutograd")
_library.impl("conv2d", _conv2d, "CompositeExplicitAutograd")
_library.impl("group_norm", F.group_norm, "CompositeExplicitAutograd")
_library.impl("attention", _attention, "CompositeExplicitAutograd")


def _check_types(*tensors: Tensor | None) -> None:
    """Libraries take one type and one device; eager's own error says so better."""
    kinds = {(t.dtype, t.device) for t in tensors if t is not None}
    torch._check(len(kinds) == 1, lambda: f"operands of several types or devices: {kinds}")


def _linear_shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    torch._check(x.shape[-1] == weight.shape[-1])
    _check_types(x, weight, bias)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _conv2d_shape(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int],
                  padding: list[int], dilation: list[int], groups: int) -> Tensor:  # fmt: skip
    torch._check(x.shape[1] == weight.shape[1] * groups)
    _check_types(x, weight, bias)
    spatial = [
        (size + 2 * pad - gap * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, gap in zip(
            x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    ]
    return x.new_empty((x.shape[0], weight.shape[0], *spatial))


def _nearest_shape(x: Tensor, size: Sequence[int]) -> Tensor:
    return x.new_empty((*x.shape[:2], *size))


def _attention_shape(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool,
                     scale: float | None) -> Tensor:  # fmt: skip
    torch._check(q.shape[-1] == k.shape[-1])
    _check_types(q, k, v)
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _group_norm_shape(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None,
                      eps: float) -> Tensor:  # fmt: skip
    """As eager: contiguous, whatever x is. torch's own rule compares sizes with 1 on CUDA."""
    if isinstance(x.shape[1], int):
        torch._check(x.shape[1] % groups == 0)
    return x.new_empty(x.shape)


for _name, _rule in (
    ("linear", _linear_shape), ("conv2d", _conv2d_shape), ("attention", _attention_shape),
    ("nearest", _nearest_shape),
    ("group_norm", _group_norm_shape),
):  # fmt: skip
    torch.library.register_fake(f"strop::{_name}", _rule)


def _pair(value: int | Sequence[int]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


def _call_conv2d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
                 padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Tensor:  # fmt: skip
    if isinstance(padding, str) or input.dim() != 4:
        return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
    result: Tensor = torch.ops.strop.conv2d(
        input, weight, bias, _pair(stride), _pair(padding), _pair(dilation), groups
    )
    return result


def _call_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    result: Tensor = torch.ops.strop.linear(input, weight, bias)
    return result


def _call_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
                    enable_gqa: bool = False) -> Tensor:  # fmt: skip
    if dropout_p or enable_gqa or query.dim() != 4:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    result: Tensor = torch.ops.strop.attention(query, key, value, attn_mask, is_causal, scale)
    return result


def _call_group_norm(input: Tensor, num_groups: int, weight: Tensor | None = None,
                     bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:  # fmt: skip
    result: Tensor = torch.ops.strop.group_norm(input, num_groups, weight, bias, eps)
    return result


def _call_interpolate(input: Tensor, size: Any = None, scale_factor: Any = None,
                      mode: str = "nearest", *args: Any, **kwargs: Any) -> Tensor:  # fmt: skip
    """Nearest by a whole factor is a broadcast: each pixel is read several times, none computed."""
    factors = {float(f) for f in scale_factor} if isinstance(scale_factor, tuple | list) else (
        {float(scale_factor)} if scale_factor is not None else set())  # fmt: skip
    if mode != "nearest" or input.dim() != 4 or len(factors) != 1 or not min(factors).is_integer():
        if mode == "nearest" and input.dim() == 4 and size is not None and not _trains(input):
            resized: Tensor = torch.ops.strop.nearest(input, _pair(size))
            return resized
        return F.interpolate(input, size, scale_factor, mode, *args, **kwargs)
    factor = int(factors.pop())
    n, c, h, w = input.shape
    tall = input.unsqueeze(3).unsqueeze(5).expand(n, c, h, factor, w, factor)
    return tall.reshape(n, c, h * factor, w * factor)


def _trains(x: Tensor) -> bool:
    """The operators of this file have no gradients."""
    return torch.is_grad_enabled() and x.requires_grad


def _call_pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
              ) -> Tensor:  # fmt: skip
    """Constant padding as a cat of constants: torch's own kernel fixes every size."""
    if mode != "constant":
        return F.pad(input, pad, mode, value)
    for dim, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True), 1):
        if before < 0 or after < 0:  # cropped
            start, end = max(-before, 0), input.shape[-dim] - max(-after, 0)
            input = input.narrow(-dim, start, end - start)
            before, after = max(before, 0), max(after, 0)
        shape = list(input.shape)
        sides = [torch.full([*shape[:-dim], width, *shape[len(shape) - dim + 1 :]], value or 0,
                            dtype=input.dtype, device=input.device)
                 if width else None for width in (before, after)]  # fmt: skip
        blocks = [block for block in (sides[0], input, sides[1]) if block is not None]
        input = torch.cat(blocks, -dim) if len(blocks) > 1 else input
    return input


def _call_constant_pad(x: Tensor, pad: Sequence[int], value: float = 0) -> Tensor:
    return _call_pad(x, pad, "constant", value)


def _call_squeeze(x: Tensor, dim: Any = None) -> Tensor:
    """Whether a size is 1 is asked aloud: torch's own rule takes symbolic ones for larger."""
    dims = range(x.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    result: Tensor = torch.ops.aten.squeeze.dims(x, [d for d in dims if x.shape[d] == 1])
    return result


# made of torch's own operators, so that gradients come by themselves
COMPOSITES: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.interpolate: _call_interpolate,
    F.pad: _call_pad,
    torch._C._nn.pad: _call_pad,
    torch.constant_pad_nd: _call_constant_pad,
    torch.squeeze: _call_squeeze,
    Tensor.squeeze: _call_squeeze,
}
RETARGET: dict[Callable[..., Any], Callable[..., Tensor]] = {
    **COMPOSITES,
    F.linear: _call_linear,
    F.conv2d: _call_conv2d,
    torch.conv2d: _call_conv2d,
    F.scaled_dot_product_attention: _call_attention,
    F.group_norm: _call_group_norm,
}


def retarget(gm: GraphModule, *, trains: bool) -> None:
    """The same in a graph that somebody else has traced."""
    table = COMPOSITES if trains else RETARGET
    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.target = table.get(node.target, node.target)
    gm.recompile()


class Retarget(TorchFunctionMode):
    """Send the functionals of RETARGET to the operators of this file while tracing."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return RETARGET.get(func, func)(*args, **(kwargs or {}))
