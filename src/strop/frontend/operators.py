"""Keep operators whole in a capture: linear, matmul, conv2d and attention are one node each.

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
from torch import SymFloat, SymInt, Tensor
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from strop.frontend import joint, whole
from strop.frontend.autocast import as_autocast
from strop.frontend.differentiated import LEVELS, asks_for_gradients, define
from strop.frontend.draws import DRAWS
from strop.frontend.formats import pictures, pictures_on_cpu, traced
from strop.frontend.indexed import made_on
from strop.frontend.layouts import LAYOUTS, as_pictures, call_contiguous, call_reshape
from strop.frontend.opened import twins
from strop.frontend.resizing import call_grid_sampler, call_interpolate
from strop.frontend.whole import CALLS, call_mirrored_pad, check_types, shaping

# torch's own, whatever a user has put in its place in torch.nn.functional
torchs_attention = torch._C._nn.scaled_dot_product_attention

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
    "linspace(Scalar start, Scalar end, SymInt steps, ScalarType dtype, Device device) -> Tensor"
)
_library.define(
    "group_norm(Tensor x, int groups, Tensor? weight, Tensor? bias, float eps) -> Tensor"
)


def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    return torchs_attention(q, k, v, mask, 0.0, causal, scale=scale)


def _linspace(
    start: float, end: float, steps: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.linspace(start, end, steps, dtype=dtype, device=device)


def _linear_shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    whole.check_linear(x, weight, bias)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _matmul_shape(x: Tensor, y: Tensor) -> Tensor:
    torch._check(x.shape[-1] == y.shape[-2])
    lead = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return x.new_empty((*lead, x.shape[-2], y.shape[-1]))


def _rms_norm_shape(
    x: Tensor, normalized: Sequence[int], weight: Tensor | None, eps: float | None
) -> Tensor:
    torch._check(len(normalized) > 0)
    shapes = [x.shape[x.dim() - len(normalized) :]] + ([] if weight is None else [weight.shape])
    for shape in shapes:
        torch._check(len(shape) == len(normalized))
        torch._check(all(a == b for a, b in zip(shape, normalized, strict=True)))
    return pictures(x, x.shape)


def _conv2d_shape(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    torch._check(x.shape[1] == weight.shape[1] * groups)
    torch._check(bias is None or bias.shape == weight.shape[:1])
    check_types(x, weight, bias)
    spatial = [
        (size + 2 * pad - gap * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, gap in zip(
            x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    ]
    return pictures(x, (x.shape[0], weight.shape[0], *spatial), by=shaping(x, weight))


def _linspace_shape(
    start: float, end: float, steps: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty(steps, dtype=dtype, device=device)


def _attention_shape(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    whole.check_attention(q, k, v, mask)
    shape = (*q.shape[:-1], v.shape[-1])
    order = sorted(range(q.dim()), key=lambda d: -traced(q.stride(d)))
    is_whole = q.shape[-1] == v.shape[-1] and order[-1] == q.dim() - 1
    if q.device.type == "cuda":  # as it chooses among its libraries where nobody tells it to
        is_whole &= q.dtype != torch.float64
        order = [0, 2, 1, 3] if q.dtype == torch.float32 else order
    if not is_whole:
        return q.new_empty(shape)
    back = sorted(range(q.dim()), key=order.__getitem__)
    return q.new_empty([shape[d] for d in order]).permute(back)  # as its queries lie


def _group_norm_shape(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Give eager's layout: contiguous, but channels-last where x is so on a CPU.

    torch's own rule compares sizes with 1, this one asks for nothing but what must be so.
    """
    for parameter in (weight, bias):
        if parameter is not None:
            torch._check(x.shape[1] == parameter.shape[0])
    torch._check(x.shape[1] % groups == 0)
    return pictures_on_cpu(x, x.shape)


for _name, _as_torch, _shapes in (
    ("linear", F.linear, _linear_shape),
    ("matmul", torch.matmul, _matmul_shape),
    ("conv2d", _conv2d, _conv2d_shape),
    ("attention", _attention, _attention_shape),
    ("group_norm", F.group_norm, _group_norm_shape),
    ("rms_norm", torch.rms_norm, _rms_norm_shape),
    ("linspace", _linspace, _linspace_shape),
):
    define(_library, _name, _as_torch, _shapes)


def _pair(value: int | Sequence[int]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


def _call_conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
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


def _padded_to_same(
    x: Tensor, kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[Tensor, list[int]]:
    """Return the padding of both sides, and x with one more at the end of odd rests."""
    totals = [gap * (size - 1) for size, gap in zip(kernel, dilation, strict=True)]
    if any(total % 2 for total in totals):
        x = _call_pad(x, [side for total in reversed(totals) for side in (0, total % 2)])
    return x, [total // 2 for total in totals]


def _call_conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """Convolve a row of pixels as a picture."""
    if input.dim() != 3:
        return torch.conv1d(input, weight, bias, stride, padding, dilation, groups)
    stride, dilation = (_single(value) for value in (stride, dilation))
    sides = padding if isinstance(padding, str) else [0, _single(padding)]
    input = call_contiguous(input)  # as eager does, which tells its strides
    row = _call_conv2d(
        input.unsqueeze(2), weight.unsqueeze(2), bias, [1, stride], sides, [1, dilation], groups
    )
    return row.squeeze(2)


def _single(value: int | Sequence[int]) -> int:
    return value if isinstance(value, int) else value[0]


def _call_matmul(x: Tensor, y: Tensor) -> Tensor:
    if x.dim() < 2 or y.dim() < 2 or x.dim() == y.dim() == 2:
        return torch.matmul(x, y)
    result: Tensor = (
        torch.ops.strop.linear(x, y.t(), None) if y.dim() == 2 else torch.ops.strop.matmul(x, y)
    )
    return result


def _call_rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    result: Tensor = torch.ops.strop.rms_norm(input, list(normalized_shape), weight, eps)
    return result


def _call_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Return the very input where nothing is dropped, as eager does; torch's trace copies it."""
    return input if not training or p == 0 else F.dropout(input, p, training, inplace)


def _call_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p or query.dim() != 4:
        return torchs_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key, value = (_repeated_heads(x, query.shape[1] // x.shape[1]) for x in (key, value))
    query, key, value = whole.spread_alike(query, key, value)
    scale = 1 / math.sqrt(int(query.shape[-1])) if scale is None else scale  # fixes the width
    result: Tensor = torch.ops.strop.attention(query, key, value, attn_mask, is_causal, scale)
    return result


def _call_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    *rest: Any,
) -> Tensor:
    """Check that statistics have the channels of x, which torch's shape rule does not do."""
    if running_mean is not None:
        torch._check(input.shape[1] == running_mean.shape[0])
    return as_pictures(torch.batch_norm(input, weight, bias, running_mean, *rest), input)


def _repeated_heads(x: Tensor, times: int) -> Tensor:
    """Repeat heads for grouped queries: each head of keys and values serves several of them."""
    batch, heads, length, width = x.shape
    spread = x.unsqueeze(2).expand(batch, heads, times, length, width)
    return call_reshape(spread, batch, heads * times, length, width) if times > 1 else x


def _call_group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    result: Tensor = torch.ops.strop.group_norm(input, num_groups, weight, bias, eps)
    return result


def _call_affine_grid(
    theta: Tensor, size: Sequence[int], align_corners: bool | None = None
) -> Tensor:
    """Compute the grid from places: torch's gradient of it knows no symbolic sizes."""
    sides = list(size)[2:]
    rank, dtype = len(sides), joint.wide(theta)
    whole = (size[0], rank, rank + 1)
    if rank not in (2, 3) or theta.dim() != 3 or theta.shape != whole:
        return F.affine_grid(theta, list(size), align_corners)  # its own error
    ones = [1] * rank
    columns = [c.reshape(-1, *ones, rank) for c in theta.to(dtype).unbind(-1)]
    grid = columns[-1]
    for after, (count, column) in enumerate(zip(reversed(sides), columns, strict=False)):
        doubled = torch.arange(1 - count, count, 2, dtype=dtype, device=theta.device)
        width = torch.sym_max(count - 1, 1) if align_corners else count
        grid = grid + (doubled / width).reshape(-1, *ones[:after], 1) * column
    kind, is_wide = theta.device.type, theta.dtype == torch.float64
    is_cast = torch.is_autocast_enabled(kind) and not is_wide  # it is a product of matrices
    return grid.to(torch.get_autocast_dtype(kind) if is_cast else theta.dtype)


def _call_linspace(
    start: Any,
    end: Any,
    steps: Any,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **kwargs: Any,
) -> Tensor:
    """Compute linspace from a number of steps that may be a symbol; torch's own would fix it."""
    dtype = dtype or torch.get_default_dtype()
    are_numbers = (isinstance(x, int | float | SymInt | SymFloat) for x in (start, end))
    is_known = dtype in (torch.float32, torch.float64) and all(are_numbers)
    if not isinstance(steps, SymInt) or not is_known or any(kwargs.values()):
        return torch.linspace(start, end, steps, dtype=dtype, device=device, **kwargs)
    torch._check(steps >= 0)
    device = torch.get_default_device() if device is None else torch.device(device)
    result: Tensor = torch.ops.strop.linspace(start, end, steps, dtype, device)
    return result


def _call_embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Reduce bags of one size as rows of a table."""
    if input.dim() != 2 or max_norm is not None or padding_idx is not None or sparse:
        return F.embedding_bag(
            input,
            weight,
            offsets,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            per_sample_weights,
            include_last_offset,
            padding_idx,
        )
    rows = F.embedding(input, weight, scale_grad_by_freq=scale_grad_by_freq)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    return rows.amax(1) if mode == "max" else rows.sum(1) if mode == "sum" else rows.mean(1)


def _trains(x: Tensor) -> bool:
    """Tell whether x needs a gradient, which the operators of this file do not have."""
    return torch.is_grad_enabled() and x.requires_grad


def _call_pad(
    input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Tensor:
    """Pad with a constant as a cat of constants: torch's own kernel fixes every size."""
    if mode == "circular" and min(pad) >= 0:
        return _wrapped_around(input, pad)
    if mode != "constant":
        return (F.pad if _trains(input) else call_mirrored_pad)(input, pad, mode)
    given = input
    for dim, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True), 1):
        if before < 0 or after < 0:  # cropped
            start, end = max(-before, 0), input.shape[-dim] - max(-after, 0)
            input = input.narrow(-dim, start, end - start)
            before, after = max(before, 0), max(after, 0)
        shape = list(input.shape)
        sides = [
            torch.full(
                [*shape[:-dim], width, *shape[len(shape) - dim + 1 :]],
                value or 0,
                dtype=input.dtype,
                device=input.device,
            )
            if width
            else None
            for width in (before, after)
        ]
        blocks = [block for block in (sides[0], input, sides[1]) if block is not None]
        input = torch.cat(blocks, -dim) if len(blocks) > 1 else input
    return as_pictures(input, given) if any(width > 0 for width in pad) else input.clone()


def _wrapped_around(x: Tensor, pad: Sequence[int]) -> Tensor:
    """Join pieces from the other ends by a cat; torch's own kernel writes them in place, into a
    contiguous result."""
    if not any(pad):
        return x.clone(memory_format=torch.contiguous_format)
    for dim, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True), 1):
        end = x.narrow(-dim, x.shape[-dim] - before, before) if before else None
        start = x.narrow(-dim, 0, after) if after else None
        x = torch.cat([piece for piece in (end, x, start) if piece is not None], -dim)
    return call_contiguous(x)


def _call_constant_pad(x: Tensor, pad: Sequence[int], value: float = 0) -> Tensor:
    return _call_pad(x, pad, "constant", value)


def _call_squeeze(x: Tensor, dim: Any = None) -> Tensor:
    """Ask aloud whether a size is 1: torch's own rule takes symbolic ones for larger."""
    dims = range(x.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    if not x.dim():  # torch takes a number for a tensor of one dim
        dims = ()
    result: Tensor = torch.ops.aten.squeeze.dims(x, [d for d in dims if x.shape[d] == 1])
    return result


def _pooled_to_one(usual: Callable[..., Any], rank: int) -> Callable[..., Tensor]:
    """Make adaptive average pooling to one element a mean; torch's own looks at memory."""

    def pool(input: Tensor, output_size: Any) -> Tensor:
        is_one = (
            output_size == 1 if isinstance(output_size, int) else (list(output_size) == [1] * rank)
        )
        if not is_one:
            result: Tensor = usual(input, output_size)
            return result
        return input.mean(list(range(-rank, 0)), keepdim=True)

    return pool


def _call_max_pool1d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    """Pool as two dims, because torch's own way to two dims fixes the length."""
    if return_indices:
        found: Tensor = torch.max_pool1d_with_indices(  # type: ignore[assignment]
            input, kernel_size, stride or [], padding, dilation, ceil_mode
        )
        return found

    def flat(value: Any, other: int) -> tuple[int, int]:
        return other, value if isinstance(value, int) else value[0]

    torch._check(all(size != 0 for size in input.shape[-2:]))
    steps = kernel_size if stride is None or stride == [] or stride == () else stride
    pooled = torch.max_pool2d(
        input.unsqueeze(-2),
        flat(kernel_size, 1),
        flat(steps, 1),
        flat(padding, 0),
        flat(dilation, 1),
        ceil_mode,
    )
    pooled = pooled.squeeze(-2)
    # eager has a kernel of its own for what needs no gradient, whose results are contiguous
    is_trained = torch.is_grad_enabled() and input.requires_grad
    return pooled if is_trained or input.device.type != "cpu" else call_contiguous(pooled)


def _repeated(usual: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Repeat to a given length, which torch 2.11 would compare with one that it fixes."""

    def call(*args: Any, output_size: Any = None, **named: Any) -> Tensor:
        repeats, dim = (
            named.get(name, args[place] if len(args) > place else None)
            for place, name in enumerate(("repeats", "dim"), 1)
        )
        if output_size is None:
            return usual(*args, **named)
        if not isinstance(repeats, int | torch.SymInt):
            return usual(*args, output_size=output_size, **named)
        result = usual(*args, **named)
        torch._check(result.shape[0 if dim is None else dim] == output_size)
        return result

    return call


def _from_size(usual: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a tensor from a size, which torch would read for once and for all."""

    def call(
        data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **how: Any
    ) -> Tensor:
        if isinstance(data, torch.SymInt) and not how:
            size: Any = data
            return torch.full((), size, dtype=dtype or torch.int64, device=device)
        return made_on(usual, data, dtype=dtype, device=device, **how)

    return call


# made of torch's own operators, so that gradients come by themselves
COMPOSITES: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.interpolate: call_interpolate,
    F.affine_grid: _call_affine_grid,
    torch.affine_grid_generator: _call_affine_grid,
    F.embedding_bag: _call_embedding_bag,
    F.multilabel_margin_loss: whole.call_multilabel_margin_loss,
    **whole.WITH_VIEWS,
    torch.linspace: _call_linspace,
    torch.tensor: _from_size(torch.tensor),
    torch.as_tensor: _from_size(torch.as_tensor),
    F.pad: _call_pad,
    torch._C._nn.pad: _call_pad,
    torch.constant_pad_nd: _call_constant_pad,
    F.max_pool1d: _call_max_pool1d,
    torch.max_pool1d: _call_max_pool1d,
    torch.repeat_interleave: _repeated(torch.repeat_interleave),
    Tensor.repeat_interleave: _repeated(Tensor.repeat_interleave),
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
    F.linear: as_autocast("linear", whole.call_linear),
    F.conv2d: as_autocast("conv2d", _call_conv2d),
    torch.conv2d: as_autocast("conv2d", _call_conv2d),
    F.conv1d: as_autocast("conv1d", _call_conv1d),
    torchs_attention: as_autocast("scaled_dot_product_attention", _call_attention),
    F.group_norm: as_autocast("group_norm", _call_group_norm),
    torch.rms_norm: as_autocast("rms_norm", _call_rms_norm),
    torch.batch_norm: _call_batch_norm,
    F.dropout: _call_dropout,
    torch.grid_sampler: call_grid_sampler,
    torch.matmul: as_autocast("matmul", _call_matmul),
    Tensor.matmul: as_autocast("matmul", _call_matmul),
    **CALLS,
    **DRAWS,
}
TRACED = {**RETARGET, **LAYOUTS}
_TWINS = twins(TRACED)


def retarget(gm: GraphModule, *, trains: bool) -> None:
    """Do the same in a graph that somebody else has traced, and in the graphs inside it."""
    table = {**LEVELS, **(COMPOSITES | joint.RETARGET if trains else RETARGET)}
    for graph in (m for m in gm.modules() if isinstance(m, GraphModule)):
        for node in graph.graph.nodes:
            if node.op == "call_function":
                node.target = table.get(node.target, node.target)
        graph.recompile()


class Retarget(TorchFunctionMode):
    """Send the functionals of TRACED to the functions of this folder while tracing."""

    has_gradients = False  # whether the module has turned gradients on, or asked a tensor for them

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not self.has_gradients and (torch.is_grad_enabled() or asks_for_gradients(func, kwargs)):
            self.has_gradients = True
        if func not in TRACED and func in _TWINS:
            with self:
                return _TWINS[func](*args, **(kwargs or {}))
        return TRACED.get(func, func)(*args, **(kwargs or {}))
