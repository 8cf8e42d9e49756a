"""Each library that is called has rows here: cuBLAS, cuDNN, and torch's attention.

They support every call of their operators on any GPU, so that there is always a choice. Their costs
are models by the rates in ``kernels.tuned``.
"""

from __future__ import annotations

import math
from dataclasses import replace

from strop.ir.contractions import AMONG_COLUMNS, NORMED, PAIRED
from strop.ir.device import Device
from strop.kernels.attention import rows as attention
from strop.kernels.attention.cases import measured_us, speaks_of, unmeasured
from strop.kernels.attention.cpu import times_on_cpu
from strop.kernels.gemm import skinny
from strop.kernels.gemm.rows import CONVOLUTIONS, MOST_NARROW, OPS, picture_of
from strop.kernels.gemm.tile import GATED, PLAIN, SUM
from strop.kernels.kernel import NEVER, Call, Kernel, Problem
from strop.kernels.tuned import tuned

# The share of the dense rate that a library's attention reaches, where nothing was measured.
ATTENTION_SHARE = 0.5
SDPA_NAME = "sdpa"
CODES_A_US = 4e5  # operations of oneDNN's product of codes, on one core with VNNI
SCALED_BEGIN_US, SCALED_GAIN = 7.7, 1.71  # of products of e4m3 codes; their rate over halves
FP64_A_US = 2e4  # of fp64
# Libraries that torch has for attention; ``runtime.run.attention_calls`` has the calls.
ATTENTION_LIBRARIES = ("cudnn_attention", "flash_attention", "efficient_attention")


def anything(call: Call, device: Device) -> str:
    return "" if device.arch else "runs on GPUs"


def conv_us(problem: Problem, device: Device) -> float:
    """Add a beginning and the time of cuDNN's operations, or of its weights where that is
    longer."""
    if problem.op == "upsampled_conv2d":
        return NEVER  # it computes all four windows everywhere, and another kernel places them
    (batch, _, *sides), weight = problem.shapes[:2]
    down, right = (int(step) for step in problem.attr("stride"))
    pixels = batch * -(-sides[0] // down) * -(-sides[1] // right)
    weights, times = math.prod(weight), tuned(device).gemm.library
    ops = 2 * pixels * weights
    return times.conv_begin_us + max(ops / times.conv_ops, 2 * weights / times.conv_bytes)


def linear_us(problem: Problem, device: Device) -> float:
    """Add the time of cuBLAS and that of what stands behind it: a second product, gates, or a
    sum."""
    end, of, times = OPS[problem.op], picture_of(problem), tuned(device).gemm.library
    columns = problem.shapes[1][0]
    numel = of.width * columns
    begin = times.linear_begin_us + times.gap_us
    us = begin + 2 * of.width * of.ins * columns / times.linear_ops
    us += 2 * numel / times.linear_bytes
    # with few rows, or beside a kernel that hides it, what a GEMM waits for are its weights
    if end == SUM or of.width <= max(skinny.ROWS):
        us = max(us, begin + 2 * of.ins * columns / times.weight_bytes)
    if end == PLAIN and columns <= MOST_NARROW and of.width > max(skinny.ROWS):
        # it waits for its input, or few programs add up a long sum
        us += max(2 * of.width * of.ins / times.linear_bytes, of.ins / times.linear_depth)
    if of.further:  # a product of its own, which reads and writes the results once more
        us += begin + 2 * of.width * of.further * columns / times.linear_ops
        us += 4 * numel / times.behind_bytes
    if end == GATED:
        us += times.behind_begin_us + 3 * numel / times.behind_bytes
    elif end == SUM:
        us += times.adding_us + 6 * numel / times.behind_bytes
    return us


def product_us(problem: Problem, device: Device) -> float:
    """Return the time of cuBLAS for two operands (..., M, K) and (..., K, N)."""
    *batch, rows, depth = problem.shapes[0]
    columns, times = problem.shapes[1][-1], tuned(device).gemm.library
    ops = 2 * math.prod(batch) * rows * depth * columns
    return times.linear_begin_us + times.gap_us + ops / times.linear_ops


def activated_us(problem: Problem, device: Device) -> float:
    """Add GELU in the epilogue, for which 0.4 to 0.6 us a million numbers were measured on an
    H100."""
    linear = replace(problem, op="linear")
    rows_by_columns = math.prod(problem.shapes[0][:-1]) * problem.shapes[1][0]
    times = tuned(device).gemm.library
    us = linear_us(linear, device) + 1.5 * rows_by_columns / times.behind_bytes
    if dict(problem.attrs).get(AMONG_COLUMNS):  # by a copy
        us += times.adding_us + 4 * rows_by_columns / times.behind_bytes
    return us


def normed_us(problem: Problem, device: Device) -> float:
    """Add the time of torch's own norm behind cuBLAS: half a dozen passes over the columns, in
    fp32."""
    rows, columns = math.prod(problem.shapes[0][:-1]), problem.shapes[1][0]
    plain = replace(problem, op="linear", attrs=(), shapes=problem.shapes[:2])
    times = tuned(device).gemm.library
    behind = 6 * times.adding_us + 40 * rows * columns / times.behind_bytes
    return linear_us(plain, device) + behind


def unfused_gates_us(problem: Problem, device: Device) -> float:
    """Add the time of torch's own GELU and product behind cuBLAS: two more passes over the
    columns."""
    of, times = picture_of(problem), tuned(device).gemm.library
    return (
        linear_us(problem, device) + times.adding_us + 8 * of.width * of.outs / times.behind_bytes
    )


def taps_us(problem: Problem, device: Device) -> float:
    """Return the time of torch's own sums: torch reads the taps in fp32, and writes a dozen pieces
    of them."""
    times = tuned(device).gemm.library
    return times.adding_us + 24 * math.prod(problem.shapes[0]) / times.behind_bytes


def anywhere(call: Call, device: Device) -> str:
    return "" if device.has_library else "runs on GPUs, and on CPUs with AVX2 or AVX-512"


def mixed_us(problem: Problem, device: Device) -> float:
    """Return the time of torch's products in fp32, of all columns, behind three passes over the
    sums."""
    times = tuned(device).gemm.library
    (rows, columns), depth = problem.shapes[0], problem.shapes[2][1]
    begin = times.linear_begin_us + times.gap_us + times.adding_us
    ops = 2 * rows * columns * depth
    return begin + ops / times.linear_ops + 24 * rows * columns / times.behind_bytes


_ALONG = {"linear_scan": 2, "recurrence": 0}  # the dim of the first operand that counts steps


def steps_us(problem: Problem, device: Device) -> float:
    """Return the time of torch's own steps, which are launches one behind the other."""
    times, shape = tuned(device).gemm.library, problem.shapes[0]
    along = _ALONG[problem.op]
    rest = math.prod(shape[:along]) * math.prod(shape[along + 1 :])
    return shape[along] * (times.linear_begin_us + 24 * rest / times.behind_bytes)


def trimmed_us(problem: Problem, device: Device) -> float:
    """Return the time of cuBLAS and of torch's copy of some columns, which are not aligned."""
    times, (columns, _) = tuned(device).gemm.library, problem.shapes[1]
    rows = math.prod(problem.shapes[0][:-1])
    linear = replace(problem, op="linear", attrs=())
    return linear_us(linear, device) + times.adding_us + 8 * rows * columns / times.behind_bytes


def codes_us(problem: Problem, device: Device) -> float:
    """Return a guess: what is rounded nowhere is not left to it where there is a choice."""
    (rows, depth), (columns, _) = problem.shapes[:2]
    return 2 * rows * depth * columns / CODES_A_US


def scaled_us(problem: Problem, device: Device) -> float:
    """Return the time of a beginning, a linear's operations in halves over what codes gain, and the
    results: within 15 % of 25 linears of SDXL, SD1.5 and Flux.1 on an H200 (codes_wgmma)."""
    (rows, depth), (columns, _) = problem.shapes[:2]
    ops = 2 * rows * depth * columns
    if not device.arch:
        return ops / CODES_A_US
    times = tuned(device).gemm.library
    results = 2 * rows * columns / times.linear_bytes
    return SCALED_BEGIN_US + ops / (SCALED_GAIN * times.linear_ops) + results


def scaled_gates_us(problem: Problem, device: Device) -> float:
    """Return the time of the product, and of torch's gates behind it: the activation and the
    product with the values, each rounded."""
    plain = replace(problem, op="scaled_product", attrs=())
    times = tuned(device).gemm.library
    numel = problem.shapes[0][0] * problem.shapes[1][0] // 2
    return scaled_us(plain, device) + 2 * times.adding_us + 10 * numel / times.behind_bytes


def code_conv_us(problem: Problem, device: Device) -> float:
    """Return a guess: torch computes it in fp64, which copies both operands."""
    (batch, _, *image), weight = problem.shapes[:2]
    return 2 * batch * math.prod(image) * math.prod(weight) / FP64_A_US


def halved_conv_us(problem: Problem, device: Device) -> float:
    """Return the time of cuDNN behind two passes that make halves of codes."""
    own = replace(problem, op="conv2d", shapes=problem.shapes[:2])
    times = tuned(device).gemm.library
    made = sum(map(math.prod, own.shapes))
    return conv_us(own, device) + 2 * times.adding_us + 6 * made / times.behind_bytes


def attention_us(problem: Problem, device: Device) -> float:
    """Return what was measured, or a share of the device's rate, or 0 where neither is known."""
    if not device.arch:
        return times_on_cpu(problem, device.isa)[1]
    nearby = measured_us(problem, SDPA_NAME, tuned(device).cases)
    if nearby is not None and math.isfinite(nearby):
        return nearby
    batch, heads, queries, head = problem.shapes[0]
    keys = problem.shapes[1][-2]  # all heads may share them, in a tensor of fewer dims
    measured = attention.library_us(head, batch * heads, queries, keys, device)
    if measured is not None or not device.half_flops:
        return measured or 0.0
    flops = 4 * batch * heads * queries * keys * head
    return 1e6 * flops / (ATTENTION_SHARE * device.half_flops)


def _one_library(name: str) -> Kernel:
    """Make the row of one library of torch, which runs where it was measured as the fastest."""

    def supports(call: Call, device: Device) -> str:
        if not device.arch:
            return "runs on GPUs"
        is_known = any(name in row.us for row in speaks_of(call, tuned(device).cases))
        return "" if is_known else unmeasured(call, device)

    def cost_us(problem: Problem, device: Device) -> float:
        us = measured_us(problem, name, tuned(device).cases)
        return NEVER if us is None else us

    return Kernel(name, ("attention",), supports, cost_us)


_SUMS = ("linear", "linear_add")
CUBLAS = Kernel("cublas", (*_SUMS, *map(PAIRED.__getitem__, _SUMS)), anything, linear_us)
PRODUCTS = Kernel("cublas_batched", ("matmul",), anything, product_us)
ACTIVATED = Kernel("cublas_gelu", ("linear_gelu",), anything, activated_us)
NORMS = Kernel("cublas_and_torch_norm", NORMED, anything, normed_us)
GATES = Kernel("cublas_and_torch", ("geglu", PAIRED["geglu"]), anything, unfused_gates_us)
CUDNN = Kernel("cudnn", CONVOLUTIONS, anything, conv_us)
MIXED = Kernel("cublas_of_all_columns", ("mixed_product",), anything, mixed_us)
STEPS = Kernel("torch_steps", tuple(_ALONG), anything, steps_us)
TRIMMED = Kernel("cublas_and_copy", ("trimmed_linear",), anything, trimmed_us)
CODES = Kernel("int_mm", ("code_sums",), anywhere, codes_us)
SCALED = Kernel("scaled_mm", ("scaled_product",), anywhere, scaled_us)
SCALED_GATES = Kernel("scaled_mm_and_torch", ("scaled_geglu",), anything, scaled_gates_us)
CODE_CONVS = Kernel("conv_of_codes_in_fp64", ("code_conv2d",), anywhere, code_conv_us)
SCALED_CONVS = Kernel("conv_of_codes_in_halves", ("scaled_conv2d",), anywhere, halved_conv_us)
TAPS = Kernel("torch", ("folded_taps",), anything, taps_us)
# Where nothing was measured: cuDNN without a mask, and torch's own choice with one.
SDPA = Kernel(SDPA_NAME, ("attention",), anywhere, attention_us)
ATTENTIONS = tuple(map(_one_library, ATTENTION_LIBRARIES))
ROWS: tuple[Kernel, ...] = (
    CUBLAS,
    PRODUCTS,
    ACTIVATED,
    NORMS,
    GATES,
    MIXED,
    STEPS,
    TRIMMED,
    CODES,
    SCALED,
    SCALED_GATES,
    CODE_CONVS,
    SCALED_CONVS,
    CUDNN,
    TAPS,
    SDPA,
    *ATTENTIONS,
)
