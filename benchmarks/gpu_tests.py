"""All tests that need a GPU, in several processes that share it: minutes, not an hour.

python benchmarks/gpu_tests.py [--jobs 10] [--gpus 2] [--seconds 400]
    [--only tests/kernels ...] [--rest-of FILE] [--logs FOLDER]

Wants torch, diffusers and pytest, no plugin of it. A process takes a chunk of a file's tests
whenever it is done with one; those of the trainer have processes of their own, with the workspace
of cuBLAS that makes sums repeatable. Tests with the marker "alone", which time something, run
before all others, in one process. tests/gpu_seconds.txt says which tests take long: their chunks
are small and come first. With --gpus 2, every process sees both GPUs, and half of the processes
have the second one as their device 0. Prints a line for each process, then what failed and why, and
what was cut off or never begun, also when it is asked to end itself (SIGTERM). Exits with 1 if
there is any of that. --logs keeps all output.
--rest-of takes what an earlier run of the same code has printed, and runs what was not green in it,
without collecting all tests anew, which takes a minute; or what its processes have printed
(--logs), and leaves out what was green in that.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
INI = """[pytest]
addopts = --import-mode=importlib -p no:cacheprovider
markers =
    gpu: needs an NVIDIA GPU
    alone: times something on a GPU, which no other process may use meanwhile
    slow: more than ten seconds on two cores
    nightly: takes too long for every change
"""
CHUNK, CHUNK_S = 10, 60  # tests of a file, and seconds, that stay in a process: it compiles for all
TRAIN = "tests/train/"
TIMES = ROOT / "tests" / "gpu_seconds.txt"
USUAL_S, USUAL_OF_TRAIN_S = 2.0, 8.0  # of a test whose file is not among these
LEAST_S = 0.05
SHARED, ALONE = "gpu and not alone", "gpu and alone"
REASONS = 40  # lines of a process that say why tests failed
GREEN = ("PASSED", "SKIPPED")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # or each process that uses it starts one a core
}
NOT_GREEN = re.compile(r"^(?:did not end|failed|error): (tests/.+)$", re.M)
RESULT = re.compile(r"^(tests/\S+?::.+?) (PASSED|SKIPPED|FAILED|ERROR|XFAIL)\b", re.M)


@dataclass(frozen=True)
class Worker:
    """A process, where its output goes, and the count of begun chunks that it shares: while that
    is held here, the process can open it."""

    log: Path
    process: Any
    begun: Any

    def kill(self) -> None:
        """End the process and all that it has started: commands that tests run would keep the GPU
        busy."""
        with contextlib.suppress(ProcessLookupError):  # it has not become a group's first yet
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()

    def results(self) -> dict[str, str]:
        """Return how each test went that came to an end."""
        return dict(RESULT.findall(self.log.read_text(errors="replace")))


def pytest_words(ini: Path, marks: str, *words: str) -> list[str]:
    return ["-c", str(ini), f"--rootdir={ROOT}", "-q", "-m", marks, *words]


def collected(ini: Path, marks: str, only: Sequence[str]) -> dict[str, list[str]]:
    """By file."""
    words = pytest_words(ini, marks, "--collect-only", *only)
    command = [sys.executable, "-m", "pytest", *words]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    found = defaultdict[str, list[str]](list)
    for line in text.splitlines():
        if "::" in line and not line.startswith(("ERROR", "FAILED")):
            found[line.split("::")[0]].append(line)
    if "error" in text.splitlines()[-1]:
        sys.exit(f"tests could not be collected:\n{text[-3000:]}")
    return found


class TerminatedError(Exception):
    """Somebody has asked this process to end (SIGTERM)."""


def terminated(*_: Any) -> None:
    raise TerminatedError


def end_all(workers: Sequence[Worker], deadline: float) -> bool:
    """Wait for processes, and kill those that have not ended at ``deadline`` of the clock, or when
    this process has to end, which is told."""
    is_terminated = False
    try:
        for worker in workers:
            worker.process.join(max(deadline - time.monotonic(), 0))
    except TerminatedError:
        is_terminated = True
    for worker in workers:
        if worker.process.is_alive():
            worker.kill()
    for worker in workers:
        worker.process.join()
    return is_terminated


def listed(text: str, only: Sequence[str]) -> dict[str, list[str]]:
    """Return the tests below ``only`` that ``summary`` has printed in ``text``, by file. There are
    none if processes have printed it."""
    found = defaultdict[str, list[str]](list)
    for test in NOT_GREEN.findall(text):
        if any(re.match(rf"{re.escape(place.rstrip('/'))}(/|::|\[|$)", test) for place in only):
            found[test.split("::")[0]].append(test)
    return found


def left_of(text: str, tests: set[str]) -> set[str]:
    """Return those of ``tests`` that ``text``, which processes have printed, does not show as
    green."""
    results = dict(RESULT.findall(text))
    return {test for test in tests if results.get(test) not in GREEN}


def chosen(
    ini: Path, only: Sequence[str], rest_of: str | None
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the tests to run that may share the GPU, and those that need it alone, by file."""
    is_summary = rest_of is not None and not RESULT.search(rest_of)
    found = listed(rest_of or "", only) if is_summary else collected(ini, SHARED, only)
    files = [file for file in with_marker(only) if not is_summary or file in found]
    alone = collected(ini, ALONE, files) if files else {}
    if is_summary:
        alone = among(alone, {test for tests in found.values() for test in tests})
    elif rest_of is not None:
        every = {test for tests in (*found.values(), *alone.values()) for test in tests}
        rest = left_of(rest_of, every)
        found, alone = among(found, rest), among(alone, rest)
    by_itself = {test for tests in alone.values() for test in tests}
    shared = {test for tests in found.values() for test in tests} - by_itself
    return among(found, shared), alone


def among(found: dict[str, list[str]], others: set[str]) -> dict[str, list[str]]:
    """Return the tests that are among ``others``, by file."""
    kept = {file: [test for test in tests if test in others] for file, tests in found.items()}
    return {file: tests for file, tests in kept.items() if tests}


def known_times() -> dict[str, float]:
    """Return the seconds that a test of a file takes."""
    lines = (line.split() for line in TIMES.read_text().splitlines() if line[:1].isdigit())
    return {file: float(seconds) for seconds, file in lines}


def seconds_of(tests: Sequence[str], times: Mapping[str, float]) -> float:
    return sum(seconds_in(test.split("::")[0], times) for test in tests)


def seconds_in(file: str, times: Mapping[str, float]) -> float:
    usual = USUAL_OF_TRAIN_S if file.startswith(TRAIN) else USUAL_S
    return max(times.get(file, usual), LEAST_S)


def chunks_of(found: dict[str, list[str]], times: Mapping[str, float]) -> list[list[str]]:
    """Return chunks of files, the longest first."""
    chunks = []
    for file, tests in found.items():
        size = min(max(int(CHUNK_S / seconds_in(file, times)), 1), CHUNK)
        chunks += [tests[n : n + size] for n in range(0, len(tests), size)]
    return sorted(chunks, key=lambda chunk: -seconds_of(chunk, times))


def processes_for(of_trainer: float, others: float, count: int) -> tuple[int, int]:
    """Divide processes among the seconds of the trainer's tests and others'. A kind that has any
    gets one."""
    mine = round(count * of_trainer / (of_trainer + others))
    mine = min(max(mine, bool(of_trainer)), max(count - bool(others), 1))
    return mine, max(count - mine, int(bool(others)))


def entry_points(folder: Path) -> str:
    """Write what tells torch of its backend "strop" where the package is not installed. Returns the
    folder."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = folder / f"{project['name']}-0.dist-info"
    own.mkdir()
    (own / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (own / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return str(folder)


def run_chunks(
    chunks: Sequence[Sequence[str]],
    begun: Any,
    ini: Path,
    marks: str,
    log: Path,
    env: dict[str, str],
) -> None:
    """Run chunks of tests until all are begun, whose count is shared; exit with 1 if one was not
    green."""
    os.setpgid(0, 0)  # a group of its own, which ends as a whole
    os.environ.update(env)
    with log.open("wb", buffering=0) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    import pytest

    code = 0
    while True:
        with begun.get_lock():
            number, begun.value = begun.value, begun.value + 1
        if number >= len(chunks):
            sys.exit(code)
        code |= bool(pytest.main(pytest_words(ini, marks, "-rfE", "-vv", *chunks[number])))


def with_marker(only: Sequence[str]) -> list[str]:
    """Return the files in which a test has the marker "alone"."""
    places = [ROOT / each.split("::")[0] for each in only]
    files = [
        file
        for place in places
        for file in (sorted(place.rglob("test_*.py")) if place.is_dir() else [place])
    ]
    return [str(file.relative_to(ROOT)) for file in files if "mark.alone" in file.read_text()]


def rotated(process: int, gpus: int) -> dict[str, str]:
    """Return the variable that gives a process another first GPU than its neighbours have, with
    all others behind it for tests that need several."""
    if gpus == 1:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(str((process + n) % gpus) for n in range(gpus))}


def started(
    name: str,
    chunks: Sequence[Sequence[str]],
    count: int,
    ini: Path,
    logs: Path,
    marks: str = SHARED,
    env: dict[str, str] | None = None,
    gpus: int = 1,
) -> list[Worker]:
    """Start processes that divide chunks of tests among themselves."""
    context = multiprocessing.get_context("spawn")
    begun, workers = context.Value("i", 0), []
    for n in range(count):
        log = logs / f"{name}{n}.txt"
        log.touch()
        words = (chunks, begun, ini, marks, log, (env or {}) | rotated(n, gpus))
        process = context.Process(target=run_chunks, args=words)
        process.start()
        workers.append(Worker(log, process, begun))
    return workers


def all_started(
    found: dict[str, list[str]], count: int, gpus: int, ini: Path, logs: Path
) -> list[Worker]:
    """Start processes for the tests of the trainer, and for all others."""
    times = known_times()
    of_trainer, others = (
        chunks_of({file: found[file] for file in found if file.startswith(TRAIN) is kind}, times)
        for kind in (True, False)
    )
    work = (sum(seconds_of(chunk, times) for chunk in kind) for kind in (of_trainer, others))
    mine, rest = processes_for(*work, count)
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return [
        *started("trainer", of_trainer, mine, ini, logs, env=env, gpus=gpus),
        *started("others", others, rest, ini, logs, gpus=gpus),
    ]


def told(worker: Worker, asked: set[str]) -> None:
    """Print how a process went, what failed in it and why."""
    results, code = worker.results(), worker.process.exitcode
    counts = {kind: list(results.values()).count(kind) for kind in sorted({*results.values()})}
    how = ", ".join(f"{count} {kind.lower()}" for kind, count in counts.items())
    print(f"{worker.log.stem:10} exit {code:4}  {how}", flush=True)
    text = worker.log.read_text(errors="replace")
    lines = text.splitlines()
    if code < 0:
        begun = [line.split(" ")[0] for line in lines if line.startswith("tests/")]
        lost = [test for test in begun if test in asked and test not in results]
        print(f"  cut off in {lost[-1] if lost else 'nothing'}")
    reasons = [line[:200] for line in lines if line.startswith("E  ")]
    failed = [line[:200] for line in lines if line.startswith(("FAILED", "ERROR"))]
    for line in (*failed, *reasons[:REASONS]):
        print(f"  {line}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=10, help="processes")
    parser.add_argument("--gpus", type=int, default=1, help="that processes are divided among")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which all are ended")
    parser.add_argument("--only", nargs="+", default=["tests"], help="files or folders of tests")
    parser.add_argument("--rest-of", type=Path, help="output of an earlier run")
    parser.add_argument("--logs", type=Path, help="folder for the whole output")
    args = parser.parse_args()
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        start, ini = time.monotonic(), Path(folder) / "pytest.ini"
        ini.write_text(INI)
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        found, alone = chosen(ini, args.only, args.rest_of and args.rest_of.read_text())
        tests = {test for each in (*found.values(), *alone.values()) for test in each}
        if not tests:
            sys.exit(f"there is no test with the marker gpu in {', '.join(args.only)}")
        paths = [entry_points(Path(folder)), str(ROOT)]
        sys.path[:0] = paths
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (*paths, before)))
        os.environ |= ENVIRONMENT
        workers: list[Worker] = []
        signal.signal(signal.SIGTERM, terminated)
        for begin in (
            lambda: started("alone", chunks_of(alone, {}), 1 if alone else 0, ini, logs, ALONE),
            lambda: all_started(found, args.jobs, args.gpus, ini, logs),
        ):
            begun = begin()
            workers += begun
            if end_all(begun, start + args.seconds):
                break
        for worker in workers:
            told(worker, tests)
        results = {test: how for worker in workers for test, how in worker.results().items()}
        codes = [worker.process.exitcode for worker in workers]
    summary(tests, results, time.monotonic() - start)
    sys.exit(len(results) < len(tests) or any(codes))


def summary(tests: set[str], results: dict[str, str], seconds: float) -> None:
    """Print what was not green, and counts of all."""
    for test in sorted(tests - {*results}):
        print(f"did not end: {test}")
    for test, how in sorted(results.items()):
        if how in ("FAILED", "ERROR"):
            print(f"{how.lower()}: {test}")
    passed, skipped = (list(results.values()).count(how) for how in ("PASSED", "SKIPPED"))
    print(
        f"{passed} green, {skipped} skipped, {len(tests) - passed - skipped} not green,"
        f" of {len(tests)}, {seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
