"""The row of 3x3 convolutions of e4m3 codes by WGMMA says which tile computes one, how long that
takes, and what is launched."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from strop.ir.device import Device
from strop.ir.source import KernelSource
from strop.kernels.gemm.implicit import ConvShape, box_of, boxes_along, picture_of
from strop.kernels.gemm.rows import GemmForm, least, result_of, why_no_window
from strop.kernels.gemm.scaled_rows import tiles_of
from strop.kernels.gemm.tile import CODE_CONV, GemmTile, Product
from strop.kernels.gemm.times import Cost
from strop.kernels.gemm.wgmma_gemm import wgmma_gemm
from strop.kernels.kernel import (
    CHANNELS_LAST,
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

X, WEIGHT, PIXELS, COLUMNS = range(4)  # operands


def supports(call: Call, device: Device) -> str:
    """Say why there are no tiles for this convolution, or nothing."""
    if not device.has_wgmma:
        return f"multiplies by WGMMA, which {device.name} lacks"
    if call.dtype not in KINDS:
        return f"computes fp16 and bf16, not {call.dtype}"
    weight = call.known(WEIGHT)
    if weight is None:
        return "wants weights of a known size"
    outs, ins, *window = weight
    reason = why_no_window(call, outs, ins, tuple(window))
    is_able = any(tiles_of(CODE_CONV, outs, device))
    return reason or ("" if is_able else "has no tile that was measured")


def form(tile: GemmTile, of: ConvShape, *, sms: int) -> GemmForm:
    """Return the form of a convolution without biases by this tile."""
    product = _product(tile, of.stride)
    box = box_of(product.rows, of)
    return GemmForm(product, box, boxes_along(box, of), -(-of.outs // product.width), sms)


def _product(tile: GemmTile, stride: int) -> Product:
    return Product(tile, 3, stride=stride, has_biases=False, codes=True)


def us_of(found: GemmForm, cost: Cost, of: ConvShape, device: Device) -> float:
    """Return about how many microseconds it takes: those of its steps of 128 codes, or those of its
    weights, which no cache holds."""
    times = tuned(device).gemm
    busy = times.busy_us(cost, found.num_tiles, of.size**2 * -(-of.ins // LINE_BYTES))
    return max(busy, times.library.weights_us(of.size**2 * of.ins * of.outs))


@lru_cache(maxsize=4096)
def fastest(problem: Problem, device: Device) -> tuple[GemmForm | None, float]:
    """Return the fastest form and its microseconds, or None and NEVER where there is none."""
    of = shape_of(problem)
    made = (
        (form(tile, of, sms=device.sms), cost)
        for tile, cost in tiles_of(CODE_CONV, of.outs, device)
    )
    return least((each, us_of(each, cost, of, device)) for each, cost in made)


def shape_of(problem: Problem) -> ConvShape:
    return picture_of(problem.shapes[X], problem.shapes[WEIGHT], problem.attr("stride")[0])


def cost_us(problem: Problem, device: Device) -> float:
    return fastest(problem, device)[1]


def launch(problem: Problem, device: Device) -> Launches | None:
    found, _ = fastest(problem, device)
    return None if found is None else launches_by(found, problem)


def launches_by(found: GemmForm, problem: Problem) -> Launches:
    """Return what this form launches."""
    of, order = shape_of(problem), CHANNELS_LAST
    columns = of.outs, of.size**2 * of.ins
    operands = (
        Operand(X, Lies.ROWS, order, view=View(box=(*found.box, found.product.line))),
        Operand(WEIGHT, order=order, view=View(columns, (columns[1], 1))),
        result_of(found, of, order),
        Operand(PIXELS),
        Operand(COLUMNS),
        Operand(COLUMNS),  # where there are no biases, none are read
    )
    source = wgmma_gemm(found.product, problem.dtype)
    return Launches((Launch(source, operands, found.scalars(of.ins)),))


def forms(call: Call, device: Device) -> Iterable[KernelSource]:
    weight = call.known(WEIGHT)
    assert weight is not None
    for tile, _ in tiles_of(CODE_CONV, weight[0], device):
        yield wgmma_gemm(_product(tile, call.attr("stride")[0]), call.dtype)


ROW = Kernel("wgmma_code_conv", ("scaled_conv2d",), supports, cost_us, launch, forms)
