"""Time two editions of Strop in turns on one machine: what a change has cost, or gained.

python benchmarks/before_after.py --before FOLDER [--out FILE] [--rows P1,P3,P5-512] [--rounds 8]
    [--measures time,host]

FOLDER holds the older edition's ``src``, as ``git archive COMMIT src | tar -x -C FOLDER`` leaves
it; the newer one is the checkout that this file lies in. Each edition is a process of its own with
an empty cache, in which all rows stay compiled. The processes are asked in turns (older, newer,
newer, older, ...), so that clocks and temperature are the same for both.

A row of ``strop bench infer`` is timed as a whole (``time``: milliseconds of a call, from a queue
of calls between two CUDA events) and on the host (``host``: microseconds until a call of the UNet
has come back, with the device idle before; ``loop``: the same within a denoise loop of diffusers'
own; ``watched``: in one where a user's code may run, so that each step looks at the model).
``--measures time`` leaves the host out, which takes most of the time. P6 is
timed from ``optimize`` to the first output, in seconds, each time in a new process with an empty
cache. A row of ``strop bench train`` is timed by the step, in milliseconds, as its contender
"strop-shadow" does it. Timing begins when both editions have built, in the background too, what
they want. The table has medians, their ratio, and the spread of the ratio over the rounds.
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
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

EDITIONS = ("before", "after")
MEASURES = ("time", "host")
HOST_CALLS = 50  # in one sample of the host's time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", type=Path, required=True, help="folder with the older src")
    parser.add_argument(
        "--rows", default="P1,P3,P5-512", help="rows of strop bench infer, and of train"
    )
    parser.add_argument("--rounds", type=int, default=8, help="pairs of samples of a row")
    parser.add_argument("--calls", type=int, default=20, help="calls of a step in one sample")
    parser.add_argument("--measures", default=",".join(MEASURES), help=", ".join(MEASURES))
    parser.add_argument("--tiny", action="store_true", help="tiny models: to try this out")
    parser.add_argument("--out", type=Path, help="JSON file for every sample")
    args = parser.parse_args()
    if not (args.before / "src" / "strop").is_dir():
        parser.error(f"{args.before} has no src/strop: git archive COMMIT src | tar -x -C FOLDER")
    if args.out and args.out.is_dir():
        parser.error(f"--out {args.out} is a folder: name a file in it, such as before_after.json")
    if unknown := set(args.measures.split(",")) - set(MEASURES):
        parser.error(f"--measures {', '.join(sorted(unknown))}: known are {', '.join(MEASURES)}")
    newer = Path(__file__).resolve().parents[1]
    with Edition(args.before, args) as before, Edition(newer, args) as after:
        for result in compare(dict(zip(EDITIONS, (before, after), strict=True)), args):
            if args.out:
                part = args.out.with_suffix(".part")
                part.write_text(json.dumps(result, indent=1))
                part.replace(args.out)


def compare(editions: dict[str, Edition], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield, after each row, all samples so far by row, measure and edition.

    Prints a line for each measure.
    """
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
        yield {
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
        words += [args.measures]
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


def serve(names: list[str], calls: int, is_tiny: bool, measures: list[str]) -> None:
    """Answer "prepare", then a row's name with one sample of each of its measures."""
    answers, sys.stdout = sys.stdout, sys.stderr
    samplers: dict[str, Callable[[], dict[str, float]]] = {}
    for line in sys.stdin:
        word = line.strip()
        if word == "prepare":
            samplers = {name: sampler(name, calls, is_tiny, "host" in measures) for name in names}
            settle()
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


Sampler = Callable[[], dict[str, float]]


def sampler(name: str, calls: int, is_tiny: bool, with_host: bool) -> Sampler:
    """Build and compile what a row needs, and return what measures it then."""
    from strop.bench.infer_rows import ROWS

    row = next((row for row in ROWS if row.name == name), None)
    if row is None:
        return step_sampler(name, calls, is_tiny)
    if row.kind == "start":
        return lambda: {"start": cold_start(name, is_tiny)}
    return call_sampler(row, calls, is_tiny, with_host)


def step_sampler(name: str, calls: int, is_tiny: bool) -> Sampler:
    """Measure training steps; the first ones compile and capture."""
    import torch

    from strop.bench.train_loop import Loop
    from strop.bench.train_models import torch_set_for
    from strop.bench.train_rows import ROWS
    from strop.options import Options

    row = next((row for row in ROWS if row.name == name), None)
    if row is None:
        raise SystemExit(f"no row {name} of strop bench infer or strop bench train")
    row = row.tiny() if is_tiny else row
    contender = next(each for each in row.contenders if each.name == "strop-shadow")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch_set_for(contender.setup, device):
        loop = Loop(contender.work, contender.setup, device)
        loop.prepare(Options.from_environment())
        for _ in range(6):
            loop.step()

    def sample() -> dict[str, float]:
        with torch_set_for(contender.setup, device):
            return {"time": milliseconds(loop.step, calls)}

    return sample


def settle(limit_s: float = 120.0) -> None:
    """Wait until this process and its children use no processor: then the background builds are
    done, which otherwise slow the host down."""
    deadline, used, is_idle = time.monotonic() + limit_s, processor_seconds(), False
    while not is_idle and time.monotonic() < deadline:
        time.sleep(1.0)
        before, used = used, processor_seconds()
        is_idle = used - before < 0.05
    if not is_idle:
        print("timed although the background builds go on", file=sys.stderr)


def processor_seconds() -> float:
    """Return the seconds of processor that this process and its living children have used, by
    proc(5)."""
    children, ticks = defaultdict[int, list[int]](list), dict[int, int]()
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        pid = int(file.parent.name)
        children[int(fields[1])].append(pid)
        ticks[pid] = int(fields[11]) + int(fields[12])
    found, family = 0, [os.getpid()]
    while family:
        pid = family.pop()
        found += ticks[pid]
        family += children[pid]
    return found / os.sysconf("SC_CLK_TCK")


def cold_start(name: str, is_tiny: bool) -> float:
    """Return the seconds that a new process with an empty cache takes from ``optimize`` to the
    first output. This process's own edition is what it runs."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        words = [sys.executable, __file__, "--cold", name, str(is_tiny)]
        environment = os.environ | {"STROP_CACHE_DIR": cache}
        text = subprocess.run(
            words, env=environment, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
    return float(text.splitlines()[-1])


def cold(name: str, is_tiny: bool) -> None:
    """Print what ``cold_start`` returns."""
    import torch

    import strop
    from strop.bench.infer_rows import MODELS, ROWS

    row = next(row for row in ROWS if row.name == name)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = MODELS[row.model]
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    workload = (model.tiny if is_tiny else model.full)(1)(device, dtype)
    given = workload.inputs((64, 64) if is_tiny else row.size, row.batch)
    with torch.no_grad():
        synchronize()
        start = time.perf_counter()
        strop.optimize(workload.target)
        workload.call(workload.target, given)
        synchronize()
    print(time.perf_counter() - start)


def call_sampler(row: Any, calls: int, is_tiny: bool, with_host: bool) -> Sampler:
    """Measure calls of a module, or pictures of a pipeline."""
    import torch

    import strop
    from strop.api import optimize_module
    from strop.bench.infer_rows import MODELS

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
    if row.kind == "picture" or not with_host:
        count = 1 if row.kind == "picture" else calls
        return lambda: {"time": milliseconds(torch.no_grad()(call), count)}

    def sample() -> dict[str, float]:
        found = {"time": milliseconds(torch.no_grad()(call), calls), "host": microseconds(call)}
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
        serve(
            sys.argv[2].split(","), int(sys.argv[3]), sys.argv[4] == "True", sys.argv[5].split(",")
        )
    elif sys.argv[1:2] == ["--cold"]:
        cold(sys.argv[2], sys.argv[3] == "True")
    else:
        main()
