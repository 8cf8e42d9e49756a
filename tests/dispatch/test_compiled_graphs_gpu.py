"""CUDA graphs behind ``torch.compile(backend="strop")``: captures, values, weights, memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from strop.dispatch import dynamo as aot
from strop.dispatch.served_graph import ServedGraph
from strop.runtime.run.cuda_graphs import pool_of
from tests.dispatch.test_compiled_graphs import Block, Blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CUDA = torch.device("cuda", 0)
CALLS = 4  # of one size: a run without a graph, a capture, replays


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    monkeypatch.setattr(aot, "AOT_LOG", aot.AotLog())


def pair(module: nn.Module, folder: Path, **options: Any) -> tuple[Any, nn.Module]:
    eager = module.to(CUDA).eval()
    options |= {"cache_dir": str(folder), "strict": True}
    return torch.compile(copy.deepcopy(eager), backend="strop", options=options), eager


def check(fast: Any, eager: Any, rows: int, tokens: int, calls: int = CALLS) -> None:
    for _ in range(calls):
        x = torch.randn(rows, tokens, 8, device=CUDA)
        torch.testing.assert_close(fast(x), eager(x), rtol=1e-4, atol=1e-5)


def num_replays() -> int:
    graphs = [g for g in aot.AOT_LOG.served if isinstance(g, ServedGraph)]
    return sum(d.counters.replays for graph in graphs for d in graph.dispatchers)


@torch.no_grad()
def test_each_size_is_captured_once_and_replayed(tmp_path: Path) -> None:
    fast, eager = pair(Blocks(2), tmp_path)
    before = pool_of(CUDA).num_captures
    for rows, tokens in ((2, 6), (3, 5), (4, 4)):
        check(fast, eager, rows, tokens)
    assert pool_of(CUDA).num_captures - before == 3
    assert num_replays() == 3 * (CALLS - 1)


@torch.no_grad()
def test_without_graphs(tmp_path: Path) -> None:
    fast, eager = pair(Block(), tmp_path, cuda_graphs=False)
    check(fast, eager, 2, 6)
    assert num_replays() == 0


@torch.no_grad()
def test_weights_may_change_under_a_graph(tmp_path: Path) -> None:
    """In place, where the graph reads them; by another Parameter, and by other memory."""
    fast, eager = pair(Blocks(2), tmp_path)
    check(fast, eager, 3, 5)
    other = torch.randn(16, 8, device=CUDA)
    for model in (fast, eager):
        model.blocks[0].down.weight.mul_(2)
    check(fast, eager, 3, 5)
    for model in (fast, eager):
        model.blocks[1].up.weight = nn.Parameter(other.clone())
    check(fast, eager, 3, 5)
    for model in (fast, eager):
        model.blocks[0].up.weight.data = other.clone() * 3
    check(fast, eager, 3, 5)


@torch.no_grad()
def test_results_of_earlier_calls_stay(tmp_path: Path) -> None:
    fast, eager = pair(Block(), tmp_path)
    given = [torch.randn(3, 5, 8, device=CUDA) for _ in range(CALLS)]
    results = [fast(x) for x in given]
    for x, found in zip(given, results, strict=True):
        torch.testing.assert_close(found, eager(x), rtol=1e-4, atol=1e-5)
    assert len({found.data_ptr() for found in results}) == CALLS


@torch.no_grad()
def test_repeated_blocks_have_a_graph_each(tmp_path: Path) -> None:
    eager = Blocks(3).to(CUDA).eval()
    ours = copy.deepcopy(eager)
    for block in ours.blocks:
        block.compile(backend="strop", options={"cache_dir": str(tmp_path), "strict": True})
    before = pool_of(CUDA).num_captures
    check(ours, eager, 3, 5)
    assert pool_of(CUDA).num_captures - before == 3
    assert num_replays() == 3 * (CALLS - 1)


def test_gradients(tmp_path: Path) -> None:
    """Two forwards before the first backward: what one has saved is not the other's."""
    fast, eager = pair(Blocks(2), tmp_path)
    for rows in (2, 3, 2):
        first, second = (torch.randn(rows, 5, 8, device=CUDA) for _ in range(2))
        for model in (fast, eager):
            loss = model(first).square().mean(), model(second).sin().mean()
            loss[0].backward()
            loss[1].backward()
    grads = [[p.grad for p in model.parameters()] for model in (fast, eager)]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)
    assert not aot.AOT_LOG.through_aot
