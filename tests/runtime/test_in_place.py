"""Results that take the memory of an operand: which may, what is saved, and that values stay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.dispatch import dynamo as aot
from strop.ir.program import KernelStep, Program
from strop.options import Options
from strop.runtime.run.memory import Interval, shared
from tests.frontend.tracing import trace
from tests.fuzz import interpreted as stand_in
from tests.fuzz.interpreted import interpreted

Values = tuple[Tensor, ...] | Tensor


def conv(x: Tensor) -> Tensor:
    return F.conv2d(x, x.new_ones(32, 32, 1, 1))


def activation(x: Tensor) -> Values:
    return conv(F.relu(conv(x)))


def residual(x: Tensor) -> Values:
    y = conv(x)
    return conv(F.relu(y)) + y


def norm_of_rows(x: Tensor) -> Values:
    return conv(F.softmax(conv(x), -1))


def groups(x: Tensor) -> Values:
    return conv(F.silu(F.group_norm(conv(x), 4)))


def rolled(x: Tensor) -> Values:
    return conv(conv(x).roll(1, 2))


def halves(x: Tensor) -> Values:
    a, b = conv(x).chunk(2, 2)
    return conv(a * F.gelu(b))


def transposed(x: Tensor) -> Values:
    return conv(conv(x).transpose(2, 3).contiguous() + 1)


def other_type(x: Tensor) -> Values:
    return conv(conv(x).to(torch.float64).exp().float()).double() + 1


def of_the_caller(x: Tensor) -> Values:
    return F.relu(conv(x))  # a result has memory of its own


# how many kernels may write over an operand
CASES: dict[Callable[[Tensor], Values], int] = {
    activation: 1,
    residual: 1,  # that y is read again is found when memory is planned
    norm_of_rows: 1,
    groups: 1,
    rolled: 0,
    halves: 0,
    transposed: 0,
    of_the_caller: 0,
}


def program_of(function: Callable[[Tensor], Values], **options: bool) -> Program:
    traced = trace(function, "b 32 h w", b=2, h=8, w=8)
    signature = Signature(traced.returned, traced.captured.guards)
    return compile_graph(traced.graph, signature, "cuda", Options(**options)).program


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_who_may(function: Callable[[Tensor], Values]) -> None:
    steps = program_of(function).kernel_steps
    assert sum(bool(step.in_place) for step in steps) == CASES[function], [s.ops for s in steps]
    for step in steps:
        assert all(v.in_place for v in step.variants) or not step.in_place
        for written, read in step.in_place:
            assert written in step.writes
            assert read in step.buffers
    assert not any(step.in_place for step in program_of(function, in_place=False).kernel_steps)


def test_on_a_cpu_nobody_may() -> None:
    """The ends of rows are computed twice there."""
    traced = trace(activation, "b 32 h w", b=2, h=8, w=8)
    signature = Signature(traced.returned, traced.captured.guards)
    program = compile_graph(traced.graph, signature, "cpu", Options()).program
    assert not any(step.in_place for step in program.steps if isinstance(step, KernelStep))


ALIVE = {
    0: Interval(0, 1, 8),
    1: Interval(1, 2, 8),
    2: Interval(2, 5, 8),
    3: Interval(2, 3, 8),
    4: Interval(3, 4, 16),
}


@pytest.mark.parametrize(
    ("pairs", "host"),
    [
        ([(1, 0)], {1: 0}),
        ([(1, 0), (2, 1)], {1: 0, 2: 0}),  # a chain lies where its first one does
        ([(2, 1), (3, 1)], {2: 1}),  # one heir
        ([(2, 0)], {}),  # of what has ended before
        ([(3, 2)], {}),  # of what lives on
        ([(4, 3)], {}),  # of another size
        ([(9, 0), (1, 9)], {}),  # not in the arena
    ],
)
def test_planning(pairs: list[tuple[int, int]], host: dict[int, int]) -> None:
    placed, found = shared(ALIVE, pairs)
    assert found == host
    assert set(placed) == set(ALIVE) - set(host)
    for new, root in host.items():
        assert placed[root].first <= ALIVE[new].first
        assert placed[root].last >= ALIVE[new].last


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.norm, self.line = nn.GroupNorm(4, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.second(F.silu(self.norm(x)))
        y = self.line(F.softmax(self.line(x.flatten(2).transpose(1, 2)) * 3, -1))
        return F.gelu(self.line(y + x.flatten(2).transpose(1, 2)))


@contextmanager
def counted(shares: list[int]):
    """How many results lie in memory of others, by bound program."""

    def counting(alive, pairs):
        placed, host = shared(alive, pairs)
        shares.append(len(host))
        return placed, host

    with patch("strop.runtime.run.memory_plan.shared", counting):
        yield


def test_values_stay(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    torch.manual_seed(0)
    block, x = Block().eval().requires_grad_(False), torch.randn(2, 8, 8, 8)
    found, shares = [], list[int]()
    with interpreted(triton=True), counted(shares):
        for in_place in (True, False):
            options = Options(
                cache_dir=str(tmp_path / str(in_place)), strict=True, in_place=in_place
            )
            strop.optimize(block, options=options)
            found.append(block(x))
            strop.restore(block)
    assert shares[0] > 0
    assert shares[1] == 0
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], block(x))


@pytest.mark.parametrize("cols", [320, 60_000])  # held on the chip, and read once a sweep
def test_an_argument_is_written_after_its_last_reading(cols: int) -> None:
    pytest.importorskip("triton")

    def add_and_norm(x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        return F.layer_norm(x, x.shape[-1:])

    torch._dynamo.reset()
    x, y = torch.randn(2, 2, cols).unbind()
    mine, theirs = x.clone(), x.clone()
    with (
        interpreted(triton=True),
        torch.no_grad(),
        patch.object(aot, "kernel_loader", lambda *args: stand_in._NoKernels()),
    ):
        found = torch.compile(add_and_norm, backend="strop", dynamic=False)(mine, y)
    torch.testing.assert_close(found, add_and_norm(theirs, y))
    assert torch.equal(mine, theirs)
