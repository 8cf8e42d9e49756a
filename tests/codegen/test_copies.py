"""Copies for products that are left out where what they copy lies as the copy would."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.api import dispatchers_of
from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.dispatch.dispatcher import Dispatcher
from strop.ir import serialize
from strop.ir.program import KernelStep, Program
from strop.options import Options
from strop.testing import assert_as_accurate_as_eager
from tests.frontend.tracing import trace
from tests.fuzz.interpreted import interpreted

DIM, HEADS, WORDS = 32, 2, 3


class Joint(nn.Module):
    """As Flux's double blocks: words and pictures attend together, and have a product each."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.words, self.picture = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def attended(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Any:
        words, picture = self.attended(x).split([WORDS, x.shape[1] - WORDS], 1)
        return self.words(words).relu(), self.picture(picture).relu()


class ReadByAKernel(Joint):
    def forward(self, x: Tensor) -> Any:
        words = self.attended(x)[:, :WORDS].contiguous()
        return self.words(words).relu(), words.sin().sum()


class Returned(Joint):
    def forward(self, x: Tensor) -> Any:
        words = self.attended(x)[:, :WORDS].contiguous()
        return self.words(words).relu(), words


class OfAnArgument(Joint):
    """The caller may write into an argument, or it may lie anywhere."""

    def forward(self, x: Tensor) -> Any:
        return self.words(x[:, :WORDS]).relu()


class OfAnotherType(Joint):
    def forward(self, x: Tensor) -> Any:
        y = self.attended(x)[:, :WORDS].double()
        return F.linear(y, self.words.weight.double()).relu()


class AtAnOddPlace(Joint):
    def forward(self, x: Tensor) -> Any:
        return F.linear(self.attended(x)[:, WORDS:, 1:], self.words.weight[:, 1:]).relu()


def optimized(module: nn.Module, folder: Path, **options: Any) -> tuple[nn.Module, Dispatcher]:
    fast = copy.deepcopy(module)
    strop.optimize(fast, options=Options(cache_dir=str(folder), strict=True, **options))
    (dispatcher,) = dispatchers_of(fast).values()
    return fast, dispatcher


def left_out(program: Program, batch: int) -> int:
    """How many kernels do not run for so many pictures."""
    steps = program.at(dict(program.hints) | {"b": batch})
    kernels = [isinstance(step, KernelStep) for step in program.steps]
    return sum(is_kernel and step is None for is_kernel, step in zip(kernels, steps, strict=True))


@pytest.mark.parametrize("check", [False, True])
def test_values(check: bool, tmp_path: Path) -> None:
    eager = Joint().eval().requires_grad_(False)
    exact = copy.deepcopy(eager).double()
    with interpreted():
        fast, dispatcher = optimized(eager, tmp_path, check=check)
        for batch, tokens in ((2, 9), (1, 9), (3, 7), (1, 20), (2, 9)):
            x = torch.randn(batch, tokens, DIM)
            for got, base, true in zip(fast(x), eager(x), exact(x.double()), strict=True):
                assert_as_accurate_as_eager(got, base, true)
    (variant,) = dispatcher.variants.all
    assert (left_out(variant.program, 1), left_out(variant.program, 2)) == (2, 0)
    assert not dispatcher.counters.findings
    assert serialize.from_json(serialize.to_json(variant.program)) == variant.program


def test_products_read_what_would_have_been_copied() -> None:
    program = compiled(Joint(), "b s 32")
    one, two = (program.at({"b": batch, "s": 9}) for batch in (1, 2))
    attention = next(step.outputs[0] for step in program.call_steps if step.op == "attention")
    near = [s for s in one if s is not None and attention in {r.buffer for r in _refs(s)}]
    assert [ref.offset.eval({"b": 1, "s": 9}) for s in near for ref in _refs(s)[:1]] == [
        0,
        WORDS * DIM,
    ]
    assert None not in two
    for step in near:
        assert program.buffers[_refs(step)[0].buffer].kind == "call"


def _refs(step: Any) -> tuple[Any, ...]:
    return getattr(step, "inputs", ())


def compiled(module: nn.Module, *shapes: str) -> Program:
    traced = trace(module.eval(), *shapes, b=2, s=9)
    return compile_graph(traced.graph, Signature(traced.returned, ()), "cpu", Options()).program


@pytest.mark.parametrize(
    "module",
    [OfAnArgument(), OfAnotherType(), AtAnOddPlace()],
    ids=["of an argument", "of another type", "an odd place"],
)
def test_where_they_stay(module: nn.Module) -> None:
    program = compiled(module, "b s 32")
    assert not any(step.copied for step in program.kernel_steps)
    assert left_out(program, 1) == 0


@pytest.mark.parametrize("module", [ReadByAKernel(), Returned()], ids=["by a kernel", "returned"])
def test_what_others_read_is_theirs(module: nn.Module, tmp_path: Path) -> None:
    """A kernel reads what is copied where that lies, and the caller gets a copy of its own."""
    assert left_out(compiled(module, "b s 32"), 1) == 1
    eager = module.eval().requires_grad_(False)
    with interpreted():
        fast, _ = optimized(eager, tmp_path)
        for batch in (1, 2, 1):
            x = torch.randn(batch, 9, DIM)
            first = [value.clone() for value in fast(x)]
            fast(x)[1].fill_(7)
            for found, again, wanted in zip(first, fast(x), eager(x), strict=True):
                torch.testing.assert_close(found, wanted)
                torch.testing.assert_close(again, wanted)
