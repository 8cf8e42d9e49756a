"""The row of the WGMMA GEMM says which of its tiles computes a convolution or a linear, by sizes
alone, how long that takes, and what is launched."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from strop.ir.contractions import (
    AMONG_COLUMNS,
    FACTORS,
    GELU_TANH,
    NORMED,
    NUM_OF_NORM,
    PAIRED,
    ColumnNorm,
    Gate,
)
from strop.ir.device import Device
from strop.ir.source import KernelSource
from strop.kernels.gemm import tile as tiles
from strop.kernels.gemm.implicit import Box, ConvShape, box_of, boxes_along, windows_of
from strop.kernels.gemm.implicit import picture_of as convolution_of
from strop.kernels.gemm.tile import ACTIVATED, GATED, NARROW, PLAIN, SUM, GemmTile, Product
from strop.kernels.gemm.times import Cost, GemmTimes
from strop.kernels.gemm.wgmma_gemm import wgmma_gemm
from strop.kernels.kernel import (
    CHANNELS_LAST,
    NEVER,
    RESULT,
    Call,
    Kernel,
    Late,
    Launch,
    Launches,
    Lies,
    Operand,
    Problem,
    Torch,
    View,
)
from strop.kernels.ptx import HALF, KINDS, LINE
from strop.kernels.tuned import tuned

_ENDS = {
    "conv2d": PLAIN,
    "upsampled_conv2d": PLAIN,
    "linear": PLAIN,
    "geglu": GATED,
    "linear_add": SUM,
    "linear_gelu": ACTIVATED,
}
_NORMS = dict.fromkeys(NORMED, tiles.NORMED)
OPS: Mapping[str, str] = _ENDS | {op: _ENDS[plain] for plain, op in PAIRED.items()} | _NORMS
# What ends read behind the operands that are multiplied. SUM: what is added, biases. GATED: biases,
# if there are any. NORMED: what is added, if it is, and the vectors of the norm.
MORE: Mapping[str, int] = {PLAIN: 0, GATED: 1, SUM: 2, ACTIVATED: 1, tiles.NORMED: NUM_OF_NORM}
CONVOLUTIONS = ("conv2d", "upsampled_conv2d")
LINEARS = tuple(op for op in OPS if op not in CONVOLUTIONS)

PIECE = 8  # what the columns and the depth of a linear are multiples of: 16 bytes
STRIDES, LEAST_MEASURED = (1, 2), 320  # of convolutions: and channels either way
MOST_NARROW = 128  # columns of a linear that has tiles of its own
MOST_TOGETHER = 64  # tiles of a linear's rows
LEAST_ROWS = 128  # of a linear: fewer wait for their weights alone
# Small pictures with fewer channels either way, as at the end of ResNet, have not been measured.
LEAST_PIXELS, LEAST_CHANNELS = 2048, 640


@dataclass(frozen=True, slots=True)
class GemmForm:
    """This is a product and its box of pictures, lines and columns of pixels; ``boxes`` says how
    many of these lie side by side: of pictures, down, right."""

    product: Product
    box: Box
    boxes: Box
    across: int  # tiles of columns
    sms: int  # multiprocessors of the device

    @property
    def windows(self) -> int:
        return windows_of(self.product.size)

    @property
    def num_tiles(self) -> int:
        return math.prod(self.boxes) * self.across * self.windows

    @property
    def num_programs(self) -> int:
        tile = self.product.tile
        if not tile.keeps_on:
            return self.num_tiles * tile.split
        return min(self.num_tiles, self.sms)

    @property
    def results(self) -> tuple[int, ...]:
        """Return the box in which results leave, columns last, or none where programs store them.
        One of four windows writes every second line."""
        if not self.product.leaves_by_boxes:
            return ()
        count, height, width = self.box
        lines = (height, 1) if self.windows > 1 else (height,)
        return (count, *lines, width, self.product.unit)

    def scalars(self, ins: int) -> tuple[int | Late, ...]:
        """Return the scalars as ``wgmma_gemm`` wants them."""
        count, down, right = self.boxes
        at_work = self.num_programs // self.product.tile.split
        all_have = self.across, right, down, count, ins, at_work, Late.WEIGHTS
        if not self.product.has_box:
            return *all_have, self.together
        _, height, width = self.box
        return *all_have, *self.box, -(-(1 << 16) // height), -(-(1 << 16) // width)

    @property
    def together(self) -> int:
        """Return how many tiles of rows are gone through together, in shares that are alike. What
        programs read at a time is then little, where large weights are more than a cache keeps."""
        count = math.prod(self.boxes)
        return -(-count // -(-count // MOST_TOGETHER))


def least(found: Iterable[tuple[GemmForm, float]]) -> tuple[GemmForm | None, float]:
    """Return the form that takes the fewest microseconds, or None and NEVER where there is none."""
    return min(found, key=lambda each: each[1], default=(None, NEVER))


def form(tile: GemmTile, of: ConvShape, end: str = PLAIN, *, sms: int) -> GemmForm:
    """Return the form of a product by this tile. ``of.outs`` counts the columns of the result."""
    product = _product(tile, of, end)
    box = box_of(product.rows, of) if product.has_box else (1, 1, product.rows)
    return GemmForm(product, box, boxes_along(box, of), -(-of.outs // product.width), sms)


def _product(tile: GemmTile, of: ConvShape, end: str) -> Product:
    return Product(tile, of.size, end, of.stride, paired=bool(of.further))


def kind_of(of: ConvShape, end: str) -> str:
    """Return the kind of GEMM, by which tables of tiles are kept."""
    if of.size == 1:
        return NARROW if end == PLAIN and of.outs <= MOST_NARROW else end
    if of.windows > 1:
        return "upsampled"
    return "conv" if of.stride == 1 else "strided"


def us_of(found: GemmForm, of: ConvShape, times: GemmTimes) -> float:
    """Return about how many microseconds it takes, on a GPU that does nothing else."""
    return max(_busy_us(found, of, times), _waiting_us(found, of, times))


def _busy_us(found: GemmForm, of: ConvShape, times: GemmTimes) -> float:
    """Return what it takes where operands come as fast as they are multiplied."""
    tile, kind = found.product.tile, kind_of(of, found.product.end)
    cost: Cost = times.tiles[kind][tile]
    whole, halves = _whole_steps(of), _half_steps(of)
    steps = whole + halves / 2 if tile.split == 1 else -(-(whole + halves) // tile.split)
    return times.busy_us(cost, found.num_tiles, steps, tile.split)


def _waiting_us(found: GemmForm, of: ConvShape, times: GemmTimes) -> float:
    """Return what its operands take to come: weights, which no cache holds; or rows that have few
    columns, once for every tile of these."""
    depth, rates = of.size**2 * of.ins + of.further, times.library
    if kind_of(of, found.product.end) == NARROW:
        return rates.row_begin_us + 2 * of.width * depth * found.across / rates.row_bytes
    weights = 2 * depth * found.across * found.product.tile.cols * of.windows
    return rates.weights_us(weights)


def _whole_steps(of: ConvShape) -> int:
    return of.size**2 * -(-of.ins // LINE)


def _half_steps(of: ConvShape) -> int:
    """Count the steps over a second pair of operands, of half the depth each."""
    return -(-of.further // HALF)


def has_steps(tile: GemmTile, of: ConvShape) -> bool:
    """Say whether every part of a sum has some steps."""
    steps = _whole_steps(of) + _half_steps(of)
    return (tile.split - 1) * -(-steps // tile.split) < steps


def is_able(product: Product, of: ConvShape) -> bool:
    """Say whether it can do this: its parts have steps, its gates lie behind the values, no column
    is added twice, and each has a bias where all do."""
    if product.end == PLAIN:
        return has_steps(product.tile, of)
    is_whole = of.outs % product.width == 0
    is_wide = product.end in (ACTIVATED, tiles.NORMED) and of.outs > product.width
    return has_steps(product.tile, of) and (is_whole or is_wide)


@lru_cache(maxsize=4096)
def form_of(of: ConvShape, end: str, device: Device) -> tuple[GemmForm | None, float]:
    """Return the fastest form and its microseconds, or None and NEVER where there is none. Of those
    that wait for operands, which take the same time, it is the one that has the least to do."""
    times = tuned(device).gemm
    found = {each: us_of(each, of, times) for each in _forms(of, end, device)}
    least = min(found.values(), default=NEVER)
    alike = (each for each, us in found.items() if us == least)
    best = min(alike, key=lambda each: _busy_us(each, of, times), default=None)
    return best, NEVER if best is None else found[best]


def _forms(of: ConvShape, end: str, device: Device) -> Iterator[GemmForm]:
    if of.width < _least_rows(end) if of.size == 1 else _is_small(of):
        return
    for tile in tuned(device).gemm.tiles[kind_of(of, end)]:
        found = form(tile, of, end, sms=device.sms)
        if is_able(found.product, of):
            yield found


def _least_rows(end: str) -> int:
    """Return how many rows a linear must have. Beside a sum, or a norm, no library is faster with
    few, as it would be another launch."""
    return 1 if end in (SUM, tiles.NORMED) else LEAST_ROWS


def _is_small(of: ConvShape) -> bool:
    is_small = max(of.ins, of.outs) < LEAST_CHANNELS and of.pixels < LEAST_PIXELS
    return is_small and of.windows == 1


def supports(call: Call, device: Device) -> str:
    """Say why there are no tiles for this convolution or linear, or nothing."""
    if not device.has_wgmma:
        return f"multiplies by WGMMA, which {device.name} lacks"
    if call.dtype not in KINDS or call.by_columns:
        how = " with weights by columns" if call.by_columns else ""
        return f"computes fp16 and bf16 of weights whose rows are dense, not {call.dtype}{how}"
    factors, end = FACTORS.get(call.op, 2), OPS[call.op]
    wanted, given = factors + MORE[end] + (call.op == NORMED[1]), len(call.shapes)
    if given != wanted and not (end == GATED and given == factors):
        return f"takes {wanted} operands for {call.op}, not {given}"
    if end == ACTIVATED and not dict(call.attrs).get(AMONG_COLUMNS):
        return "was not measured beside a library with the same end"
    weight, up = call.known(1), call.known(factors - 1)
    if weight is None or up is None:
        return "wants weights of a known size"
    if call.op == "upsampled_conv2d":
        return ""  # ``passes.upsampled_conv`` makes none that does not fit
    outs, ins = weight[:2]
    if call.op == "conv2d":
        return why_no_window(call, outs, ins, weight[2:])
    halves = 2 if OPS[call.op] == GATED else 1
    if ins % PIECE or outs % (halves * PIECE):
        return f"wants widths that are multiples of {PIECE}, not {ins} -> {outs}"
    if up[1] % PIECE:
        return f"goes on over multiples of {PIECE} channels, not {up[1]}"
    return "" if any(_forms_of(call, device)) else f"has no tile for {ins} -> {outs}"


def why_no_window(call: Call, outs: int, ins: int, window: tuple[int, ...]) -> str:
    """Say why there are no tiles for a convolution, or nothing. They take a window of 3x3 pixels,
    with zeros around that keep height and width but for the stride."""
    if min(ins, outs) < LEAST_MEASURED or ins % LINE or outs % LINE:
        return f"was measured from {LEAST_MEASURED} channels on, multiples of {LINE}"
    stride = tuple(call.attr("stride"))
    is_plain = call.attr("groups") == 1 and tuple(call.attr("dilation")) == (1, 1)
    is_square = stride in [(step, step) for step in STRIDES]
    if window != (3, 3) or tuple(call.attr("padding")) != (1, 1) or not (is_plain and is_square):
        return "computes dense 3x3 windows with padding 1 and stride 1 or 2"
    return ""


def cost_us(problem: Problem, device: Device) -> float:
    return form_of(picture_of(problem), OPS[problem.op], device)[1]


def launch(problem: Problem, device: Device) -> Launches | None:
    found, _ = form_of(picture_of(problem), OPS[problem.op], device)
    return None if found is None else launches_by(found, problem)


def launches_by(found: GemmForm, problem: Problem) -> Launches:
    """Return what this form launches."""
    of, end = picture_of(problem), OPS[problem.op]
    order = CHANNELS_LAST if problem.op in CONVOLUTIONS else ()
    columns = problem.shapes[1][0], math.prod(problem.shapes[1][1:])
    weights = View(columns, (columns[1], 1))
    factors, is_paired = FACTORS.get(problem.op, 2), bool(of.further)
    # where there are no biases none are read
    biases = len(problem.shapes) - 1 if len(problem.shapes) > factors else 1
    ones = 0 if order else 2
    rows, further = (View(box=(*found.box, line), ones=ones) for line in (LINE, HALF))
    operands = (
        Operand(0, Lies.ROWS, order, view=rows),
        Operand(1, order=order, view=weights),
        *((Operand(2, Lies.ROWS, view=further), Operand(3, Lies.ROWS, view=View())) * is_paired),
        result_of(found, of, order),
        *_beside(problem, biases, order),
    )
    source = wgmma_gemm(ended_as(found.product, problem), problem.dtype)
    product = Launch(source, operands, found.scalars(of.ins))
    if end != SUM:
        return Launches((product,))
    return Launches((Torch("copy", (Operand(factors), Operand(RESULT))), product))


def _beside(problem: Problem, biases: int, order: tuple[int, ...]) -> Iterator[Operand]:
    """Yield what stands behind the result: biases, or the vectors of a norm and what is added."""
    if OPS[problem.op] != tiles.NORMED:
        yield Operand(biases, order=order if biases == 1 else ())
        return
    count = len(problem.shapes)
    yield from (Operand(n, Lies.RUNS) for n in range(count - NUM_OF_NORM, count))
    if problem.op == NORMED[1]:
        yield Operand(2)


def result_of(found: GemmForm, of: ConvShape, order: tuple[int, ...]) -> Operand:
    """Return the result: rows may have gaps, as columns of a wider value, where it leaves by
    boxes."""
    if not found.results:
        return Operand(RESULT, order=order)
    if found.product.end in (PLAIN, ACTIVATED) and not order:
        return Operand(RESULT, Lies.ROWS, view=View(box=found.results, ones=2))
    return Operand(RESULT, order=order, view=View(of.result, dense(of.result), found.results))


def ended_as(product: Product, call: Call | Problem) -> Product:
    """Return the product with the gates, the activation or the norm that a call asks for, which
    take as long as any."""
    if product.end == tiles.NORMED:
        return replace(product, norm=ColumnNorm.of(call.op, dict(call.attrs)))
    if product.end == ACTIVATED:
        return replace(product, gate=Gate(GELU_TANH))
    if product.end != GATED:
        return product
    has_biases = len(call.shapes) > FACTORS[call.op]
    return replace(product, gate=Gate.of(dict(call.attrs)), has_biases=has_biases)


def dense(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a dense tensor."""
    return tuple(math.prod(sizes[n + 1 :]) for n in range(len(sizes)))


def forms(call: Call, device: Device) -> Iterable[KernelSource]:
    for product in _forms_of(call, device):
        yield wgmma_gemm(ended_as(product, call), call.dtype)


def _forms_of(call: Call, device: Device) -> Iterator[Product]:
    """Yield what may compute such a call at some number of rows or pixels."""
    end, weight = OPS[call.op], call.known(1)
    assert weight is not None
    # the number of rows is not known: it decides no more than which of these runs
    shapes: tuple[tuple[int, ...], ...] = ((1, weight[1], 1, 1)[: len(weight)], weight)
    if FACTORS.get(call.op) == FACTORS[PAIRED["linear"]]:
        up = call.known(3)
        assert up is not None
        shapes += (1, up[1]), up
    of = picture_of(Problem(call.op, call.attrs, shapes, call.dtype))
    for tile in tuned(device).gemm.tiles[kind_of(of, end)]:
        product = _product(tile, of, end)
        if is_able(product, of):
            yield product


def picture_of(problem: Problem) -> ConvShape:
    """Return the shape by the sizes of the operands: (B, CI, H, W) and (CO, CI, size, size), or
    (..., K) and (N, K), whose rows are one line of pixels; and further (..., R) and (N, R)."""
    x, weight = problem.shapes[:2]
    if problem.op in CONVOLUTIONS:
        return convolution_of(x, weight, dict(problem.attrs).get("stride", (1,))[0])
    *rows, depth = x
    further = problem.shapes[3][1] if FACTORS.get(problem.op, 2) > 2 else 0
    return line_of(math.prod(rows), weight[0], depth, OPS[problem.op], further)


def line_of(rows: int, columns: int, depth: int, end: str, further: int = 0) -> ConvShape:
    """Return the shape of a linear of so many columns, those of gates among them, whose sum goes on
    over ``further`` channels."""
    outs = columns // 2 if end == GATED else columns
    return ConvShape(1, depth, outs, 1, 1, rows, further=further)


ROW = Kernel("wgmma_gemm", tuple(OPS), supports, cost_us, launch, forms)
