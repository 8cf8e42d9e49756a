"""Is a 3x3 convolution of ours that reads boxes of pixels by TMA faster than cuDNN's, and where?

python benchmarks/probes/conv_boxes.py --out FOLDER [--seconds 150] [--every]

One H100, fp16, channels-last, stride 1: the convolutions of SD1.5's UNet, of SDXL's and of the
VAE's decoder at several sizes and batches, and others between them, of which no rule knows. Parts
of a cut depth are added by a kernel of their own, which is timed with it. Errors are against fp32.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import astuple
from typing import Any

import contest
import torch
from conv_narrow import SETS, arguments, library_call, window_of
from torch import Tensor

from strop.ir.source import KernelSource
from strop.kernels.box_conv import BOXES, Form, Picture, Tile, box_of, sources_of
from strop.runtime.box_convolution import BoxConvolution

# batch, height = width, channels in and out
SD15 = ((1, 320, 320), (2, 320, 640), (2, 640, 640), (4, 640, 1280), (4, 1280, 1280),
        (8, 1280, 1280), (8, 2560, 1280), (4, 2560, 1280), (4, 1920, 1280), (2, 1920, 640),
        (2, 1280, 640), (2, 960, 640), (1, 960, 320), (1, 640, 320), (1, 640, 640),
        (2, 1280, 1280))  # fmt: skip
SDXL = ((1, 320, 320), (2, 320, 640), (2, 640, 640), (4, 640, 1280), (4, 1280, 1280),
        (4, 2560, 1280), (4, 1920, 1280), (2, 1920, 640), (2, 1280, 640), (2, 960, 640),
        (1, 960, 320), (1, 640, 320), (1, 640, 640), (2, 1280, 1280))  # fmt: skip
VAE = ((1, 512, 512), (0.5, 512, 512), (0.25, 512, 256), (0.25, 256, 256), (0.125, 256, 128),
       (0.125, 128, 128), (0.25, 512, 512), (0.125, 256, 256))  # fmt: skip


def shapes() -> list[tuple[int, ...]]:
    found = [(2, 64 // down, ins, outs) for down, ins, outs in SD15]  # 512x512
    found += [(1, int(64 / up), ins, outs) for up, ins, outs in VAE]
    found += [(2, 128 // down, ins, outs) for down, ins, outs in SD15]  # 1024
    found += [(8, 64 // down, ins, outs) for down, ins, outs in SD15]
    found += [(2, 128 // down, ins, outs) for down, ins, outs in SDXL]
    found += [(2, 96 // down, ins, outs) for down, ins, outs in SD15]  # 768
    found += [(1, int(128 / up), ins, outs) for up, ins, outs in VAE]
    rng = random.Random(0)
    for _ in range(40):
        level = rng.randrange(4)
        side = rng.randrange(40, 136) // 2**level
        outs = rng.choice((320, 640, 1280)) if level < 3 else 1280
        found.append((rng.randrange(1, 9), side, 64 * rng.randrange(5, 31), outs))
    return list(dict.fromkeys((*each, 3, 1) for each in found))


TILES = tuple(Tile(*each) for each in (
    (128, 128, 4, 4), (128, 128, 3, 4), (128, 128, 4, 8), (64, 256, 4, 4), (64, 256, 3, 4),
    (64, 256, 4, 4, 1, 1), (64, 128, 4, 4), (64, 128, 6, 4), (128, 256, 4, 8), (256, 128, 4, 8),
    (128, 128, 4, 4, 3), (128, 128, 5, 8, 9), (64, 128, 6, 4, 3), (128, 64, 5, 4), (64, 64, 6, 4),
    (128, 128, 4, 4, 2), (128, 256, 4, 8, 3), (64, 128, 6, 4, 9), (128, 128, 4, 4, 6),
    (64, 64, 6, 4, 3), (64, 64, 6, 4, 9),
))  # fmt: skip
TRIED = {**BOXES, 64: ((1, 1, 64), (1, 2, 32), (1, 4, 16), (1, 8, 8))}  # of tiles that lost
SMS, WORST = 132, 1.7  # tiles of which a first guess says that they take longer are left out


def picture_of(shape: tuple[int, ...]) -> Picture:
    batch, side, ins, outs, size, _ = shape
    return Picture(size, ins, outs, batch, side, side)


def forms(shape: tuple[int, ...]) -> list[Form]:
    of, found = picture_of(shape), dict[Form, float]()
    for tile in TILES:
        if of.outs % tile.cols or 9 * of.ins // 64 % tile.split:
            continue
        form = Form(tile, box_of(tile.pixels, of, tile.extra, TRIED))
        pixels = tile.pixels + tile.extra * form.box[2]
        found[form] = -(-form.num_programs(of) // SMS) * tile.cols * pixels / tile.split
        found[form] *= 1.0 if tile.cols * pixels >= 128 * 128 else 1.3
    least = min(found.values(), default=0.0)
    return [form for form, guess in found.items() if guess <= WORST * least]


def sources(shape: tuple[int, ...]) -> Iterator[KernelSource]:
    for form in forms(shape):
        yield from sources_of(form, picture_of(shape), torch.float16)


def call_of(form: Form, sets: list[tuple[Tensor, ...]], library: Any, stream: int
            ) -> Callable[[], None]:  # fmt: skip
    def otherwise(inputs: Any, out: Tensor) -> None:
        raise AssertionError("these operands are for the kernel")

    conv = BoxConvolution(otherwise, library, stream, choose=lambda of: form)
    numbers = itertools.cycle(sets)

    def call() -> None:
        x, w, out = next(numbers)
        conv([x, w], out)

    return call


def measure(shape: tuple[int, ...], library: Any) -> dict[str, Any]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        sets = arguments(shape)
        x, w, out = sets[0]
        truth = torch.nn.functional.conv2d(x.float(), w.float(), padding=1)
        calls: dict[str, Callable[[], None]] = {"cudnn": library_call(sets, window_of(shape))}
        for form in forms(shape):
            calls[str(astuple(form.tile))] = call_of(form, sets, library, stream.cuda_stream)
        return contest.judged(calls, SETS, out, truth, stream)


def main() -> None:
    torch.backends.cudnn.allow_tf32 = False
    parser = contest.arguments_of(__doc__, seconds=150)
    parser.add_argument("--every", action="store_true", help="sizes of all models, and others")
    args = parser.parse_args()
    chosen = shapes() if args.every else shapes()[:24]
    contest.hold("conv_boxes", args, (s for shape in chosen for s in sources(shape)), chosen,
                 measure)  # fmt: skip


if __name__ == "__main__":
    main()
