"""Convolutions by boxes: the kernels in the interpreter and the compiler, the choice, the whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.ir.dims import const, symbol
from strop.ir.graph import Node
from strop.kernels import box_conv
from strop.kernels.box_conv import HALVES, Form, Picture, Tile, box_of, sources_of
from strop.options import Options
from strop.runtime.box_convolution import BoxConvolution
from strop.testing import assert_as_accurate_as_eager
from tests.codegen.test_triton_compile import compiled, resources
from tests.kernels.interpreted import Interpreted

pytest.importorskip("triton")

SMALL = Tile(64, 64, 2, 4)
# of the interpreter: batch, height, width, channels in and out
WHOLE = (2, 8, 8, 64, 64)
RAGGED = (3, 5, 9, 128, 64)  # a box leaves the picture, and the last one the batch
CASES = (
    (SMALL, WHOLE),
    (SMALL, RAGGED),
    (Tile(64, 64, 2, 4, split=3), RAGGED),
    (Tile(64, 64, 2, 4, extra=1), (1, 7, 16, 64, 128)),
)


@pytest.fixture(autouse=True)
def _small_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For an interpreter, which takes its time."""
    monkeypatch.setitem(box_conv.BOXES, 64, ((1, 4, 16), (1, 8, 8), (4, 2, 8)))


def operands(sizes: tuple[int, ...], dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    batch, height, width, ins, outs = sizes
    x = torch.randn(batch, ins, height, width).to(dtype)
    weight = (torch.randn(outs, ins, 3, 3) * (9 * ins) ** -0.5).to(dtype)
    last = torch.channels_last
    return x.to(memory_format=last), weight.to(memory_format=last)


def library(inputs: Sequence[Tensor], out: Tensor) -> None:
    out.copy_(F.conv2d(*inputs, padding=1))


def run(tile: Tile | None, x: Tensor, weight: Tensor, monkeypatch: pytest.MonkeyPatch
        ) -> tuple[Tensor, list[str]]:  # fmt: skip
    """The result of the step, and which kernels ran."""
    kernels = Interpreted()
    made = torch.empty

    def empty(*sizes: Any, **kinds: Any) -> Tensor:
        parts = made(*sizes, **kinds).fill_(float("nan"))
        return kernels.known(parts)

    def choose(of: Picture) -> Form | None:
        return tile and Form(tile, box_of(tile.pixels, of, tile.extra))

    shape = F.conv2d(x, weight, padding=1).shape
    out = torch.empty(shape, dtype=x.dtype).to(memory_format=torch.channels_last)
    for tensor in (x, weight, out):
        kernels.known(tensor)
    call = BoxConvolution(library, kernels, 0, choose=choose)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        call([x, weight], out)
    return out, kernels.ran


@pytest.mark.parametrize(("tile", "sizes"), CASES, ids=str)
def test_as_accurate_as_torch(tile: Tile, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
                              ) -> None:  # fmt: skip
    x, weight = operands(sizes)
    found, ran = run(tile, x, weight, monkeypatch)
    truth = F.conv2d(x.double(), weight.double(), padding=1)
    assert_as_accurate_as_eager(found, F.conv2d(x, weight, padding=1), truth)
    assert ran == (["box_conv"] if tile.split == 1 else ["box_conv", "add_parts"])


def test_the_library_does_what_is_not_chosen_or_lies_otherwise(monkeypatch: pytest.MonkeyPatch
                                                               ) -> None:  # fmt: skip
    x, weight = operands(WHOLE)
    wanted = F.conv2d(x, weight, padding=1)
    moved = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].as_strided(x.shape, x.stride())
    for tile, given in ((None, x), (SMALL, x.contiguous()), (SMALL, moved.copy_(x))):
        found, ran = run(tile, given, weight, monkeypatch)
        assert not ran
        torch.testing.assert_close(found, wanted)


def test_nan_and_infinity_reach_their_neighbours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = operands(WHOLE)
    x[0, 3, 0, 0], x[1, 5, 7, 7] = float("nan"), float("inf")
    found, ran = run(SMALL, x, weight, monkeypatch)
    assert ran
    wanted = F.conv2d(x, weight, padding=1)
    assert torch.equal(found.isfinite(), wanted.isfinite())


def node_of(ins: int, outs: int, dtype: torch.dtype = torch.float16, window: int = 3,
            **changes: Any) -> Node:  # fmt: skip
    sizes = tuple(map(symbol, "bhw"))
    x = Node("input", (), {}, (sizes[0], const(ins), *sizes[1:]), dtype)
    weight = Node("input", (), {}, tuple(map(const, (outs, ins, window, window))), dtype)
    side = window // 2
    attrs = {"stride": (1, 1), "padding": (side, side), "dilation": (1, 1), "groups": 1} | changes
    return Node("conv2d", (x, weight), attrs, (sizes[0], const(outs), *sizes[1:]), dtype)


@pytest.mark.parametrize(
    ("node", "is_ours"),
    [
        (node_of(320, 640), True),
        (node_of(320, 640, torch.bfloat16), True),
        (node_of(320, 640, torch.float32), False),
        (node_of(320, 640, stride=(2, 2)), False),
        (node_of(320, 640, padding=(0, 0)), False),
        (node_of(320, 640, groups=2), False),
        (node_of(320, 640, dilation=(2, 2)), False),
        (node_of(96, 640), False),
        (node_of(256, 640), False),  # no such picture was measured
        (node_of(512, 64), False),
        (node_of(64, 4), False),
        (node_of(320, 640, window=1), False),  # is a linear layer
    ],
    ids=str,
)
def test_which_convolutions(node: Node, is_ours: bool) -> None:
    assert box_conv.is_boxed(node) == is_ours


def test_boxes_cover_a_picture_with_little_waste() -> None:
    for height, width in ((64, 64), (96, 96), (12, 12), (8, 8), (72, 128), (16, 40)):
        for pixels in box_conv.BOXES:
            of = Picture(3, 320, 320, 2, height, width)
            form = Form(Tile(64, pixels, 4, 4), box_of(pixels, of))
            count, down, right = form.boxes(of)
            assert count * form.box[0] >= of.batch
            assert down * form.box[1] >= height
            assert right * form.box[2] >= width
            covered = count * down * right * pixels
            assert covered <= 2 * max(of.batch * height * width, pixels)
    assert box_of(256, Picture(3, 320, 320, 2, 64, 64)) == (1, 4, 64)
    assert box_of(128, Picture(3, 320, 320, 2, 8, 8)) == (2, 8, 8)


def forms_in_use() -> list[tuple[Form, Picture]]:
    sizes = [(320, 320, 64), (640, 640, 32), (1280, 1280, 16), (1280, 1280, 8), (512, 512, 64)]
    pictures = [Picture(3, ins, outs, 2, side, side) for ins, outs, side in sizes]
    found = [(box_conv.form_of(of), of) for of in pictures]
    return [(form, of) for form, of in found if form]


def test_a_form_for_each_level_of_a_unet() -> None:
    assert len({of.height for _, of in forms_in_use()}) == 4
    assert box_conv.form_of(Picture(3, 64, 64, 1, 4, 4)) is None  # hardly any work


@pytest.mark.parametrize(("form", "of"), forms_in_use(), ids=str)
def test_compiles(form: Form, of: Picture, tmp_path: Path) -> None:
    for source in sources_of(form, of, torch.float16):
        cubin = compiled(source, 90)
        assert cubin.shared <= 227 * 1024
        assert resources(cubin, tmp_path)[1] == 0  # nothing spilled
        assert cubin.early


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in
                                   ((320, 320), (320, 640), (640, 320)))  # fmt: skip
        self.norms = nn.ModuleList(nn.GroupNorm(32, c) for c in (320, 320, 640))

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = conv(F.silu(norm(x)))
        return x


def test_kernels_for_all_sizes_are_known() -> None:
    """Every form that some picture gets is among those that are built ahead."""
    half = torch.float16
    got, known = set(), set(box_conv.sources_anywhere([const(s) for s in (1280, 640, 3, 3)], half))
    for batch, height, width in itertools.product((1, 2, 3, 8), range(4, 130, 5), range(4, 130, 7)):
        shapes = (batch, 640, height, width), (1280, 640, 3, 3)
        got |= set(box_conv.sources_at(shapes, half))
    assert len(got) > 5
    assert got <= known
    assert len(known) < 4 * len(got)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
                    reason="needs an NVIDIA GPU with a tensor memory accelerator")  # fmt: skip
class TestOnAGpu:
    @pytest.mark.parametrize("dtype", HALVES, ids=str)
    @pytest.mark.parametrize("tile", list(box_conv.TILES), ids=str)
    def test_each_tile_at_odd_sizes(self, tile: Tile, dtype: torch.dtype) -> None:
        from strop.runtime.kernels import kernel_library

        stream = torch.cuda.current_stream().cuda_stream
        kernels = kernel_library("cuda", torch.cuda.current_device(), "", 0)

        def choose(of: Picture) -> Form:
            return Form(tile, box_of(tile.pixels, of, tile.extra))

        conv = BoxConvolution(library, kernels, stream, choose=choose)
        for sizes in ((2, 13, 37, 320, 320), (1, 64, 64, 64, 640), (3, 9, 8, 192, 1280)):
            if sizes[-1] % tile.cols or 9 * sizes[-2] // 64 % tile.split:
                continue
            x, weight = (t.cuda() for t in operands(sizes, dtype))
            wanted = F.conv2d(x, weight, padding=1)
            out = torch.full_like(wanted, float("nan"))
            conv([x, weight], out)
            truth = F.conv2d(x.double(), weight.double(), padding=1)
            assert_as_accurate_as_eager(out, wanted, truth)

    @pytest.mark.parametrize("dtype", HALVES, ids=str)
    def test_in_a_module(self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        module = Network().cuda().to(dtype).eval().requires_grad_(False)
        exact = Network().cuda().double()
        exact.load_state_dict(module.state_dict())
        seen: list[Picture] = []
        binds = BoxConvolution._bind

        def bind(self: BoxConvolution, of: Picture, dtype: torch.dtype) -> Any:
            seen.append(of)
            return binds(self, of, dtype)

        monkeypatch.setattr(BoxConvolution, "_bind", bind)
        inputs = [torch.randn(b, 320, h, w, device="cuda", dtype=dtype)
                  for b, h, w in ((2, 64, 64), (1, 56, 72), (2, 8, 8))]  # fmt: skip
        with torch.no_grad():
            wanted = [(module(x), exact(x.double())) for x in inputs]
            options = Options(strict=True, group_product=False)
            strop.optimize(module, options=options)
            for x, (eager, truth) in zip(inputs, wanted, strict=True):
                for _ in range(3):  # step by step, captured, replayed
                    assert_as_accurate_as_eager(module(x), eager, truth)
            assert Picture(3, 320, 320, 2, 64, 64) in seen
            strop.restore(module)
            strop.optimize(module, options=replace(options, box_conv=False))
            seen.clear()
            assert_as_accurate_as_eager(module(inputs[0]), *wanted[0])
            assert not seen
