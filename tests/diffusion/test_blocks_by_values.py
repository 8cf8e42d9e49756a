"""Transformers that cannot be traced as a whole, as those that read sizes from a mask: they stay in
eager themselves, and their blocks are compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import strop
from strop.api import dispatchers_of, with_cached_parts
from strop.bench.pipelines.all import PIPELINES
from strop.bench.pipelines.tiny import TinyPipeline, drawn
from strop.bench.pipelines.twins import nearness
from strop.dispatch.cached_parts import blocks_of
from strop.errors import StropError
from strop.options import Options

pytestmark = [
    pytest.mark.filterwarnings("ignore:In CPU autocast"),
    pytest.mark.filterwarnings("ignore:CPU Autocast"),
]
CASES = {
    "lumina2": ["context_refiner.0", "layers.0", "layers.1", "noise_refiner.0"],
    "mochi": ["transformer_blocks.0", "transformer_blocks.1"],
}


def case_of(name: str) -> TinyPipeline:
    return next(case for case in PIPELINES if case.name == name)


def served(pipe: Any) -> dict[str, Any]:
    """Return what serves the transformer and its blocks, by their paths in it."""
    found = with_cached_parts(dispatchers_of(pipe))
    start = "transformer."
    return {path.removeprefix(start): d for path, d in found.items() if path.startswith(start)}


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_compiled_and_follow_their_weights(name: str, tmp_path: Any) -> None:
    case = case_of(name)
    eager, fast = case.made(), case.made()
    strop.optimize(fast, options=Options(cache_dir=str(tmp_path)))
    before = drawn(case, fast)
    assert nearness(before, drawn(case, eager)) >= 100
    blocks = served(fast)
    assert sorted(blocks) == CASES[name]
    for block in blocks.values():
        assert block.counters.calls
        assert not block.counters.eager_calls
    whole = dispatchers_of(fast)["transformer"].counters
    assert not whole.eager_calls
    assert all(reason.startswith("its blocks are compiled: ") for reason in whole.fallbacks)
    with torch.no_grad():
        for pipe in (eager, fast):
            for weight in pipe.transformer.get_submodule(CASES[name][-1]).parameters():
                weight.data = weight * 1.5
    after = drawn(case, fast)
    assert nearness(after, before) < 90
    assert nearness(after, drawn(case, eager)) >= 100
    strop.restore(fast)
    assert not any("forward" in vars(part) for part in fast.transformer.modules())
    assert nearness(drawn(case, fast), drawn(case, eager)) == float("inf")


class Asking(nn.Module):
    """Asks whether a tensor is true, which no trace knows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if x.abs().sum() >= 0 else x


def test_blocks_are_compiled_whatever_the_forward_around_them_does(tmp_path: Any) -> None:
    case = case_of("flux")
    eager, fast = case.made(), case.made()
    for pipe in (eager, fast):
        pipe.transformer.proj_out = Asking(pipe.transformer.proj_out)
    strop.optimize(fast, options=Options(cache_dir=str(tmp_path)))
    assert nearness(drawn(case, fast), drawn(case, eager)) >= 100
    blocks = served(fast)
    assert sorted(blocks) == ["single_transformer_blocks.0", "transformer_blocks.0"]
    assert all(block.counters.calls and not block.counters.eager_calls for block in blocks.values())
    (reason,) = dispatchers_of(fast)["transformer"].counters.fallbacks
    assert reason.startswith("its blocks are compiled: ")


def test_strict_refuses(tmp_path: Any) -> None:
    case = case_of("lumina2")
    pipe = strop.optimize(case.made(), options=Options(cache_dir=str(tmp_path), strict=True))
    with pytest.raises(StropError, match="the values of a tensor decide"):
        drawn(case, pipe)


def test_a_block_that_its_user_has_optimised_stays_theirs(tmp_path: Any) -> None:
    case, options = case_of("lumina2"), Options(cache_dir=str(tmp_path))
    eager, fast = case.made(), case.made()
    strop.optimize(fast.transformer.layers[0], options=options)
    own = fast.transformer.layers[0].forward
    strop.optimize(fast, options=options)
    assert nearness(drawn(case, fast), drawn(case, eager)) >= 100
    assert fast.transformer.layers[0].forward is own
    assert "layers.0" not in served(fast)
    strop.restore(fast)
    assert fast.transformer.layers[0].forward is own


def test_blocks_are_members_of_own_lists() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    model.inner = nn.Sequential(nn.ModuleList([nn.Linear(1, 1)]))
    assert list(blocks_of(model)) == ["layers.0", "layers.1"]
