"""Peaks of memory have one meaning for all contenders: weights included, all at one moment."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from strop.bench import infer_report, timer
from strop.bench.infer_contenders import Contender, Field, Plan
from strop.bench.infer_rows import MODELS, chosen_rows
from strop.bench.models import Workload
from strop.runtime.run import growing_memory
from strop.runtime.run.layouts import bytes_of

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


class Counted:
    """torch's counters of a GPU, and Strop's working memory beside them."""

    def __init__(self) -> None:
        self.now = self.most = self.held_bytes = self.num_clears = 0
        self.before_change: Any = None

    def allocate(self, size_bytes: int) -> None:
        self.now += size_bytes
        self.most = max(self.most, self.now)

    def grow(self, size_bytes: int) -> None:
        if self.before_change is not None:
            self.before_change()
        self.held_bytes += size_bytes

    def forget(self, device: torch.device) -> None:
        self.most = self.now

    def clear(self) -> None:
        self.num_clears += 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Counted:
    counted = Counted()
    monkeypatch.setattr(growing_memory, "_SPACES", {GPU: counted})
    monkeypatch.setattr(timer, "_PEAKS", {})
    answers = {
        "synchronize": lambda device: None,
        "reset_peak_memory_stats": counted.forget,
        "memory_allocated": lambda device: counted.now,
        "max_memory_allocated": lambda device: counted.most,
        "max_memory_reserved": lambda device: counted.most + 1,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", counted.clear, raising=False)
    return counted


def test_peaks_of_two_moments_are_not_added(gpu: Counted) -> None:
    def work() -> None:
        gpu.allocate(900)  # weights that lie elsewhere for a moment
        gpu.allocate(-900)
        gpu.grow(600)
        gpu.allocate(200)
        gpu.allocate(-200)

    gpu.allocate(5000)
    assert timer.with_peak(work, GPU) == (None, 900)
    assert timer.peak_reserved(GPU) == 5901
    assert timer.with_peak(lambda: gpu.allocate(10), GPU) == (None, 10)


def test_working_memory_counts_where_it_is_the_most(gpu: Counted) -> None:
    def work() -> None:
        gpu.allocate(100)
        gpu.grow(600)
        gpu.allocate(300)
        gpu.allocate(-300)
        gpu.grow(-500)

    assert timer.with_peak(work, GPU) == (None, 1000)


def test_every_contender_has_the_weights_that_all_share(gpu: Counted) -> None:
    """The second one allocates none, and needs them as the first one does."""
    model = torch.nn.Linear(30, 10)
    workload = Workload(model, lambda size, batch: {}, lambda target, given: target)
    weights_bytes = bytes_of(model.parameters())
    assert weights_bytes == 4 * (300 + 10)
    for allocates in (weights_bytes, 0):

        def build(size_bytes: int = allocates) -> Workload:
            gpu.allocate(size_bytes)
            return workload

        found = Contender.built(build, GPU, is_shared=True)
        _, peak = found.run(partial(given_back, gpu, 50))
        assert (found.weights_bytes, peak) == (weights_bytes, weights_bytes + 50)


def given_back(gpu: Counted, size_bytes: int) -> list[torch.Tensor]:
    gpu.allocate(size_bytes)
    gpu.allocate(-size_bytes)
    return []


def test_a_graph_made_by_hand_is_not_held_by_eager(gpu: Counted) -> None:
    """They share a model. Results are gone when the next row begins."""
    found = Contender(Workload(None, lambda size, batch: {}, lambda target, given: target), GPU)

    def replay() -> list[torch.Tensor]:
        gpu.allocate(700 + 40)  # its memory, and a result
        return [torch.zeros(10)]

    assert found.run(partial(given_back, gpu, 50))[1] == 50
    assert found.run(replay, by_graph=True)[1] == 740
    gpu.allocate(-40)
    assert found.run(partial(given_back, gpu, 50))[1] == 50
    assert found.run(partial(given_back, gpu, 50), by_graph=True)[1] == 750
    assert (found.held_bytes, found.graphs_bytes) == (0, 700)


def test_contenders_of_a_large_model_share_its_weights(tmp_path: Any) -> None:
    (row,) = chosen_rows(["D1"], tiny=True)
    assert MODELS[row.model].is_large
    field = Field.of(row, Plan("cpu", "fp32"), str(tmp_path))
    ours, eager = (field.contender(name) for name in ("strop", "eager"))
    assert ours.workload.target is not eager.workload.target
    assert ours.weights_bytes == eager.weights_bytes == ours.held_bytes > 0
    both = [*ours.workload.target.parameters(), *eager.workload.target.parameters()]
    assert bytes_of(both) <= ours.weights_bytes


def test_bytes_are_counted_once() -> None:
    memory = torch.zeros(100)
    pieces = [memory[80:].view(4, 5).t(), memory[:40], memory[20:60]]
    assert bytes_of(pieces) == 4 * (60 + 20)
    assert bytes_of([*pieces, memory[::10]]) == 400, "nobody else can have what lies in between"
    assert bytes_of([memory[:0]]) == bytes_of([]) == 0


def test_the_table_says_whether_strop_takes_more_than_eager() -> None:
    (row,) = chosen_rows(["D1"])
    times = {"p20_ms": 1.0, "p50_ms": 1.0, "p80_ms": 1.0, "first_s": 1.0}
    contenders = {
        "strop": {**times, "peak_bytes": 3 << 30, "weights_bytes": 1 << 30},
        "eager": {**times, "peak_bytes": 2 << 30, "weights_bytes": 1 << 30},
    }
    result = SimpleNamespace(
        row=row.name, unit="ms", measures="step", must=1.0, stretch=1.0, is_tiny=False
    )
    found = {**vars(result), "contenders": contenders}
    header, ours, eager, memory = infer_report.rows_of([found])
    column = header.index("peak GiB, with weights")
    assert (ours[column], eager[column]) == ("3.00", "2.00")
    said = "3.00 GiB, eager's 2.00, of which weights 1.00: 1.500 of eager's"
    assert (memory[1], memory[-1]) == ("peak memory", f"{said}, more than 1.0")
    contenders["strop"]["peak_bytes"] = 2 << 30
    assert infer_report.memory_text(found).endswith("1.00: 1.000 of eager's")
    del contenders["eager"]
    assert len(infer_report.rows_of([found])) == 2
