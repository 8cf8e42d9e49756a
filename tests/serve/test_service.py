"""The line and its batches: what is drawn together, refused, cancelled, and never lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from strop.drawing.request import PictureRequest
from strop.serve.order import Wish
from strop.serve.service import Service

from .asking import GENERATE, LIMITS, RawCall, asking, opened, run
from .painters import FakePainter

WISH = Wish("a cat", seed=1)


def closed() -> FakePainter:
    painter = FakePainter()
    painter.gate.clear()
    return painter


def test_what_fits_is_drawn_together_and_the_rest_takes_turns() -> None:
    async def scenario() -> None:
        painter = closed()
        async with asking(painter) as asked:
            first = asked.service.accept(WISH)
            await first.after(first.version)  # it is being drawn, alone
            others = (
                WISH,
                replace(WISH, width=48),
                replace(WISH, seed=5),
                replace(WISH, loras={"ink": 0.5}),
                replace(WISH, is_eager=True),
                replace(WISH, is_alone=True),
                replace(WISH, steps=3),
            )
            jobs = [first, *(asked.service.accept(wish) for wish in others)]
            painter.gate.set()
            for job in jobs:
                await job.over()
        assert [len(batch.requests) for batch in painter.batches] == [1, 2, 1, 1, 1, 1, 1]
        assert painter.batches[3].adapters == (("ink", 0.5),)
        assert painter.batches[4].is_eager

    run(scenario)


def test_a_full_line_says_when_to_ask_again() -> None:
    async def scenario() -> None:
        painter = closed()
        async with asking(painter) as asked:
            running = asked.service.accept(WISH)
            await running.after(running.version)
            for _ in range(2):
                asked.service.accept(replace(WISH, count=4))
            answer = await asked.client.post(GENERATE, json={"prompt": "x"})
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert "strop_orders_refused_total 1.0" in asked.service.metrics.text().decode()
            painter.gate.set()
            await running.over()
        assert sum(len(batch.requests) for batch in painter.batches) == 9, "all accepted are drawn"

    run(scenario)


def test_cancelling_ends_a_batch_that_nobody_wants() -> None:
    async def scenario() -> None:
        painter = closed()
        async with asking(painter) as asked:
            job = await asked.job(count=2)
            waiting = await asked.job(width=48)
            await asked.until("drawing", job["id"])
            for name in (waiting["id"], job["id"]):
                answer = await asked.client.delete(f"/api/pictures/{name}")
                assert answer.json()["state"] == "cancelled"
            again = await asked.client.delete(f"/api/pictures/{job['id']}")
            assert again.json()["state"] == "cancelled"
            await asked.service.drain()
        assert painter.num_stopped == 1
        assert len(painter.batches) == 1, "what is cancelled in the line is never drawn"

    run(scenario)


def test_others_of_a_batch_go_on_when_one_is_cancelled() -> None:
    async def scenario() -> None:
        painter = closed()
        async with asking(painter) as asked:
            first = asked.service.accept(replace(WISH, width=48))
            await first.after(first.version)
            jobs = [asked.service.accept(replace(WISH, seed=seed)) for seed in (1, 2)]
            asked.service.cancel(first)
            await jobs[1].after(jobs[1].version)
            asked.service.cancel(jobs[0])
            painter.gate.set()
            await jobs[1].over()
            assert jobs[0].pictures == [None]

    run(scenario)


def test_a_client_that_hangs_up_is_not_drawn_for() -> None:
    async def scenario() -> None:
        painter = closed()
        async with asking(painter) as asked:
            call = RawCall(asked.app, GENERATE, b'{"prompt": "a cat"}')
            task = asyncio.create_task(call.run())
            while not painter.batches:
                await asyncio.sleep(0.005)
            call.hang_up()
            assert await task == 499
            await asked.service.drain()
        assert painter.num_stopped == 1

    run(scenario)


def test_who_stops_listening_cancels_nothing() -> None:
    async def scenario() -> None:
        painter = closed()
        async with asking(painter) as asked:
            job = await asked.job()
            path = f"/api/pictures/{job['id']}/events"
            call = RawCall(asked.app, path, method="GET", headers={})
            task = asyncio.create_task(call.run())
            await asyncio.sleep(0.05)
            call.hang_up()
            assert await task == 200
            painter.gate.set()
            await asked.until("done", job["id"])

    run(scenario)


def test_one_picture_that_fails_fails_no_other() -> None:
    def fault(requests: Sequence[PictureRequest]) -> Exception | None:
        is_bad = any(request.seed == 3 for request in requests)
        return RuntimeError("secret detail") if is_bad else None

    async def scenario() -> None:
        async with asking(FakePainter(fault=fault)) as asked:
            found = await asyncio.gather(
                *(
                    asked.client.post(GENERATE, json={"prompt": "x", "seed": seed})
                    for seed in range(4)
                )
            )
            assert [answer.status_code for answer in found] == [200, 200, 200, 500]
            assert "RuntimeError" in found[3].text
            assert "secret" not in found[3].text
            again = await asked.client.post(GENERATE, json={"prompt": "x", "seed": 1})
            assert again.status_code == 200, "it goes on"

    run(scenario)


def test_too_little_memory_for_a_batch_draws_halves() -> None:
    def fault(requests: Sequence[PictureRequest]) -> Exception | None:
        return torch.OutOfMemoryError("no") if len(requests) > 1 else None

    async def scenario() -> None:
        painter = FakePainter(fault=fault)
        async with asking(painter) as asked:
            body = {"prompt": "x", "seed": 1, "n": 4}
            answer = await asked.client.post(GENERATE, json=body)
            pictures = [opened(one["b64_json"]) for one in answer.json()["data"]]
            assert [picture.getpixel((0, 0))[0] for picture in pictures] == [1, 2, 3, 4]
            painter.fault = lambda _: torch.OutOfMemoryError("no")
            answer = await asked.client.post(GENERATE, json=body)
            assert answer.status_code == 503
            assert "smaller" in answer.text

    run(scenario)


def test_stopping_finishes_what_is_accepted() -> None:
    async def scenario() -> None:
        painter = closed()
        async with asking(painter) as asked:
            jobs = [asked.service.accept(replace(WISH, seed=seed)) for seed in range(6)]
            await jobs[0].after(jobs[0].version)
            stopping = asyncio.create_task(asked.service.stop())
            await asyncio.sleep(0.02)
            answer = await asked.client.post(GENERATE, json={"prompt": "x"})
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
            assert (await asked.client.get("/healthz")).status_code == 503
            assert not stopping.done()
            painter.gate.set()
            await stopping
            assert all(job.state == "done" for job in jobs)

    run(scenario)


def test_who_comes_back_for_a_picture_finds_it_before_the_end() -> None:
    async def scenario() -> None:
        painter = closed()
        async with asking(painter) as asked:
            before, job = await asked.job(), await asked.job(seed=5)
            painter.gate.set()
            await asked.until("done", before["id"])
            await asked.until("done", job["id"])
            painter.gate.clear()
            late = await asked.job(seed=6)
            draining = asyncio.create_task(asked.service.drain())
            await asyncio.sleep(0.02)
            painter.gate.set()
            await draining
            seen = asyncio.create_task(asked.service.seen(20))
            await asyncio.sleep(0.1)
            assert not seen.done()
            assert (await asked.client.get(f"/api/pictures/{late['id']}/0.png")).status_code == 200
            await seen
            again = await asked.client.post("/api/pictures", json={"prompt": "x"})
            assert again.status_code == 503

    run(scenario)


def test_interfaces_that_wait_keep_nothing() -> None:
    async def scenario() -> None:
        async with asking() as asked:
            assert (await asked.client.post(GENERATE, json={"prompt": "x"})).status_code == 200
            assert not asked.service.jobs._jobs

    run(scenario)


def test_finished_pictures_are_kept_within_limits() -> None:
    async def scenario(limits: Any, kept: int) -> None:
        async with asking(limits=limits) as asked:
            names = []
            for _ in range(4):
                job = asked.service.accept(WISH)
                await job.over()
                names.append(job.id)
            asked.service.jobs.tidy()
            found = [await asked.client.get(f"/api/pictures/{name}") for name in names]
            assert [a.status_code for a in found] == [404] * (4 - kept) + [200] * kept
            missing = await asked.client.get(f"/api/pictures/{names[-1]}/7.png")
            assert missing.status_code == 404

    run(lambda: scenario(LIMITS, 4))
    run(lambda: scenario(replace(LIMITS, keep_bytes=9000), 2))
    run(lambda: scenario(replace(LIMITS, keep_seconds=0), 0))


def test_nothing_is_lost_under_overload() -> None:
    """Every order is drawn whole or refused with 429; each picture is that of its seed."""

    async def scenario() -> None:
        painter = FakePainter()
        async with asking(painter) as asked:
            sizes = ("32x16", "48x24", "16x32")

            async def one(seed: int) -> int:
                body = {"prompt": "x", "seed": seed, "size": sizes[seed % 3], "n": 1 + seed % 2}
                answer = await asked.client.post(GENERATE, json=body)
                if answer.status_code == 200:
                    data = answer.json()["data"]
                    got = [opened(one["b64_json"]).getpixel((0, 0)) for one in data]
                    assert [p[0] for p in got] == [(seed + n) % 256 for n in range(len(data))]
                    assert len(data) == body["n"]
                return answer.status_code

            found = await asyncio.gather(*map(one, range(64)))
            assert set(found) == {200, 429}
            assert (await asked.client.post(GENERATE, json={"prompt": "x"})).status_code == 200

    run(scenario)


def test_slow_listeners_get_the_end() -> None:
    from .asking import events

    async def scenario() -> None:
        painter = closed()
        async with asking(painter) as asked:
            job = await asked.job(seed=9)
            path = f"/api/pictures/{job['id']}/events"
            both = [asyncio.create_task(asked.client.get(path)) for _ in range(2)]
            await asyncio.sleep(0.02)
            painter.gate.set()
            for answer in await asyncio.gather(*both):
                told = events(answer.text)
                assert [name for name, _ in told].count("picture") == 1
                assert told[-1][0] == "end"
            late = events((await asked.client.get(path)).text)
            assert [name for name, _ in late] == ["state", "picture", "end"]

    run(scenario)


@pytest.mark.parametrize("way", ["cancel", "draw"])
def test_memory_is_flat(way: str) -> None:
    """Of what the service holds: jobs that are over are forgotten, cancelled ones too."""

    async def scenario() -> None:
        limits = replace(LIMITS, keep_bytes=50_000)
        async with asking(limits=limits) as asked:
            for _ in range(200):
                job = asked.service.accept(replace(WISH, seed=None))
                if way == "cancel":
                    asked.service.cancel(job)
                    await asyncio.sleep(0)
                else:
                    await job.over()
            assert len(asked.service.jobs._jobs) < 20
            assert not len(asked.service._line)

    run(scenario)


def test_lanes_draw_at_once_and_a_stop_waits_for_all() -> None:
    async def scenario() -> None:
        painter = FakePainter()
        painter.gate.clear()
        service = Service(painter, LIMITS, lanes=2)
        service.start()
        jobs = [service.accept(Wish("x", steps=steps)) for steps in (2, 3, 4)]
        while len(painter.batches) < 2:
            await asyncio.sleep(0.005)
        assert [job.state.value for job in jobs] == ["drawing", "drawing", "waiting"]
        service.cancel(jobs[0])  # its lane is free for the third one
        while len(painter.batches) < 3:
            await asyncio.sleep(0.005)
        stopping = asyncio.ensure_future(service.stop())
        await asyncio.sleep(0.02)
        assert not stopping.done()
        painter.gate.set()
        await stopping
        assert [job.state.value for job in jobs] == ["cancelled", "done", "done"]

    run(scenario)
