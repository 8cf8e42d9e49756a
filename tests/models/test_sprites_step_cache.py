"""Under a step cache, the models that ship inside still draw what prompts ask for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import strop
from strop.bench import numerics
from strop.models import sprites
from strop.models.sprites import evaluate
from tests.e2e.tiny import cache_dir

pytestmark = pytest.mark.filterwarnings("ignore")
# word -> how many of 20 steps are computed in full
FULL = {"cautious": 12, "balanced": 9, "fast": 8}


@pytest.mark.parametrize("word", FULL)
def test_held_out_prompts_are_right(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE_DIR", cache_dir())
    pipe = sprites.load()
    pipe.set_progress_bar_config(disable=True)
    strop.optimize(pipe, options=strop.Options.from_environment(numerics=(f"step_cache:{word}",)))
    prompts = sprites.held_out_prompts(10)
    pictures = evaluate.draw_prompts(pipe, prompts, 96, 64, evaluate.Options())
    right = [sprites.score(i, p).all_right for i, p in zip(pictures, prompts, strict=True)]
    assert sum(right) >= 9, right
    report = strop.explain(pipe)
    assert report.fallbacks == {}
    (row,) = (c for c in report.components if c.num_full_steps)
    assert (row.name, row.num_full_steps, row.num_cached_steps) == (
        "unet",
        FULL[word],
        20 - FULL[word],
    )


def test_pictures_of_each_word_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE_DIR", cache_dir())
    result, worst = numerics.run(["step_cache"], models=["sprites"], num_prompts=4)
    exact, *others = result["rows"]
    assert [row["numerics"] for row in others] == [f"step_cache:{word}" for word in FULL]
    assert (exact["distance_worst"], exact["num_cached"]) == (0.0, 0)
    assert all(0 < row["distance_median"] < 0.1 for row in others)
    assert [row["num_full"] for row in others] == [4 * count for count in FULL.values()]
    assert [title.partition(":")[0] for title, _, _ in worst] == ["sprites, step_cache"] * 3
    header, *rows = numerics.rows_of(result)
    assert all(len(row) == len(header) for row in rows)


@pytest.mark.nightly
def test_a_transformer_draws_what_prompts_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE_DIR", cache_dir())
    result, _ = numerics.run(["step_cache"], models=["sprites-dit"], num_prompts=40)
    exact, *others = result["rows"]
    assert all(row["num_right"] >= exact["num_right"] - 2 for row in others), result["rows"]
    assert others[-1]["num_cached"] > others[0]["num_cached"] > 0
    assert not any(row["fallbacks"] for row in others)


def test_the_distance_is_that_of_structure() -> None:
    g = torch.Generator().manual_seed(0)
    picture = torch.rand(3, 32, 48, generator=g)
    assert numerics.distance(picture, picture) == pytest.approx(0.0, abs=1e-12)
    other = torch.rand(3, 32, 48, generator=g)
    assert 0.9 < numerics.distance(picture, other) < 1.1  # nothing in common
    near = (picture + 0.05 * torch.randn(3, 32, 48, generator=g)).clamp(0, 1)
    assert 0 < numerics.distance(picture, near) < 0.05
    assert numerics.distance(picture, near) == pytest.approx(numerics.distance(near, picture))
    flat = torch.zeros(3, 16, 16)
    light: Any = 2 * 0.5 * 0.0 + 0.01**2  # of the formula, where nothing varies
    expected = 1 - light / (0.25 + 0.01**2)
    assert numerics.distance(flat, flat + 0.5) == pytest.approx(expected, abs=1e-9)
