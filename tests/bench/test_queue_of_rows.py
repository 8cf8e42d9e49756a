"""Rows that are prepared at the same time, and timed one after another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.bench import queue_of_rows, speed
from strop.bench.infer_contenders import Plan

PLAN = Plan("cpu", "fp32", ("eager",), samples=3)


class Told:
    """A process that notes what is done to it, and is ready after some looks."""

    notes: list[str]

    def __init__(self, variables: dict[str, str]) -> None:
        self.threads = variables["TORCHINDUCTOR_COMPILE_THREADS"]
        self.name, self.looks, self.is_over = "", 0, False

    def __enter__(self) -> Told:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def begin(self, task: dict[str, Any]) -> None:
        assert task["has_turn"]
        self.name = task["name"]
        self.is_over = self.name == "broken"
        self.notes.append(f"begin {self.name}")

    @property
    def is_ready(self) -> bool:
        self.looks += 1
        if self.looks == 2 and not self.is_over:
            self.notes.append(f"ready {self.name}")
        return self.looks >= (9 if self.name == "slow" else 2) and self.name != "hangs"

    def give_turn(self) -> None:
        self.notes.append(f"turn {self.name}")
        self.is_over = self.name != "hangs"

    def pause(self) -> None:
        self.notes.append(f"pause {self.name}")

    def resume(self) -> None:
        self.notes.append(f"resume {self.name}")

    def answer(self) -> dict[str, Any]:
        return {"failed": "exit 1"} if self.name == "broken" else {"name": self.name}

    def cut(self, limit_s: float) -> dict[str, Any]:
        return {"failed": f"cut after {limit_s:.0f} s"}

    def close(self) -> None:
        self.notes.append(f"close {self.name}")


def answers(names: list[str], jobs: int, monkeypatch: pytest.MonkeyPatch, left: Any) -> list[Any]:
    Told.notes = []
    monkeypatch.setattr(queue_of_rows, "Worker", Told)
    monkeypatch.setattr(queue_of_rows, "LOOK_S", 0.0)
    tasks = [{"name": name} for name in names]
    return list(queue_of_rows.as_ready(tasks, names, jobs, left, lambda text, done: None))


def test_whoever_is_ready_is_timed_while_others_stand_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = answers(["slow", "a", "broken", "b"], 3, monkeypatch, lambda: 100.0)
    assert sorted(found) == [
        (0, {"name": "slow"}),
        (1, {"name": "a"}),
        (2, {"failed": "exit 1"}),
        (3, {"name": "b"}),
    ]
    assert found[-1][0] == 0, "nobody waits for the slowest"
    notes = Told.notes
    assert notes[:3] == ["begin slow", "begin a", "begin broken"]
    for name in ("a", "b"):
        begin, end = notes.index(f"turn {name}"), notes.index(f"close {name}")
        assert "pause slow" in notes[:begin]
        assert notes[begin:end].count("resume slow") == 0
        assert notes[end + 1 :].index("resume slow") >= 0, "its memory is given back first"
    assert notes.count("pause slow") == notes.count("resume slow")
    assert notes.index("begin b") < notes.index("turn slow")


def test_who_is_not_ready_in_time_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = iter([100.0, 100.0, *[50.0] * 3, *[0.0] * 19])
    found = answers(["hangs", "late"], 1, monkeypatch, lambda: next(budget))
    assert found == [(0, {"failed": "cut after 0 s"}), (1, {"skipped": "0 s left of the budget"})]


def test_networks_are_prepared_at_the_same_time(tmp_path: Path) -> None:
    rows = speed.chosen(["bert-base", "resnet50"], [1], tiny=True)
    result = speed.run(rows, PLAN, out=tmp_path / "speed.json", jobs=2, budget_s=300.0)
    for row in result["rows"]:
        assert row["jobs"] == 2
        times = row["contenders"]
        assert times["strop"]["p50_ms"] > 0 < times["eager"]["p50_ms"]
