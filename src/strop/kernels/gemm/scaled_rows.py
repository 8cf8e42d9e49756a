"""The row of products of e4m3 codes by WGMMA says which tile computes one, how long that takes, and
what is launched. Products whose halves are values and gates end in these: what is twice as wide as
the result is never written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

from strop.ir.contractions import Gate
from strop.ir.device import Device
from strop.ir.dims import const
from strop.ir.source import KernelSource
from strop.kernels.gemm.rows import GemmForm, least
from strop.kernels.gemm.tile import (
    CODES,
    GATED,
    GATED_CODES,
    GEGLU,
    PLAIN,
    GemmTile,
    Product,
)
from strop.kernels.gemm.times import Cost
from strop.kernels.gemm.wgmma_gemm import wgmma_gemm
from strop.kernels.kernel import (
    RESULT,
    Call,
    Kernel,
    Launch,
    Launches,
    Lies,
    Operand,
    Problem,
    View,
)
from strop.kernels.ptx import KINDS, LINE_BYTES
from strop.kernels.tuned import tuned

DEPTH_PIECE, COLUMNS_PIECE = 16, 8  # what the depth and the columns are multiples of: 16 bytes
OPS: Mapping[str, str] = {"scaled_product": PLAIN, "scaled_geglu": GATED}
KINDS_OF: Mapping[str, str] = {PLAIN: CODES, GATED: GATED_CODES}  # of tiles, by the end


def supports(call: Call, device: Device) -> str:
    """Say why there are no tiles for this product, or nothing."""
    if not device.has_wgmma:
        return f"multiplies by WGMMA, which {device.name} lacks"
    if call.dtype not in KINDS:
        return f"computes fp16 and bf16, not {call.dtype}"
    weight = call.known(1)
    if weight is None:
        return "wants weights of a known size"
    (columns, depth), end = weight, OPS[call.op]
    if depth % DEPTH_PIECE or columns % (COLUMNS_PIECE * _halves(end)):
        return f"wants depths of 16s and widths of 8s, not {depth} -> {columns}"
    by_row, by_column = (shape[:1] for shape in (call.shapes[2], call.shapes[3][::-1]))
    if by_row != call.shapes[0][:1] or by_column != (const(columns),):
        return "scales each row and each column, not all of either alike"
    is_able = any(tiles_of(KINDS_OF[end], columns, device))
    return "" if is_able else f"has no tile that was measured for {columns}"


def _halves(end: str) -> int:
    """Return how many rows a weight has for each column of the result."""
    return 2 if end == GATED else 1


def tiles_of(kind: str, columns: int, device: Device) -> Iterator[tuple[GemmTile, Cost]]:
    """Yield tiles with their costs. Scales of a tile's columns are read as a whole."""
    costs = tuned(device).gemm.tiles.get(kind, {})
    yield from ((tile, cost) for tile, cost in costs.items() if tile.cols <= columns)


def form(
    tile: GemmTile,
    rows: int,
    columns: int,
    end: str = PLAIN,
    gate: Gate = GEGLU,
    *,
    has_biases: bool,
    sms: int,
) -> GemmForm:
    """Return the form of a product by this tile. ``columns`` are a weight's rows, no fewer than the
    tile has; with gates among them a multiple of 16."""
    product = Product(tile, 1, end, gate=gate, has_biases=has_biases, codes=True)
    boxes = (1, 1, -(-rows // product.rows))
    across = -(-columns // (_halves(end) * product.width))
    return GemmForm(product, (1, 1, product.rows), boxes, across, sms)


def us_of(found: GemmForm, cost: Cost, depth: int, columns: int, device: Device) -> float:
    """Return about how many microseconds it takes: those of its steps of 128 codes, or those of its
    weights, which no cache holds."""
    times = tuned(device).gemm
    busy = times.busy_us(cost, found.num_tiles, -(-depth // LINE_BYTES))
    return max(busy, times.library.weights_us(depth * columns))


@lru_cache(maxsize=4096)
def fastest(problem: Problem, device: Device) -> tuple[GemmForm | None, float]:
    """Return the fastest form and its microseconds, or None and NEVER where there is none."""
    (rows, depth), (columns, _) = problem.shapes[:2]
    end, gate, has_biases = _ended(problem)
    made = (
        (form(tile, rows, columns, end, gate, has_biases=has_biases, sms=device.sms), cost)
        for tile, cost in tiles_of(KINDS_OF[end], columns, device)
    )
    return least((each, us_of(each, cost, depth, columns, device)) for each, cost in made)


def _ended(call: Call | Problem) -> tuple[str, Gate, bool]:
    """Return the end of a call, what its gates go through, and whether it has biases."""
    end = OPS[call.op]
    gate = Gate.of(dict(call.attrs)) if end == GATED else GEGLU
    return end, gate, len(call.shapes) > 4


def cost_us(problem: Problem, device: Device) -> float:
    return fastest(problem, device)[1]


def launch(problem: Problem, device: Device) -> Launches | None:
    found, _ = fastest(problem, device)
    return None if found is None else launches_by(found, problem)


def launches_by(found: GemmForm, problem: Problem) -> Launches:
    """Return what this form launches."""
    product = found.product
    columns, depth = problem.shapes[1]
    rows = View(box=(*found.box, product.line), ones=2)
    operands = (
        Operand(0, Lies.ROWS, view=rows),
        Operand(1, view=View((columns, depth), (depth, 1))),
        Operand(RESULT, Lies.ROWS, view=View(box=found.results, ones=2)),
        Operand(2),
        Operand(3),
        Operand(4 if product.has_biases else 1),  # where there are none, none are read
    )
    source = wgmma_gemm(product, problem.dtype)
    return Launches((Launch(source, operands, found.scalars(depth)),))


def forms(call: Call, device: Device) -> Iterable[KernelSource]:
    weight = call.known(1)
    assert weight is not None
    end, gate, has_biases = _ended(call)
    for tile, _ in tiles_of(KINDS_OF[end], weight[0], device):
        product = Product(tile, 1, end, gate=gate, has_biases=has_biases, codes=True)
        yield wgmma_gemm(product, call.dtype)


ROW = Kernel("wgmma_codes", tuple(OPS), supports, cost_us, launch, forms)
