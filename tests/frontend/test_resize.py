"""Resized images have eager's pixels, whatever tells their size.

Most cases evaluate the imported graph with torch's operators, node by node: that is quick, and a
place that is off by one shows. A few go through the kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import strop
from strop.debug.reference import evaluate
from strop.frontend.resize_rules import SHORTCUTS
from strop.frontend.resizing import RESIZING, is_repeat
from strop.ir.tensor_spec import TensorSpec
from tests.frontend.tracing import Function, trace_specs

MODES = [(mode, rank) for mode, (_, ranks) in RESIZING.items() for rank in ranks]
ALIGNED = ("linear", "bilinear", "trilinear", "bicubic")
# binary fractions, so that one graph serves every size; of some sizes they keep or double it
HOW: dict[str, dict[str, Any]] = {
    "keeps": {"scale_factor": 1.25},
    "doubles": {"scale_factor": 2.125},
    "shrinks": {"scale_factor": 0.625},
    "repeats": {"scale_factor": 3},
    "one": {"scale_factor": 1.0},
    "recomputed": {"scale_factor": 1.25, "recompute_scale_factor": True},
}
SIDES = (2, 3, 5, 8)
LAST = {4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}


def pixels(shape: Sequence[int], dtype: torch.dtype, *, is_last: bool) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    x = torch.randint(0, 200, tuple(shape), generator=generator).to(dtype)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()]) if is_last else x


def steps(x: Tensor) -> list[int]:
    """The strides that mean something."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


def sizes_of(rank: int, side: int) -> list[int]:
    """The last dim is the one to look at; of the others one is larger."""
    return [side, side + 2, side][3 - rank :]


def check(function: Any, arguments: Sequence[Tensor], *, is_last: bool) -> None:
    """One graph with symbolic sides against eager at all of these arguments."""
    first = arguments[0]
    names = ("d", "h", "w")[5 - first.dim() :]
    order = LAST[first.dim()] if is_last else None
    spec = TensorSpec((*map(str, first.shape[:2]), *names), first.dtype, first.device, order)
    hints = dict.fromkeys(names, 6)
    module = Function(function).eval()
    traced = trace_specs(module, module, [spec], hints)
    assert set(traced.captured.hints) == set(names), "a size was fixed"
    for x in arguments:
        wanted = function(x)
        env = dict(zip(names, x.shape[2:], strict=True))
        found = evaluate(traced.outputs, {traced.graph.inputs[0]: x}, env, exact=False)
        for node, want in zip(traced.outputs, wanted, strict=True):
            got = found[node]
            assert got.shape == want.shape
            scale = 200 * torch.finfo(want.dtype).eps * 16 if want.is_floating_point() else 0.0
            torch.testing.assert_close(got.to(want.dtype), want, rtol=0, atol=scale)


@pytest.mark.parametrize(("mode", "rank"), MODES)
@pytest.mark.parametrize("layout", ["contiguous", "channels-last", "few channels-last"])
def test_every_size(mode: str, rank: int, layout: str) -> None:
    if rank == 1 and layout != "contiguous":
        pytest.skip("no picture")
    is_last, channels = layout != "contiguous", 2 if layout == "few channels-last" else 5
    ways = [{**how, "mode": mode} for how in HOW.values()]
    ways += [{**HOW["keeps"], "mode": mode, "align_corners": True}] * (mode in ALIGNED)
    is_nearest = mode.startswith("nearest")
    dtypes = [torch.uint8, torch.float64] if is_nearest else [torch.float32]
    for dtype in dtypes:
        arguments = [
            pixels([2, channels, *sizes_of(rank, side)], dtype, is_last=is_last) for side in SIDES
        ]
        check(lambda x: [F.interpolate(x, **way) for way in ways], arguments, is_last=is_last)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("channels", [3, 4])
def test_sizes_where_eager_takes_another_kernel(mode: str, is_last: bool, channels: int) -> None:
    """Of nearest pixels eager looks at the sizes up to 128 rows and columns of the result."""
    ways = [{"scale_factor": (1.0, factor), "mode": mode} for factor in (1.25, 2.125)]
    shapes = [
        (1, channels, height, side) for height, side in itertools.product((118, 125, 126), (3, 5))
    ]
    arguments = [pixels(shape, torch.float32, is_last=is_last) for shape in shapes]
    check(lambda x: [F.interpolate(x, **way) for way in ways], arguments, is_last=is_last)


@pytest.mark.parametrize(("mode", "rank"), MODES)
def test_half_types_and_sizes_that_are_given(mode: str, rank: int) -> None:
    ways: list[dict[str, Any]] = [{"size": 7}, {"size": [4, 6, 10][3 - rank :]}]
    for dtype in (torch.bfloat16, torch.float16):
        arguments = [
            pixels([2, 3, *sizes_of(rank, side)], dtype, is_last=False) for side in (1, 5, 7)
        ]
        check(
            lambda x: [F.interpolate(x, mode=mode, **way) for way in ways], arguments, is_last=False
        )


def test_whole_factors_that_eager_rounds_down() -> None:
    """1 / 41 in fp32 is too small, and the first pixel of some groups is that of the group before
    or not: such factors are no broadcast."""
    assert [n for n in range(1, 64) if not is_repeat(float(n))] == [
        n
        for n in range(1, 64)
        if torch.tensor(1 / n, dtype=torch.float32).double() * n < 1
        and (torch.tensor(1 / n).double() != 1 / n or n & (n - 1))
    ]
    for factor in (25, 41, 47):
        x = pixels((1, 1, 2, 90), torch.float32, is_last=False)
        check(lambda x, n=factor: [F.interpolate(x, scale_factor=n)], [x], is_last=False)


def test_rows_are_of_modes_that_there_are() -> None:
    assert {(mode, rank) for _, mode, rank in SHORTCUTS} <= set(MODES)


# factors that keep and double a size that the trace fixes
FIXED = {
    (mode, rank): [{"scale_factor": 1.3, "mode": mode}, {"scale_factor": 2.2, "mode": mode}]
    for mode, rank in MODES
}


@pytest.mark.parametrize("way", ["optimize", "compile", "train", "compiled gradients"])
@pytest.mark.parametrize("is_last", [False, True])
def test_in_kernels(way: str, is_last: bool, tmp_path: Path) -> None:
    """Pixels, gradients, and the strides of both."""
    chosen = [("bilinear", 2), ("nearest-exact", 2), ("nearest", 2), ("nearest", 3)]
    chosen += [] if is_last else [("nearest", 1)]

    def resized(*images: Tensor) -> list[Tensor]:
        return [
            F.interpolate(x, **how)
            for x, kind in zip(images, chosen, strict=True)
            for how in FIXED[kind]
        ]

    images = [
        pixels([1, 4, *sizes_of(rank, 3)], torch.float32, is_last=is_last) for _, rank in chosen
    ]
    trains = way in ("train", "compiled gradients")
    for image in images:
        image.requires_grad_(trains)
    torch._dynamo.reset()
    options = strop.Options(cache_dir=str(tmp_path), strict=way != "train")
    if way in ("compile", "compiled gradients"):
        function: Any = torch.compile(resized, backend="strop", options=options)
    else:
        module = Function(resized)
        function = strop.optimize(
            module if trains else module.eval(), options=options, train=trains
        )
    wanted = resized(*images)
    with torch.set_grad_enabled(trains):
        found = function(*images)
    pairs = list(zip(found, wanted, strict=True))
    if trains:
        pairs += zip(
            *(
                torch.autograd.grad(sum((r**2).sum() for r in results), images)
                for results in (found, wanted)
            ),
            strict=True,
        )
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-3)
        assert steps(got) == steps(want)
