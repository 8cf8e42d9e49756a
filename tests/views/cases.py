"""Every way to read, copy, make and index tensors: one row a torch function.

An argument is a text: sizes as names or numbers, "i5: b h" for another kind of values. ``i5`` are
int64 indices below 5, ``m`` a bool mask, nothing floats. A row says what has become of the call:
KERNEL (nothing but generated kernels and views), LIBRARY (torch runs it, by decision).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strop.ir.dims import parse

KERNEL, LIBRARY = "kernel", "library"


@dataclass(frozen=True)
class Case:
    function: Callable[..., Any]
    arguments: tuple[str, ...]
    runs_in: str = KERNEL


def _kernel(function: Callable[..., Any], *arguments: str) -> Case:
    return Case(function, arguments)


def _library(function: Callable[..., Any], *arguments: str) -> Case:
    return Case(function, arguments, LIBRARY)


def _write_interleaved(x: Tensor, y: Tensor) -> Tensor:
    """Rotate pairs, as Wan does."""
    one, other = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = y[..., 0::2].cos(), y[..., 1::2].sin()
    out = torch.empty_like(x)
    out[..., 0::2] = one * cos - other * sin
    out[..., 1::2] = one * sin + other * cos
    return out.type_as(x)


def _write_halves(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[..., :3], out[..., 3:] = y * 2, z.exp()
    return out + x


def _write_three_ways(x: Tensor, y: Tensor) -> Tensor:
    out = x * 2
    for n in (2, 0, 1):
        out[:, n::3] = y + n
    return out


def _write_part(x: Tensor, y: Any, where: Any) -> Tensor:
    out = x * 2
    out[where] = y
    return out + 1


VIEWS: dict[str, Case] = {
    "reshape": _kernel(lambda x: x.reshape(-1, 6) + 1, "b 4 h 6"),
    "view": _kernel(lambda x: x.view(x.shape[0], -1) * 2, "b 4 h 6"),
    "view_as": _kernel(lambda x, y: x.view_as(y) + y, "b 4 6", "b 24"),
    "flatten": _kernel(lambda x: x.flatten(1) * 2, "b 4 h 6"),
    "flatten_all": _kernel(lambda x: x.flatten() * 2, "b 4 h 6"),
    "unflatten": _kernel(lambda x: x.unflatten(1, (2, -1)).sum(1), "b 6 h w"),
    "ravel": _kernel(lambda x: x.transpose(0, 1).ravel() * 2, "b 4 h 6"),
    "reshape_of_transposed": _kernel(lambda x: x.transpose(1, 2).reshape(-1, 4), "b 4 h 6"),
    "permute": _kernel(lambda x: x.permute(0, -1, 1, 2) + 1, "b 4 h 6"),
    "transpose": _kernel(lambda x: x.transpose(-1, -2) * x.mT, "b 4 h 6"),
    "t": _kernel(lambda x: x.t() + 1, "b 5"),
    "movedim": _kernel(lambda x: x.movedim(1, -1) + 1, "b 4 h 6"),
    "moveaxis": _kernel(lambda x: torch.moveaxis(x, (0, 1), (2, 0)) + 1, "b 4 h 6"),
    "swapdims": _kernel(lambda x: x.swapdims(0, 2) + 1, "b 4 h 6"),
    "expand": _kernel(lambda x: x.unsqueeze(1).expand(-1, 3, -1, -1, -1) + 1, "b 4 h 6"),
    "expand_result": _kernel(lambda x: (x * 2).unsqueeze(1).expand(-1, 3, -1), "b 6"),
    "expand_as": _kernel(lambda x, y: x.expand_as(y) * y, "4 1", "b 4 h"),
    "broadcast_to": _kernel(lambda x: x[:, None].broadcast_to(x.shape[0], 3, 6) + 1, "b 6"),
    "broadcast_tensors": _kernel(lambda x, y: torch.broadcast_tensors(x, y), "b 1 h", "4 1"),
    "squeeze": _kernel(lambda x: x[:, :1].squeeze(1) + 1, "b 4 h"),
    "squeeze_all": _kernel(lambda x: x[:1, :1, :, :1].squeeze() + 1, "b 4 6 6"),
    "squeeze_dims": _kernel(lambda x: x[:, :1, :, :1].squeeze((1, 3)) + 1, "b 4 h 6"),
    "unsqueeze": _kernel(lambda x: x.unsqueeze(-1) * x.unsqueeze(1), "b 3"),
    "slice": _kernel(lambda x: x[1:, 1:-1] + 1, "b 6 h"),
    "slice_negative": _kernel(lambda x: x[:, -3:] * x[:, -4:-1], "b 6 h"),
    "slice_step": _kernel(lambda x: x[:, ::2] * x[:, 1::2], "b 6 h"),
    "slice_step_symbolic": _kernel(lambda x: x[:, :, ::2] * 2, "b 6 2*h"),
    "slice_step_ragged": _kernel(lambda x: x[:, :, 1::3] * 2, "b 6 h"),
    "slice_step_of_computed": _kernel(lambda x: F.silu(x)[:, ::2] + x[:, 1::2], "b 6 h"),
    "slice_step_merged": _kernel(lambda x: x.flatten(1)[:, ::4] * 2, "b 6 4"),
    "slice_step_of_permuted": _kernel(lambda x: x.transpose(1, 2)[:, ::2, 1::2] + 1, "b 4 6"),
    "slice_empty": _kernel(lambda x: torch.cat([x[:, 6:], x[:, :2]], 1), "b 6 h"),
    "slice_beyond": _kernel(lambda x: x[:, 2:100] + 1, "b 6 h"),
    "slice_symbolic_end": _kernel(lambda x: x[:, :, : x.shape[2] // 2] + 1, "b 6 2*h"),
    "slice_negative_symbolic": _kernel(lambda x: x[:, -2:, -1:] + 1, "b h 6"),
    "select": _kernel(lambda x: x[0] + x.select(0, -1), "b 6 h"),
    "select_last": _kernel(lambda x: x[:, -1] + x[..., 0], "b 6 6"),
    "ellipsis_and_none": _kernel(lambda x: x[None, ..., 1:3, None] + 1, "b 4 h 6"),
    "narrow": _kernel(lambda x: x.narrow(1, 1, 3) + 1, "b 6 h"),
    "split": _kernel(lambda x: [p + 1 for p in x.split(2, 1)], "b 6 h"),
    "split_sizes": _kernel(lambda x: [p + 1 for p in x.split([1, 2, 3], 1)], "b 6 h"),
    "split_rest": _kernel(lambda x: [p + 1 for p in x.split(4, 1)], "b 6 h"),
    "chunk": _kernel(lambda x: (lambda a, b: a * F.gelu(b))(*x.chunk(2, -1)), "b h 6"),
    "tensor_split": _kernel(lambda x: [p + 1 for p in x.tensor_split(4, 1)], "b 6 h"),
    "tensor_split_indices": _kernel(lambda x: [p + 1 for p in x.tensor_split((1, 4), 1)], "b 6 h"),
    "unbind": _kernel(lambda x: (lambda a, b, c: a * b + c)(*x.unbind(1)), "b 3 h"),
    "unbind_as_is": _kernel(lambda x: (x * 2).unbind(1), "b 3 h"),
    "diagonal": _kernel(lambda x: x.diagonal(0, 1, 2) + 1, "b 5 5"),
    "diagonal_offset": _kernel(lambda x: x.diagonal(1, 1, 2) * x.diagonal(-1, 1, 2), "b 5 5"),
    "diagonal_of_oblong": _kernel(
        lambda x: x.diagonal(2, 1, 2) + x.diagonal(0, 1, 2)[:, :2], "b 2 4"
    ),
    "diag_embed": _kernel(lambda x: torch.diag_embed(x), "b 5"),
    "trace": _kernel(lambda x: x.diagonal(0, 1, 2).sum(-1), "b 5 5"),
    "unfold": _kernel(lambda x: x.unfold(1, 3, 1) * 2, "b 6"),
    "unfold_step": _kernel(lambda x: x.unfold(-1, 4, 2).sum(-1), "b 4 8"),
    "unfold_computed": _kernel(lambda x: F.silu(x).unfold(1, 2, 2) + 1, "b 6"),
    "real_view_dtype": _library(lambda x: x.view(torch.int32) + 1, "b 6"),
    "as_strided": _library(lambda x: x.as_strided((1, 3), (1, 2)) + 1, "b 6"),
    "as_strided_computed": _library(lambda x: F.silu(x).as_strided((1, 3), (1, 2)) + 1, "b 6"),
}

COPIES: dict[str, Case] = {
    "clone": _kernel(lambda x: x.clone() + 1, "b 4 h"),
    "contiguous": _kernel(lambda x: x.transpose(1, 2).contiguous(), "b 4 h"),
    "channels_last": _kernel(lambda x: x.to(memory_format=torch.channels_last) + 1, "b 4 h w"),
    "cat": _kernel(lambda x, y: torch.cat([x, y * 2, x], 1), "b 4 h", "b 3 h"),
    "cat_dim0": _kernel(lambda x, y: torch.cat([x, y * 2], 0) + 1, "b 4 h", "w 4 h"),
    "cat_last": _kernel(lambda x, y: torch.cat([x, y], -1).sum(-1), "b 4 h", "b 4 w"),
    "cat_promoting": _kernel(lambda x, i: torch.cat([x, i], 0), "b 4", "i9: b 4"),
    "concat": _kernel(lambda x, y: torch.concat((x, y), dim=-1), "b 6", "b 5"),
    "stack": _kernel(lambda x, y: torch.stack([x, y, x * y], 1), "b 4 h", "b 4 h"),
    "stack_last": _kernel(lambda x, y: torch.stack([-y, x], -1).flatten(-2), "b 4 h", "b 4 h"),
    "hstack": _kernel(lambda x, y: torch.hstack([x, y]) + 1, "b 4", "b 3"),
    "vstack": _kernel(lambda x, y: torch.vstack([x, y]) + 1, "b 4", "b 4"),
    "pad": _kernel(lambda x: F.pad(x, (0, 1, 2, 0), value=3.0) * 2, "b 4 h 6"),
    "pad_channels": _kernel(lambda x: F.pad(x, (0, 0, 0, 0, 1, 2)) * 2, "b 4 h 6"),
    "pad_crop": _kernel(lambda x: F.pad(x, (-1, 2, 1, -2), value=1.0) + 1, "b 4 h 6"),
    "pad_only_crop": _kernel(lambda x: F.pad(x, (-1, -2)) + 1, "b 4 h 6"),
    "constant_pad": _kernel(lambda x: torch.constant_pad_nd(x, (1, -1), 2.0), "b 4 h"),
    "pad_reflect": _kernel(lambda x: F.pad(x, (1, 2, 1, 1), "reflect"), "b 4 h w"),
    "pad_reflect_1d": _kernel(lambda x: F.pad(F.silu(x), (2, 0), "reflect") * 2, "b 4 h"),
    "pad_replicate": _kernel(lambda x: F.pad(x, (1, 2, 1, 9), "replicate") + 1, "b 4 h w"),
    "pad_replicate_3d": _kernel(lambda x: F.pad(x, (1,) * 6, "replicate") + 1, "b 2 h w 3"),
    "pad_replicate_crop": _kernel(lambda x: F.pad(x, (-1, 2), "replicate") + 1, "b 4 h"),
    "pad_circular": _kernel(lambda x: F.pad(x, (1, 2, 0, 1), "circular") + 1, "b 4 h w"),
    "repeat": _kernel(lambda x: x.repeat(2, 1, 3) + 1, "b 4 h"),
    "repeat_rank": _kernel(lambda x: x.repeat(2, 1, 2), "b 4"),
    "repeat_one": _kernel(lambda x: x.repeat(1, 1) * 2, "b 4"),
    "tile": _kernel(lambda x: torch.tile(x, (2, 3)) + 1, "b 4 h"),
    "repeat_interleave": _kernel(lambda x: x.repeat_interleave(3, 1) + 1, "b 4 h"),
    "repeat_interleave_0": _kernel(lambda x: x.repeat_interleave(2, 0), "b 4 h"),
    "repeat_interleave_flat": _kernel(lambda x: x.repeat_interleave(2), "b 4"),
    "flip": _kernel(lambda x: x.flip(1) + x, "b 4 h"),
    "flip_several": _kernel(lambda x: x.flip((0, -1)) * 2, "b 4 h"),
    "flip_computed": _kernel(lambda x: F.silu(x).flip(-1) + x, "b 4 6"),
    "fliplr": _kernel(lambda x: torch.fliplr(x) * 2, "b 4 6"),
    "rot90": _kernel(lambda x: torch.rot90(x, 1, (2, 3)) * 2, "b 4 h w"),
    "roll": _kernel(lambda x: x.roll(1, 1) + x, "b 4 h"),
    "roll_several": _kernel(lambda x: x.roll((1, -2), (1, 2)) + 1, "b 4 6"),
    "roll_symbolic": _kernel(lambda x: x.roll(-1, 2) + 1, "b 4 h w"),
    "roll_flat": _kernel(lambda x: x.roll(2) + 1, "b 6"),
    "tril": _kernel(lambda x: x.tril() + 1, "b 5 6"),
    "triu": _kernel(lambda x: x.triu(1) * 2, "b h 6"),
    "tril_negative": _kernel(lambda x: x.tril(-1), "b 5 5"),
    "triu_of_bool": _kernel(lambda m: m.triu(), "m: b 5 5"),
    "causal_mask": _kernel(lambda x: x + torch.full((5, 5), float("-inf")).triu(1), "b 5 5"),
    "slice_scatter": _kernel(lambda x, y: torch.slice_scatter(x, y, 1, 1, 3) + 1, "b 4 h", "b 2 h"),
    "slice_scatter_step": _kernel(
        lambda x, y: torch.slice_scatter(x, y, 1, 1, None, 2), "b 6 h", "b 3 h"
    ),
    "slice_scatter_step_to_the_middle": _kernel(
        lambda x, y: torch.slice_scatter(x, y * 2, 1, 1, 6, 3), "b 8 h", "b 2 h"
    ),
    "slice_scatter_step_unfit": _kernel(
        lambda x, y: torch.slice_scatter(x, y * 2, 1, 0, None, 3) + 1, "b 7 h", "b 3 h"
    ),
    "slice_scatter_step_ragged": _kernel(
        lambda x, y: torch.slice_scatter(x, y[:, :, : (x.shape[2] + 1) // 2], 2, 0, None, 2),
        "b 4 h",
        "b 4 h",
    ),
    "slice_scatter_step_from_ragged": _kernel(
        lambda x, y: torch.slice_scatter(x, y[:, :, 1::2].sin(), 2, 1, None, 2), "b 4 h", "b 4 h"
    ),
    "write_interleaved": _kernel(_write_interleaved, "b h 6", "b h 6"),
    "write_interleaved_symbolic": _kernel(_write_interleaved, "b 4 2*h", "b 4 2*h"),
    "write_halves": _kernel(_write_halves, "b h 6", "b h 3", "b h 3"),
    "write_three_ways": _kernel(_write_three_ways, "b 9 h", "b 3 h"),
    "write_some_ways": _kernel(
        lambda x, y: _write_part(x, y, (slice(None), slice(1, None, 3))), "b 9 h", "b 3 h"
    ),
    "write_corner": _kernel(
        lambda x, y: _write_part(x, y, (slice(None), slice(1, 3), slice(0, 4, 2))), "b 4 6", "b 2 2"
    ),
    "write_number": _kernel(
        lambda x: _write_part(x, 2.0, (slice(None), slice(0, None, 2))), "b 6 h"
    ),
    "write_row": _kernel(lambda x, y: _write_part(x, y, (slice(None), -1)), "b 4 h", "b h"),
    "select_scatter": _kernel(lambda x, y: torch.select_scatter(x, y, 1, -1), "b 4 h", "b h"),
    "diagonal_scatter": _library(
        lambda x, y: torch.diagonal_scatter(x, y, 0, 1, 2), "b 5 5", "b 5"
    ),
    "meshgrid": _kernel(lambda x, y: torch.meshgrid(x, y, indexing="ij"), "b", "w"),
    "pixel_shuffle": _kernel(lambda x: F.pixel_shuffle(x, 2) + 1, "b 8 h w"),
    "pixel_unshuffle": _kernel(lambda x: F.pixel_unshuffle(x, 2) + 1, "b 3 2*h 2*w"),
    "channel_shuffle": _kernel(lambda x: F.channel_shuffle(x, 2) + 1, "b 6 h w"),
    "upsample_nearest": _kernel(lambda x: F.interpolate(x, scale_factor=2.0) + 1, "b 4 h w"),
    "upsample_nearest_odd": _kernel(lambda x: F.interpolate(x, scale_factor=1.5) + 1, "b 4 h w"),
    "upsample_nearest_1d": _kernel(lambda x: F.interpolate(x, scale_factor=2.0), "b 4 h"),
    "upsample_nearest_3d": _kernel(lambda x: F.interpolate(x, (3, 4, 5)) * 2, "b 2 h 3 w"),
    "upsample_nearest_size": _kernel(
        lambda x, y: F.interpolate(x, y.shape[2:]) + y, "b 4 h w", "b 4 w h"
    ),
    "upsample_nearest_exact": _kernel(
        lambda x: F.interpolate(x, (7, 9), mode="nearest-exact"), "b 4 h w"
    ),
    "upsample_nearest_third": _kernel(lambda x: F.interpolate(x, scale_factor=0.3), "b 4 16 16"),
    "upsample_linear": _kernel(
        lambda x: F.interpolate(x, scale_factor=2.5, mode="linear") * 2, "b 4 h"
    ),
    "upsample_bilinear": _kernel(
        lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), "b 4 h w"
    ),
    "upsample_bilinear_size": _kernel(
        lambda x: F.interpolate(x, (7, 9), mode="bilinear", align_corners=True), "b 4 h w"
    ),
    "upsample_bilinear_symbolic": _kernel(
        lambda x, y: torch.cat([F.interpolate(F.silu(x), y.shape[2:], mode="bilinear"), y], 1),
        "b 4 h w",
        "b 3 w h",
    ),
    "upsample_bilinear_one": _kernel(
        lambda x: F.interpolate(x, (1, 1), mode="bilinear", align_corners=True) * 2, "b 4 h w"
    ),
    "upsample_trilinear": _kernel(
        lambda x: F.interpolate(x, (3, 4, 5), mode="trilinear"), "b 2 h 3 w"
    ),
    "upsample_bicubic": _kernel(
        lambda x: F.interpolate(x, scale_factor=(1.5, 0.5), mode="bicubic"), "b 4 h w"
    ),
    "upsample_bicubic_size": _kernel(
        lambda x: F.interpolate(x, (7, 9), mode="bicubic", align_corners=True), "b 4 h w"
    ),
    "upsample_antialias": _library(
        lambda x: F.interpolate(x, (7, 9), mode="bicubic", antialias=True), "b 4 6 6"
    ),
}


CREATION: dict[str, Case] = {
    "arange": _kernel(lambda x: x + torch.arange(4), "b 4"),
    "arange_step": _kernel(lambda x: x + torch.arange(1, 9, 2), "b 4"),
    "arange_down": _kernel(lambda x: x + torch.arange(4, 0, -1), "b 4"),
    "arange_float": _kernel(lambda x: x + torch.arange(0.0, 1.0, 0.25), "b 4"),
    "arange_dtype": _kernel(lambda x: x + torch.arange(4, dtype=torch.float64), "b 4"),
    "arange_symbolic": _kernel(lambda x: x + torch.arange(x.shape[1])[:, None], "b h 6"),
    "arange_from_size": _kernel(
        lambda x: x + torch.arange(x.shape[1], 2 * x.shape[1])[:, None], "b h 6"
    ),
    "arange_step_symbolic": _kernel(
        lambda x: x[:, ::2] + torch.arange(0, x.shape[1], 2)[:, None], "b 2*h 6"
    ),
    "full": _kernel(lambda x: x + torch.full((x.shape[0], 4), 2.5), "b 4"),
    "full_int": _kernel(lambda x: torch.full((x.shape[0], 4), 7), "b 4"),
    "full_bool": _kernel(lambda x: torch.full((x.shape[0], 4), True), "b 4"),
    "full_like": _kernel(lambda x: torch.full_like(x, 3) * x, "b 4"),
    "full_like_dtype": _kernel(lambda x: torch.full_like(x, 3, dtype=torch.int64), "b 4"),
    "zeros": _kernel(lambda x: torch.cat([torch.zeros(2, 4), x]), "b 4"),
    "ones": _kernel(lambda x: torch.ones(x.shape, dtype=torch.float64) + x, "b 4"),
    "zeros_like": _kernel(lambda x: torch.zeros_like(x) + x, "b 4"),
    "ones_like": _kernel(lambda x: torch.ones_like(x, dtype=torch.bool), "b 4"),
    "new_zeros": _kernel(lambda x: torch.cat([x.new_zeros(2, 4), x]), "b 4"),
    "new_ones": _kernel(lambda x: x.new_ones(x.shape[0]) + x.sum(1), "b 4"),
    "new_full": _kernel(lambda x: x.new_full((x.shape[0], 4), 2) + x, "b 4"),
    "new_empty_filled": _kernel(lambda x: x.new_empty(4).fill_(2.0) + x, "b 4"),
    "empty_zeroed": _kernel(lambda x: torch.empty_like(x).zero_() + x, "b 4"),
    "eye": _kernel(lambda x: x + torch.eye(4), "b 4 4"),
    "eye_oblong": _kernel(lambda x: x + torch.eye(5, 4, dtype=torch.float64), "b 5 4"),
    "eye_symbolic": _kernel(lambda x: x[:, :, None] * torch.eye(x.shape[1])[:, :, None], "b h 6"),
    "linspace": _kernel(lambda x: x * torch.linspace(0, 1, 6), "b 6"),
    "linspace_down": _kernel(lambda x: x * torch.linspace(3.0, -2.5, 6), "b 6"),
    "linspace_symbolic": _kernel(lambda x: x * torch.linspace(-1, 1, x.shape[1])[:, None], "b h 6"),
    "linspace_to_a_size": _kernel(
        lambda x: x * torch.linspace(1, x.shape[1] - 1, x.shape[1])[:, None], "b h 6"
    ),
    "linspace_half_a_size": _kernel(
        lambda x: x * torch.linspace(0, x.shape[1] / 2, x.shape[1])[:, None], "b h 6"
    ),
    "linspace_one": _kernel(lambda x: x * torch.linspace(3, 9, 1), "b 6"),
    "one_hot": _kernel(lambda i: F.one_hot(i, 5) * 2, "i5: b h"),
    "scalar_tensor": _kernel(lambda x: x * torch.scalar_tensor(0.5), "b 6"),
    "python_where": _kernel(lambda x: torch.where(x > 0, x, 2.0), "b 6"),
    "masked_fill": _kernel(lambda x, m: x.masked_fill(m, -1.0), "b 6", "m: b 6"),
    "masked_fill_tensor": _kernel(lambda x, m: x.masked_fill(m, x[0, 0]), "b 6", "m: b 6"),
    "causal_bool_mask": _kernel(
        lambda x: torch.where(torch.ones(5, 5, dtype=torch.bool).tril(), x, -1.0), "b 5 5"
    ),
    "to_dtype": _kernel(lambda x: x.to(torch.float64) + x.half(), "b 6"),
    "type_as": _kernel(lambda i, x: i.type_as(x) * x, "i9: b 6", "b 6"),
}

INDEXING: dict[str, Case] = {
    "embedding": _kernel(lambda i, w: F.embedding(i, w) * 2, "i5: b h", "5 6"),
    "embedding_padding": _kernel(lambda i, w: F.embedding(i, w, 1) * 2, "i5: b h", "5 6"),
    "gather": _kernel(lambda x, i: x.gather(1, i) + 1, "b 4", "i4: b 3"),
    "index_select": _kernel(lambda x, i: x.index_select(1, i) + 1, "b 4 h", "i4: 3"),
    "index": _kernel(lambda x, i: x[i] + 1, "5 6", "i5: b h"),
    "index_middle": _kernel(lambda x, i: x[:, i] + 1, "b 4 h", "i4: 3"),
    "index_several": _kernel(lambda x, i, j: x[i, j] + 1, "4 5 6", "i4: b", "i5: b"),
    "index_broadcast": _kernel(lambda x, i, j: x[i[:, None], :, j] + 1, "4 5 6", "i4: b", "i6: w"),
    "index_negative": _kernel(lambda x, i: x[i - 5], "5 6", "i5: b"),
    "index_last_token": _kernel(
        lambda x, i: x[torch.arange(x.shape[0]), i.argmax(-1)], "b h 6", "i9: b h"
    ),
    "embedding_table": _kernel(lambda i, w: F.embedding(i, F.silu(w)[:, ::2]), "i5: b h", "5 6"),
    "embedding_transposed": _kernel(lambda i, w: F.embedding(i, w.t()) * 2, "i5: b h", "6 5"),
    "embedding_norm": _kernel(
        lambda i, w, v: F.layer_norm(F.embedding(i, w) + v, (6,), eps=1e-3), "i5: b h", "5 6", "6"
    ),
    "embedding_one": _kernel(lambda i, w: F.embedding(i, w), "i5: 1", "5 6"),
    "gather_last": _kernel(lambda x, i: torch.where(i > 1, x.gather(-1, i), 0), "b 4", "i4: b 3"),
    "gather_middle": _kernel(lambda x, i: x.gather(1, i).sum(1), "b 4 h", "i4: b 3 h"),
    "gather_of_computed": _kernel(lambda x, i: x.softmax(-1).gather(-1, i), "b 4", "i4: b 2"),
    "gather_own": _kernel(lambda x, i: (x * 2) + (x * 2).gather(1, i), "b 4", "i4: b 4"),
    "gather_in_cat": _kernel(lambda x, i: torch.cat([x, x.gather(1, i)], 1) * 2, "b 4", "i4: b 3"),
    "take_along_dim": _kernel(lambda x, i: x.take_along_dim(i, 1) + 1, "b 4", "i4: b 3"),
    "index_int32": _kernel(lambda x, i: x[i.int()] + 1, "5 6", "i5: b h"),
    "index_apart": _kernel(lambda x, i, j: x[i, :, j] * 2, "4 5 6", "i4: b", "i6: b"),
    "index_chained": _kernel(lambda x, i, j: x[i[j]] + 1, "5 6", "i5: 4", "i4: b"),
    "index_sliced": _kernel(lambda x, i: x[:, 1:][:, i][:, :2] + 1, "b 5 h", "i4: 3"),
    "index_grown": _kernel(lambda x, i: x[:, 1:, i], "b 3 h", "i2: 2"),
    "index_of_reshaped": _kernel(lambda x, i: x.transpose(1, 2).flatten(1)[:, i], "b 4 h", "i9: 5"),
    "index_reduced": _kernel(lambda x, i: x[i].sum(-1), "5 6", "i5: b h"),
    "index_column_reduced": _kernel(lambda x, i: x[i].sum((0, 1)), "5 6", "i5: b h"),
    "one_hot": _kernel(lambda i, w: F.one_hot(i, 5) * w, "i5: b h", "5"),
    "embedding_bag": _kernel(lambda i, w: F.embedding_bag(i, w) * 2, "i5: b h", "5 6"),
    "embedding_bag_weighted": _kernel(
        lambda i, w, s: F.embedding_bag(i, w, mode="sum", per_sample_weights=s),
        "i5: b h",
        "5 6",
        "b h",
    ),
    "embedding_bag_max": _kernel(
        lambda i, w: F.embedding_bag(i, w, mode="max") * 2, "i5: b h", "5 6"
    ),
    "embedding_bag_offsets": _kernel(
        lambda i, w: F.embedding_bag(i.flatten(), w, torch.arange(2) * 2), "i5: b h", "5 6"
    ),
    "index_put": _library(lambda x, i, y: x.index_put((i,), y), "5 6", "i5: 3", "3 6"),
    "index_put_add": _library(
        lambda x, i, y: x.index_put((i,), y, accumulate=True), "5 6", "i5: b", "b 6"
    ),
    "index_add": _library(lambda x, i, y: x.index_add(0, i, y), "5 6", "i5: b", "b 6"),
    "index_copy": _library(
        lambda x, i, y: x.index_copy(1, i.argsort()[:4], y), "b 4", "i9: 4", "b 4"
    ),
    "index_fill": _library(lambda x, i: x.index_fill(1, i, 2.0), "b 4", "i4: 2"),
    "scatter": _library(lambda x, i, y: x.scatter(1, i.argsort(1), y), "b 4", "i4: b 4", "b 4"),
    "scatter_value": _library(lambda x, i: x.scatter(1, i, 1.0), "b 4", "i4: b 2"),
    "scatter_add": _library(lambda x, i, y: x.scatter_add(1, i, y), "b 4", "i4: b 3", "b 3"),
    "scatter_reduce": _library(
        lambda x, i, y: x.scatter_reduce(1, i, y, "amax"), "b 4", "i4: b 3", "b 3"
    ),
    "take": _kernel(lambda x, i: x.take(i) + 1, "b 4", "i4: 3 3"),
    "topk": _library(lambda x: x.topk(3, -1), "b 6"),
    "sort": _library(lambda x: x.sort(-1, descending=True), "b 6"),
    "argsort": _library(lambda x: x.argsort(-1, descending=True), "b 6"),
    "cumsum": _library(lambda x: x.cumsum(1) * 2, "b 4 h"),
    "cumprod": _library(lambda x: x.cumprod(1) * 2, "b 4 h"),
    "cummax": _library(lambda x: x.cummax(1), "b 4 h"),
    "argmax": _kernel(lambda x: x.argmax(-1) + 1, "b 6"),
    "kthvalue": _library(lambda x: x.kthvalue(2, -1), "b 6"),
    "median": _library(lambda x: x.median(-1), "b 5"),
    "searchsorted": _library(lambda s, x: torch.searchsorted(s.sort(-1)[0], x), "5", "b 6"),
    "bucketize": _library(lambda x, s: torch.bucketize(x, s.sort(-1)[0]), "b 6", "5"),
    "masked_scatter": _library(lambda x, m: x.masked_scatter(m, x * 2), "b 6", "m: b 6"),
}

POOLING: dict[str, Case] = {
    "max_pool2d": _kernel(lambda x: F.max_pool2d(x, 2) + 1, "b 4 6 6"),
    "max_pool2d_overlapping": _kernel(lambda x: F.max_pool2d(x, 3, 2) + 1, "b 4 h w"),
    "max_pool2d_places": _library(
        lambda x: F.max_pool2d(x, 2, return_indices=True)[1] + 1, "b 4 6 6"
    ),
    "max_pool2d_padded": _kernel(lambda x: F.max_pool2d(F.silu(x), 3, 2, 1) + 1, "b 4 h w"),
    "max_pool2d_half_padded": _kernel(lambda x: F.max_pool2d(x, (2, 3), (1, 2), (1, 0)), "b 4 h w"),
    "max_pool2d_up": _kernel(lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), "b 4 h w"),
    "max_pool2d_up_over_all": _kernel(lambda x: F.max_pool2d(x, (5, 1), ceil_mode=True), "b 4 h w"),
    "max_pool2d_dilated": _kernel(lambda x: F.max_pool2d(x, 3, 1, 1, 2) - 1, "b 4 2*h 2*w"),
    "max_pool2d_of_one_image": _kernel(lambda x: F.max_pool2d(x, 3, 2, 1), "4 h w"),
    "max_pool2d_wide": _library(lambda x: F.max_pool2d(x, 5, 2, 2) + 1, "b 4 h w"),
    "max_pool1d": _kernel(lambda x: F.max_pool1d(x, 2) + 1, "b 4 8"),
    "max_pool1d_of_any_length": _kernel(lambda x: F.max_pool1d(x, 3, 2, 1) + 1, "b 4 h"),
    "max_pool1d_up": _kernel(lambda x: nn.MaxPool1d(3, 2, ceil_mode=True)(x), "b 4 h"),
    "max_pool1d_places": _library(
        lambda x: F.max_pool1d(x, 2, return_indices=True)[1] + 1, "b 4 8"
    ),
    "max_pool3d": _library(lambda x: F.max_pool3d(x, 2) + 1, "b 2 4 4 4"),
    "avg_pool2d": _kernel(lambda x: F.avg_pool2d(x, 2) + 1, "b 4 2*h 2*w"),
    "avg_pool2d_over_the_edge": _kernel(lambda x: F.avg_pool2d(x, 2, 2, 1) + 1, "b 4 h w"),
    "avg_pool2d_same": _kernel(lambda x: F.avg_pool2d(F.silu(x), 3, 1, 1) * 2, "b 4 h w"),
    "avg_pool2d_of_those_inside": _kernel(
        lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False), "b 4 h w"
    ),
    "avg_pool2d_up": _kernel(lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), "b 4 h w"),
    "avg_pool2d_up_inside": _kernel(lambda x: F.avg_pool2d(x, 3, 2, 1, True, False), "b 4 h w"),
    "avg_pool2d_up_over_all": _kernel(lambda x: F.avg_pool2d(x, (1, 5), ceil_mode=True), "b 4 h w"),
    "avg_pool2d_by_a_number": _kernel(
        lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5), "b 4 h w"
    ),
    "avg_pool1d": _kernel(lambda x: F.avg_pool1d(x, 2) + 1, "b 4 8"),
    "avg_pool1d_of_any_length": _kernel(
        lambda x: F.avg_pool1d(x, 3, 2, 1, count_include_pad=False) + 1, "b 4 h"
    ),
    "adaptive_avg_pool2d": _library(lambda x: F.adaptive_avg_pool2d(x, (2, 3)), "b 4 h w"),
    "global_avg_pool": _kernel(lambda x: F.adaptive_avg_pool2d(x, 1) + 1, "b 4 h w"),
    "global_avg_pool1d": _kernel(lambda x: F.adaptive_avg_pool1d(x, 1) + 1, "b 4 h"),
    "global_avg_pool3d": _kernel(lambda x: F.adaptive_avg_pool3d(x, 1) + 1, "b 2 4 4 4"),
    "adaptive_max_pool2d": _library(lambda x: F.adaptive_max_pool2d(x, (2, 2)), "b 4 6 6"),
    "conv1d": _library(lambda x, w: F.conv1d(x, w, padding=1) + 1, "b 4 h", "6 4 3"),
    "conv3d": _library(lambda x, w: F.conv3d(x, w) + 1, "b 2 4 4 4", "3 2 2 2 2"),
    "conv_transpose2d": _library(
        lambda x, w: F.conv_transpose2d(x, w, stride=2) + 1, "b 4 6 6", "4 3 2 2"
    ),
    "conv_transpose1d": _library(
        lambda x, w: F.conv_transpose1d(x, w, stride=2) + 1, "b 4 6", "4 3 2"
    ),
    "fold": _library(lambda x: F.fold(x, (4, 4), 2, stride=2), "b 8 4"),
    "unfold_image": _library(lambda x: F.unfold(x, 2), "b 3 4 4"),
    "grid_sample": _library(
        lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), "b 3 4 4", "b 5 5 2"
    ),
    "dropout_eval": _kernel(lambda x: F.dropout(x, 0.5, training=False) + 1, "b 6"),
}

CASES = VIEWS | COPIES | CREATION | INDEXING | POOLING


def sizes_of(argument: str) -> tuple[str, tuple[str, ...]]:
    """(kind of values, sizes) of an argument's text."""
    kind, _, sizes = argument.rpartition(":")
    return kind.strip(), tuple(sizes.split())


def make(
    argument: str,
    env: dict[str, int],
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Values for an argument; ``dtype`` is that of arguments of no other kind."""
    kind, texts = sizes_of(argument)
    sizes = tuple(parse(text).eval(env) for text in texts)
    if kind.startswith("i"):
        return torch.randint(int(kind[1:]), sizes, generator=generator)
    if kind == "m":
        return torch.rand(sizes, generator=generator) > 0.5
    return (torch.randn(sizes, generator=generator) * 4).to(dtype)
