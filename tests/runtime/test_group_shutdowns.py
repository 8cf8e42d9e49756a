"""Those who hold CUDA graphs let go of them before a process group shuts down."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed import destroy_process_group  # by a name of its own, as many scripts do

from strop import train
from strop.runtime.run import group_shutdowns
from tests.train import taped

pytestmark = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()), reason="needs gloo"
)


class Holder:
    def __init__(self) -> None:
        self.was_there: list[bool] = []

    def let_go_of_graphs(self) -> None:
        self.was_there.append(distributed.is_initialized())


@pytest.fixture
def world(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    meeting = f"file://{tmp_path / 'meeting'}"
    distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


def test_graphs_go_once_and_before_their_group(world: None) -> None:
    holder = Holder()
    group_shutdowns.note_capture(holder)
    group_shutdowns.note_capture(holder)
    assert holder.was_there == []
    destroy_process_group()
    assert holder.was_there == [True]
    assert not distributed.is_initialized()


def test_graphs_go_before_a_part_of_the_world(world: None) -> None:
    part, holder = distributed.new_group([0]), Holder()
    group_shutdowns.note_capture(holder)
    distributed.destroy_process_group(part)
    assert holder.was_there == [True]
    distributed.destroy_process_group()
    assert holder.was_there == [True], "it has captured nothing since"


def test_without_groups_nobody_is_noted(tmp_path: Path) -> None:
    holder = Holder()
    group_shutdowns.note_capture(holder)
    meeting = f"file://{tmp_path / 'meeting'}"
    distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    distributed.destroy_process_group()
    assert holder.was_there == []


def test_a_step_captures_again(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    taped.use(monkeypatch)
    weight = torch.nn.Parameter(torch.ones(3))
    step = train.compile_step(
        lambda x: (weight * x).square().mean(), train.FusedSGD([weight], lr=0.1)
    )
    like = torch.nn.Parameter(torch.ones(3))
    plain = train.compile_step(
        lambda x: (like * x).square().mean(), train.FusedSGD([like], lr=0.1), graph=False
    )
    x = torch.tensor([1.0, 2.0, 3.0])
    for _ in range(4):
        assert torch.equal(step(x), plain(x))
    assert (step.report().captures, step.report().replays) == (1, 2)
    destroy_process_group()
    for _ in range(4):
        assert torch.equal(step(x), plain(x))
    report = step.report()
    assert (report.captures, report.replays, report.stale) == (2, 4, 0)
