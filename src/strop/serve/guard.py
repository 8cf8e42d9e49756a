"""Look at every request before any route does: who asks, from where, and how much is sent."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from strop.serve.limits import ServeLimits
from strop.serve.metrics import ServeMetrics
from strop.serve.refused import Refused

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

log = logging.getLogger("strop.serve")
_OPEN = ("/", "/healthz")  # without a token; so are the files of the page
_PAGE = "/page/"
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (
        b"content-security-policy",
        b"default-src 'self'; img-src 'self' data: blob:; style-src 'self'; script-src 'self';"
        b" frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    ),
)


@dataclass(frozen=True)
class GuardRules:
    """Say who may ask. ``hosts`` are the names under which the server may be addressed; empty: any.
    They keep a web page from asking a server on the loopback under a name of its own."""

    token: str = ""
    hosts: tuple[str, ...] = ()


class HttpGuard:
    """Wrap an ASGI app. Whatever passes has a body that has arrived whole and is small enough."""

    def __init__(
        self, app: App, rules: GuardRules, limits: ServeLimits, metrics: ServeMetrics
    ) -> None:
        self.app, self.rules, self.limits, self.metrics = app, rules, limits, metrics
        self._held_bytes = 0  # of bodies whose requests are not answered yet

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answer, body = _Answer(send), _Body()
        try:
            self._check(scope)
            await self._read(body, scope, receive)
            await self.app(scope, _again(b"".join(body.parts), receive), answer)
        except Refused as refused:
            await _refuse(answer, refused)
        finally:
            self._held_bytes -= body.size
            self._note(scope, answer)

    def _check(self, scope: Message) -> None:
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if self.rules.hosts and _name_of(host) not in self.rules.hosts:
            raise Refused(421, "wrong_host", "this server does not answer under that name")
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and origin.partition("://")[2] != host:
            raise Refused(403, "other_origin", "pages of other servers may not ask this one")
        if not self.rules.token or scope["path"] in _OPEN or scope["path"].startswith(_PAGE):
            return
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        is_right = hmac.compare_digest(given.strip(), self.rules.token.encode())
        if kind.lower() != b"bearer" or not is_right:
            raise Refused(401, "wrong_token", "send the header 'Authorization: Bearer TOKEN'")

    async def _read(self, body: _Body, scope: Message, receive: Receive) -> None:
        """Read the body. Raises Refused: 413 where it is too large, 408 where it comes too slowly,
        503 where too many others are held, 400 where the client has gone."""
        most = self.limits.most_body_bytes
        too_large = Refused(413, "too_large", f"a request has at most {most} bytes")
        told = dict(scope["headers"]).get(b"content-length", b"0")
        if told.isdigit() and int(told[:20]) > most:
            raise too_large
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refused(400, "hung_up", "the client has gone")
                    part = message.get("body", b"")
                    body.parts.append(part)
                    body.size += len(part)
                    self._held_bytes += len(part)
                    if body.size > most:
                        raise too_large
                    if self._held_bytes > self.limits.most_held_bytes:
                        text = "other requests fill the memory for bodies; ask again later"
                        raise Refused(503, "busy", text, retry_after_s=5)
                    if not message.get("more_body", False):
                        return
        except TimeoutError as error:
            raise Refused(408, "too_slow", "the request did not arrive in time") from error

    def _note(self, scope: Message, answer: _Answer) -> None:
        seconds = time.perf_counter() - answer.begun
        route = getattr(scope.get("route"), "path", "other")  # one name for all ids
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self.metrics.answers.labels(method, route, answer.status).inc()
        self.metrics.answer_s.labels(route).observe(seconds)
        log.info(
            "answered",
            extra={
                "request": answer.id,
                "method": method,
                "route": route,
                "status": answer.status,
                "seconds": round(seconds, 4),
            },
        )


_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS")


class _Body:
    """Hold what has arrived of a body."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0


class _Answer:
    """Send an answer with the headers that all have, and note its status."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.id, self.status, self.begun = secrets.token_hex(8), 0, time.perf_counter()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            more = [*_HEADERS, (b"x-request-id", self.id.encode())]
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        await self.send(message)


def _name_of(host: str) -> str:
    """Return a host without its port: "[::1]:80" and "localhost:80"."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].lower()


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that gives the body that has been read, then what comes after it."""
    given = False

    async def receive_again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


async def _refuse(answer: _Answer, refused: Refused) -> None:
    body = json.dumps(refused.body).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    encoded = [(k.encode(), v.encode()) for k, v in (headers | refused.headers).items()]
    await answer({"type": "http.response.start", "status": refused.status, "headers": encoded})
    await answer({"type": "http.response.body", "body": body})
