"""Compute attention on a CPU in fp32 and bf16, for all lengths, strides and masks.

softmax(q k^T * scale + mask) v over operands (B, H, S, D). ``cpu.h`` is the kernel: it packs keys
and values into working memory, and walks over chunks of keys with row maxima and sums in fp32, as
FlashAttention does (arXiv:2205.14135). Operands of bf16 are multiplied as they are where the
processor has ``vdpbf16ps``, and are widened to fp32 elsewhere. Rows whose scores are all minus
infinity give 0, as torch's do. It runs where it was measured as faster than torch's
(``tuned.attention_cpu``).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import torch

from strop.ir.device import Device
from strop.ir.source import KernelSource
from strop.kernels.attention.cases import is_over
from strop.kernels.attention.cpu_cases import times_us
from strop.kernels.attention.rows import SEQUENCE_FIRST, scale_of
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
    Scalar,
    Stride,
    scratch,
)
from strop.kernels.tuned.attention_cpu import CASES

NAME = "cpu_attention"
TYPES = {torch.float32: "float", torch.bfloat16: "sp::bf16"}
MOST_HEAD = 256  # cpu.h has rows of so many numbers on its stack
LANES = 16  # of the widest vectors, to whose multiples it pads what it packs
ALIGNMENT = 64  # bytes of the packed operands
Q, K, V, MASK = range(4)
_NO_MASK, _MARKS, _NUMBERS = range(3)
_DIMS = 4


def supports(call: Call, device: Device) -> str:
    if not device.isa:
        return "runs on CPUs with AVX2, AVX-512 or NEON"
    if call.dtype not in TYPES:
        return f"takes fp32 and bf16, not {str(call.dtype).removeprefix('torch.')}"
    if any(len(shape) != _DIMS for shape in call.shapes[:MASK]):
        return "takes operands (B, H, S, D)"
    if len(call.shapes) > MASK:
        if call.attr("causal"):
            return "takes no mask where the order of queries is one"
        if call.mask not in (torch.bool, call.dtype) or len(call.shapes[MASK]) > _DIMS:
            return "takes masks of marks, or of numbers of the operands' type"
    if (scale := call.attr("scale")) is not None and scale <= 0.0:
        return "takes scales above 0, below which torch has several answers"
    heads = [shape[-1] for shape in call.shapes[:MASK]]
    if not all(size.is_const and size.value <= MOST_HEAD for size in heads):
        return f"wants heads of a known size, up to {MOST_HEAD}"
    return ""


@lru_cache(maxsize=4096)
def times_on_cpu(problem: Problem, isa: str) -> tuple[float, float]:
    """Return the microseconds that ours and torch's take. Both rows ask, one after the other."""
    return times_us(problem, isa, CASES)


def cost_us(problem: Problem, device: Device) -> float:
    return times_on_cpu(problem, device.isa)[0] if _is_whole(problem) else NEVER


def _is_whole(problem: Problem) -> bool:
    """Tell whether sizes match without broadcasting batches, and nothing is empty."""
    q, k, v, *masks = problem.shapes
    return (
        k[:3] == v[:3]
        and (q[0], q[3]) == (k[0], k[3])
        and math.prod(q) * math.prod(k) * math.prod(v) > 0
        and q[1] % k[1] == 0
        and all(is_over(mask, (*q[:3], k[2])) for mask in masks)
    )


@lru_cache
def source(dtype: torch.dtype, *, is_paired: bool) -> KernelSource:
    """Return the kernel for operands of a type, which is one for all sizes. ``is_paired``: pairs of
    bf16 are multiplied as they are, which AVX-512 BF16 can."""
    name = f"{NAME}_{'pairs' if is_paired else str(dtype).removeprefix('torch.')}"
    call = f"attention::attend<{TYPES[dtype]}, {'true' if is_paired else 'false'}>"
    text = (
        f'#include "vmath.h"\n\n{header()}\n{_tasks()}\n'
        f'extern "C" void {name}(void* const* buffers, const int64_t* scalars) {{\n'
        f"  {call}(buffers, scalars);\n"
        "}\n"
    )
    params = (*[dtype] * 4, torch.uint8)
    return KernelSource(name, "cpp", text, params, scalars=(1,) * 30)


@lru_cache
def header() -> str:
    """Return the text of ``cpu.h``, of which products of small matrices take tiles too."""
    return Path(__file__).with_name("cpu.h").read_text()


def _tasks() -> str:
    return Path(__file__).with_name("cpu_tasks.h").read_text()


def forms(call: Call, device: Device) -> Iterable[KernelSource]:
    """Both forms for bf16 where there is AVX-512: an artefact serves processors with and without
    BF16. A target of AArch64 says which it is."""
    widened = source(call.dtype, is_paired=False)
    if call.dtype is torch.bfloat16 and device.isa == "neon_bf16":
        return (source(call.dtype, is_paired=True),)
    if call.dtype is torch.bfloat16 and device.isa.startswith("avx512"):
        return (source(call.dtype, is_paired=True), widened)
    return (widened,)


def launch(problem: Problem, device: Device) -> Launches | None:
    if not _is_whole(problem):
        return None
    (batch, heads, queries, head), (_, sources, keys, _) = problem.shapes[:2]
    values = problem.shapes[V][-1]
    is_paired = problem.dtype is torch.bfloat16 and device.has_bf16
    scale = scale_of(problem.attr("scale"), head)
    (scale_bits,) = struct.unpack("<q", struct.pack("<d", scale))
    packed_bytes = batch * sources * _packed_bytes(keys, head, values, is_paired=is_paired)
    kind = {None: _NO_MASK, torch.bool: _MARKS}.get(problem.mask, _NUMBERS)
    operands = [
        *(Operand(number, Lies.UNALIGNED) for number in (Q, K, V, RESULT)),
        Operand(scratch(0)),
        *(Operand(MASK, Lies.UNALIGNED) for _ in problem.shapes[MASK:]),
    ]
    mask = problem.shapes[MASK] if len(problem.shapes) > MASK else ()
    numbers = (batch, heads, queries, keys, head, values, heads // sources)
    scalars: tuple[Scalar, ...] = (
        *numbers,
        int(problem.attr("causal")),
        kind,
        scale_bits,
        *(Stride(place, dim) for place in (Q, K, V, 3) for dim in range(_DIMS)),
        *_mask_strides(mask, len(operands) - 1),
    )
    part = Launch(source(problem.dtype, is_paired=is_paired), tuple(operands), scalars)
    memory = (PartScratch((packed_bytes + ALIGNMENT,), torch.uint8),)
    return Launches((part,), memory, (batch, heads, queries, values), SEQUENCE_FIRST)


def _packed_bytes(keys: int, head: int, values: int, *, is_paired: bool) -> int:
    """Return the bytes of one head's packed keys and values, as ``attend`` in cpu.h lays them
    out."""
    each = 2 if is_paired else 1
    of_keys = _up_to(keys) * -(-head // each)
    return 4 * (of_keys + _up_to(-(-keys // each) * _up_to(values)))


def _up_to(count: int) -> int:
    return -(-count // LANES) * LANES


def _mask_strides(mask: tuple[int, ...], place: int) -> list[Scalar]:
    """Return the strides of a mask along (B, H, S, K): none where all share it."""
    missing = _DIMS - len(mask)
    of_mask = [Stride(place, dim) if size > 1 else 0 for dim, size in enumerate(mask)]
    return [*[0] * missing, *of_mask]


ROW = Kernel(NAME, ("attention",), supports, cost_us, launch, forms)
