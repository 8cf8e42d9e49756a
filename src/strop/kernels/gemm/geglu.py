"""This computes the gates of GEGLU behind a library's GEMM.

They are value * gelu(gate), where [value, gate] = x w^T + bias, by
https://arxiv.org/abs/2002.05202, or with another activation, or with the gate first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from strop.ir.contractions import FACTORS, GELU, GELU_TANH, PAIRED, SILU, Gate
from strop.ir.device import Device
from strop.ir.dims import symbol, to_expr
from strop.ir.functions import EARLY, FUNCTIONS, HALVES
from strop.ir.ops import OPS
from strop.ir.source import KernelSource
from strop.kernels.gemm import skinny
from strop.kernels.kernel import (
    NEVER,
    RESULT,
    Call,
    Kernel,
    Launch,
    Launches,
    Lies,
    Operand,
    PartScratch,
    Problem,
    Torch,
    scratch,
)
from strop.kernels.libraries import linear_us

MULTIPLE = 16  # of the width of a result, whose accesses are 16 bytes wide
MOST_NUMBERS = 2**31

_HEAD = """\
import triton
import triton.language as tl


"""
_HALF_GELU = f"""\
@triton.jit
{FUNCTIONS["half_gelu"]}


"""
# The text of each activation of ``gate``, and what it calls.
_ACTIVATIONS: Mapping[str, tuple[str, str]] = {
    GELU: ("half_gelu(gate)", _HALF_GELU),
    GELU_TANH: (OPS[GELU_TANH].triton.format("gate"), ""),
    SILU: (OPS[SILU].triton.format("gate"), ""),
}
_BEHIND = """\
@triton.jit
def geglu(p0, p1, p2, s0, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
EARLY_LINES    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    col = at % WIDTH
    place = p0 + at // WIDTH * (2 * WIDTH) + col
    value = tl.load(placeVALUE, mask=at < s0, other=0.0).to(tl.float32)
    gate = tl.load(placeGATE, mask=at < s0, other=0.0).to(tl.float32)
BIAS    tl.store(p2 + at, (value * ACTIVATED).to(HALF), mask=at < s0)
"""
_BIAS_BEHIND = """\
    value += tl.load(p1VALUE + col, mask=at < s0, other=0.0).to(tl.float32)
    gate += tl.load(p1GATE + col, mask=at < s0, other=0.0).to(tl.float32)
"""
BLOCK = 1024
_GELU = Gate()


def _text(bias: str, dtype: torch.dtype, gate: Gate) -> str:
    activated, called = _ACTIVATIONS[gate.activation]
    places = ("", " + WIDTH")[:: -1 if gate.is_first else 1]
    text = (
        _BEHIND.replace("EARLY_LINES", EARLY).replace("BIAS", bias).replace("HALF", HALVES[dtype])
    )
    text = text.replace("ACTIVATED", activated)
    return _HEAD + called + text.replace("VALUE", places[0]).replace("GATE", places[1])


def geglu(width: int, dtype: torch.dtype, *, has_bias: bool, gate: Gate = _GELU) -> KernelSource:
    """Return the kernel of the gates, which computes in fp32. Params: the product (M, 2 N), the
    bias (2 N,) and the result (M, N), all dense; without bias it is not read. Scalars: M * N.
    ``width`` is N, a multiple of 16."""
    text = _text(_BIAS_BEHIND if has_bias else "", dtype, gate)
    constants = (("WIDTH", width), ("BLOCK", BLOCK), ("EARLY", 1))
    return KernelSource(
        "geglu",
        "triton",
        text,
        (dtype,) * 3,
        (16,),
        ((symbol("s0") + (BLOCK - 1)) // BLOCK,),
        constants=constants,
    )


def supports(call: Call, device: Device) -> str:
    if not device.arch:
        return "runs on GPUs"
    weight = call.known(1)
    if weight is None:
        return "wants weights of a known size"
    if call.dtype not in HALVES or weight[0] % (2 * MULTIPLE):
        return f"computes fp16 and bf16, and widths that are multiples of {MULTIPLE}"
    return ""


def cost_us(problem: Problem, device: Device) -> float:
    """Add the time of cuBLAS and that of a kernel behind it, which reads what it has written."""
    if 2 * _numel(problem) >= MOST_NUMBERS:
        return NEVER
    return linear_us(problem, device)


def _numel(problem: Problem) -> int:
    return math.prod(problem.shapes[0][:-1]) * (problem.shapes[1][0] // 2)


def _few_rows(call: Call | Problem, device: Device) -> Call | None:
    """Return the product of a call without biases, as of language models, if a kernel reads its
    weights as fast as they come where there are few rows."""
    if len(call.shapes) > len(("x", "weights")):
        return None
    shapes = tuple(tuple(map(to_expr, shape)) for shape in call.shapes)
    product = Call("linear", (), shapes, call.dtype)
    return None if skinny.supports(product, device) else product


def _product(problem: Problem, device: Device, result: Operand) -> Torch | Launch:
    product = _few_rows(problem, device)
    few = product and skinny.launch(product.at({}), device)
    if not few:
        return Torch("linear", (Operand(0, Lies.ANYHOW), Operand(1), result))
    (only,) = (part for part in few.parts if isinstance(part, Launch))
    return replace(only, operands=(*only.operands[:2], result))


def launch(problem: Problem, device: Device) -> Launches:
    rows, columns = math.prod(problem.shapes[0][:-1]), problem.shapes[1][0]
    factors = FACTORS[problem.op]
    has_bias = len(problem.shapes) > factors
    source = geglu(
        columns // 2, problem.dtype, has_bias=has_bias, gate=Gate.of(dict(problem.attrs))
    )
    product = Operand(scratch(0))
    bias = Operand(factors if has_bias else 1)  # without one it is not read
    gates = Launch(source, (product, bias, Operand(RESULT)), (_numel(problem),))
    parts: list[Torch | Launch] = [_product(problem, device, product)]
    if factors > 2:
        low, up = Operand(2, Lies.ANYHOW), Operand(3, Lies.ANYHOW)
        parts.append(Torch("further linear", (low, up, product)))
    return Launches((*parts, gates), (PartScratch((rows, columns), problem.dtype),))


def forms(call: Call, device: Device) -> Iterable[KernelSource]:
    weight = call.known(1)
    assert weight is not None
    has_bias = len(call.shapes) > FACTORS[call.op]
    product, gate = _few_rows(call, device), Gate.of(dict(call.attrs))
    products = skinny.forms(product, device) if product else ()
    return [*products, geglu(weight[0] // 2, call.dtype, has_bias=has_bias, gate=gate)]


ROW = Kernel("geglu", ("geglu", PAIRED["geglu"]), supports, cost_us, launch, forms)
