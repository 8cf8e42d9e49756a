"""A front with replicas is the server as it is; a batch whose replica dies is drawn by another."""

from __future__ import annotations

import asyncio
from itertools import chain, repeat

import pytest
import torch

from strop.drawing.request import PictureRequest
from strop.serve.metrics import ServeMetrics
from strop.serve.refused import Refused
from strop.serve.replicas.drawer import Introduction
from strop.serve.replicas.painter import MOST_REPLICAS, ReplicaPainter
from strop.serve.studio import BatchDone, PictureBatch, StepTold, Stopped
from tests.serve.asking import GENERATE, asking, run
from tests.serve.painters import CARD, SIZE, coloured
from tests.waiting import wait_until

from .stand_ins import FakeReplicas, FakeStudio

RED = PictureRequest("red", SIZE, 4, 4.0, 7)
BATCH = PictureBatch([RED], previews=[2])


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.serve.replicas.painter._PAUSE_S", 0.0)


def _painter(replicas: FakeReplicas) -> ReplicaPainter:
    return ReplicaPainter(Introduction(CARD, None), replicas, ServeMetrics())


def _draw(painter: ReplicaPainter, batch: PictureBatch = BATCH) -> tuple[BatchDone, list[StepTold]]:
    told: list[StepTold] = []
    return painter.draw(batch, told.append, lambda: True), told


def _lost(painter: ReplicaPainter) -> float:
    return painter._metrics.replicas_lost._value.get()


def test_steps_previews_and_pictures_arrive() -> None:
    painter = _painter(FakeReplicas(FakeStudio(), dies=repeat(None)))
    done, told = _draw(painter)
    assert list(done.pictures) == [coloured(RED)]
    assert [(step.number, step.total) for step in told] == [(n, 4) for n in range(1, 5)]
    assert [step.previews for step in told] == [{}, {0: b"jpeg"}, {}, {}]
    assert painter.report() == "3 graphs"
    assert _lost(painter) == 0


@pytest.mark.parametrize("parts", [0, 1, 3, 5])
def test_a_batch_whose_replica_dies_is_drawn_by_another(parts: int) -> None:
    studios = FakeStudio(), FakeStudio()
    replicas = FakeReplicas(*studios, dies=iter((parts, None)))
    painter = _painter(replicas)
    done, _ = _draw(painter)
    assert list(done.pictures) == [coloured(RED)]
    assert [len(studio.batches) for studio in studios] == [min(parts, 1), 1]
    assert _lost(painter) == 1


def test_a_batch_that_kills_replicas_is_given_up() -> None:
    replicas = FakeReplicas(FakeStudio(), dies=repeat(2))
    with pytest.raises(Refused, match=r"3 replicas ended while they drew this") as caught:
        _draw(_painter(replicas))
    assert caught.value.status == 503
    assert replicas.num_sent == MOST_REPLICAS == 3


def test_an_error_of_drawing_is_no_death() -> None:
    studio = FakeStudio(fault=lambda _: torch.OutOfMemoryError("full"))
    replicas = FakeReplicas(studio, dies=repeat(None))
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        _draw(_painter(replicas))
    assert replicas.num_sent == 1


def test_what_nobody_wants_any_more_is_not_drawn() -> None:
    studio = FakeStudio()
    studio.gate.clear()
    replicas = FakeReplicas(studio, dies=repeat(None))
    with pytest.raises(Stopped):
        _painter(replicas).draw(BATCH, lambda _: None, lambda: not studio.batches)
    assert replicas.num_cancelled == 1
    wait_until(lambda: studio.num_stopped == 1)


def test_what_nobody_wants_while_all_replicas_are_gone() -> None:
    """There is a pause after a death, in which an order may be cancelled."""
    replicas = FakeReplicas(FakeStudio(), dies=repeat(0))
    with pytest.raises(Stopped):
        _painter(replicas).draw(BATCH, lambda _: None, lambda: replicas.num_sent == 0)
    assert replicas.num_sent == 1


def test_the_server_loses_nothing() -> None:
    """Through HTTP: two replicas, of which one dies again and again."""

    async def scenario() -> None:
        dies = chain((2, 0, None, 3, 1), repeat(None))
        painter = _painter(FakeReplicas(FakeStudio(), FakeStudio(), dies=dies))
        async with asking(painter) as asked:
            bodies = [{"prompt": "x", "seed": seed, "steps": 2 + seed % 3} for seed in range(6)]
            posts = [asked.client.post(GENERATE, json=body) for body in bodies]
            answers = await asyncio.gather(*posts)
            assert [answer.status_code for answer in answers] == [200] * 6
            seeds = [answer.json()["data"][0]["seed"] for answer in answers]
            assert seeds == [*range(6)]

    run(scenario)
