"""Gradients of what moves elements: views, joins, pads, pools, pictures of another size, lookups.

Tables as in ``test_compiled_operators``.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from tests.train.compiled import options
from tests.train.test_compiled_operators import Case, Sum, drawn, gradcheck, judge_gradients

pytestmark = pytest.mark.usefixtures("fresh")


def _product(parts: tuple[Tensor, ...]) -> Tensor:
    return parts[0] * parts[-1]


VIEWS: dict[str, Case] = {
    "cat": (lambda x, y: torch.cat([x, y * 2, x], 1), ("b h 4", "b 3 4")),
    "stack": (lambda x, y: torch.stack([x, y], 1), ("b h", "b h")),
    "split": (lambda x: _product(x.split(2, 1)), ("b 4 h",)),
    "split by sizes": (lambda x: torch.cat(x.split([1, 3], 1)[::-1], 1), ("b 4 h",)),
    "unbind": (lambda x: _product(x.unbind(1)), ("b 4 h",)),
    "roll": (lambda x: x.roll((1, 2), (0, 1)), ("b h",)),
    "flip": (lambda x: x.flip(0, 2), ("b h 4",)),
    "rot90": (lambda x: x.rot90(), ("b h 4",)),
    "tril": (lambda x: x.tril(-1), ("b h 4",)),
    "triu": (lambda x: x.triu(1), ("b h 4",)),
    "diagonal": (lambda x: x.diagonal(1, 1, 2), ("b 5 4",)),
    "diag_embed": (lambda x: x.diag_embed(), ("b h",)),
    "expand": (lambda x: x.expand(-1, 3, -1), ("b 1 h",)),
    "repeat": (lambda x: x.repeat(1, 2, 1), ("b h 4",)),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), ("b h",)),
    "permute": (lambda x: x.permute(2, 0, 1).reshape(4, -1), ("b h 4",)),
    "transpose": (lambda x: x.transpose(0, 1).contiguous().view(-1), ("b h 4",)),
    "t": (lambda x: x.t() * 2, ("b h",)),
    "squeeze": (lambda x: x.squeeze(1).unsqueeze(0), ("b 1 h",)),
    "select": (lambda x: x[:, -1] * x[:, 0], ("b h 4",)),
    "slice in steps": (lambda x: x[:, 1::2], ("b h",)),
    "as_strided": (lambda x: torch.as_strided(x * 2, (3, 2), (1, 1)), ("3 4",)),
    "clone": (lambda x: x.clone() * x, ("b h",)),
    "unfold": (lambda x: x.unfold(1, 3, 1), ("b h 2",)),
    "unfold into large windows": (lambda x: x.unfold(1, 10, 1), ("b 14",)),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), ("b 8 h 3",)),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), ("b 2 4 6",)),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 2), ("b 8 h 3",)),
    "slice_scatter": (lambda x, y: torch.slice_scatter(x, y, 1, 1, 3), ("b 5", "b 2")),
    "select_scatter": (lambda x, y: torch.select_scatter(x, y, 1, 2), ("b 5 h", "b h")),
    "diagonal_scatter": (torch.diagonal_scatter, ("5 5", "5")),
}

_WIDE = "b 2 h 4 5"  # a volume; its first dims a picture and a row
PADS: dict[str, Case] = {
    "constant": (lambda x: F.pad(x, (1, 2, 2, 0), value=3.0), ("b h 4",)),
    "cropped": (lambda x: F.pad(x, (-1, 2)), ("b h 4",)),
    "circular": (lambda x: F.pad(x, (1, 2, 1, 1), mode="circular"), ("b 2 h 4",)),
    **{
        f"{mode}, {rank} dims": (
            lambda x, mode=mode, rank=rank: F.pad(x, (1, 2, 2, 1, 1, 1)[: 2 * rank], mode=mode),
            (" ".join(_WIDE.split()[: 2 + rank]),),
        )
        for mode in ("reflect", "replicate")
        for rank in (1, 2, 3)
    },
}

POOLS: dict[str, Case] = {
    "max, 1 dim": (lambda x: F.max_pool1d(x, 3, 2, 1), ("b 2 h",)),
    "max, overlapping": (lambda x: F.max_pool2d(x, 3, 2, 1), ("b 2 h 5",)),
    "max, 3 dims": (lambda x: F.max_pool3d(x, 2), ("b 2 h 4 2",)),
    "mean, 1 dim": (lambda x: F.avg_pool1d(x, 3, 2, 1), ("b 2 h",)),
    "mean, overlapping": (
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        ("b 2 h 5",),
    ),
    "mean, 3 dims": (lambda x: F.avg_pool3d(x, 2), ("b 2 h 4 2",)),
    "mean into 3": (lambda x: F.adaptive_avg_pool1d(x, 3), ("b 2 h",)),
    "mean into 3x2": (lambda x: F.adaptive_avg_pool2d(x, (3, 2)), ("b 2 h 5",)),
    "mean into 1": (lambda x: F.adaptive_avg_pool2d(x, 1), ("b 2 h 5",)),
    "mean into 2x2x2": (lambda x: F.adaptive_avg_pool3d(x, 2), ("b 2 h 4 3",)),
    "max into 3": (lambda x: F.adaptive_max_pool1d(x, 3), ("b 2 h",)),
    "max into 3x2": (lambda x: F.adaptive_max_pool2d(x, (3, 2)), ("b 2 h 5",)),
    "max into 2x2x2": (lambda x: F.adaptive_max_pool3d(x, 2), ("b 2 h 4 3",)),
    "root of squares": (lambda x: F.lp_pool2d(x, 2.0, 2), ("b 2 h 4",)),
    "unfold": (lambda x: F.unfold(x, 3, padding=1), ("b 2 h 4",)),
    "fold": (lambda x: F.fold(x, (4, 5), 2), ("b 8 12",)),
}


def _resized(mode: str, shape: str, **how: object) -> Case:
    return lambda x: F.interpolate(x, mode=mode, **(how or {"scale_factor": 2})), (shape,)


def _sampled(mode: str, padding: str = "zeros", align: bool = False) -> Case:
    return lambda x, grid: F.grid_sample(x, grid, mode, padding, align), ("b 2 h 4", "b 3 5 2")


def _affine(theta: Tensor, shape: Sequence[int], align_corners: bool = False) -> Tensor:
    return F.affine_grid(theta, list(shape), align_corners)


SIZES: dict[str, Case] = {
    "nearest, twice": _resized("nearest", "b 2 h 4"),
    "nearest, 1 dim": _resized("nearest", "b 2 h", size=7),
    "nearest, 2 dims": _resized("nearest", "b 2 h 4", size=(7, 5)),
    "nearest, 3 dims": _resized("nearest", "b 2 h 3 2"),
    "nearest-exact, 1 dim": _resized("nearest-exact", "b 2 h", size=7),
    "nearest-exact, 2 dims": _resized("nearest-exact", "b 2 h 4", size=(7, 5)),
    "nearest-exact, 3 dims": _resized("nearest-exact", "b 2 h 3 2"),
    "linear": _resized("linear", "b 2 h"),
    "bilinear": _resized("bilinear", "b 2 h 4"),
    "bilinear between corners": _resized("bilinear", "b 2 h 4", size=(7, 5), align_corners=True),
    "bilinear, antialiased": _resized("bilinear", "b 2 h 4", size=(3, 2), antialias=True),
    "trilinear": _resized("trilinear", "b 2 h 3 2"),
    "bicubic": _resized("bicubic", "b 2 h 4"),
    "bicubic, antialiased": _resized("bicubic", "b 2 h 4", size=(3, 2), antialias=True),
    "bicubic, antialiased by a factor": _resized(
        "bicubic", "b 2 h 4", scale_factor=0.5, antialias=True
    ),
    "grid": _sampled("bilinear"),
    "grid, mirrored": _sampled("bilinear", "reflection", align=True),
    "grid, bicubic": _sampled("bicubic", "border"),
    "grid of a volume": (
        lambda x, grid: F.grid_sample(x, grid, align_corners=False),
        ("b 2 h 4 3", "b 3 2 5 3"),
    ),
    "affine grid": (lambda t, x: _affine(t, x.shape) * x[:, :1, ..., None], ("b 2 3", "b 2 h 4")),
    "affine grid between corners": (
        lambda t, x: _affine(t, (*x.shape, 5), align_corners=True) * x[:, :1, :, None, None],
        ("b 2 3", "b 2 h"),
    ),
    "affine grid of a volume": (
        lambda t, x: _affine(t, x.shape) * x[:, :1, ..., None],
        ("b 3 4", "b 2 h 3 4"),
    ),
    "affine grid, sampled": (
        lambda x, t: F.grid_sample(x, _affine(t, x.shape), align_corners=False),
        ("b 2 h 4", "b 2 3"),
    ),
}

LOOKUPS: dict[str, Case] = {
    "gather": (lambda x, i: x.gather(1, i), ("b h 4", "b 3 4 < 4")),
    "scatter": (lambda x, y, i: x.scatter(1, i.argsort(1), y), ("b 4", "b 4", "b 4 < 9")),
    "scatter of a number": (lambda x, i: x.scatter(1, i, 2.5), ("b 4", "b 2 < 4")),
    "scatter_add": (lambda x, y, i: x.scatter_add(1, i, y), ("b 4", "b h", "b h < 4")),
    "scatter_reduce": (
        lambda x, y, i: x.scatter_reduce(1, i, y, "amax"),
        ("b 4", "b h", "b h < 4"),
    ),
    "index_select": (lambda x, i: x.index_select(1, i), ("b 4 3", "h < 4")),
    "index": (lambda x, i: x[i], ("5 h", "b < 5")),
    "index of two dims": (lambda x, i, j: x[:, i, j], ("b 4 5", "h < 4", "h < 5")),
    "take": (lambda x, i: x.take(i), ("4 5", "b h < 20")),
    "put": (lambda x, y, i: x.put(i, y, accumulate=True), ("4 5", "2 6", "2 6 < 20")),
    "index_put": (lambda x, y, i: x.index_put((i.argsort(),), y), ("7 h", "7 h", "7 < 99")),
    "index_put, added": (
        lambda x, y, i: x.index_put((i,), y, accumulate=True),
        ("7 h", "b h", "b < 7"),
    ),
    "index_put under a mask": (
        lambda x, i: x.index_put((i > 2,), torch.zeros_like(x[0, 0])),
        ("b h", "b h < 5"),
    ),
    "index_add": (lambda x, y, i: x.index_add(0, i, y), ("7 h", "b h", "b < 7")),
    "index_copy": (lambda x, y, i: x.index_copy(0, i.argsort(), y), ("7 h", "7 h", "7 < 99")),
    "index_fill": (lambda x, i: x.index_fill(0, i, 2.0), ("7 h", "3 < 7")),
    "masked_scatter": (lambda x, y, i: x.masked_scatter(i > 2, y), ("b h", "b h", "b h < 5")),
    "embedding": (lambda w, i: F.embedding(i, w, padding_idx=2), ("5 8", "b h < 5")),
    "embedding_bag": (lambda w, i: F.embedding_bag(i, w), ("5 8", "b h < 5")),
    "embedding_bag of two sizes": (
        lambda w, i: F.embedding_bag(i, w, torch.arange(0, 4, 3, device=w.device)),
        ("5 8", "h < 5"),
    ),
}

# The row of the padding has no gradient by decree: differences find one.
DECREED = {"embedding"}

FAMILIES = {"views": VIEWS, "pads": PADS, "pools": POOLS, "sizes": SIZES, "lookups": LOOKUPS}


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients(family: str) -> None:
    judge_gradients(FAMILIES[family])


@pytest.mark.parametrize("name", ["bicubic, antialiased", "affine grid", "affine grid, sampled"])
def test_gradients_by_torch_compile(name: str) -> None:
    """As AOTAutograd traces them, which for symbolic sizes torch alone cannot."""
    eager, compiled = (
        Sum({name: SIZES[name]}),
        torch.compile(Sum({name: SIZES[name]}), backend="strop"),
    )
    for sizes in ({"b": 3, "h": 6}, {"b": 5, "h": 4}, {"b": 4, "h": 10}):
        given = [x.requires_grad_() for x in drawn({name: SIZES[name]}, sizes)]
        found, expected = (torch.autograd.grad(f(*given), given) for f in (compiled, eager))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_an_affine_grid_has_the_type_of_eager() -> None:
    """Under autocast too, where it is a product of matrices."""

    class Grid(nn.Module):
        def forward(self, theta: Tensor, x: Tensor) -> Tensor:
            return _affine(theta, x.shape)

    ours, x = strop.optimize(Grid(), train=True, options=options()), torch.randn(2, 3, 4, 5)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        theta = torch.randn(2, 2, 3).to(dtype).requires_grad_()
        for enabled in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                torch.testing.assert_close(ours(theta, x), Grid()(theta, x), rtol=2e-2, atol=2e-2)
    assert not ours.forward.traced_by_torch


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_gradcheck(family: str) -> None:
    cases = FAMILIES[family].items()
    gradcheck({name: case for name, case in cases if name not in DECREED})
