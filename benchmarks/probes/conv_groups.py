"""Is a 3x3 convolution of ours, in PTX, faster where the programs of a cluster share a sum?

python benchmarks/probes/conv_groups.py --out FOLDER [--seconds 150]

One H100, fp16, channels-last, stride 1: see ``products.py``. 128 pixels x 160 channels, in up to
eight parts, leave few of 132 processors without work at all sizes of SD1.5's UNet. Peers: cuDNN and
``box_conv`` with the kernel that adds its parts. Errors are against fp32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import astuple
from typing import Any

import contest
import conv_boxes
import torch
from conv_narrow import SETS, arguments, library_call, window_of
from products import DEPTH, LINE, ROWS, SMS, Product, Tile, source_of
from torch import Tensor

from strop.ir.source import KernelSource
from strop.kernels.box_conv import Picture, form_of, sources_of

WORST = 1.35  # tiles of which a guess says that they take so much longer are left out
TILES = tuple(Tile(*each) for each in (
    *((2, 160, 5, split) for split in (1, 2, 3, 4, 6, 8)), *((2, 80, 7, split) for split in (1, 8)),
    *((2, 128, 6, split) for split in (1, 2, 3)), *((2, 256, 4, split) for split in (1, 2, 4)),
    *((2, 192, 5, split) for split in (1, 2)), *((1, 160, 7, split) for split in (1, 4, 8)),
    *((3, 160, 4, split) for split in (1, 2, 4)), *((3, 128, 5, split) for split in (1, 2)),
    *((4, 80, 5, split) for split in (1, 2)), (2, 160, 5, 1, True), (2, 128, 5, 1, True),
    (2, 256, 3, 1, True), (2, 192, 4, 1, True), (3, 160, 3, 1, True),
))  # fmt: skip
BOXES = {
    1: ((1, 1, 64), (1, 2, 32), (1, 4, 16), (1, 8, 8)),
    2: ((1, 1, 128), (1, 2, 64), (1, 4, 32), (1, 8, 16), (2, 8, 8)),
    3: ((1, 3, 64), (1, 6, 32), (1, 12, 16), (3, 8, 8)),
    4: ((1, 2, 128), (1, 4, 64), (1, 8, 32), (1, 16, 16), (4, 8, 8)),
}


def tiles_along(box: tuple[int, int, int], of: Picture) -> tuple[int, ...]:
    sizes = (of.batch, of.height, of.width)
    return tuple(-(-size // step) for size, step in zip(sizes, box, strict=True))


def product_of(tile: Tile, of: Picture) -> Product:
    """With the box that wastes the fewest pixels."""
    box = min(BOXES[tile.groups], key=lambda box: math.prod(tiles_along(box, of)))
    return Product(tile, of.size, box)


def clocks(product: Product, of: Picture) -> float:
    """A guess: a step takes as long as its products, or as what they read and write of shared
    memory at 128 bytes a clock."""
    tile = product.tile
    programs = math.prod(tiles_along(product.box, of)) * -(-of.outs // tile.cols) * tile.split
    reads = LINE // DEPTH * tile.groups * (ROWS + tile.cols) * 2 * DEPTH
    step = max(2 * tile.groups * tile.cols, (reads + product.stage) / 128)
    steps = -(-(of.size**2) * of.ins // LINE // tile.split)
    around = 3000 if tile.keeps_on else 5000 if tile.split == 1 else 7000
    return -(-programs // SMS) * (around + steps * step)


def has_steps(tile: Tile, of: Picture) -> bool:
    """Whether every part of a sum has some."""
    steps = of.size**2 * -(-of.ins // LINE)
    return (tile.split - 1) * -(-steps // tile.split) < steps


def products(of: Picture) -> list[Product]:
    """Those that are worth a try."""
    tried = (product_of(tile, of) for tile in TILES if has_steps(tile, of))
    found = {product: clocks(product, of) for product in tried}
    least = min(found.values())
    return [product for product, guess in found.items() if guess <= WORST * least]


def bound(product: Product, of: Picture, sets: list[tuple[Tensor, ...]], library: Any, stream: int
          ) -> Callable[[], None]:  # fmt: skip
    count, down, right = tiles_along(product.box, of)
    across = -(-of.outs // product.width)
    total = count * down * right * across
    at_work = min(total, SMS) if product.tile.keeps_on else total
    scalars = [across, right, down, count, of.ins, at_work]
    sizes = [(of.batch, of.height, of.width, of.ins), (of.outs, of.size**2 * of.ins)]
    views = [(each, torch.empty(each, device="meta").stride()) for each in sizes]
    source, launches = source_of(product, torch.float16), []
    for tensors in sets:
        pointers = [*(t.data_ptr() for t in tensors), 0][:4]  # a convolution adds nothing
        launches.append(library.bind(source, pointers, scalars, stream, early=True, views=views))
    turns = itertools.cycle(launches)
    return lambda: next(turns)()


def sources(shape: tuple[int, ...]) -> Iterator[KernelSource]:
    of = conv_boxes.picture_of(shape)
    yield from (source_of(product, torch.float16) for product in products(of))
    form = form_of(of)
    if form:
        yield from sources_of(form, of, torch.float16)


def measure(shape: tuple[int, ...], library: Any) -> dict[str, Any]:
    of, stream = conv_boxes.picture_of(shape), torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        sets = arguments(shape)
        x, w, out = sets[0]
        truth = torch.nn.functional.conv2d(x.float(), w.float(), padding=1)
        calls: dict[str, Callable[[], None]] = {"cudnn": library_call(sets, window_of(shape))}
        form = form_of(of)
        if form:
            calls["boxes"] = conv_boxes.call_of(form, sets, library, stream.cuda_stream)
        for product in products(of):
            name = str(astuple(product.tile))
            calls[name] = bound(product, of, sets, library, stream.cuda_stream)
        return contest.judged(calls, SETS, out, truth, stream)


def main() -> None:
    torch.backends.cudnn.allow_tf32 = False
    args = contest.arguments_of(__doc__, seconds=150).parse_args()
    shapes = [shape for shape in conv_boxes.shapes()[:40] if shape[2] >= 256]
    contest.hold("conv_groups", args, (s for shape in shapes for s in sources(shape)), shapes,
                 measure)  # fmt: skip


if __name__ == "__main__":
    main()
