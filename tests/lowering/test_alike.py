"""Lowering once what is alike gives what lowering each group gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.fusion.planner import plan
from strop.ir.loops import Schedule
from strop.lowering import alike
from strop.lowering.lower import lower
from strop.options import Options
from strop.passes import run as run_passes
from tests.frontend.tracing import trace
from tests.lowering.test_lower import CASES, ENVS


def blocks(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(4):
        x = F.silu(F.group_norm(x @ y, 2)) + x
    return x


def pieces(x: Tensor, t: Tensor) -> list[Tensor]:
    """Rows of products begin at multiples of 16 elements and at others, and are read once or
    twice, alone and beside the whole."""
    once, twice, all_ = t @ t.new_ones(96, 96), t @ t.new_ones(96, 80), t @ t.new_ones(96, 48)
    sums = [F.silu(x[i] + once[:, None, s : s + 16]) for i, s in enumerate((0, 16, 48, 5, 7))]
    norms = [F.layer_norm(x[i] * once[:, None, 8 * i : 8 * i + 16], (16,)) for i in range(4)]
    pairs = [
        (twice[:, s : s + 16] * twice[:, e : e + 16]).cos()
        for s, e in ((0, 16), (0, 48), (16, 16), (16, 0))
    ]
    beside = [(all_ + F.pad(all_[:, s : s + 16], (0, 32))).exp() for s in (0, 16)]
    return [*sums, *norms, *pairs, *beside]


def shifted(t: Tensor) -> list[Tensor]:
    """Pieces of a cat are read from before their first element on."""
    t = t @ t.new_ones(96, 96)
    return [torch.cat([t[:, 64:], t[:, s : s + 16]], 1).exp() for s in (0, 16, 32)]


REPEATED: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "blocks": (blocks, ("b 4 h 12", "b 4 12 12")),
    "pieces": (pieces, ("6 b 16 16", "b 96")),
    "shifted": (shifted, ("b 96",)),
}


@pytest.mark.parametrize("name", [*CASES, *REPEATED])
def test_is_what_each_group_gives(name: str) -> None:
    function, shapes = (CASES | REPEATED)[name]
    traced = trace(function, *shapes, dtype=torch.float16, **ENVS[0])
    signature = Signature(traced.returned, traced.captured.guards)
    compiled = compile_graph(traced.graph, signature, "cuda", Options())
    graph, fusion = compiled.graph, compiled.plan
    stored = {node for group in fusion.groups for node in group.stores}
    lower_group = alike.lower_once(graph.hints)
    for group in fusion.groups:
        assert lower_group(group, stored) == lower(group, stored, graph.hints)


@pytest.mark.parametrize(("name", "most"), [("blocks", 3), ("pieces", 15)])
def test_lowers_what_repeats_once(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    function, shapes = REPEATED[name]
    graph, _ = run_passes(trace(function, *shapes, dtype=torch.float16, **ENVS[0]).graph, Options())
    groups = plan(graph).groups
    calls: list[Schedule] = []

    def counted(group: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(group.schedule)
        return lower(group, *args, **kwargs)

    monkeypatch.setattr(alike, "lower", counted)
    lower_group = alike.lower_once(graph.hints)
    for group in groups:
        lower_group(group, {node for g in groups for node in g.stores})
    assert len(calls) <= most < len(groups)
