"""Blocks of Dynamo's graphs that repeat are traced once, and only where they compute the same."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.dispatch import dynamo as aot
from strop.dispatch.served_graph import ServedGraph
from strop.dispatch.variants import Variant
from strop.frontend import traced_graph
from strop.frontend.graph_blocks import GraphBlocks
from strop.ir.serialize import to_json
from tests.e2e import tiny

SIZES = ((2, 6), (3, 5), (4, 7))


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    monkeypatch.setattr(aot, "AOT_LOG", aot.AotLog())


class Part(nn.Module):
    """It has nodes enough to be a block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("gate", torch.randn(8))
        self.scale: Any = 0.5
        self.drop = 0.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(x))) * 2 + 1
        hidden = nn.functional.dropout(hidden, self.drop, training=self.drop > 0)
        return x + torch.tanh(self.down(hidden)) * self.gate * self.scale


class Writing(Part):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        x.add_(1)  # its caller's
        return y.mul_(2)


class Several(Part):
    """It gives two results, one of which only some callers read."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x) * 2, x.mean(-1, keepdim=True)


class Whole(nn.Module):
    def __init__(self, kind: type[Part] = Part, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList([kind() for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.5
        for number, part in enumerate(self.parts):
            x = part(x)
            if isinstance(x, tuple):
                x = x[0] + x[1] if number % 2 else x[0]
        return x


def compiled(module: nn.Module) -> Any:
    options = {"cache_dir": tiny.cache_dir(), "strict": True, "record": True}
    return torch.compile(copy.deepcopy(module), backend="strop", options=options)


@torch.no_grad()
def check(fast: Any, eager: Any) -> None:
    for rows, tokens in SIZES:
        x = torch.randn(rows, tokens, 8)
        torch.testing.assert_close(fast(x.clone()), eager(x.clone()), rtol=1e-4, atol=1e-5)


def variants() -> list[Variant]:
    graphs = [graph for graph in aot.AOT_LOG.served if isinstance(graph, ServedGraph)]
    return [variant for graph in graphs for variant in graph.variants.all]


def copied() -> set[int]:
    return {variant.num_copied_blocks for variant in variants()}


def test_later_blocks_are_copied() -> None:
    eager = Whole().eval()
    check(compiled(eager), eager)
    assert copied() == {3}


def test_the_program_is_that_of_a_whole_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = Whole().eval()
    check(compiled(eager), eager)
    texts = set(map(_text, variants()))
    assert len(texts) == 1
    torch._dynamo.reset()
    aot.AOT_LOG.served.clear()
    monkeypatch.setattr(traced_graph, "GraphBlocks", lambda graph: GraphBlocks(torch.fx.Graph()))
    check(compiled(eager), eager)
    assert copied() == {0}
    assert set(map(_text, variants())) == texts


def _text(variant: Variant) -> str:
    """Write out its program, but for which module each kernel comes from."""
    return re.sub(r"TracedGraphModule|TracedBlock|\bb\d+\b", "", str(to_json(variant.program)))


def scale(model: Whole) -> None:
    model.parts[1].scale = 0.25


def scale_of_other_type(model: Whole) -> None:
    model.parts[1].scale = 1
    model.parts[2].scale = 1.0


def signed_zero(model: Whole) -> None:
    model.parts[1].norm.eps = 0.0
    model.parts[2].norm.eps = 1.0


def hook(model: Whole) -> None:
    model.parts[1].up.register_forward_hook(lambda part, given, result: result * 3)


def activation(model: Whole) -> None:
    model.parts[1].norm = nn.Identity()


@pytest.mark.parametrize(
    "change", [scale, scale_of_other_type, signed_zero, hook, activation], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_block_that_differs_is_not_copied(change: Callable[[Whole], None], is_late: bool) -> None:
    """Whether it does from the first call on, or is changed between two."""
    eager = Whole().eval()
    if not is_late:
        change(eager)
    fast = compiled(eager)
    check(fast, eager)
    if not is_late:
        assert copied() <= {1, 2}
        return
    if change is hook:  # Dynamo looks at no hooks of a module that has been traced
        torch._dynamo.reset()
    change(eager)
    change(fast._orig_mod)
    check(fast, eager)


def test_weights_of_blocks_may_be_replaced_and_shared() -> None:
    eager = Whole().eval()
    fast = compiled(eager)
    check(fast, eager)
    other = torch.randn(16, 8)
    for model in (eager, fast._orig_mod):
        model.parts[1].up.weight = nn.Parameter(other.clone())
        model.parts[2].gate = torch.ones(8)
        with torch.no_grad():
            model.parts[3].down.weight.mul_(2)
    check(fast, eager)
    for model in (eager, fast._orig_mod):
        model.parts[3].up.weight = model.parts[1].up.weight
    check(fast, eager)


def test_tied_blocks() -> None:
    """The third one is the first, and the last one shares a weight within itself."""
    eager = Whole().eval()
    eager.parts[2] = eager.parts[0]
    eager.parts[3].norm.bias = eager.parts[3].norm.weight
    check(compiled(eager), eager)
    assert copied() == {2}


def test_results_that_others_read_are_part_of_a_block() -> None:
    eager = Whole(Several).eval()
    check(compiled(eager), eager)
    assert copied() == {2}


def test_blocks_that_write_to_what_they_are_given() -> None:
    eager = Whole(Writing).eval()
    check(compiled(eager), eager)


def test_blocks_that_draw_random_numbers_are_not_copied() -> None:
    model = Whole()
    for part in model.parts:
        part.drop = 0.5
    fast, x = compiled(model), torch.ones(4, 6, 8)
    with torch.no_grad():
        torch.manual_seed(1)
        first, second = fast(x), fast(x)
        torch.manual_seed(1)
        assert torch.equal(fast(x), first)
    assert not torch.equal(first, second)
    assert copied() == {0}


def test_training_has_no_blocks_of_a_graph() -> None:
    eager = Whole()
    fast = compiled(eager)
    for rows, tokens in SIZES:
        x = torch.randn(rows, tokens, 8)
        fast(x).square().sum().backward()
        eager(x).square().sum().backward()
    grads = [[p.grad for p in model.parameters()] for model in (fast, eager)]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)


class Halved(nn.Module):
    """It asks whether its picture can be halved twice, and if so halves and doubles it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down, self.up = nn.Conv2d(3, 3, 3, 2, padding=1), nn.Conv2d(6, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[2] % 4 or x.shape[3] % 4:
            return self.down(x).mean((2, 3))
        half = self.down(x)
        double = nn.functional.interpolate(self.down(half), scale_factor=4.0)
        return self.up(torch.cat([double, x], 1))


@torch.no_grad()
def test_sizes_are_multiples_of_what_the_code_asks() -> None:
    eager = Halved().eval()
    fast = compiled(eager)
    for shape in ((1, 8, 8), (2, 8, 12), (3, 4, 16), (2, 12, 4), (2, 6, 9), (2, 7, 10), (1, 16, 8)):
        x = torch.randn(shape[0], 3, *shape[1:])
        torch.testing.assert_close(fast(x), eager(x), rtol=1e-4, atol=1e-5)
    found = {spec.shape for variant in variants() for spec in variant.specs}
    assert any("4*" in shape[2] and "4*" in shape[3] for shape in found)
    assert strop.explain(fast).num_graphs == len(variants())
