"""Replicas on a Ray of this machine, with the sprites model on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.waiting import LIMIT_S, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: strop[ray]"),
]

ROOT = Path(__file__).parents[3]
GENERATE, HEALTH = "/v1/images/generations", "/healthz"
TWO = ("--replicas", "2")


@dataclass
class RayServer:
    """Hold a server whose replicas Ray runs, and the file of its log."""

    process: subprocess.Popen[str]
    address: str
    log: Path

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(
            self.address + path, data, {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(asked, timeout=LIMIT_S) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def ask_all(self, bodies: list[dict[str, Any]]) -> Callable[[], list[tuple[int, Any]]]:
        """Ask at once, and return what waits for the answers."""
        found: list[Any] = [None] * len(bodies)

        def one(number: int) -> None:
            found[number] = self.ask(GENERATE, bodies[number])

        threads = [threading.Thread(target=one, args=(n,)) for n in range(len(bodies))]
        for thread in threads:
            thread.start()

        def answers() -> list[tuple[int, Any]]:
            for thread in threads:
                thread.join(LIMIT_S)
            return found

        return answers

    def lines(self, message: str) -> list[dict[str, Any]]:
        """The lines of the log with a message."""
        texts = [text for text in self.log.read_text().splitlines() if text.startswith("{")]
        return [line for line in map(json.loads, texts) if line["message"] == message]

    def replicas(self) -> dict[int, psutil.Process]:
        """The processes of the replicas that Ray runs for this server, by number."""
        return {one.pid: one for one in _below(self.process) if _is_replica(one)}

    def drawn_by(self, body: dict[str, Any]) -> str:
        """Draw a picture, and return which replica has drawn it."""
        before = len(self.lines("drawn"))
        assert self.ask(GENERATE, body)[0] == 200
        (line,) = self.lines("drawn")[before:]
        return str(line["replica"])


def _below(process: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)  # type: ignore[no-any-return]
    except psutil.NoSuchProcess:
        return []


def _is_replica(process: psutil.Process) -> bool:
    try:
        return "PictureReplica" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # or a zombie
        return False


@contextmanager
def _process(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    log = folder / "log.txt"
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")))
    env = {**os.environ, "PYTHONPATH": paths, "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    env |= {"RAY_USAGE_STATS_ENABLED": "0", "STROP_CACHE_DIR": str(folder / "cache")}
    with (
        log.open("w") as target,
        subprocess.Popen(
            [sys.executable, "-m", *words],
            stdout=subprocess.PIPE,
            stderr=target,
            text=True,
            env=env,
            cwd=folder,
        ) as process,
    ):
        try:
            yield process, log
        finally:
            for one in _below(process):
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            process.kill()


@contextmanager
def _served(folder: Path, *words: str) -> Iterator[RayServer]:
    every = ("serve", "--ray", "--device", "cpu", "--port", "0", "--replica-cpus", "1")
    with _process(folder, "strop", *every, *words) as (process, log):
        assert process.stdout is not None
        told = process.stdout.readline()
        assert "http://" in told, log.read_text()
        server = RayServer(process, told.split(": ")[1].strip(), log)
        wait_until(lambda: _is_ready(server))
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayServer]:
    with _served(tmp_path_factory.mktemp("two"), *TWO) as served:
        yield served


def _body(seed: int, size: str = "96x64", steps: int = 4) -> dict[str, Any]:
    return {"prompt": "a red circle", "seed": seed, "size": size, "steps": steps}


def test_equal_sizes_go_to_the_same_replica(server: RayServer) -> None:
    sizes = ("96x64", "64x64", "96x64", "64x64", "64x64", "96x64")
    by = [server.drawn_by(_body(n, size)) for n, size in enumerate(sizes)]
    assert by[0] == by[2] == by[5] != by[1] == by[3] == by[4]


def test_both_replicas_draw(server: RayServer) -> None:
    bodies = [_body(seed, size, 8) for seed in range(3) for size in ("96x64", "64x64", "64x96")]
    before = len(server.lines("drawn"))
    answers = server.ask_all(bodies)()
    assert [status for status, _ in answers] == [200] * 9
    assert len({line["replica"] for line in server.lines("drawn")[before:]}) == 2


def test_a_replica_that_is_killed_loses_nothing(server: RayServer) -> None:
    bodies = [_body(seed, ("96x64", "64x64", "64x96")[seed % 3], 60) for seed in range(6)]
    expected = [server.ask(GENERATE, body)[1]["data"] for body in bodies[:2]]
    before = len(server.lines("sent"))
    answers = server.ask_all(bodies)
    wait_until(lambda: len(server.lines("sent")) >= before + 2)
    victim = server.lines("sent")[before]["pid"]
    server.replicas()[victim].kill()
    found = answers()
    assert [status for status, _ in found] == [200] * 6
    assert [answer["data"] for _, answer in found[:2]] == expected, "drawn again, bit for bit"
    assert len(server.lines("a replica was lost")) == 1
    assert "strop_replicas_lost_total 1.0" in _text(server, "/metrics")
    wait_until(lambda: len(server.replicas()) == 2 and victim not in server.replicas())


def test_previews_and_a_cancelled_order(server: RayServer) -> None:
    order = {"prompt": "a red circle", "steps": 8, "preview_every": 2}
    _, job = server.ask("/api/pictures", order)
    told = _text(server, f"/api/pictures/{job['id']}/events")
    assert told.count("event: preview\n") >= 1
    assert told.count("event: picture\n") == 1
    _, job = server.ask("/api/pictures", order | {"steps": 150})
    cancel = urllib.request.Request(f"{server.address}/api/pictures/{job['id']}", method="DELETE")
    with urllib.request.urlopen(cancel, timeout=LIMIT_S) as answer:
        assert json.loads(answer.read())["state"] == "cancelled"
    assert server.ask(GENERATE, _body(1))[0] == 200
    assert "graph" in _text(server, "/api/report")


def test_a_signal_finishes_what_is_accepted(server: RayServer) -> None:
    """The last test of this server."""
    before = len(server.lines("sent"))
    answers = server.ask_all([_body(seed, size, 40) for seed, size in ((1, "96x64"), (2, "64x64"))])
    wait_until(lambda: len(server.lines("sent")) >= before + 2)
    below = _below(server.process)
    server.process.send_signal(signal.SIGTERM)
    assert [status for status, _ in answers()] == [200, 200]
    assert server.process.wait(LIMIT_S) == 0
    wait_until(lambda: not any(_runs(one) for one in below))


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _text(server: RayServer, path: str) -> str:
    with urllib.request.urlopen(server.address + path, timeout=LIMIT_S) as answer:
        return answer.read().decode()  # type: ignore[no-any-return]


def test_replicas_come_while_pictures_wait_and_go_again(tmp_path: Path) -> None:
    words = ("--replicas", "1", "--max-replicas", "2", "--scale-up-s", "0", "--scale-down-s", "1")
    with _served(tmp_path, *words) as server:
        assert len(server.replicas()) == 1
        while len({line["replica"] for line in server.lines("drawn")}) < 2:
            bodies = [_body(seed, ("96x64", "64x64")[seed % 2], 20) for seed in range(8)]
            assert {status for status, _ in server.ask_all(bodies)()} == {200}
        wait_until(lambda: len(server.replicas()) == 1)
        assert server.ask(GENERATE, _body(1))[0] == 200
        assert not server.lines("a replica was lost"), "a replica that is taken away finishes"


@pytest.mark.gpu
def test_two_replicas_share_a_gpu(tmp_path: Path) -> None:
    with _served(tmp_path, "--device", "cuda", "--replicas-per-gpu", "2", *TWO) as server:
        by = [server.drawn_by(_body(n, size)) for n, size in enumerate(("96x64", "64x64", "96x64"))]
        assert by[0] == by[2] != by[1]


def test_a_deployment_file_serves(tmp_path: Path) -> None:
    from strop.serve.running import bound  # wants uvicorn

    with bound("127.0.0.1", 0) as free:
        port = str(free.getsockname()[1])
    asked = ("serve", "--ray", "--device", "cpu", "--replica-cpus", "1", "--port", port, *TWO)
    with _process(tmp_path, "strop", *asked, "--deployment-file", "serve.yaml") as (writer, _):
        assert writer.wait(LIMIT_S) == 0
    with _process(tmp_path, "ray.serve.scripts", "run", "serve.yaml") as (process, log):
        server = RayServer(process, f"http://127.0.0.1:{port}", log)
        wait_until(lambda: _is_ready(server))
        answers = server.ask_all([_body(seed) for seed in range(3)])()
        assert [status for status, _ in answers] == [200] * 3
        assert server.ask("/nowhere")[0] == 404
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT_S)


ERRORS = """
import ray, torch
from ray import serve
from strop.drawing.draw import NotFiniteError
from strop.drawing.request import PictureRequest, PictureSize
from strop.serve.metrics import ServeMetrics
from strop.serve.replicas import deployed, painter, plan
from strop.serve.studio import PictureBatch
from tests.serve.replicas.stand_ins import FakeStudio

FAULTS = {1: torch.OutOfMemoryError("full"), 2: NotFiniteError("not finite")}

def load():
    return FakeStudio(fault=lambda requests: FAULTS.get(requests[0].seed))

ray.init(include_dashboard=False, num_cpus=1, log_to_driver=False)
serve.start(http_options={"location": "NoServer"})
application = deployed.replicas_of(plan.ReplicaPlan(1, 1, 1, 0), load)
replicas = deployed.RayReplicas(serve.run(application, name="errors", route_prefix=None))
painter = painter.ReplicaPainter(replicas.introduction(), replicas, ServeMetrics())
for seed in range(3):
    batch = PictureBatch([PictureRequest("x", PictureSize(32, 16), 4, 1.0, seed)])
    try:
        done = painter.draw(batch, lambda step: None, lambda: True)
        print("drawn", len(done.pictures[0]), flush=True)
    except (torch.OutOfMemoryError, NotFiniteError) as error:
        print(type(error).__name__, error, flush=True)
serve.shutdown()
ray.shutdown()
"""


def test_errors_of_drawing_arrive_as_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "errors.py").write_text(ERRORS)
    with _process(tmp_path, "errors") as (process, log):
        assert process.stdout is not None
        told = process.stdout.read()
        assert process.wait(LIMIT_S) == 0, log.read_text()
    expected = ["drawn 1536", "OutOfMemoryError full", "NotFiniteError not finite"]
    assert told.splitlines()[:3] == expected, "Ray says more behind it"


def _is_ready(server: RayServer) -> bool:
    assert server.process.poll() is None, server.log.read_text()
    try:
        return server.ask(HEALTH) == (200, {"state": "ready", "model": "sprites"})
    except (urllib.error.URLError, json.JSONDecodeError, ConnectionError):
        return False  # Ray's proxy does not listen yet, or knows of no application


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--replicas", "500"), "are needed, and there are"),
        (("--ray-address", "127.0.0.1:1"), "no Ray answers at 127.0.0.1:1"),
        (("--ray-address", "ray://here:1"), "give HOST:PORT, or auto"),
    ],
)
def test_what_ray_cannot_do(words: tuple[str, ...], part: str, tmp_path: Path) -> None:
    every = ("serve", "--ray", "--device", "cpu", "--port", "0", "--replica-cpus", "1")
    with _process(tmp_path, "strop", *every, *words) as (process, log):
        assert process.wait(LIMIT_S) == 1
        assert part in " ".join(log.read_text().split())
