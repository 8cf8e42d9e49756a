"""Attention of ours on a CPU, against fp64 and eager, by each kind of vectors this machine has."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.ir.device import CPU, Device
from strop.ir.source import KernelSource
from strop.kernels import library
from strop.kernels.attention import cpu
from strop.kernels.attention.cpu_cases import CpuCase, times_us
from strop.kernels.kernel import NEVER, Problem
from strop.kernels.tuned.attention_cpu import CASES
from strop.options import Options
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.native import NativeFunction, NativeKernels
from strop.runtime.build.processors import processor
from strop.testing import assert_as_accurate_as_eager, assert_as_accurate_together
from tests.kernels.launching import PLAIN, call, launched, refuse

# What a processor is described as -> the target that its kernels are compiled for.
TARGETS = {"avx512_bf16": "cpu-v4", "avx512": "cpu-v4", "avx2": "cpu-v3", "": "cpu-v1"}
ABLE = {"avx512_bf16": 3, "avx512": 2, "avx2": 1, "": 0}
DTYPES = (torch.float32, torch.bfloat16)
HEADS = (32, 40, 64, 80, 96, 128, 160, 17, 33, 1, 256)
MASKINGS = ("none", "causal", "marks", "marks of keys", "numbers", "numbers of keys")


class Kernels:
    """Builds for any target, and binds to any sizes."""

    def __init__(self, folder: Path, isa: str) -> None:
        self.device = replace(CPU, isa=isa or "avx2")
        self._native = NativeKernels(DiskCache(folder), target=TARGETS[isa])

    def build(self, sources: Sequence[KernelSource]) -> dict[KernelSource, NativeFunction]:
        return self._native.build(sources)

    def bind(
        self,
        source: KernelSource,
        pointers: Sequence[int],
        scalars: Sequence[int],
        *_: Any,
        **__: Any,
    ) -> Any:
        return self.build([source])[source].bind(pointers, scalars)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(params=TARGETS)
def kernels(request: pytest.FixtureRequest, folder: Path) -> Kernels:
    here = processor()
    if not here.isa:
        pytest.skip(f"{here.name} has neither AVX2 nor AVX-512")
    if ABLE[request.param] > ABLE[here.isa]:
        pytest.skip(f"this processor has no {request.param}, only {here.isa}")
    return Kernels(folder, request.param)


def problem_of(operands: Sequence[Tensor], *, causal: bool, scale: float | None) -> Problem:
    q, *_ = operands
    mask = operands[3].dtype if len(operands) > 3 else None
    shapes = tuple(tuple(x.shape) for x in operands)
    return Problem("attention", (("causal", causal), ("scale", scale)), shapes, q.dtype, mask)


def ours(
    kernels: Any, operands: Sequence[Tensor], *, causal: bool = False, scale: float | None = None
) -> Tensor:
    problem = problem_of(operands, causal=causal, scale=scale)
    assert not cpu.supports(problem.call, kernels.device)
    launches = cpu.launch(problem, kernels.device)
    return launched(launches, kernels).allocating(refuse)(operands)


def torchs(
    operands: Sequence[Tensor], *, causal: bool = False, scale: float | None = None
) -> Tensor:
    q, k, v, *masks = operands
    mask = masks[0] if masks else None
    return F.scaled_dot_product_attention(
        q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def exact(operands: Sequence[Tensor], **how: Any) -> Tensor:
    return torchs([x if x.dtype is torch.bool else x.double() for x in operands], **how)


# ---- operands ----------------------------------------------------------------------------------


def dense(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def sequence_first(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    b, h, s, d = shape
    return torch.randn(b, s, h, d).to(dtype).transpose(1, 2)


def odd_place(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A part of wider rows, at an address that is a multiple of the element's size alone."""
    b, h, s, d = shape
    return torch.randn(b, s, h, d + 3).to(dtype)[..., 1 : d + 1].transpose(1, 2)


def columns_apart(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    b, h, s, d = shape
    return torch.randn(b, h, d, s).to(dtype).transpose(2, 3)


def reversed_heads(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """All batch elements share it, by a stride of 0."""
    return torch.randn(1, *shape[1:]).to(dtype).expand(shape)


LAYOUTS = (dense, sequence_first, odd_place, columns_apart, reversed_heads)


def mask_of(kind: str, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> list[Tensor]:
    """A mask spreads over all scores, or over some dims of them."""
    full = [size if random.random() < 0.6 else 1 for size in sizes[:2]]
    shape = (*full, 1 if kind.endswith("keys") else sizes[2], sizes[3])
    if random.random() < 0.3:
        shape = shape[2:]
    if kind.startswith("marks"):
        marks = torch.rand(shape) > 0.4
        marks[..., random.randrange(sizes[3])] = True  # no row without a key
        return [marks]
    return [torch.randn(shape).to(dtype)] if kind.startswith("numbers") else []


def random_call(lengths: int, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
    batch, heads, shared = random.choice(((1, 1, 1), (2, 3, 1), (1, 4, 2), (3, 2, 2)))
    queries, keys = (random.randint(1, lengths) for _ in range(2))
    head = random.choice(HEADS)
    masking = random.choice(MASKINGS)
    q, k, v = (
        random.choice(LAYOUTS)((batch, some, length, head), dtype)
        for some, length in ((heads, queries), (heads // shared, keys), (heads // shared, keys))
    )
    mask = mask_of(masking, (batch, heads, queries, keys), dtype)
    scale = random.choice((None, None, 0.05, 0.5))
    return [q, k, v, *mask], {"causal": masking == "causal", "scale": scale}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_no_further_from_fp64_than_eager(kernels: Kernels, dtype: torch.dtype, seed: int) -> None:
    """Forty calls of random lengths, masks and strides, judged as one."""
    random.seed(seed)
    torch.manual_seed(seed)
    found = []
    for _ in range(40):
        operands, how = random_call(300, dtype)
        triple = ours(kernels, operands, **how), torchs(operands, **how), exact(operands, **how)
        found.append(triple)
        near = 0.02 if dtype is torch.bfloat16 else 1e-4
        sizes = [tuple(x.shape) for x in operands]
        torch.testing.assert_close(
            triple[0].double(), triple[2], atol=near, rtol=near, msg=f"{sizes} {how}"
        )
    assert_as_accurate_together(found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_keys(kernels: Kernels, dtype: torch.dtype) -> None:
    """Several chunks of keys, the last of them with few."""
    torch.manual_seed(0)
    for queries, keys, head in ((70, 2049, 64), (1, 4096, 40), (50, 1000, 128)):
        operands = [dense((1, 2, n, head), dtype) for n in (queries, keys, keys)]
        for how in ({}, {"causal": True}):
            assert_as_accurate_as_eager(
                ours(kernels, operands, **how), torchs(operands, **how), exact(operands, **how)
            )


def test_values_may_be_of_another_width(kernels: Kernels) -> None:
    q, k = dense((2, 3, 20, 48), torch.float32), dense((2, 3, 30, 48), torch.float32)
    operands = [q, k, dense((2, 3, 30, 72), torch.float32)]
    assert_as_accurate_as_eager(ours(kernels, operands), torchs(operands), exact(operands))


# ---- special values ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", [5, 64, 300])
def test_rows_without_a_key_are_zero(kernels: Kernels, dtype: torch.dtype, keys: int) -> None:
    torch.manual_seed(0)
    q, k, v = (dense((2, 2, n, 40), dtype) for n in (9, keys, keys))
    marks = torch.rand(2, 1, 9, keys) > 0.5
    marks[0, :, 3] = False
    marks[1] = False
    for mask in (marks, torch.zeros(marks.shape, dtype=dtype).masked_fill_(~marks, -torch.inf)):
        result = ours(kernels, [q, k, v, mask])
        assert not result[0, :, 3].any()
        assert not result[1].any()
        operands = [q, k, v, mask]
        assert_as_accurate_as_eager(result, torchs(operands), exact(operands))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", range(4))
def test_what_is_not_finite_spreads(
    kernels: Kernels, dtype: torch.dtype, value: float, where: int
) -> None:
    """In a query, a key, a value, or a mask: as in fp64 and in fp32. Torch's attention in bf16
    gives numbers where a score is infinite."""
    torch.manual_seed(0)
    operands = [dense((1, 2, n, 48), dtype) for n in (7, 80, 80)]
    if where == 3:
        operands.append(torch.zeros(1, 2, 7, 80, dtype=dtype))
    operands[where][0, 1, 5, 11] = value
    result, eager = ours(kernels, operands), torchs([x.float() for x in operands]).to(dtype)
    for other in (eager, exact(operands)):
        assert torch.equal(result.isnan(), other.isnan())
        assert torch.equal(result.isinf(), other.isinf())
    fine = eager.isfinite()
    near = 0.02 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(result[fine], eager[fine], atol=near, rtol=near)
    assert where == 3 or not fine.all() or value == -torch.inf


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_minus_infinity_and_nan_is_nan(kernels: Kernels, dtype: torch.dtype) -> None:
    q, k, v = (dense((1, 1, n, 32), dtype) for n in (6, 40, 40))
    mask = torch.full((6, 40), -torch.inf, dtype=dtype)
    mask[2, 17] = torch.nan
    result, eager = ours(kernels, [q, k, v, mask]), torchs([q, k, v, mask])
    assert torch.equal(result.isnan(), eager.isnan())
    assert result[0, 0, 2].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_huge_scores(kernels: Kernels, dtype: torch.dtype) -> None:
    """One key takes all, or all scores are the least number: each key counts the same then."""
    torch.manual_seed(0)
    q, k, v = (dense((1, 2, n, 64), dtype) for n in (11, 600, 600))
    for operands in (
        [1e4 * q, 1e4 * k, v],
        [q, k, v, torch.full((11, 600), torch.finfo(dtype).min, dtype=dtype)],
        [1e-30 * q, k, v],
    ):
        result, eager, reference = ours(kernels, operands), torchs(operands), exact(operands)
        if len(operands) == 4:  # fp64 tells such scores apart
            reference = v.double().mean(2, keepdim=True).expand(1, 2, 11, 64)
        assert_as_accurate_as_eager(result, eager, reference)


# ---- threads -----------------------------------------------------------------------------------


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_for_any_number_of_threads(
    kernels: Kernels, dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    torch.manual_seed(0)
    operands = [dense((2, 3, n, 40), dtype) for n in (210, 333, 333)]
    found = []
    for count in (1, 2, 3, 8):
        set_threads(count)
        found += [ours(kernels, operands), ours(kernels, operands, causal=True)]
    for result in found[2:]:
        assert any(torch.equal(result, first) for first in found[:2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_rows_beside_it(kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = (dense((1, 2, n, 48), dtype) for n in (101, 130, 130))
    whole = ours(kernels, [q, k, v])
    for begin, end in ((0, 1), (3, 8), (50, 101)):
        assert torch.equal(ours(kernels, [q[:, :, begin:end], k, v]), whole[:, :, begin:end])


# ---- which calls -------------------------------------------------------------------------------

HERE = replace(CPU, isa="avx512_bf16")
SHAPE = ("b", 8, "n", 64)


@pytest.mark.parametrize(
    ("reason", "asked"),
    [
        ("takes fp32 and bf16", call("attention", *[SHAPE] * 3, **PLAIN)),
        (
            "takes scales",
            call("attention", *[SHAPE] * 3, dtype=torch.float32, causal=False, scale=-0.1),
        ),
        (
            "takes operands",
            call("attention", *[("n", 64)] * 3, dtype=torch.float32, **PLAIN),
        ),
        (
            "wants heads of a known size",
            call("attention", *[("b", 8, "n", "d")] * 3, dtype=torch.float32, **PLAIN),
        ),
        (
            "takes no mask where",
            call(
                "attention",
                *[SHAPE] * 3,
                ("n", "n"),
                dtype=torch.float32,
                causal=True,
                scale=None,
            ),
        ),
    ],
)
def test_reasons(reason: str, asked: Any) -> None:
    assert cpu.supports(asked, HERE).startswith(reason)


def test_masks_of_a_third_type_are_torchs() -> None:
    asked = call("attention", *[SHAPE] * 3, ("n", "n"), dtype=torch.float32, **PLAIN)
    assert cpu.supports(replace(asked, mask=torch.float32), HERE) == ""
    assert cpu.supports(replace(asked, mask=torch.bool), HERE) == ""
    assert cpu.supports(replace(asked, mask=torch.float64), HERE).startswith("takes masks")


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 8, 10, 64), (1, 8, 10, 64), (1, 8, 10, 64)),  # one batch element for all
        ((2, 8, 10, 64), (2, 3, 10, 64), (2, 3, 10, 64)),
        ((2, 8, 10, 64), (2, 8, 0, 64), (2, 8, 0, 64)),
        ((2, 8, 10, 64), (2, 8, 7, 64), (2, 8, 7, 64), (10, 5)),
    ],
)
def test_sizes_that_are_left_to_torch(shapes: tuple[tuple[int, ...], ...]) -> None:
    mask = torch.float32 if len(shapes) > 3 else None
    asked = Problem("attention", (("causal", False), ("scale", None)), shapes, torch.float32, mask)
    assert cpu.cost_us(asked, HERE) == NEVER
    assert cpu.launch(asked, HERE) is None
    assert library.select(asked.call, asked, HERE).kernel == "sdpa"


@pytest.mark.parametrize("isa", ["avx512_bf16", "avx512", "avx2"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_a_processor_runs(isa: str, dtype: torch.dtype) -> None:
    """Pairs of bf16 where they can be multiplied; an artefact has both forms for AVX-512."""
    device = replace(CPU, isa=isa)
    q = dense((2, 8, 1024, 64), dtype)
    asked = problem_of([q, q, q], causal=False, scale=None)
    choice = library.select(asked.call, asked, device)
    assert choice.kernel == "cpu_attention"
    (source,) = choice.sources
    has_pairs = dtype is torch.bfloat16 and isa == "avx512_bf16"
    assert source is cpu.source(dtype, is_paired=has_pairs)
    known = set(library.forms(asked.call, device))
    assert source in known
    assert len(known) == (2 if dtype is torch.bfloat16 and isa != "avx2" else 1)
    off = library.select(asked.call, asked, device, ("cpu_attention",))
    assert (off.kernel, off.sources) == ("sdpa", ())


@pytest.mark.parametrize("row", CASES, ids=str)
def test_the_faster_one_was_measured(row: CpuCase) -> None:
    """At the sizes of a measured case, what was faster there runs."""
    sizes = (1, row.heads, row.queries, row.head), (1, row.heads, row.keys, row.head)
    shapes, mask = (sizes[0], sizes[1], sizes[1]), None
    attrs = (("causal", row.is_masked), ("scale", None))
    asked = Problem("attention", attrs, shapes, row.dtype, mask)
    found = times_us(asked, row.isa, CASES)
    assert found in {
        (other.ours_us, other.torchs_us)
        for other in CASES
        if (other.isa, other.dtype, other.work) == (row.isa, row.dtype, row.work)
    }
    faster = "cpu_attention" if found[0] <= found[1] else "sdpa"
    choice = library.select(asked.call, asked, replace(CPU, isa=row.isa))
    assert choice.kernel == faster


def test_small_calls_in_fp32() -> None:
    """They are torch's on a Zen 4 without its products of bf16, and ours on a Zen 5."""
    for sizes in ((1, 4, 32, 64), (2, 4, 24, 32)):
        asked = Problem("attention", tuple(PLAIN.items()), (sizes,) * 3, torch.float32)
        for isa, kernel in (("avx512", "sdpa"), ("avx512_bf16", "cpu_attention")):
            assert library.select(asked.call, asked, replace(CPU, isa=isa)).kernel == kernel


# ---- a whole module ----------------------------------------------------------------------------


class Attends(nn.Module):
    """Queries, keys and values are parts of one product, where they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(128, 384), nn.Linear(128, 128)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.inward(x).view(batch, length, 3, 2, 64).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, mask)
        return self.outward(found.transpose(1, 2).reshape(x.shape))


def choice_of(report: Any, kernel: str) -> Any:
    """Return what the one attention of a module runs, which is to be this kernel."""
    rows = (row for graph in report.components[0].graphs for row in graph.choices)
    (found,) = (row for row in rows if "linear" not in row.kernel)
    assert found.kernel == kernel
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_program_runs_it_and_says_so(dtype: torch.dtype, folder: Path) -> None:
    here: Device = processor()
    if not here.isa:
        pytest.skip(f"{here.name} has neither AVX2 nor AVX-512")
    torch.manual_seed(0)
    module, plain = Attends().eval().to(dtype), Attends().eval().to(dtype)
    plain.load_state_dict(module.state_dict())
    strop.optimize(module, options=Options(cache_dir=str(folder)))
    with torch.no_grad():
        for length in (96, 77, 101):  # ours is the faster one with AVX2 and with AVX-512
            x = torch.randn(2, length, 128).to(dtype)
            judge = Attends().eval().to(dtype)
            judge.load_state_dict(module.state_dict())
            assert_as_accurate_as_eager(module(x), plain(x), judge.double()(x.double()))
    report = strop.explain(module)
    row = choice_of(report, "cpu_attention")
    assert [name for name, _ in row.beaten] == ["sdpa"]
    switched_off = Attends().eval().to(dtype)
    options = Options(cache_dir=str(folder), kernels_off=("cpu_attention",))
    strop.optimize(switched_off, options=options)
    with torch.no_grad():
        switched_off(torch.randn(2, 96, 128).to(dtype))
    choice_of(strop.explain(switched_off), "sdpa")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", [8, 31, 64, 77, 600])
def test_marks_that_hide_nothing_change_no_bit(
    kernels: Kernels, dtype: torch.dtype, keys: int
) -> None:
    torch.manual_seed(0)
    operands = [dense((3, 2, n, 64), dtype) for n in (13, keys, keys)]
    marks = torch.ones(3, 1, 13, keys, dtype=torch.bool)
    assert torch.equal(ours(kernels, [*operands, marks]), ours(kernels, operands))
    marks[1, :, :, keys // 2] = False
    marks[2, :, 5, :-1] = False
    wanted = ours(kernels, [*operands, marks.to(dtype).log()])  # -infinity as numbers
    assert torch.equal(ours(kernels, [*operands, marks]), wanted)
