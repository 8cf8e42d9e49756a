"""Sum products of int8 codes on a CPU: x (M, K) times a weight (N, K) transposed, to int32, both
without their zero points.

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
_TEXT = """\
  const int8_t* const x = static_cast<const int8_t*>(buffers[0]);
  int32_t* const sums = static_cast<int32_t*>(buffers[2]);
  code_sums::Word* const memory = static_cast<code_sums::Word*>(buffers[3]);
  const int64_t rows = scalars[0], columns = scalars[1], depth = scalars[2];
  const int32_t zero = int32_t(scalars[3]);
  code_sums::product(x, static_cast<const int8_t*>(buffers[1]), sums, memory, rows, columns, depth,
                     zero);
"""
_WITH_ZEROS = """\
  const int64_t* const given = static_cast<const int64_t*>(buffers[4]);
  int32_t* const room = reinterpret_cast<int32_t*>(memory);
  const int32_t* const zeros = code_sums::used_zeros(given, columns, room);
  code_sums::take_off(zeros, x, rows, columns, depth, zero, sums, columns);
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
def source(*, has_zeros: bool = False) -> KernelSource:
    """Return the kernel. Params: x, the weight, the sums, working memory, and maybe zero points of
    the weight in int64. Scalars: M, N, K, the zero point of x."""
    name = "product_of_codes_with_zeros" if has_zeros else "product_of_codes"
    begin = f'extern "C" void {name}(void* const* buffers, const int64_t* scalars) {{\n'
    text = f"{begin}{_TEXT}{_WITH_ZEROS if has_zeros else ''}}}\n"
    params = (torch.int8, torch.int8, torch.int32, torch.int32, *[torch.int64] * has_zeros)
    return KernelSource(
        name, "cpp", f'#include "vmath.h"\n\n{header()}\n{text}', params, scalars=(1,) * 4
    )


def launch(problem: Problem, device: Device) -> Launches | None:
    (rows, depth), (columns, _), *zeros = problem.shapes
    if not rows * depth * columns:
        return None
    words = packed_words(columns, depth) + rows * row_words(depth) + -(-columns // 16) * 16
    numbers = (0, 1, RESULT, scratch(0), *(2 for _ in zeros))
    zero = dict(problem.attrs).get("zero", 0)
    operands = tuple(map(Operand, numbers))
    part = Launch(source(has_zeros=bool(zeros)), operands, (rows, columns, depth, zero))
    return Launches((part,), (PartScratch((words,), torch.int32),))


def forms(call: Call, device: Device) -> Iterable[KernelSource]:
    return (source(has_zeros=len(call.shapes) > 2),)


ROW = Kernel(NAME, ("code_sums",), supports, cost_us, launch, forms)
