"""How wide GPU kernels access memory, read from their PTX: 16 bytes where divisibility is proven,
and never more than what it allows, since a wider access would be misaligned."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

from strop.codegen.triton import emit
from strop.ir.dims import symbol
from strop.ir.loops import LoopKernel, Schedule, with_sizes
from strop.ir.source import KernelSource
from strop.runtime.build.cubin import compile_cubin
from tests.codegen.kernels import Sample, Writer, axis, index, reads, writes
from tests.codegen.test_triton import check
from tests.codegen.triton_samples import CONTIGUOUS

triton = pytest.importorskip("triton")

F16 = torch.float16
ACCESS = re.compile(r"\b(ld|st)\.global(?:\.[\w:]+)*?(?:\.v([248]))?\.[bfu](8|16|32|64)\b")
ASYNC = re.compile(r"\bcp\.async\.\w+\.shared\.global[\w.:]* \[[^\]]*\], \[[^\]]*\], (?:0x)?(\w+)")


@cache
def ptx(source: KernelSource) -> str:
    texts: list[str] = []
    usual = triton.compile

    def noted(*args: Any, **options: Any) -> Any:
        compiled = usual(*args, **options)
        texts.append(compiled.asm["ptx"])
        return compiled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "compile", noted)
        compile_cubin(source, 90)
    (text,) = texts
    return text


def accesses(source: KernelSource) -> dict[str, Counter[int]]:
    """How many accesses of so many bytes to global memory there are."""
    text = ptx(source)
    found: dict[str, Counter[int]] = {"ld": Counter(), "st": Counter()}
    for kind, count, bits in ACCESS.findall(text):
        found[kind][int(count or 1) * int(bits) // 8] += 1
    found["ld"].update(int(size, 16) for size in ASYNC.findall(text))
    return found


def widths(kernel: LoopKernel) -> dict[str, set[int]]:
    """Bytes of the accesses to global memory."""
    return {kind: set(found) for kind, found in accesses(emit(kernel).source).items()}


@pytest.mark.parametrize(
    ("name", "channels"),
    [
        ("geglu", 320),
        ("geglu", 1280),
        ("layer_norm", 64),
        ("group_norm_silu", 320),
        ("silu_flat", 320),
    ],
)
def test_sixteen_bytes_where_rows_are_multiples_of_that(name: str, channels: int):
    found = widths(CONTIGUOUS[name](F16, channels).kernel)
    assert max(found["ld"]) == 16
    assert found["st"] == {16}


@pytest.mark.parametrize(("channels", "width"), [(320, 4), (1280, 8), (4096, 8)])
def test_as_wide_as_what_a_thread_has_of_a_row(channels: int, width: int):
    """Pieces of a row are shared out among more threads than 16 bytes would leave work for."""
    found = widths(CONTIGUOUS["layer_norm"](F16, channels).kernel)
    assert max(found["ld"]) == width
    assert found["st"] == {width}


@pytest.mark.parametrize(("channels", "most"), [(324, 8), (322, 4), (321, 2)])
@pytest.mark.parametrize("name", ["geglu", "layer_norm"])
def test_no_more_than_rows_are_multiples_of(name: str, channels: int, most: int):
    found = widths(CONTIGUOUS[name](F16, channels).kernel)
    if name == "layer_norm":  # weights have no rows: any two of them lie on four bytes
        assert min(found["ld"]) <= most
        assert max(found["st"]) <= most
    else:
        assert max(found["ld"] | found["st"]) <= most


def moved(offset: int, factor: int) -> Sample:
    """out[i] = 2 * x[i + offset] over factor * n elements."""
    n = symbol("n") * factor
    w = Writer(torch.float32)
    w.store(1, index(i=1), w.apply("mul", w.load(0, index(offset, i=1)), w.literal(2.0)))
    params = reads(F16) + writes(F16)
    kernel = LoopKernel("moved", Schedule.POINTWISE, (), (axis("i", n),), params, w.take())
    return Sample(kernel, (n + offset, n), ())


@pytest.mark.parametrize(
    ("offset", "factor", "load", "store"),
    [
        (0, 8, 16, 16),
        (8, 64, 16, 16),
        (4, 8, 8, 16),
        (1, 8, 2, 16),
        (0, 4, 8, 8),
        (0, 1, 2, 2),
    ],
)
def test_offsets_and_unknown_sizes(offset: int, factor: int, load: int, store: int):
    found = widths(moved(offset, factor).kernel)
    assert max(found["ld"]) <= load
    assert max(found["st"]) <= store
    if (load, store) == (16, 16):
        assert (found["ld"], found["st"]) == ({16}, {16})


def biased(heads: int) -> Sample:
    """out[h, i, j] = x[h, i, j] + bias[i, j], as attention has it, for any number of words."""
    s = symbol("s")
    w = Writer(torch.float32)
    x = w.load(0, index(h=s * s, i=s, j=1))
    w.store(2, index(h=s * s, i=s, j=1), w.apply("add", x, w.load(1, index(i=s, j=1))))
    axes = (axis("h", heads), axis("i", s)), (axis("j", s),)
    params = reads(F16, F16) + writes(F16)
    kernel = LoopKernel("biased", Schedule.POINTWISE, *axes, params, w.take())
    return Sample(kernel, (s * s * heads, s * s, s * s * heads), ())


def test_rows_that_happen_to_be_whole_vectors():
    """There is a form for them, which is right, and none for other lengths."""
    sample = biased(3)
    forms = emit(sample.kernel).variants
    assert [form.multiple for form in forms] == [1, 8]
    found = accesses(forms[-1].source)
    assert (set(found["ld"]), set(found["st"])) == ({16}, {16})
    check(sample, {"s": 24})
    check(sample, {"s": 23})
    other = with_sizes(sample.kernel, {"s": symbol("s") * 3})  # no symbol says how long a row is
    assert [form.multiple for form in emit(other).variants] == [1]
