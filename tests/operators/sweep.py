"""The sweep: every case of torch's table through every way in, into the ledger.

    python -m tests.operators.sweep                      what the ledger lacks or has of old sources
    python -m tests.operators.sweep --only 'add|conv.*'  these operators, each failure printed
    python -m tests.operators.sweep --shard 1/4 --minutes 30

Worker processes run the cases. One that dies, or takes too long, costs its case alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import queue
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass
from typing import IO, Any

import torch

from tests.operators import ledger
from tests.operators.checking import Finding, TooLongError, applies, check
from tests.operators.ledger import Counts, Key, Row
from tests.operators.running import DIRECTIONS, WAYS
from tests.operators.samples import COMMON, DTYPES, EVERY, Case, operators

CASE_SECONDS = 240  # of processor time
SILENT_SECONDS = 1200  # then a worker is ended
CASES_A_WORKER = 250  # torch and the process keep every library and graph that they have loaded
SAVE_SECONDS = 30
MOST_SAMPLES = 12


def keys() -> Iterator[Key]:
    """All that the ledger is to have, types that matter most first."""
    for operator, way in itertools.product(operators(), WAYS):
        yield Key(operator, way, "forward", "errors", "float32")
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        for operator, direction, way in itertools.product(operators(), DIRECTIONS, WAYS):
            if applies(Case(operator, dtype, EVERY), direction):
                yield Key(operator, way, direction, EVERY, name)


def run(key: Key, folder: str, most: int) -> Finding:
    """The case, within its time."""
    case = Case(key.operator, getattr(torch, key.dtype), key.layout)
    most //= (1 if case.dtype in COMMON else 2) * (1 if key.direction == "forward" else 2)
    signal.setitimer(signal.ITIMER_PROF, CASE_SECONDS)
    try:
        return check(case, key.way, key.direction, folder, most)
    except TooLongError:
        return Finding(Counts(failed=1), failures=[f"takes more than {CASE_SECONDS} s"])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def work(folder: str, most: int) -> None:
    """A worker: cases come in by lines, findings go out by lines."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)

    def ring(*_: Any) -> None:
        raise TooLongError

    signal.signal(signal.SIGPROF, ring)
    out, sys.stdout = sys.stdout, sys.stderr  # what operators print is no finding
    for line in sys.stdin:
        key = Key(*json.loads(line))
        found = run(key, folder, most)
        row = {"counts": astuple(found.counts), "reason": found.reason, "said": found.failures}
        print(json.dumps(row), file=out, flush=True)


@dataclass
class Sweep:
    """Hands keys to workers and keeps what they find."""

    todo: queue.SimpleQueue[Key]
    folder: str
    most: int
    deadline: float
    verbose: bool

    def __post_init__(self) -> None:
        self.rows: dict[Key, Row] = {}
        self._unsaved: dict[Key, Row] = {}
        self._lock, self._digest = threading.Lock(), ledger.digest()
        self._saved = time.monotonic()

    def serve(self) -> None:
        """One worker after another, until nothing is left to do."""
        while not self.todo.empty() and time.monotonic() < self.deadline:
            command = [sys.executable, "-m", "tests.operators.sweep", "--worker", self.folder]
            with tempfile.TemporaryFile("w+") as complaints:
                worker = subprocess.Popen(
                    [*command, "--most", str(self.most)],
                    text=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=complaints,
                )
                try:
                    self._feed(worker, complaints)
                finally:
                    worker.kill()
                    worker.wait()

    def _feed(self, worker: subprocess.Popen[str], complaints: IO[str]) -> None:
        assert worker.stdin is not None
        assert worker.stdout is not None
        for _ in range(CASES_A_WORKER):
            if time.monotonic() >= self.deadline:
                return
            try:
                key = self.todo.get_nowait()
            except queue.Empty:
                return
            worker.stdin.write(json.dumps(astuple(key)) + "\n")
            worker.stdin.flush()
            ready, _, _ = select.select([worker.stdout], [], [], SILENT_SECONDS)
            line = worker.stdout.readline() if ready else ""
            if not line:
                complaints.seek(0)
                last = complaints.read().strip().rpartition("\n")[2]
                self._keep(key, Counts(failed=1), f"the process died or hung: {last}"[:160], [])
                return
            found = json.loads(line)
            self._keep(key, Counts(*found["counts"]), found["reason"], found["said"])

    def _keep(self, key: Key, counts: Counts, reason: str, said: list[str]) -> None:
        with self._lock:
            row = self.rows[key] = self._unsaved[key] = Row(self._digest, counts, reason)
            if counts.failed or self.verbose:
                print(f"{' '.join(astuple(key))}: {asdict(row.counts)} {reason}", flush=True)
                for text in said[: None if self.verbose else 3]:
                    print(f"    {text}", flush=True)
            if time.monotonic() - self._saved > SAVE_SECONDS:
                self.save()

    def save(self) -> None:
        ledger.update(self._unsaved)
        self._unsaved, self._saved = {}, time.monotonic()


def wanted(given: argparse.Namespace) -> list[Key]:
    """What is to be run, in order."""
    number, count = map(int, given.shard.split("/"))
    known, now = ledger.read(), ledger.digest()
    found = []
    for place, key in enumerate(keys()):
        row = known.get(key)
        is_known = row is not None and (row.digest == now or given.missing)
        is_chosen = all(
            re.fullmatch(pattern, value)
            for pattern, value in (
                (given.only, key.operator),
                (given.way, key.way),
                (given.direction, key.direction),
                (given.dtype, key.dtype),
            )
        )
        if given.failed and not (row is not None and row.counts.failed):
            continue
        if place % count == number - 1 and is_chosen and (given.again or not is_known):
            found.append(key)
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, what in (
        ("only", "operators"),
        ("way", "ways"),
        ("direction", "directions"),
        ("dtype", "types"),
    ):
        parser.add_argument(f"--{name}", default=".*", metavar="REGEX", help=f"these {what} alone")
    parser.add_argument("--shard", default="1/1", help="part i of n of the cases: i/n")
    parser.add_argument("--again", action="store_true", help="also cases that have not changed")
    parser.add_argument("--missing", action="store_true", help="only what the ledger lacks")
    parser.add_argument("--failed", action="store_true", help="only what has failed")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no case after that")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--most",
        type=int,
        default=MOST_SAMPLES,
        help="samples of a case, half as many of rare types",
    )
    parser.add_argument("--dry", action="store_true", help="leave the ledger as it is")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    given = arguments()
    if given.worker:
        work(given.worker, given.most)
        return 0
    todo: queue.SimpleQueue[Key] = queue.SimpleQueue()
    for key in wanted(given):
        todo.put(key)
    total, started = todo.qsize(), time.monotonic()
    print(f"{total} cases", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        sweep = Sweep(todo, folder, given.most, started + 60 * given.minutes, given.only != ".*")
        if given.dry:
            sweep.save = lambda: None  # type: ignore[method-assign]
        threads = [threading.Thread(target=sweep.serve) for _ in range(given.workers)]
        for thread in threads:
            thread.start()
        while running := [thread for thread in threads if thread.is_alive()]:
            running[0].join(60)
            print(f"{len(sweep.rows)} of {total} in {time.monotonic() - started:.0f} s", flush=True)
    sweep.save()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{(used.ru_utime + used.ru_stime) / 3600:.2f} hours of processor time")
    print(ledger.summary(sweep.rows))
    return int(any(row.counts.failed for row in sweep.rows.values()))


if __name__ == "__main__":
    sys.exit(main())
