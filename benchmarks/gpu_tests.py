"""All tests that need a GPU, in several processes that share it: minutes, not an hour.

python benchmarks/gpu_tests.py [--jobs 10] [--seconds 400] [--only tests/kernels ...]

Wants torch, diffusers and pytest, no plugin of it. Tests go to processes in chunks of a file; the
trainer's have the workspace of cuBLAS that makes sums repeatable. Prints a line for each process,
then what failed and why, or in which test it was cut off. Exits with 1 if anything failed, was cut
off, or did not run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INI = """[pytest]
addopts = --import-mode=importlib -p no:cacheprovider
markers =
    gpu: needs an NVIDIA GPU
    slow: more than ten seconds on two cores
    nightly: takes too long for every change
"""
CHUNK = 15  # tests of a file that stay in one process, which has imported and compiled for them
TRAIN = "tests/train/"
OF_TRAIN = 2  # tests elsewhere that take as long as one of the trainer
SUMMARY = re.compile(r"\d+ (?:passed|failed|skipped|error).* in [\d.]+s")
RESULT = re.compile(r"^(tests/\S+?::.+?) (PASSED|SKIPPED|FAILED|ERROR|XFAIL)\b", re.M)


@dataclass
class Job:
    """Tests of one process."""

    is_of_trainer: bool
    tests: list[str] = field(default_factory=list)


def pytest(ini: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-c", str(ini), f"--rootdir={ROOT}", "-q", *words]


def collected(ini: Path, only: Sequence[str]) -> dict[str, list[str]]:
    """By file."""
    command = pytest(ini, "-m", "gpu", "--collect-only", *only)
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    found = defaultdict[str, list[str]](list)
    for line in text.splitlines():
        if "::" in line and not line.startswith(("ERROR", "FAILED")):
            found[line.split("::")[0]].append(line)
    if not found or "error" in text.splitlines()[-1]:
        sys.exit(f"tests could not be collected:\n{text[-3000:]}")
    return found


def shared(found: dict[str, list[str]], count: int) -> list[Job]:
    """Chunks of files, the largest first, each to who has least."""
    work = {
        kind: sum(len(t) for f, t in found.items() if f.startswith(TRAIN) is kind)
        for kind in (True, False)
    }
    work[True] *= OF_TRAIN
    of_trainer = round(count * work[True] / sum(work.values()))
    of_trainer = min(max(of_trainer, bool(work[True])), count - bool(work[False]))
    jobs = [Job(number < of_trainer) for number in range(count)]
    chunks = [
        (file, tests[n : n + CHUNK])
        for file, tests in found.items()
        for n in range(0, len(tests), CHUNK)
    ]
    for file, chunk in sorted(chunks, key=lambda each: -len(each[1])):
        mine = [job for job in jobs if job.is_of_trainer is file.startswith(TRAIN)]
        min(mine, key=lambda job: len(job.tests)).tests += chunk
    return [job for job in jobs if job.tests]


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


def begun(job: Job, ini: Path, log: Path, path: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (path, env.get("PYTHONPATH"))))
    if job.is_of_trainer:
        env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    with log.open("wb") as out:
        return subprocess.Popen(
            pytest(ini, "-m", "gpu", "-rfE", "-vv", *job.tests),
            cwd=ROOT,
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def told(number: int, job: Job, log: Path, code: int) -> tuple[int, int]:
    """How many of its tests are green, and how many skipped themselves, having said how it went."""
    text = log.read_text(errors="replace")
    summary, results = SUMMARY.findall(text), dict(RESULT.findall(text))
    how = summary[-1] if summary else f"cut off in {_first_without(results, job)}"
    print(f"{number:3}  {len(job.tests):4} tests  exit {code:4}  {how}", flush=True)
    if code:
        marks = ("FAILED", "ERROR", "E  ")
        print("\n".join([line[:200] for line in text.splitlines() if line.startswith(marks)][:20]))
    passed, skipped = (
        sum(result == kind for result in results.values()) for kind in ("PASSED", "SKIPPED")
    )
    return passed, skipped


def _first_without(results: Mapping[str, str], job: Job) -> str:
    """Return the test that has no result though all before it have."""
    return next((test for test in job.tests if test not in results), "nothing")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=10, help="processes")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which all are ended")
    parser.add_argument("--only", nargs="+", default=["tests"], help="files or folders of tests")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start, ini = time.monotonic(), Path(folder) / "pytest.ini"
        ini.write_text(INI)
        jobs = shared(collected(ini, args.only), args.jobs)
        logs = [Path(folder) / f"{number}.txt" for number in range(len(jobs))]
        path = entry_points(Path(folder))
        running = [begun(job, ini, log, path) for job, log in zip(jobs, logs, strict=True)]
        for process in running:
            try:
                process.wait(max(args.seconds - (time.monotonic() - start), 1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        codes = [process.returncode for process in running]
        each = zip(range(len(jobs)), jobs, logs, codes, strict=True)
        passed, skipped = map(sum, zip(*(told(*one) for one in each), strict=True))
    count, took = sum(len(job.tests) for job in jobs), time.monotonic() - start
    print(
        f"{passed} green, {skipped} skipped, {count - passed - skipped} not green, of {count} "
        f"in {len(jobs)} processes, {took:.0f} s"
    )
    sys.exit(passed + skipped < count or any(codes))


if __name__ == "__main__":
    main()
