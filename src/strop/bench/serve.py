"""Measure a server beside the same pictures drawn without one (``strop bench serve``)."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import strop
from strop.bench import environment, report
from strop.bench.load_report import Must, rank
from strop.drawing.draw import batch_key
from strop.drawing.request import PictureRequest, PictureSize

if TYPE_CHECKING:
    from strop.serve.limits import ServeLimits
    from strop.serve.studio import Studio

LEAST_OF_OFFLINE = 0.9
MOST_OFF = 2  # of 255: what another batch may change in a picture
_SIZES = (PictureSize(64, 64), PictureSize(96, 64), PictureSize(64, 96), PictureSize(96, 96))
_PROMPTS = (
    "a red circle above a blue square on a white background",
    "a small green star at the top left",
    "a yellow heart on a navy background",
    "a large purple diamond in the center on a beige background",
)
_GUIDANCE = 4.0
_MOST_WAIT_S = 2.0


@dataclass(frozen=True)
class ServePlan:
    """Say what is measured: in each round ``pictures`` offline, from the server, and from one
    whose line has room for ``overload_room`` pictures only."""

    clients: int = 64
    pictures: int = 128
    steps: int = 10
    rounds: int = 3
    max_batch: int = 4
    overload_room: int = 16
    sizes: Sequence[PictureSize] = field(default=_SIZES)

    @property
    def requests(self) -> list[PictureRequest]:
        """Return the pictures: sizes and prompts in turns, each with a seed of its own."""
        count = range(self.pictures)
        kinds = itertools.cycle(zip(self.sizes, itertools.cycle(_PROMPTS), strict=False))
        return [
            PictureRequest(prompt, size, self.steps, _GUIDANCE, seed)
            for seed, (size, prompt) in zip(count, kinds, strict=False)
        ]


@dataclass
class ServeRounds:
    """Hold what was measured, a value for each round."""

    offline_s: list[float] = field(default_factory=list)
    served_s: list[float] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    overload_s: list[float] = field(default_factory=list)
    cpu_s: dict[str, list[float]] = field(default_factory=lambda: {"offline": [], "server": []})
    num_refused: int = 0
    num_lost: int = 0
    num_wrong: int = 0


def run(
    plan: ServePlan, device: torch.device, step: Callable[[str], object] = lambda note: None
) -> dict[str, Any]:
    """Measure by a plan, and return the result. ``step`` is told what is being measured."""
    step("loading and compiling")
    studio = _studio(device)
    expected = _offline(studio, plan)[1]  # which also builds what the first round would wait for
    rounds = ServeRounds()
    for number in range(plan.rounds):
        step(f"round {number + 1} of {plan.rounds}: offline")
        cpu = time.process_time()
        rounds.offline_s.append(_offline(studio, plan)[0])
        rounds.cpu_s["offline"].append(time.process_time() - cpu)
        for name, room in (("server", plan.pictures), ("overload", plan.overload_room)):
            step(f"round {number + 1} of {plan.rounds}: {name}")
            with _serving(studio, _limits(plan, room)) as (host, port):
                cpu = time.process_time()
                found = asked_by_clients(bodies_of(plan), plan.clients, host, port)
                found["cpu_s"] = time.process_time() - cpu  # of the server; the clients have theirs
            _note(rounds, found, expected, name)
    return _result(plan, rounds, environment.describe(device))


def written(result: Mapping[str, Any], folder: Path, device: torch.device) -> Path:
    """Write the result as ``serve-sprites_<device>_<date>.json``, and return where."""
    date, label = result["environment"]["date"][:10], environment.device_label(device)
    return report.write_json(result, folder / f"serve-sprites_{label}_{date}.json")


def _studio(device: torch.device) -> Studio:
    from strop.models import sprites
    from strop.serve.order import ModelCard
    from strop.serve.studio import Studio

    pipe = sprites.load(torch.float16 if device.type == "cuda" else torch.float32, device)
    pipe.set_progress_bar_config(disable=True)
    strop.optimize(pipe)
    card = ModelCard("sprites", _SIZES[0], 16, _GUIDANCE, (), False, lambda text, _: (text, ""))
    return Studio(card, pipe)


def _offline(studio: Studio, plan: ServePlan) -> tuple[float, list[bytes]]:
    """Draw full batches, one after the other, and return the seconds and the pictures."""
    from strop.serve.studio import PictureBatch

    groups: dict[Any, list[int]] = {}
    requests = plan.requests
    for number, request in enumerate(requests):
        groups.setdefault(batch_key(request), []).append(number)
    made: dict[int, bytes] = {}
    start = time.perf_counter()
    for group in groups.values():
        for first in range(0, len(group), plan.max_batch):
            chosen = group[first : first + plan.max_batch]
            batch = PictureBatch([requests[number] for number in chosen])
            done = studio.draw(batch, lambda _: None, lambda: True)
            made |= zip(chosen, done.pictures, strict=True)
    return time.perf_counter() - start, [made[number] for number in range(len(requests))]


def _limits(plan: ServePlan, room: int) -> ServeLimits:
    from strop.serve.limits import ServeLimits

    return ServeLimits(most_pixels=96 * 96, most_batch=plan.max_batch, most_waiting=room)


@contextmanager
def _serving(studio: Studio, limits: ServeLimits) -> Iterator[tuple[str, int]]:
    """Serve on a free port, as ``strop serve`` does, in a thread of its own."""
    from strop.serve import running
    from strop.serve.app import build_app
    from strop.serve.service import Service

    threads = torch.get_num_threads()
    listening = running.bound("127.0.0.1", 0)
    host, port = listening.getsockname()
    service = Service(studio, limits, prepare=lambda: torch.set_num_threads(threads))
    server = running.PictureServer(running.config_of(build_app(service)), service)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield host, port
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


def bodies_of(plan: ServePlan) -> list[dict[str, Any]]:
    """Return the bodies of a plan's requests, in OpenAI's interface."""
    return [
        {
            "prompt": request.prompt,
            "size": str(request.size),
            "steps": request.steps,
            "guidance": request.guidance,
            "seed": request.seed,
        }
        for request in plan.requests
    ]


def asked_by_clients(
    bodies: Sequence[Mapping[str, Any]], clients: int, host: str, port: int
) -> dict[str, Any]:
    """Return what the clients got, from a process of theirs. The client of a body with
    ``hangs_up_s`` waits so long for its answer, then hangs up."""
    told = {"host": host, "port": port, "clients": clients, "bodies": bodies}
    told |= {"tries": 10_000, "most_wait_s": _MOST_WAIT_S}
    done = subprocess.run(
        [sys.executable, "-m", "strop.bench.serve_clients"],
        input=json.dumps(told) + "\n",
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _note(
    rounds: ServeRounds, found: Mapping[str, Any], expected: Sequence[bytes], name: str
) -> None:
    answers = found["answers"]
    good = [answer for answer in answers if answer["status"] == 200]
    rounds.num_lost += len(expected) - len({answer["number"] for answer in good})
    rounds.num_wrong += sum(_is_wrong(a["png"], expected[a["number"]]) for a in good)
    rounds.num_refused += sum(answer["refused"] for answer in answers)
    if name == "server":
        rounds.served_s.append(found["seconds"])
        rounds.cpu_s["server"].append(found["cpu_s"])
        rounds.latencies_s += [answer["seconds"] for answer in good]
    else:
        rounds.overload_s.append(found["seconds"])


def _is_wrong(png: str, expected: bytes) -> bool:
    """Tell whether a picture is another than the one that was drawn offline, in another batch."""
    return differ(pixels_of(png), expected)


def pixels_of(png: str) -> bytes:
    """Return the bytes of a picture that is PNG in base64."""
    from PIL import Image

    pixels: bytes = Image.open(io.BytesIO(base64.b64decode(png))).tobytes()
    return pixels


def differ(got: bytes, expected: bytes) -> bool:
    """Tell whether two pictures differ by more than another batch changes."""
    if len(got) != len(expected):
        return True
    return max(abs(a - b) for a, b in zip(got, expected, strict=True)) > MOST_OFF


def _result(plan: ServePlan, rounds: ServeRounds, where: dict[str, Any]) -> dict[str, Any]:
    rates = {
        name: [plan.pictures / seconds for seconds in found]
        for name, found in (
            ("offline", rounds.offline_s),
            ("server", rounds.served_s),
            ("overload", rounds.overload_s),
        )
    }
    ratios = [a / b for a, b in zip(rates["server"], rates["offline"], strict=True)]
    musts = (
        Must("throughput over offline batches", rank(ratios, 0.5), LEAST_OF_OFFLINE, is_least=True),
        Must("requests without a picture", rounds.num_lost, 0, is_least=False),
        Must("pictures that are not those of their seeds", rounds.num_wrong, 0, is_least=False),
    )
    return {
        "kind": "serve",
        "workload": "sprites",
        "plan": asdict(plan) | {"sizes": [str(size) for size in plan.sizes]},
        "pictures_a_second": {name: _spread(values) for name, values in rates.items()},
        "ratio": _spread(ratios),
        "cpu_s_a_picture": {
            name: _spread([seconds / plan.pictures for seconds in found])
            for name, found in rounds.cpu_s.items()
        },
        "latency_s": {
            f"p{n}": round(rank(rounds.latencies_s, n / 100), 3) for n in (20, 50, 80, 99)
        },
        "num_refused_and_asked_again": rounds.num_refused,
        "musts": [asdict(must) | {"holds": must.holds} for must in musts],
        "environment": where,
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    found: dict[str, Any] = {f"p{n}": round(rank(values, n / 100), 4) for n in (20, 50, 80)}
    return found | {"samples": [round(value, 4) for value in values]}


def rows_of(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a table with its header first."""
    rows: list[tuple[str, ...]] = [("", "pictures a second, p20 / p50 / p80")]
    for name, found in result["pictures_a_second"].items():
        rows.append((name, " / ".join(f"{found[p]:.2f}" for p in ("p20", "p50", "p80"))))
    latency = result["latency_s"]
    rows.append(("seconds to a picture", f"p50 {latency['p50']:.2f}, p99 {latency['p99']:.2f}"))
    cpu = [result["cpu_s_a_picture"][name]["p50"] for name in ("offline", "server")]
    rows.append(("CPU seconds a picture", f"offline {cpu[0]:.3f}, server {cpu[1]:.3f}"))
    rows.append(("refused, asked again", str(result["num_refused_and_asked_again"])))
    return rows
