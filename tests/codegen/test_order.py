"""Calls that are done early so that less memory is needed: what moves, and that values stay."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop import backend
from strop.backend import Compiled
from strop.codegen.assemble import Signature
from strop.codegen.order import _Memory, in_order
from strop.debug.steps import planned_steps
from strop.fusion.plan import Group
from strop.ir.program import CallStep, KernelStep, Program, Step
from strop.ir.source import Split
from strop.ir.tensor_spec import TensorSpec
from strop.options import Options
from tests.frontend.tracing import trace_specs
from tests.fuzz.interpreted import interpreted
from tests.gpus import H100

Values = tuple[Tensor, ...] | Tensor
SIDE = 16


class Block(nn.Module):
    """A block of a VAE's decoder, which keeps what it reads for the shortcut."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.before = nn.Conv2d(8, ins, 3, padding=1, bias=False)
        self.first = nn.Conv2d(ins, outs, 3, padding=1, bias=False)
        self.second = nn.Conv2d(outs, outs, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(ins, outs, 1, bias=False)
        self.after = nn.Conv2d(outs, 3, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(4, ins), nn.GroupNorm(4, outs)])

    def inside(self, x: Tensor) -> Tensor:
        h = self.first(F.silu(self.norms[0](x)))
        return self.second(F.silu(self.norms[1](h)))

    def forward(self, x: Tensor) -> Values:
        x = self.before(x)
        return self.after(self.inside(x) + self.shortcut(x))


class ReadAtTheEnd(Block):
    def forward(self, x: Tensor) -> Values:
        x = self.before(x)
        return self.after(self.inside(x) + self.shortcut(x)), x.sum(1)


class WrittenBetween(Block):
    """The shortcut reads what is written after the norm has read."""

    def forward(self, x: Tensor) -> Values:
        x = self.before(x)
        h = self.inside(x)
        x[:, :8] = h.mean()
        return self.after(h + self.shortcut(x))


class Rows(nn.Module):
    """The same of linear layers, whose results a program places on a CPU as well."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.before, self.shortcut = nn.Linear(8, ins, bias=False), nn.Linear(ins, outs, bias=False)
        self.first, self.second = nn.Linear(ins, outs, bias=False), nn.Linear(outs, outs)
        self.norm, self.after = nn.LayerNorm(ins), nn.Linear(outs, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        h = self.second(F.silu(self.first(F.silu(self.norm(x)))))
        return self.after(h + self.shortcut(x))


MOVES: dict[str, tuple[Block, bool]] = {
    "narrowing": (Block(64, 32), True),
    "widening": (Block(32, 64), False),
    "read at the end": (ReadAtTheEnd(64, 32), True),  # where it is made, so that it ends there
}
ALL = {name: block for name, (block, _) in MOVES.items()} | {
    "written between": WrittenBetween(64, 32)
}


def compiled_of(block: Block, device: str = "cuda") -> Compiled:
    specs = [TensorSpec(("b", "8", "h", "w"), torch.float32, torch.device("cpu"))]
    hints = {"b": 2, "h": SIDE, "w": SIDE}
    traced = trace_specs(block.eval().requires_grad_(False), block, specs, hints)
    signature = Signature(traced.returned, traced.captured.guards)
    return backend.compile_graph(traced.graph, signature, device, Options())


def programs_of(block: Block, device: str = "cuda") -> tuple[Program, Program]:
    """As the graph says, and as it is run."""
    compiled = compiled_of(block, device)
    back = sorted(range(len(compiled.order)), key=compiled.order.__getitem__)
    return in_order(compiled.program, tuple(back)), compiled.program


def most_alive(program: Program) -> int:
    return _Memory(program).most_alive(tuple(range(len(program.steps))))[0]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", MOVES)
def test_what_moves(name: str, device: str) -> None:
    block, moves = MOVES[name]
    moves &= device == "cuda"  # on a CPU nothing is written over an operand: there is no gain
    before, after = programs_of(block, device)
    assert sorted(map(id, before.steps)) == sorted(map(id, after.steps))
    moved = [s for s, t in zip(before.steps, after.steps, strict=True) if s is not t]
    assert bool(moved) is moves
    assert (most_alive(after) < most_alive(before)) is moves
    rest = [inner_kernels(program) for program in (before, after)]
    assert rest[0] == rest[1]


def inner_kernels(program: Program) -> list[Step]:
    """Those that write something else than results."""
    results = {number for number, b in enumerate(program.buffers) if b.kind == "result"}
    kernels = (step for step in program.steps if isinstance(step, KernelStep))
    return [step for step in kernels if not results.issuperset(step.writes)]


class KeysAndValues(nn.Module):
    """Layers of a language model, which returns keys and values of each as copies."""

    def __init__(self, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.both = nn.ModuleList([nn.Linear(width, 2 * width) for _ in range(layers)])
        self.out = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])

    def forward(self, x: Tensor) -> Values:
        found = []
        for both, out in zip(self.both, self.out, strict=True):
            keys, values = both(x).chunk(2, -1)
            found += [keys.contiguous(), values.contiguous()]
            x = out(F.silu(keys) * values)
        return (x, *found)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_keys_and_values_are_copied_before_the_next_layer(device: str) -> None:
    model, specs = KeysAndValues(), [TensorSpec(("n", "64"), torch.float32, torch.device("cpu"))]
    traced = trace_specs(model.eval().requires_grad_(False), model, specs, {"n": 32})
    signature = Signature(traced.returned, traced.captured.guards)
    program = backend.compile_graph(traced.graph, signature, device, Options()).program
    layer = 32 * 64 * 4
    # keys and values of one layer, what is computed of both, and what the layer makes of that
    assert 3 * layer <= most_alive(program) <= 4 * layer
    results = {number for number, b in enumerate(program.buffers) if b.kind == "result"}
    copies = [
        place
        for place, step in enumerate(program.steps)
        if isinstance(step, KernelStep) and results.issuperset(step.writes)
    ]
    assert copies, "else the test says nothing"
    assert copies[0] <= 2
    assert copies[-1] < len(program.steps) - 1


def test_the_shortcut_comes_before_the_norm_which_takes_its_operands_memory() -> None:
    before, after = programs_of(ALL["narrowing"])
    pixels = 2 * SIDE * SIDE * 4
    # operand, norm and the first result; with the shortcut instead of the operand
    assert most_alive(before) // pixels == 64 + 64 + 32
    assert most_alive(after) // pixels == 64 + 32 + 32
    calls = [step for step in after.steps if isinstance(step, CallStep)]
    sides = [step.inputs[1].shape[-1].value for step in calls[:2]]
    assert sides == [3, 1]  # of the layer and the shortcut, which fp32 leaves a convolution


def reads_and_writes(step: Step) -> tuple[set[int], set[int]]:
    if isinstance(step, CallStep):
        return {ref.buffer for ref in step.inputs}, {n for n in step.outputs if n >= 0}
    assert isinstance(step, KernelStep)
    return set(step.buffers) - set(step.writes), set(step.writes)


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_read_before_it_is_written(name: str) -> None:
    before, after = programs_of(ALL[name])

    def reads(program: Program) -> list[tuple[int, int, tuple[int, ...]]]:
        """For each read which of the writes to its buffer it sees."""
        found, seen = [], dict[int, tuple[int, ...]]()
        for step in program.steps:
            read, written = reads_and_writes(step)
            found += [(id(step), buffer, seen.get(buffer, ())) for buffer in read]
            for buffer in written:
                seen[buffer] = (*seen.get(buffer, ()), id(step))
        return sorted(found)

    assert reads(before) == reads(after)


@pytest.mark.parametrize("name", ALL)
def test_it_counts_what_the_runtime_needs(name: str) -> None:
    from strop.runtime.run.executor import Bound
    from strop.runtime.run.workspace import Workspace

    class Kernels:
        device = H100

        def build(self, sources: object) -> None:
            pass

        def splits(self, split: Split, sizes: Mapping[str, int]) -> int:
            return 1

    for program in programs_of(ALL[name]):
        bound = Bound(
            program,
            dict(program.hints),
            [],
            Kernels(),  # type: ignore[arg-type]
            Workspace(torch.device("cpu")),
            0,
            None,
        )
        small = bound.arena_bytes - most_alive(program)
        assert 0 <= small < 0.05 * bound.arena_bytes, "statistics' scratch, and alignment"


def test_values_stay(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    torch.manual_seed(0)
    rows, x = Rows(64, 32).eval().requires_grad_(False), torch.randn(37, 8)
    found, orders = [], []
    with interpreted(triton=True):
        for order in (backend.lean, lambda program: tuple(range(len(program.steps)))):
            with patch.object(backend, "lean", order):
                options = Options(cache_dir=str(tmp_path / str(len(found))), strict=True)
                strop.optimize(rows, options=options)
                found.append(rows(x))
                orders.append(calls_of(rows))
            strop.restore(rows)
    assert orders[0] == ["before", "shortcut", "first", "second", "after"]
    assert orders[1] == ["before", "first", "second", "shortcut", "after"]
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], rows(x), rtol=1e-4, atol=1e-4)


def calls_of(module: nn.Module) -> list[str]:
    (graph,) = strop.explain(module).graphs
    return [step.origin for step in graph.steps if step.kind == "call"]


@pytest.mark.parametrize("name", ALL)
def test_the_explanation_knows_which_step_is_which(name: str) -> None:
    compiled = compiled_of(ALL[name])
    planned = planned_steps(compiled)
    assert [p.step for p in planned] == list(compiled.program.steps)
    assert [p.number for p in planned] == list(range(len(planned)))
    for p in planned:
        assert isinstance(p.plan, Group) is isinstance(p.step, KernelStep)
        assert isinstance(p.plan, Group) or (p.plan.op, p.plan.origin) == (p.step.op, p.step.origin)


def test_every_step_is_judged_in_the_order_of_the_program(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")
    torch.manual_seed(0)
    rows, x = Rows(64, 32).eval().requires_grad_(False), torch.randn(37, 8)
    with interpreted(triton=True), caplog.at_level(logging.INFO, "strop"):
        strop.optimize(rows, options=Options(cache_dir=str(tmp_path), strict=True, check=True))
        rows(x)
        calls = calls_of(rows)
        strop.restore(rows)
    assert "steps, 0 findings, 0 steps without a judge" in caplog.text
    assert calls.index("shortcut") < calls.index("first"), "as it runs"
