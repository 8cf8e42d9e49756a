"""A small model, and bugs to plant in the compiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import strop
from strop import passes
from strop.debug import case as cases
from strop.debug.case import Case
from strop.ir.graph import Builder, Graph, Node, rewrite
from strop.ir.ops import OPS
from strop.options import Options


class Model(nn.Module):
    """Norm, GEMMs, activations; the bugs below each hit one operator of ``act`` or ``gate``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.act = nn.SiLU()
        self.gate = nn.Sigmoid()
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        return x + self.down(self.act(h) * self.gate(h + 1))


def model() -> Model:
    torch.manual_seed(0)
    return Model().eval().requires_grad_(False)


def dumped(folder: Path, cache: Path) -> Path:
    """The dump of one compiled call."""
    options = Options(dump=str(folder), cache_dir=str(cache))
    module = strop.optimize(model(), options=options)
    with torch.no_grad():
        module(torch.randn(3, 16))
    (made,) = folder.iterdir()
    return made


def case_in(folder: Path, cache: Path) -> Case:
    case = cases.load(folder)
    return replace(case, options=replace(case.options, cache_dir=str(cache)))


def plant_pass(
    monkeypatch: pytest.MonkeyPatch,
    op: str,
    makes: Callable[[Builder, Node, tuple[Node, ...]], Node],
) -> None:
    """A pass that gets one operator wrong, in the middle of the pipeline."""

    def wrong_pass(graph: Graph, options: Options) -> Graph:
        return rewrite(graph, lambda b, n, inputs: makes(b, n, inputs) if n.op == op else None)

    first, *rest = passes.PIPELINE
    monkeypatch.setattr(passes, "PIPELINE", (first, wrong_pass, *rest))


def doubles(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node:
    value = b.copy_of(node, inputs)
    return b.pointwise("add", value, value, dtype=node.dtype, alpha=1)


def raises(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node:
    raise LookupError(f"no rule for {node.op}")


def plant_row(monkeypatch: pytest.MonkeyPatch, op: str, cpp: str) -> None:
    """Another C++ expression for an operator."""
    monkeypatch.setitem(OPS, op, replace(OPS[op], cpp=cpp))  # type: ignore[arg-type]
