"""The row of products of e4m3 codes by WGMMA says which tile computes one, how long that takes, and
what is launched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from strop.ir.device import Device
from strop.ir.dims import const
from strop.ir.source import KernelSource
from strop.kernels.gemm.rows import GemmForm
from strop.kernels.gemm.tile import CODES, GemmTile, Product
from strop.kernels.gemm.times import Cost
from strop.kernels.gemm.wgmma_gemm import wgmma_gemm
from strop.kernels.kernel import (
    NEVER,
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


def supports(call: Call, device: Device) -> str:
    """Say why there are no tiles for this product, or nothing."""
    if not device.has_wgmma:
        return f"multiplies by WGMMA, which {device.name} lacks"
    if call.dtype not in KINDS:
        return f"computes fp16 and bf16, not {call.dtype}"
    weight = call.known(1)
    if weight is None:
        return "wants weights of a known size"
    columns, depth = weight
    if depth % DEPTH_PIECE or columns % COLUMNS_PIECE:
        return f"wants depths of 16s and widths of 8s, not {depth} -> {columns}"
    by_row, by_column = (shape[:1] for shape in (call.shapes[2], call.shapes[3][::-1]))
    if by_row != call.shapes[0][:1] or by_column != (const(columns),):
        return "scales each row and each column, not all of either alike"
    is_able = any(tiles_of(CODES, columns, device))
    return "" if is_able else f"has no tile that was measured for {columns}"


def tiles_of(kind: str, columns: int, device: Device) -> Iterator[tuple[GemmTile, Cost]]:
    """Yield tiles with their costs. Scales of a tile's columns are read as a whole."""
    costs = tuned(device).gemm.tiles.get(kind, {})
    yield from ((tile, cost) for tile, cost in costs.items() if tile.cols <= columns)


def least(found: Iterable[tuple[GemmForm, float]]) -> tuple[GemmForm | None, float]:
    """Return the form that takes the fewest microseconds, or None and NEVER where there is none."""
    return min(found, key=lambda each: each[1], default=(None, NEVER))


def form(tile: GemmTile, rows: int, columns: int, *, has_biases: bool, sms: int) -> GemmForm:
    """Return the form of a product by this tile."""
    product = Product(tile, 1, has_biases=has_biases, codes=True)
    boxes = (1, 1, -(-rows // product.rows))
    return GemmForm(product, (1, 1, product.rows), boxes, -(-columns // product.width), sms)


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
    has_biases = len(problem.shapes) > 4
    made = (
        (form(tile, rows, columns, has_biases=has_biases, sms=device.sms), cost)
        for tile, cost in tiles_of(CODES, columns, device)
    )
    return least((each, us_of(each, cost, depth, columns, device)) for each, cost in made)


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
    has_biases = len(call.shapes) > 4
    for tile, _ in tiles_of(CODES, weight[0], device):
        yield wgmma_gemm(Product(tile, 1, has_biases=has_biases, codes=True), call.dtype)


ROW = Kernel("wgmma_codes", ("scaled_product",), supports, cost_us, launch, forms)
