"""Ask a server in this process, without a socket."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
from PIL import Image

from strop.serve.app import build_app
from strop.serve.guard import App, GuardRules
from strop.serve.limits import ServeLimits
from strop.serve.service import Service
from strop.serve.studio import Painter

from .painters import FakePainter

LIMITS = ServeLimits(most_pixels=64 * 64, most_batch=4, most_waiting=8)
GENERATE, EDIT = "/v1/images/generations", "/v1/images/edits"


@dataclass
class Asked:
    """Hold a server that runs, and a client of it."""

    client: httpx2.AsyncClient
    service: Service
    app: App

    async def job(self, **body: Any) -> dict[str, Any]:
        answer = await self.client.post("/api/pictures", json={"prompt": "x", **body})
        assert answer.status_code == 202, answer.text
        return answer.json()  # type: ignore[no-any-return]

    async def until(self, state: str, name: str) -> dict[str, Any]:
        """The job when it is in a state."""
        for _ in range(4000):
            found = (await self.client.get(f"/api/pictures/{name}")).json()
            if found["state"] == state:
                return found  # type: ignore[no-any-return]
            await asyncio.sleep(0.005)
        raise AssertionError(f"it is not {state}: {found}")


@asynccontextmanager
async def asking(
    painter: Painter | None = None,
    limits: ServeLimits = LIMITS,
    rules: GuardRules | None = None,
    headers: dict[str, str] | None = None,
) -> AsyncIterator[Asked]:
    service = Service(painter or FakePainter(), limits)
    app = build_app(service, rules)
    service.start()
    transport = httpx2.ASGITransport(app=app)
    client = httpx2.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)
    async with client:
        try:
            yield Asked(client, service, app)
        finally:
            if isinstance(painter, FakePainter):
                painter.gate.set()
            await service.stop()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run a scenario, and fail if it takes half a minute."""

    async def limited() -> None:
        async with asyncio.timeout(30):
            await scenario()

    asyncio.run(limited())


@dataclass
class RawCall:
    """Call the app by hand: a client that sends what it likes, and hangs up when it likes."""

    app: App
    path: str
    body: bytes = b""
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "application/json"})
    sent: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.messages.put_nowait({"type": "http.request", "body": self.body, "more_body": False})

    def hang_up(self) -> None:
        self.messages.put_nowait({"type": "http.disconnect"})

    async def run(self) -> int:
        """Return the status."""
        path, _, query = self.path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": self.method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(k.encode(), v.encode()) for k, v in self.headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("localhost", 80),
        }

        async def send(message: Any) -> None:
            self.sent.append(message)

        await self.app(scope, self.messages.get, send)
        return int(self.sent[0]["status"])

    @property
    def text(self) -> str:
        return b"".join(m.get("body", b"") for m in self.sent[1:]).decode()


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Read a stream of server-sent events."""
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found


def opened(base64_png: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(base64_png)))


def png(width: int = 32, height: int = 16, mode: str = "RGB", kind: str = "PNG") -> bytes:
    target = io.BytesIO()
    Image.new(mode, (width, height)).save(target, format=kind)
    return target.getvalue()


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()
