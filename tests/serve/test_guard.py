"""What no route ever sees: wrong tokens, wrong names, bodies that are too large or too slow."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace

import pytest

from strop.serve.guard import GuardRules
from strop.serve.logs import JsonLines

from .asking import GENERATE, LIMITS, RawCall, asking, run

TOKEN = "a-token-of-a-server"
LOCAL = GuardRules(hosts=("localhost", "127.0.0.1", "[::1]"))


def test_a_token_is_asked_for_everywhere_but_at_the_page_and_the_health() -> None:
    async def scenario() -> None:
        async with asking(rules=GuardRules(TOKEN)) as asked:
            for path in ("/", "/healthz", "/page/app.js"):
                assert (await asked.client.get(path)).status_code == 200
            closed = ("/metrics", "/api/model", "/openapi.json", "/v1/models", "/nope", "/page")
            wrong = (
                "",
                TOKEN,
                f"Basic {TOKEN}",
                f"Bearer {TOKEN}x",
                f"Bearer {TOKEN[:-1]}",
                "Bearer",
            )
            for path in closed:
                for given in wrong:
                    answer = await asked.client.get(path, headers={"authorization": given})
                    assert answer.status_code == 401
                    assert answer.headers["www-authenticate"] == "Bearer"
            right = {"authorization": f"Bearer {TOKEN}"}
            assert (await asked.client.get("/api/model", headers=right)).status_code == 200
            answer = await asked.client.post(GENERATE, json={"prompt": "x"}, headers=right)
            assert answer.status_code == 200

    run(scenario)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "localhost:8000"}, 200),
        ({"host": "127.0.0.1:1", "origin": "http://127.0.0.1:1"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "evil.example"}, 421),
        ({"host": ""}, 421),
        ({"host": "localhost:8000", "origin": "http://evil.example"}, 403),
        ({"host": "localhost:8000", "origin": "null"}, 403),
        ({"host": "localhost:8000", "origin": "http://localhost:9"}, 403),
    ],
)
def test_pages_of_others_cannot_ask_a_server_on_the_loopback(
    headers: dict[str, str], status: int
) -> None:
    async def scenario() -> None:
        async with asking(rules=LOCAL) as asked:
            assert (await asked.client.get("/api/model", headers=headers)).status_code == status

    run(scenario)


def test_a_body_that_is_too_large_is_not_read() -> None:
    async def scenario() -> None:
        limits = replace(LIMITS, most_body_bytes=1000)
        async with asking(limits=limits) as asked:
            told = RawCall(asked.app, GENERATE, headers={"content-length": "1001"})
            assert await told.run() == 413
            assert told.messages.qsize() == 1, "nothing was read"
            untold = RawCall(asked.app, GENERATE, b"x" * 600)
            untold.messages.get_nowait()
            for _ in range(3):
                untold.messages.put_nowait(
                    {"type": "http.request", "body": b"x" * 600, "more_body": True}
                )
            assert await untold.run() == 413
            assert untold.messages.qsize() == 1
            assert (await asked.client.post(GENERATE, json={"prompt": "x"})).status_code == 200

    run(scenario)


def test_a_body_that_comes_too_slowly_is_given_up() -> None:
    async def scenario() -> None:
        async with asking(limits=replace(LIMITS, body_seconds=0.05)) as asked:
            call = RawCall(asked.app, GENERATE)
            call.messages.get_nowait()
            call.messages.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
            assert await call.run() == 408
            gone = RawCall(asked.app, GENERATE)
            gone.messages.get_nowait()
            gone.hang_up()
            assert await gone.run() == 400

    run(scenario)


def test_bodies_together_have_a_limit() -> None:
    async def scenario() -> None:
        limits = replace(LIMITS, most_held_bytes=1000)
        async with asking(limits=limits) as asked:
            slow = RawCall(asked.app, GENERATE)
            slow.messages.get_nowait()
            slow.messages.put_nowait(
                {"type": "http.request", "body": b" " * 900, "more_body": True}
            )
            task = asyncio.create_task(slow.run())
            await asyncio.sleep(0.01)
            answer = await asked.client.post(GENERATE, json={"prompt": "x" * 200})
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
            slow.messages.put_nowait({"type": "http.request", "body": b'{"prompt": "x"}'})
            assert await task == 200
            answer = await asked.client.post(GENERATE, json={"prompt": "x" * 200})
            assert answer.status_code == 200, "there is room again"

    run(scenario)


def test_every_answer_is_counted_and_logged_without_what_was_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with asking() as asked:
            answer = await asked.client.post(GENERATE, json={"prompt": "a secret wish"})
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "default-src 'self'" in answer.headers["content-security-policy"]
            await asked.client.get("/api/pictures/some-id")
            await asked.client.get("/no/such/path")
            text = (await asked.client.get("/metrics")).text
            start = 'strop_http_answers_total{method="'
            assert f'{start}POST",route="{GENERATE}",status="200"}} 1.0' in text
            assert f'{start}GET",route="/api/pictures/{{job_id}}",status="404"}} 1.0' in text
            assert f'{start}GET",route="other",status="404"}} 1.0' in text
            assert 'strop_pictures_total{engine="strop"} 1.0' in text
            (first, *_) = [r for r in caplog.records if r.name == "strop.serve"]
            line = json.loads(JsonLines().format(first))
            assert line["request"] == answer.headers["x-request-id"]
            assert (line["route"], line["status"]) == (GENERATE, 200)

    with caplog.at_level(logging.INFO, "strop.serve"):
        run(scenario)
    assert "secret wish" not in "".join(JsonLines().format(record) for record in caplog.records)


def test_a_line_of_the_log_is_json_whatever_is_in_it() -> None:
    record = logging.makeLogRecord({"msg": 'a "quoted"\nline', "levelname": "INFO", "what": object})
    try:
        raise ValueError("once")
    except ValueError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    text = JsonLines().format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert line["message"] == 'a "quoted"\nline'
    assert "ValueError: once" in line["exception"]
