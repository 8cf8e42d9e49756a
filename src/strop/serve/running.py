"""Run a server until it is told to stop."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import signal
import socket
from types import FrameType

import uvicorn

from strop.errors import StropError
from strop.serve.guard import App
from strop.serve.service import Service

log = logging.getLogger("strop.serve")
_MOST_CONNECTIONS = 1000
_CLOSE_S = 10  # clients whose pictures are done may take so long to read them


class AddressError(StropError, OSError):
    """A server cannot listen where it is to."""


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches a host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that nobody listens on yet; port 0 takes a free one. Raises AddressError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise AddressError(f"there is no host {host!r}; give --host 127.0.0.1") from error
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
    except OSError as error:
        made.close()
        raise AddressError(_advice(error, host, port)) from error
    return made


def _advice(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use; stop the program that has it, or give another --port"
    if error.errno == errno.EACCES:
        return f"port {port} is for administrators; give a --port from 1024 on"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"this machine has no address {host}; give --host 127.0.0.1, or 0.0.0.0 for all"
    return f"cannot listen on {host}, port {port}: {error.strerror}"


def address_of(made: socket.socket) -> str:
    host, port = made.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class PictureServer(uvicorn.Server):
    """Finish what is accepted at the first signal, and refuse the rest; end at the second one."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop, on the loop: a signal may come between any two instructions."""
        if self.service.is_draining:
            self.force_exit = self.should_exit = True
            self._loop.call_soon_threadsafe(self.service.abandon)
            return
        self.service.refuse_orders()
        log.info("stopping", extra={"signal": signal.Signals(sig).name})
        self._loop.call_soon_threadsafe(self._begin_draining)

    def _begin_draining(self) -> None:
        self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        await self.service.drain()
        await self.service.seen(_CLOSE_S)
        self.should_exit = True

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)


def config_of(app: App) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_graceful_shutdown=_CLOSE_S,
        server_header=False,
        h11_max_incomplete_event_size=1 << 16,
        ws="none",
        lifespan="on",
    )


def run(app: App, service: Service, listening: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM; then new orders get 503, and accepted ones are finished."""
    asyncio.run(PictureServer(config_of(app), service).serve([listening]))
