"""Time two editions of Strop in turns on one machine: what a change has cost, or gained.

python benchmarks/before_after.py --before FOLDER [--out FILE] [--rows P1,P3,P5-512] [--rounds 8]

FOLDER holds the older edition's ``src``, as ``git archive COMMIT src | tar -x -C FOLDER`` leaves
it; the newer one is the checkout that this file lies in. Each edition is a process of its own with
an empty cache, in which all rows stay compiled. The processes are asked in turns (older, newer,
newer, older, ...), so that clocks and temperature are the same for both.

A row is timed as a whole (``time``: milliseconds of a call, from a queue of calls between two CUDA
events) and on the host (``host``: microseconds until a call of the UNet has come back, with the
device idle before; ``loop``: the same within a denoise loop of diffusers' own; ``watched``: in one
where a user's code may run, so that each step looks at the model). The table has medians, their
ratio, and the spread of the ratio over the rounds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

EDITIONS = ("before", "after")
HOST_CALLS = 50  # in one sample of the host's time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", type=Path, required=True, help="folder with the older src")
    parser.add_argument("--rows", default="P1,P3,P5-512", help="rows of strop bench infer")
    parser.add_argument("--rounds", type=int, default=8, help="pairs of samples of a row")
    parser.add_argument("--calls", type=int, default=20, help="calls of a step in one sample")
    parser.add_argument("--tiny", action="store_true", help="tiny models: to try this out")
    parser.add_argument("--out", type=Path, help="JSON file for every sample")
    args = parser.parse_args()
    if not (args.before / "src" / "strop").is_dir():
        parser.error(f"{args.before} has no src/strop: git archive COMMIT src | tar -x -C FOLDER")
    if args.out and args.out.is_dir():
        parser.error(f"--out {args.out} is a folder: name a file in it, such as before_after.json")
    newer = Path(__file__).resolve().parents[1]
    with Edition(args.before, args) as before, Edition(newer, args) as after:
        result = compare(dict(zip(EDITIONS, (before, after), strict=True)), args)
    if args.out:
        part = args.out.with_suffix(".part")
        part.write_text(json.dumps(result, indent=1))
        part.replace(args.out)


def compare(editions: dict[str, Edition], args: argparse.Namespace) -> dict[str, Any]:
    """All samples, by row, measure and edition; prints a line for each measure."""
    for edition in editions.values():
        edition.send("prepare")
    facts = {name: edition.receive() for name, edition in editions.items()}
    print(f"{facts['after']['device']}, torch {facts['after']['torch']}", flush=True)
    rows: dict[str, Any] = {}
    for row in args.rows.split(","):
        samples: dict[str, dict[str, list[float]]] = {}
        for number in range(2 * args.rounds + 1):
            for name in EDITIONS if number % 2 else reversed(EDITIONS):
                editions[name].send(row)
                found = editions[name].receive()
                for measure, value in found.items() if number else ():
                    samples.setdefault(measure, {}).setdefault(name, []).append(value)
        rows[row] = {measure: summary(found) for measure, found in samples.items()}
        for measure, one in rows[row].items():
            low, middle, high = one["ratio"]
            medians = " ".join(f"{one['median'][name]:9.3f}" for name in EDITIONS)
            print(f"{row:8} {measure:9} {medians}   {middle:.4f} ({low:.4f} to {high:.4f})")
        sys.stdout.flush()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {
        "kind": "before_after",
        "date": now,
        "editions": facts,
        "rounds": args.rounds,
        "rows": rows,
    }


def summary(samples: dict[str, list[float]]) -> dict[str, Any]:
    """Of two samples of an edition, one was taken first and one behind the other edition's, which
    leaves the device in another state: P1 differs by 3 % between the two."""
    pairs = [[*zip(samples[name][::2], samples[name][1::2], strict=True)] for name in EDITIONS]
    ratios = sorted(sum(b) / sum(a) for a, b in zip(*pairs, strict=True))
    fifth = len(ratios) // 5
    spread = (ratios[fifth], statistics.median(ratios), ratios[-1 - fifth])
    median = {name: statistics.median(values) for name, values in samples.items()}
    return {"median": median, "ratio": [round(value, 5) for value in spread], "samples": samples}


class Edition:
    """A process that runs one edition, and answers a line of JSON to each line."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self._cache = tempfile.TemporaryDirectory()
        paths = [str(folder.resolve() / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "STROP_CACHE_DIR": self._cache.name,
        }
        words = [sys.executable, __file__, "--serve", args.rows, str(args.calls), str(args.tiny)]
        self._process = subprocess.Popen(
            words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Edition:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        self._cache.cleanup()

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("an edition ended without an answer; what it said is above")
        return json.loads(line)


# within an edition's process


def serve(names: list[str], calls: int, is_tiny: bool) -> None:
    """Answer "prepare", then a row's name with one sample of each of its measures."""
    answers, sys.stdout = sys.stdout, sys.stderr
    samplers: dict[str, Callable[[], dict[str, float]]] = {}
    for line in sys.stdin:
        word = line.strip()
        if word == "prepare":
            samplers = {name: sampler(name, calls, is_tiny) for name in names}
            answer: Any = facts()
        else:
            answer = samplers[word]()
        print(json.dumps(answer), file=answers, flush=True)


def facts() -> dict[str, str]:
    import torch

    import strop

    has_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if has_gpu else "CPU"
    found = {"device": device, "torch": torch.__version__, "strop": strop.__version__}
    files = sorted(Path(strop.__file__).parent.rglob("*.py"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    return found | {"source": digest.hexdigest()[:12]}


def sampler(name: str, calls: int, is_tiny: bool) -> Callable[[], dict[str, float]]:
    """Build and compile a row's model; what measures it then."""
    import torch

    import strop
    from strop.api import optimize_module
    from strop.bench.infer_rows import MODELS, ROWS

    row = next(row for row in ROWS if row.name == name)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = MODELS[row.model]
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    workload = (model.tiny if is_tiny else model.full)(2 if is_tiny else row.steps)(device, dtype)
    if row.kind == "picture":
        strop.optimize(workload.target)
    else:  # as a part of a pipeline; the class of loops is the edition's own, wherever it keeps it
        loop = type(optimize_module(workload.target, strop.Options()).loop)()
        optimize_module(workload.target, strop.Options(), loop=loop)
    size = (64, 64) if is_tiny else row.size
    given = workload.inputs(size, row.batch)

    def call() -> None:
        workload.call(workload.target, given)

    with torch.no_grad():
        for _ in range(4):
            call()
    if row.kind == "picture":
        return lambda: {"time": milliseconds(call, 1)}

    def sample() -> dict[str, float]:
        found = {"time": milliseconds(call, calls), "host": microseconds(call)}
        loop.begin(None)
        call()
        for measure, is_watched in (("loop", False), ("watched", True)):
            loop.has_user_code = is_watched
            found[measure] = microseconds(call)
        loop.end()
        return found

    with torch.no_grad():
        sample()
    return sample


def milliseconds(call: Callable[[], None], count: int) -> float:
    """Of one call, in a queue of ``count``."""
    import torch

    with torch.no_grad():
        synchronize()
        if not torch.cuda.is_available():
            start = time.perf_counter()
            for _ in range(count):
                call()
            return 1e3 * (time.perf_counter() - start) / count
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(count):
            call()
        last.record()
        synchronize()
        return first.elapsed_time(last) / count


def microseconds(call: Callable[[], None]) -> float:
    """Until a call comes back to the host, which found the device idle: the median of some."""
    import torch

    def each() -> Iterator[float]:
        for _ in range(HOST_CALLS):
            synchronize()
            start = time.perf_counter()
            call()
            yield 1e6 * (time.perf_counter() - start)

    with torch.no_grad():
        return statistics.median(each())


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2].split(","), int(sys.argv[3]), sys.argv[4] == "True")
    else:
        main()
