"""All rows of ``strop bench infer``, with their peers, random shapes and the ladder, on all GPUs.

python benchmarks/all_rows.py --out FOLDER [--seconds 570] [--only steps,pictures ...] [--commit C]

Each run is one command of ``strop bench infer``, with a GPU and a share of the cores to itself;
results are FOLDER/RUN/ROW_h100_DATE.json, and what it said is FOLDER/RUN.txt. The longest begin
first; what no longer fits into the time is named at the end, and not begun. A cold start comes
last, when nothing else is at work. All of it wants 40 minutes of one H100.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

START_S = 20.0  # of a command, imports and the last file among it


@dataclass(frozen=True, slots=True)
class Run:
    """A command by its name, and about how long it takes on an H100 with an empty cache."""

    name: str
    words: str
    seconds: float
    is_alone: bool = False


RUNS = (
    Run("steps", "P1 P2 P2b P3 P4 --peers eager,eager-graph", 180),
    Run("inductor-P1-P3", "P1 P3 --peers eager-graph,inductor,inductor-graph", 330),
    Run("inductor-P2-P4", "P2 P2b P4 --peers eager-graph,inductor,inductor-graph", 420),
    Run("pictures", "P5-512 P5-768 P5-1024 P5x --peers eager", 220),
    Run("from-pictures", "P5-512-img2img P5-768-img2img P5-1024-img2img --peers eager", 135),
    Run("ladder", "P1 --ablate --peers eager-graph", 215),
    Run("random-unet", "P1 --random 12 --variants --peers eager-graph", 200),
    Run("random-sdxl", "P3 --random 12 --peers eager-graph", 150),
    Run("random-decoder", "P4-512 --random 12 --peers eager-graph", 95),
    Run("random-pictures", "P5-512 --random 4 --peers eager", 110),
    Run("random-sdxl-pictures", "P5x --random 4 --peers eager", 170),
    Run("memory", "P7 --peers eager", 60),
    Run("start", "P6 --peers ''", 45, is_alone=True),
)


class Queue:
    """What is left to run, for one thread a GPU."""

    def __init__(self, runs: list[Run], args: argparse.Namespace, gpus: int) -> None:
        self._left = sorted(runs, key=lambda run: -run.seconds)
        self._args, self._end = args, time.monotonic() + args.seconds
        cores = sorted(os.sched_getaffinity(0))
        self._cores = [
            cores[n * len(cores) // gpus : (n + 1) * len(cores) // gpus] for n in range(gpus)
        ]
        self._lock = threading.Lock()
        self.failed = list[str]()

    def work(self, gpu: int) -> None:
        while (run := self._next()) is not None:
            self.perform(run, gpu)

    def _next(self) -> Run | None:
        with self._lock:
            for run in self._left:
                if not run.is_alone and self._fits(run):
                    self._left.remove(run)
                    return run
        return None

    def _fits(self, run: Run) -> bool:
        return time.monotonic() + run.seconds <= self._end

    def last(self) -> list[str]:
        """Those that want to be alone; the names of all that did not fit."""
        for run in [run for run in self._left if run.is_alone and self._fits(run)]:
            self._left.remove(run)
            self.perform(run, 0)
        return [run.name for run in self._left]

    def perform(self, run: Run, gpu: int) -> None:
        budget = max(min(1.5 * run.seconds, self._end - time.monotonic()) - START_S, 10.0)
        command = f"{sys.executable} -m strop bench infer {run.words} --budget {budget:.0f}"
        command += f" --out {self._args.out / run.name} --commit '{self._args.commit}'"
        (self._args.out / run.name).mkdir(parents=True, exist_ok=True)
        cores = ",".join(map(str, self._cores[gpu]))
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
        start = time.monotonic()
        with (self._args.out / f"{run.name}.txt").open("w") as said:
            done = subprocess.run(
                f"taskset -c {cores} {command}",
                shell=True,
                env=env,
                stdout=said,
                stderr=subprocess.STDOUT,
                check=False,
            )
        took = time.monotonic() - start
        if done.returncode:
            self.failed.append(run.name)
        print(f"{run.name}: exit {done.returncode} after {took:.0f} s on GPU {gpu}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3600.0, help="for everything")
    parser.add_argument("--only", default="", help=", ".join(run.name for run in RUNS))
    parser.add_argument("--commit", default="", help="for the JSON, instead of the checkout's")
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else [run.name for run in RUNS]
    unknown = set(wanted) - {run.name for run in RUNS}
    if unknown:
        parser.error(f"no run {', '.join(sorted(unknown))}: {', '.join(run.name for run in RUNS)}")
    gpus = torch.cuda.device_count()
    if not gpus:
        parser.error("needs an NVIDIA GPU")
    queue = Queue([run for run in RUNS if run.name in wanted], args, gpus)
    threads = [threading.Thread(target=queue.work, args=(gpu,)) for gpu in range(gpus)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    missing = queue.last()
    print(f"left out, for want of time: {', '.join(missing) or 'nothing'}")
    sys.exit(bool(missing or queue.failed))


if __name__ == "__main__":
    main()
