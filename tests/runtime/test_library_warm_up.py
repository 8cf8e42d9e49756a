"""The first library calls, made while compilers work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.debug.explain import explain
from strop.ir.device import Device
from strop.ir.program import CallStep, Program
from strop.options import Options
from strop.runtime.run import library_calls as calls
from strop.runtime.run import library_warm_up as priming
from tests.frontend.tracing import trace
from tests.gpus import A100, H100

SIZES = {"b": 2, "h": 64, "w": 64}
ATTENTION = ("wgmma_attention", "cross_attention", "tma_attention")
PLAIN = Options(kernels_off=("wgmma_gemm", *ATTENTION))


class Blocks(nn.Module):
    """Each kind of call, some of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.same = nn.Conv2d(4, 320, 3, padding=1), nn.Conv2d(320, 320, 3, padding=1)
        self.again, self.down = (
            nn.Conv2d(320, 320, 3, padding=1),
            nn.Conv2d(320, 64, 3, stride=2, padding=1),
        )
        self.qkv, self.up = nn.Linear(64, 192), nn.Linear(64, 2 * 2560)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(F.silu(self.again(F.silu(self.same(F.silu(self.first(x)))))))
        rows = F.silu(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(rows).unflatten(-1, (3, 1, 64)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        value, gate = self.up(F.scaled_dot_product_attention(attended, k, v)).chunk(2, -1)
        return value * F.gelu(gate)


def program_of(options: Options) -> Program:
    traced = trace(Blocks().half(), "b 4 h w", dtype=torch.float16, **SIZES)
    return compile_graph(traced.graph, Signature(traced.returned, ()), "cuda", options).program


def ops(program: Program, device: Device, sizes: Mapping[str, int] = SIZES) -> list[str]:
    return [form.op for form in priming.forms_of(program, sizes, device)]


def test_each_form_of_operands_once() -> None:
    program = program_of(PLAIN)
    called = [step.op for step in program.at(SIZES) if isinstance(step, CallStep)]
    assert called.count("conv2d") == 4  # the first of them by a kernel of ours, two alike
    assert called.count("attention") == 2  # queries of the second lie otherwise
    assert sorted(ops(program, H100)) == [
        "attention",
        "attention",
        "conv2d",
        "conv2d",
        "linear",
        "linear",
    ]


def test_what_kernels_of_ours_do_is_no_library_call() -> None:
    program = program_of(Options())
    assert "attention" not in ops(program, H100)
    assert "attention" in ops(program, A100)


def test_large_operands_are_left_alone() -> None:
    program = program_of(PLAIN)
    assert ops(program, H100, {"b": 2, "h": 512, "w": 512}).count("conv2d") == 0
    for form in priming.forms_of(program, SIZES, H100):
        assert form.num_bytes <= priming.MOST_BYTES


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The library calls that are made; on a CPU in the place of a GPU."""
    made: list[str] = []

    def heard(op: str, row: Any) -> Any:
        def with_attrs(attrs: Mapping[str, Any]) -> Any:
            call = row(attrs)

            def run(inputs: Sequence[Tensor], *out: Tensor) -> Any:
                made.append(op)
                return call(inputs, *out)

            return run

        return with_attrs

    def conv(attrs: Mapping[str, Any]) -> Any:
        def run(inputs: Sequence[Tensor], out: Tensor) -> None:
            assert inputs[1].is_contiguous(memory_format=torch.channels_last)
            result = calls.ALLOCATING["conv2d"](attrs)(inputs)
            assert (result.shape, out.dtype) == (out.shape, result.dtype)

        return run

    planned = {**calls.CUDA_PLANNED_OUT, "conv2d": conv}
    monkeypatch.setattr(priming, "CUDA_PLANNED_OUT", {op: heard(op, planned[op]) for op in planned})
    allocating = {op: heard(op, row) for op, row in calls.ALLOCATING.items()}
    monkeypatch.setattr(priming, "allocating_on", lambda device, kernel: allocating)
    return made


def test_the_longest_come_first(called: list[str]) -> None:
    program, sizes = program_of(PLAIN), {"b": 1, "h": 16, "w": 16}
    count = priming.prime(program, sizes, torch.device("cpu"), H100, lambda: True)
    assert called == ["attention", "attention", "conv2d", "conv2d", "linear", "linear"]
    assert count == len(called)


def test_none_is_made_when_all_kernels_are_there(called: list[str]) -> None:
    program, sizes, answers = program_of(PLAIN), {"b": 1, "h": 16, "w": 16}, [True, True, False]
    count = priming.prime(program, sizes, torch.device("cpu"), H100, lambda: answers.pop(0))
    assert called == ["attention", "attention"]
    assert count == len(called)


def test_each_is_made_where_the_caller_says(called: list[str]) -> None:
    """As on the stream of captures, which nobody else has meanwhile: between two calls others go
    on."""
    seen = list[str]()

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        before = len(called)
        yield
        seen.extend(called[before:])

    program, sizes = program_of(PLAIN), {"b": 1, "h": 16, "w": 16}
    priming.prime(program, sizes, torch.device("cpu"), H100, lambda: True, around)
    assert seen == called
    assert len(seen) == 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_first_call_primes_and_a_cached_one_does_not(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = Blocks().half().cuda().eval(), torch.randn(2, 4, 64, 64).half().cuda()
    module.to(memory_format=torch.channels_last)  # as a run leaves weights: plans are kept for that
    with torch.no_grad():
        truth = module.double()(x.double())
        module.half()
        before = torch.cuda.get_rng_state()
        for is_cached in (False, True):
            options = Options(cache_dir=str(tmp_path), strict=True)
            ours = strop.optimize(module, options=options)
            torch.testing.assert_close(ours(x).double(), truth, rtol=2e-2, atol=2e-3)
            assert ("libraries" in explain(ours).stage_seconds()) is not is_cached
            strop.restore(ours)
        assert torch.equal(torch.cuda.get_rng_state(), before)
