"""Sum products of int8 codes on a CPU: x (M, K) times a weight (N, K) transposed, to int32.

``codegen/rt/code_sums.h`` is the kernel. It packs the weight in each call, so that nothing of it is
ever stale, and multiplies by ``vpdpbusd`` where the processor has AVX-512 VNNI, else by pairs of 16
bits. Sums are exact, and the same on every processor. Most products of many rows are a part of the
kernel that reads their sums (``stages.code_panels``); this is the others, where torch's are not
exact: oneDNN lets them saturate on processors without VNNI.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch

from strop.ir.code_panel import header, packed_words, row_words
from strop.ir.device import Device
from strop.ir.source import KernelSource
from strop.kernels.kernel import (
    FASTEST,
    NEVER,
    RESULT,
    Call,
    Kernel,
    Launch,
    Launches,
    Operand,
    PartScratch,
    Problem,
    scratch,
)

NAME = "code_sums"
_TEXT = f"""\
#include "vmath.h"

{header()}
extern "C" void product_of_codes(void* const* buffers, const int64_t* scalars) {{
  code_sums::product(static_cast<const int8_t*>(buffers[0]), static_cast<const int8_t*>(buffers[1]),
                     static_cast<int32_t*>(buffers[2]), static_cast<code_sums::Word*>(buffers[3]),
                     scalars[0], scalars[1], scalars[2]);
}}
"""


def supports(call: Call, device: Device) -> str:
    if not device.isa:
        return "runs on CPUs with AVX2, AVX-512 or NEON"
    return "" if call.dtype is torch.int32 else "adds in int32"


def cost_us(problem: Problem, device: Device) -> float:
    """Leave it to torch where torch is exact: it packs nothing and was 1.0 to 4 times as fast
    (``benchmarks/cpu_int8.py --products``)."""
    return FASTEST if all(map(all, problem.shapes)) and not device.has_vnni else NEVER


@lru_cache
def source() -> KernelSource:
    """Return the kernel. Params: x, the weight, the sums, working memory. Scalars: M, N, K."""
    params = (torch.int8, torch.int8, torch.int32, torch.int32)
    return KernelSource("product_of_codes", "cpp", _TEXT, params, scalars=(1,) * 3)


def launch(problem: Problem, device: Device) -> Launches | None:
    (rows, depth), (columns, _) = problem.shapes
    if not rows * depth * columns:
        return None
    words = packed_words(columns, depth) + rows * row_words(depth)
    operands = (Operand(0), Operand(1), Operand(RESULT), Operand(scratch(0)))
    part = Launch(source(), operands, (rows, columns, depth))
    return Launches((part,), (PartScratch((words,), torch.int32),))


def forms(call: Call, device: Device) -> Iterable[KernelSource]:
    return (source(),)


ROW = Kernel(NAME, ("code_sums",), supports, cost_us, launch, forms)
