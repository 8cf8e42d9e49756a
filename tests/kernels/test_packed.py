"""Where weights are packed on a CPU, and the number that tells when one is another."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.ir.contractions import CONTRACTIONS
from strop.ir.device import CPU, Device
from strop.ir.dims import const, symbol
from strop.kernels import library
from strop.kernels.conv import conv_cpu
from strop.kernels.gemm import linear_cpu
from strop.kernels.kernel import Call, Problem
from strop.kernels.packed import rows
from strop.kernels.packed.costs import CONV, Line, PackedCase, Work
from strop.kernels.packed.fingerprint import SHARE_BYTES, num_words, source
from strop.kernels.tuned.packed_cpu import CASES
from strop.options import INFERENCE_KERNELS, Options
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.native import NativeKernels
from strop.runtime.derived.packed_weights import PackedWeight, PackedWeights, has_no_gaps
from strop.runtime.run.library_calls import ALLOCATING
from strop.runtime.run.packed_calls import PRODUCTS, way_of

MEASURED = replace(CPU, isa="avx512_bf16")
DTYPES = (torch.float32, torch.bfloat16)
wants_bf16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN packs no bf16 on this CPU"
)
PACKED = (torch.float32, pytest.param(torch.bfloat16, marks=wants_bf16))
PLACES = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}


def problem(op: str, *shapes: tuple[int, ...], dtype: torch.dtype, groups: int = 1) -> Problem:
    attrs = tuple(sorted({**PLACES, "groups": groups}.items())) if op == CONV else ()
    return Problem(op, attrs, shapes, dtype)


def kernel_of(asked: Problem, device: Device = MEASURED, off: tuple[str, ...] = ()) -> str:
    return library.select(asked.call, asked, device, off).kernel


@pytest.mark.parametrize("dtype", DTYPES)
def test_choices(dtype: torch.dtype) -> None:
    """Small pictures wait for the weights, large ones do not. Ours does not wait either, but loses
    where there are many operations."""
    small = problem(CONV, (2, 128, 4, 6), (128, 128, 3, 3), dtype=dtype)
    large = problem(CONV, (2, 64, 256, 256), (64, 64, 3, 3), dtype=dtype)
    assert kernel_of(small) == conv_cpu.NAME
    assert kernel_of(small, off=(conv_cpu.NAME,)) == rows.NAME
    assert kernel_of(small, off=(rows.NAME, conv_cpu.NAME)) == rows.PLAIN_NAME
    assert kernel_of(large, off=(conv_cpu.NAME,)) == rows.PLAIN_NAME
    empty = problem(CONV, (0, 128, 4, 6), (128, 128, 3, 3), dtype=dtype)
    assert kernel_of(empty) == rows.PLAIN_NAME
    grouped = problem(CONV, (2, 128, 4, 6), (128, 64, 3, 3), dtype=dtype, groups=2)
    assert kernel_of(grouped) == rows.PLAIN_NAME
    dilated = replace(small, attrs=tuple(sorted({**dict(small.attrs), "dilation": (2, 2)}.items())))
    assert kernel_of(dilated, off=(conv_cpu.NAME,)) == rows.PLAIN_NAME
    few = problem("linear", (64, 64), (64, 64), dtype=dtype)
    assert kernel_of(few, off=(linear_cpu.NAME,)) == rows.PLAIN_NAME


def test_reasons() -> None:
    asked = problem(CONV, (2, 128, 4, 6), (128, 128, 3, 3), dtype=torch.float64).call
    assert "fp" not in rows.supports(asked, MEASURED)
    assert "was not measured with float64" in rows.supports(asked, MEASURED)
    assert rows.supports(asked, CPU) == "runs on CPUs with AVX2 or AVX-512"
    sizes = ((symbol("b"), const(4)), (const(1024), const(1024)))
    linear = Call("linear", (), sizes, torch.float32)
    assert not rows.supports(linear, MEASURED)
    unknown = Call("linear", (), (sizes[0], (symbol("n"), const(4))), torch.float32)
    assert rows.supports(unknown, MEASURED) == "wants weights of a known size"


def test_training_does_without() -> None:
    """Weights are others in each step of it."""
    assert rows.NAME in INFERENCE_KERNELS
    assert set(rows.OPS) <= {row.name for row in CONTRACTIONS} & PRODUCTS.keys()


def test_table() -> None:
    kinds = {(case.isa, case.dtype, case.kind) for case in CASES}
    assert len(kinds) == len(CASES)
    for case in CASES:
        numbers = (case.watching, *(getattr(line, name) for line in (case.plain, case.packed)
                                    for name in Line.__slots__))  # fmt: skip
        assert all(number > 0 for number in numbers)
    line, work = Line(1.0, 10.0, 100.0), Work(ops=20, weight_bytes=300)
    case = PackedCase("", torch.float32, CONV, line, line, 50.0)
    assert case.times_us(work) == (6.0, 12.0)
    of_conv = Work.of(problem(CONV, (2, 3, 4, 5), (7, 3, 3, 3), dtype=torch.bfloat16))
    assert of_conv == Work(2 * 2 * 4 * 5 * 7 * 27, 7 * 27 * 2)


# The fingerprint


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return NativeKernels(DiskCache(tmp_path_factory.mktemp("kernels")))


def number_of(kernels: Any, memory: Tensor) -> int:
    found = torch.zeros(num_words(memory.nbytes), dtype=torch.int64)
    pointers = [memory.data_ptr(), found.data_ptr()]
    kernels.build([source()])[source()].bind(pointers, [memory.nbytes])()
    return int(found[0])


SIZES = (1, 7, 8, 9, 1023, 1024, 1025, 5000, SHARE_BYTES - 1, SHARE_BYTES, SHARE_BYTES + 9,
         3 * SHARE_BYTES + 1030)  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_any_bit_counts(kernels: Any, size: int) -> None:
    g = torch.Generator().manual_seed(size)
    memory = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=g)
    before = number_of(kernels, memory)
    assert number_of(kernels, memory.clone()) == before
    places = {0, size - 1, size // 2, *torch.randint(0, size, (20,), generator=g).tolist()}
    found = {before}
    for place in sorted(places):
        for bit in range(8):
            memory[place] ^= 1 << bit
            found.add(number_of(kernels, memory))
            memory[place] ^= 1 << bit
    assert len(found) == 1 + 8 * len(places)
    assert number_of(kernels, memory) == before


def test_changes_that_cancel_in_a_sum(kernels: Any) -> None:
    """Places that are exchanged, signs, zeros that are shorter, and what is moved by a row."""
    weight = torch.randn(64, 40)
    others = [
        weight,
        -weight,
        weight.flip(0),
        weight.flip(1),
        weight.roll(1, 0),
        weight.roll(16, 1),
        weight * 2,
        torch.zeros(64, 40),
        torch.zeros(64, 41),
        -torch.zeros(64, 40),
        torch.ones(64, 40),
    ]
    pairs = weight.clone()
    pairs[:, [0, 1]] = pairs[:, [1, 0]]
    signs = weight.clone()
    signs[[0, 3]] *= -1
    others += [pairs, signs]
    assert len({number_of(kernels, other.contiguous()) for other in others}) == len(others)


def test_threads_do_not_count(kernels: Any) -> None:
    memory, full = torch.randn(SHARE_BYTES), torch.get_num_threads()
    try:
        found = set()
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.add(number_of(kernels, memory))
    finally:
        torch.set_num_threads(full)
    assert len(found) == 1


# What is held


class Script:
    """A fingerprint that says what a test wants."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = list(numbers)

    def now(self) -> int:
        return self.numbers.pop(0)


def test_a_write_while_it_is_packed_is_seen() -> None:
    """Somebody has written between the two looks, then put all back."""
    weight, packs = torch.zeros(2), list[Tensor]()

    def pack(of: Tensor) -> Tensor:
        packs.append(of.clone())
        weight.add_(1)
        return packs[-1]

    held = PackedWeight(pack, lambda: None)
    first = held.of(weight, Script(5, 6, 6))  # type: ignore[arg-type]
    assert torch.equal(first, torch.ones(2))  # of the second time
    assert len(packs) == 2
    assert held.of(weight, Script(6)) is first  # type: ignore[arg-type]
    assert held.of(weight, Script(5, 5)) is not first  # type: ignore[arg-type]


def test_one_for_each_way() -> None:
    held, weight = PackedWeights(), torch.randn(4, 4)
    one = held.get(weight, "rows", Tensor.clone)
    assert held.get(weight.detach(), "rows", Tensor.clone) is one
    others = [
        held.get(weight, "columns", Tensor.clone),
        held.get(weight[:2], "rows", Tensor.clone),
        held.get(weight.t(), "rows", Tensor.clone),
    ]
    assert len({id(other) for other in (one, *others)}) == 4
    assert (len(held), held.size_bytes, held.num_made) == (0, 0, 0)  # nobody has asked yet
    del one, others
    assert not held._all()


def test_gaps() -> None:
    base = torch.randn(4, 6, 2, 3)
    dense = (base, base.permute(0, 2, 3, 1), base[1:3], base[:, :1, :1, :1][:1],
             base.contiguous(memory_format=torch.channels_last))  # fmt: skip
    assert all(map(has_no_gaps, dense))
    gaps = (base[:, :3], base[..., ::2], base[:1].expand(4, 6, 2, 3), base[:0])
    assert not any(map(has_no_gaps, gaps))


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("outs", [48, 96, 384])
def test_blocks_are_those_that_the_size_wants(outs: int, dtype: torch.dtype) -> None:
    """With those of another size oneDNN takes its plainest loops, 20 to 80 times as slow."""
    attrs = {**PLACES, "groups": 1}
    weight, bias = torch.randn(outs, 128, 3, 3).to(dtype), torch.randn(outs).to(dtype)
    x = torch.randn(1, 128, 4, 6).to(dtype).contiguous(memory_format=torch.channels_last)
    product = PRODUCTS[CONV](attrs, x.shape)
    packed, plain = product.pack(weight), ALLOCATING[CONV](attrs)

    def least_s(call: Callable[[], object]) -> float:
        times = []
        for _ in range(5):
            begin = time.process_time()
            call()
            times.append(time.process_time() - begin)
        return min(times)

    own = least_s(lambda: product.call([x, weight, bias], packed))
    assert own < 5 * least_s(lambda: plain([x, weight, bias]))


@wants_bf16
def test_sizes_share_blocks_where_they_can() -> None:
    attrs, look = tuple({**PLACES, "groups": 1}.items()), ((64, 64, 3, 3), (576, 9, 3, 1))
    ways = {
        way_of(CONV, attrs, (2, 64, *size), (*look, torch.bfloat16))
        for size in ((4, 6), (8, 8), (16, 24), (64, 64))
    }
    assert len(ways) == 1
    assert way_of(CONV, attrs, (2, 64, 4, 6), (*look, torch.float32)) not in ways


def test_options_name_it() -> None:
    assert Options(kernels_off=(rows.NAME,)).kernels_off == (rows.NAME,)
    assert rows.NAME in library.MAY_BE_OFF
    assert rows.PLAIN_NAME not in library.MAY_BE_OFF
