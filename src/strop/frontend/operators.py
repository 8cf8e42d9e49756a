"""Operators that capture keeps whole: linear, matmul, conv2d and attention as one node each.

While a module is traced, the torch.nn.functional calls below are retargeted to these operators.
Their shape rules are plain arithmetic, so tracing never asks a convolution or attention backend,
whose answers would plant guards on batch and size. They also run as ordinary torch operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from strop.frontend.layouts import LAYOUTS, call_reshape
from strop.frontend.opened import twins
from strop.frontend.whole import CALLS, call_mirrored_pad

_library = torch.library.Library("strop", "DEF")
_library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.define("matmul(Tensor x, Tensor y) -> Tensor")
_library.define("rms_norm(Tensor x, SymInt[] normalized, Tensor? weight, float? eps) -> Tensor")
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
_library.impl("matmul", torch.matmul, "CompositeExplicitAutograd")
_library.impl("rms_norm", torch.rms_norm, "CompositeExplicitAutograd")
_library.impl("conv2d", _conv2d, "CompositeExplicitAutograd")
_library.impl("group_norm", F.group_norm, "CompositeExplicitAutograd")
_library.impl("attention", _attention, "CompositeExplicitAutograd")


def _linear_shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    torch._check(x.shape[-1] == weight.shape[-1])
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _matmul_shape(x: Tensor, y: Tensor) -> Tensor:
    torch._check(x.shape[-1] == y.shape[-2])
    lead = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return x.new_empty((*lead, x.shape[-2], y.shape[-1]))


def _rms_norm_shape(x: Tensor, normalized: Sequence[int], weight: Tensor | None,
                    eps: float | None) -> Tensor:  # fmt: skip
    last = x.shape[x.dim() - len(normalized) :]
    torch._check(all(a == b for a, b in zip(last, normalized, strict=True)))
    return x.new_empty(x.shape)


def _conv2d_shape(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int],
                  padding: list[int], dilation: list[int], groups: int) -> Tensor:  # fmt: skip
    torch._check(x.shape[1] == weight.shape[1] * groups)
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
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _group_norm_shape(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None,
                      eps: float) -> Tensor:  # fmt: skip
    """As eager: contiguous, whatever x is. torch's own rule compares sizes with 1 on CUDA."""
    if weight is not None:
        torch._check(x.shape[1] == weight.shape[0])
    return x.new_empty(x.shape)


for _name, _rule in (
    ("linear", _linear_shape), ("conv2d", _conv2d_shape), ("attention", _attention_shape),
    ("nearest", _nearest_shape), ("matmul", _matmul_shape),
    ("group_norm", _group_norm_shape), ("rms_norm", _rms_norm_shape),
):  # fmt: skip
    torch.library.register_fake(f"strop::{_name}", _rule)


def _pair(value: int | Sequence[int]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


def _call_conv2d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
                 padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Tensor:  # fmt: skip
    if input.dim() != 4:
        return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
    dilation = _pair(dilation)
    if padding == "same":
        input, padding = _padded_to_same(input, weight.shape[2:], dilation)
    padding = 0 if padding == "valid" else padding
    result: Tensor = torch.ops.strop.conv2d(
        input, weight, bias, _pair(stride), _pair(padding), dilation, groups
    )
    return result


def _padded_to_same(x: Tensor, kernel: Sequence[int], dilation: Sequence[int]
                    ) -> tuple[Tensor, list[int]]:  # fmt: skip
    """What the convolution pads on both sides, and x with one more at the end of odd rests."""
    totals = [gap * (size - 1) for size, gap in zip(kernel, dilation, strict=True)]
    if any(total % 2 for total in totals):
        x = _call_pad(x, [side for total in reversed(totals) for side in (0, total % 2)])
    return x, [total // 2 for total in totals]


def _call_conv1d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
                 padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Tensor:  # fmt: skip
    """A row of pixels."""
    if input.dim() != 3:
        return torch.conv1d(input, weight, bias, stride, padding, dilation, groups)
    stride, dilation = (_single(value) for value in (stride, dilation))
    sides = padding if isinstance(padding, str) else [0, _single(padding)]
    row = _call_conv2d(input.unsqueeze(2), weight.unsqueeze(2), bias, [1, stride], sides,
                       [1, dilation], groups)  # fmt: skip
    return row.squeeze(2)


def _single(value: int | Sequence[int]) -> int:
    return value if isinstance(value, int) else value[0]


def _call_matmul(x: Tensor, y: Tensor) -> Tensor:
    if x.dim() < 2 or y.dim() < 2 or x.dim() == y.dim() == 2:
        return torch.matmul(x, y)
    result: Tensor = (torch.ops.strop.linear(x, y.t(), None) if y.dim() == 2
                      else torch.ops.strop.matmul(x, y))  # fmt: skip
    return result


def _call_rms_norm(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
                   eps: float | None = None) -> Tensor:  # fmt: skip
    result: Tensor = torch.ops.strop.rms_norm(input, list(normalized_shape), weight, eps)
    return result


def _call_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    result: Tensor = torch.ops.strop.linear(input, weight, bias)
    return result


def _call_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
                    enable_gqa: bool = False) -> Tensor:  # fmt: skip
    if dropout_p or query.dim() != 4:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key, value = (_repeated_heads(x, query.shape[1] // x.shape[1]) for x in (key, value))
    scale = 1 / math.sqrt(int(query.shape[-1])) if scale is None else scale  # fixes the width
    result: Tensor = torch.ops.strop.attention(query, key, value, attn_mask, is_causal, scale)
    return result


def _call_batch_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None,
                     running_mean: Tensor | None, *rest: Any) -> Tensor:  # fmt: skip
    """torch's shape rule does not say that the channels are those of the statistics."""
    if running_mean is not None:
        torch._check(input.shape[1] == running_mean.shape[0])
    return torch.batch_norm(input, weight, bias, running_mean, *rest)


def _repeated_heads(x: Tensor, times: int) -> Tensor:
    """Grouped queries: each head of keys and values serves several of them."""
    batch, heads, length, width = x.shape
    spread = x.unsqueeze(2).expand(batch, heads, times, length, width)
    return call_reshape(spread, batch, heads * times, length, width) if times > 1 else x


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
    return call_reshape(tall, n, c, h * factor, w * factor)


def _trains(x: Tensor) -> bool:
    """The operators of this file have no gradients."""
    return torch.is_grad_enabled() and x.requires_grad


def _call_pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
              ) -> Tensor:  # fmt: skip
    """Constant padding as a cat of constants: torch's own kernel fixes every size."""
    if mode != "constant":
        return (F.pad if _trains(input) else call_mirrored_pad)(input, pad, mode)
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


def _pooled_to_one(usual: Callable[..., Any], rank: int) -> Callable[..., Tensor]:
    """Adaptive average pooling to one element is a mean; torch's own rule looks at memory."""

    def pool(input: Tensor, output_size: Any) -> Tensor:
        sizes = [output_size] if isinstance(output_size, int) else list(output_size)
        if any(size != 1 for size in sizes):
            result: Tensor = usual(input, output_size)
            return result
        return input.mean(list(range(-rank, 0)), keepdim=True)

    return pool


# made of torch's own operators, so that gradients come by themselves
COMPOSITES: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.interpolate: _call_interpolate,
    F.pad: _call_pad,
    torch._C._nn.pad: _call_pad,
    torch.constant_pad_nd: _call_constant_pad,
    torch.squeeze: _call_squeeze,
    Tensor.squeeze: _call_squeeze,
    **{
        usual: _pooled_to_one(usual, rank)
        for rank, usual in (
            (1, torch.adaptive_avg_pool1d),
            (2, torch._C._nn.adaptive_avg_pool2d),
            (3, torch._C._nn.adaptive_avg_pool3d),
        )
    },
}
RETARGET: dict[Callable[..., Any], Callable[..., Tensor]] = {
    **COMPOSITES,
    F.linear: _call_linear,
    F.conv2d: _call_conv2d,
    torch.conv2d: _call_conv2d,
    F.conv1d: _call_conv1d,
    F.scaled_dot_product_attention: _call_attention,
    F.group_norm: _call_group_norm,
    torch.rms_norm: _call_rms_norm,
    torch.batch_norm: _call_batch_norm,
    torch.matmul: _call_matmul,
    Tensor.matmul: _call_matmul,
    **CALLS,
}
TRACED = {**RETARGET, **LAYOUTS}
_TWINS = twins(TRACED)


def retarget(gm: GraphModule, *, trains: bool) -> None:
    """The same in a graph that somebody else has traced."""
    table = COMPOSITES if trains else RETARGET
    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.target = table.get(node.target, node.target)
    gm.recompile()


class Retarget(TorchFunctionMode):
    """Send the functionals of TRACED to the functions of this folder while tracing."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in TRACED and func in _TWINS:
            with self:
                return _TWINS[func](*args, **(kwargs or {}))
        return TRACED.get(func, func)(*args, **(kwargs or {}))
