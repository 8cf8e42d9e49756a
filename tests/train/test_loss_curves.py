"""The loss curves of benchmarks/loss_curves.py: what is committed, and the first steps again."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STEPS, SEEDS = 300, 3


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("loss_curves", BENCHMARKS / "loss_curves.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "path", sorted((BENCHMARKS / "results").glob("loss_curves-*.json")), ids=lambda path: path.stem
)
def test_committed_curves(path: Path, bench: Any) -> None:
    """Strop's lie as near to the plain recipe's as that does from weights moved by one place."""
    found = json.loads(path.read_text())
    curves = found["losses"]
    assert {name: [len(c) for c in curves[name].values()] for name in bench.NAMES} == {
        name: [STEPS] * SEEDS for name in bench.NAMES
    }
    verdict = bench.judged(curves)
    for name in ("moved", "strop"):
        assert verdict[name] == pytest.approx(found["verdict"][name])
    assert verdict["is_inside"]
    assert path.with_suffix(".png").is_file()


def test_a_worse_training_is_seen(bench: Any) -> None:
    """The judge is no formality: curves that are two hundredths off are outside."""
    (path, *_) = sorted((BENCHMARKS / "results").glob("loss_curves-*.json"))
    curves = json.loads(path.read_text())["losses"]
    curves["strop"] = {seed: [v + 0.02 for v in c] for seed, c in curves["strop"].items()}
    assert not bench.judged(curves)["is_inside"]


@pytest.mark.slow
def test_the_first_steps_agree(bench: Any) -> None:
    args = argparse.Namespace(batch=4, steps=5, mixed_precision="no", device="cpu")
    plain, ours = (bench.losses(name, 0, args) for name in ("plain", "strop"))
    assert ours == pytest.approx(plain, rel=1e-5)
