"""Ask ``strop serve`` for thousands of pictures while clients hang up and the disk fills
(``strop bench serve --soak N``).

The server is the command itself, in a process of its own. From the middle on no file can be written
by it, as on a full disk: the kernel refuses by the limit on the size of files. Every round asks for
the same pictures, so that a picture that changes is found.
"""

from __future__ import annotations

import itertools
import resource
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from strop.bench import environment, report
from strop.bench.load_report import MOST_GROWN_BYTES, Must, rank
from strop.bench.serve import ServePlan, asked_by_clients, bodies_of, differ, pixels_of
from strop.errors import StropError

_STOP_S = 120.0
_LINE = "strop_pictures_waiting"
_HANG_UPS_S = (0.0, 0.1, 0.3, 1.0)  # behind the request: before it is drawn, and while it is
_WARM_ROUNDS = 2  # in which each size and each batch allocates what it needs


@dataclass(frozen=True)
class SoakPlan:
    """Say what is asked: ``requests`` pictures in ``rounds`` equal rounds, besides which every
    ``hang_up_every``-th request is sent once more by a client that hangs up within a second."""

    requests: int = 5000
    clients: int = 64
    steps: int = 4
    rounds: int = 10
    max_batch: int = 4
    hang_up_every: int = 20
    model: str = "sprites"

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """Return the requests of a round."""
        one = ServePlan(pictures=max(1, self.requests // self.rounds), steps=self.steps)
        return bodies_of(one)


@dataclass
class SoakRound:
    """Hold what was measured in a round. Memory is the server's resident set behind it."""

    seconds: float
    latencies_s: list[float]
    num_hung_up: int
    num_lost: int
    num_wrong: int
    memory_bytes: int
    is_disk_full: bool


@dataclass
class Soaked:
    """Hold the rounds, and how the server ended: its exit code at SIGTERM, and how many pictures
    were still in its line."""

    rounds: list[SoakRound] = field(default_factory=list)
    num_waiting: float = 0.0
    exit_code: int | None = None


def run(
    plan: SoakPlan, device: torch.device, step: Callable[[str], object] = lambda note: None
) -> dict[str, Any]:
    """Measure by a plan, and return the result. ``step`` is told what is being measured. Raises
    StropError where the server does not start, or ends by itself."""
    step("starting the server")
    soaked, first = Soaked(), dict[int, bytes]()
    with _server(plan, device) as (process, host, port):
        for number in range(plan.rounds):
            is_full = number >= plan.rounds / 2
            step(f"round {number + 1} of {plan.rounds}{', disk full' if is_full else ''}")
            if is_full:
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, 0))
            found = asked_by_clients(_told(plan), plan.clients, host, port)
            _check_alive(process)
            soaked.rounds.append(_round(plan, found, first, process.pid, is_full))
        soaked.num_waiting = _waiting(host, port)
        process.send_signal(signal.SIGTERM)
        soaked.exit_code = process.wait(_STOP_S)
    return _result(plan, soaked, environment.describe(device))


def written(result: Mapping[str, Any], folder: Path, device: torch.device) -> Path:
    """Write the result as ``serve-sprites-soak_<device>_<date>.json``, and return where."""
    date, label = result["environment"]["date"][:10], environment.device_label(device)
    return report.write_json(result, folder / f"serve-sprites-soak_{label}_{date}.json")


def _told(plan: SoakPlan) -> list[dict[str, Any]]:
    """Return the requests of a round, and among them those whose clients hang up."""
    found: list[dict[str, Any]] = []
    for number, body in enumerate(plan.bodies):
        found.append(body)
        if number % plan.hang_up_every == 0:
            seconds = _HANG_UPS_S[number // plan.hang_up_every % len(_HANG_UPS_S)]
            found.append(body | {"hangs_up_s": seconds})
    return found


@contextmanager
def _server(
    plan: SoakPlan, device: torch.device
) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """Start ``strop serve`` on a free port, and yield its process and where it listens."""
    words = ["--port", "0", "--no-eager", "--max-batch", str(plan.max_batch)]
    words += ["--device", device.type, "--max-waiting", str(2 * plan.clients)]
    with subprocess.Popen(
        [sys.executable, "-m", "strop", "serve", plan.model, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            if "http://" not in line:
                raise StropError(
                    f"the server has not started; run 'strop serve {plan.model}' to see why"
                )
            host, _, port = line.split()[-1].removeprefix("http://").rpartition(":")
            yield process, host, int(port)
        finally:
            if process.poll() is None:
                process.kill()


def _check_alive(process: subprocess.Popen[str]) -> None:
    if process.poll() is not None:
        raise StropError(f"the server has ended by itself, with status {process.returncode}")


def _round(
    plan: SoakPlan, found: Mapping[str, Any], first: dict[int, bytes], pid: int, is_full: bool
) -> SoakRound:
    """Sum up the answers of a round. ``first`` has the pictures of the first one, by number."""
    staying = [answer for answer in found["answers"] if not answer["hung_up"]]
    good = [answer for answer in staying if answer["status"] == 200]
    wrong = 0
    for answer in good:
        pixels = pixels_of(answer["png"])
        wrong += differ(pixels, first.setdefault(answer["number"], pixels))
    return SoakRound(
        seconds=found["seconds"],
        latencies_s=[answer["seconds"] for answer in good],
        num_hung_up=len(found["answers"]) - len(staying),
        num_lost=len(plan.bodies) - len(good),
        num_wrong=wrong,
        memory_bytes=_resident_bytes(pid),
        is_disk_full=is_full,
    )


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _waiting(host: str, port: int) -> float:
    """Return how many pictures wait, by the server's metrics."""
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{_LINE} "))


def _result(plan: SoakPlan, soaked: Soaked, where: dict[str, Any]) -> dict[str, Any]:
    rounds = soaked.rounds
    settled = rounds[min(_WARM_ROUNDS, len(rounds)) - 1].memory_bytes
    latencies = [seconds for one in rounds for seconds in one.latencies_s]
    lost, wrong = sum(one.num_lost for one in rounds), sum(one.num_wrong for one in rounds)
    grown = rounds[-1].memory_bytes - settled
    musts = (
        Must("requests without a picture", lost, 0, is_least=False),
        Must("pictures that differ from those of the first round", wrong, 0, is_least=False),
        Must(
            f"growth of the server's memory behind round {_WARM_ROUNDS}, MB",
            grown / 1e6,
            MOST_GROWN_BYTES / 1e6,
            is_least=False,
        ),
        Must("pictures in line at the end", soaked.num_waiting, 0, is_least=False),
        Must("exit code at SIGTERM", abs(soaked.exit_code or 0), 0, is_least=False),
    )
    return {
        "kind": "serve-soak",
        "workload": "sprites" if plan.model == "sprites" else Path(plan.model).name,
        "plan": asdict(plan) | {"model": Path(plan.model).name},
        "latency_s": {f"p{n}": round(rank(latencies, n / 100), 3) for n in (20, 50, 80, 99)},
        "rounds": [_of_round(plan, one) for one in rounds],
        "musts": [asdict(must) | {"holds": must.holds} for must in musts],
        "environment": where,
    }


def _of_round(plan: SoakPlan, one: SoakRound) -> dict[str, Any]:
    drawn = len(plan.bodies) - one.num_lost
    return {
        "pictures_a_second": round(drawn / one.seconds, 3),
        "p50_s": round(rank(one.latencies_s, 0.5), 3) if one.latencies_s else None,
        "p99_s": round(rank(one.latencies_s, 0.99), 3) if one.latencies_s else None,
        "hung_up": one.num_hung_up,
        "lost": one.num_lost,
        "wrong": one.num_wrong,
        "memory_mb": round(one.memory_bytes / 1e6, 1),
        "is_disk_full": one.is_disk_full,
    }


def rows_of(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a table with its header first, a row for each round."""
    header = ("round", "pictures/s", "p50 s", "p99 s", "hung up", "lost", "memory MB", "disk")
    names = ("pictures_a_second", "p50_s", "p99_s", "hung_up", "lost", "memory_mb")
    rows: list[tuple[str, ...]] = [header]
    for number, one in zip(itertools.count(1), result["rounds"], strict=False):
        disk = "full" if one["is_disk_full"] else "has room"
        rows.append((str(number), *(str(one[name]) for name in names), disk))
    return rows
