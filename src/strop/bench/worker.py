"""Make one measurement in a process of its own: a fresh start, and a hang that can be cut."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

Task = Mapping[str, Any]  # {"do": "rows", "random", "switches", "start", "compile" or "train"}

LOOK_S = 0.05  # of a process that waits for its turn


def run_apart(task: Task, limit_s: float) -> dict[str, Any]:
    """Run a task in a process of its own; return its result, or {"failed": why}. The process and
    its children end at ``limit_s``."""
    with Worker() as worker:
        return worker.perform(task, limit_s)


class Worker:
    """Run a process that has begun to import what tasks need, and waits for its only one.
    ``variables`` is its whole environment; without, it gets what this process has."""

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._answer = Path(self._folder.name) / "answer.json"
        self._log = Path(self._folder.name) / "log.txt"
        with self._log.open("w") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "strop.bench.worker", str(self._answer)],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=None if variables is None else dict(variables),
            )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def perform(self, task: Task, limit_s: float) -> dict[str, Any]:
        """Return the result, or {"failed": why, "partial": what was there by then}."""
        start = time.perf_counter()
        self.begin(task)
        try:
            with stopped_by_exception():
                self._process.wait(max(limit_s, 0.0))
        except subprocess.TimeoutExpired:
            return self.cut(limit_s)
        finally:
            self._end()
        return self.answer() | {"process_s": round(time.perf_counter() - start, 2)}

    def begin(self, task: Task) -> None:
        """Hand the task over; the process works on it from now on."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has failed already, and its log says why
            self._process.stdin.write(json.dumps(dict(task)).encode())
            self._process.stdin.close()

    @property
    def is_ready(self) -> bool:
        """Tell whether a task that has a turn is ready for it."""
        return _ready(self._answer).exists()

    def give_turn(self) -> None:
        """Let it go on."""
        _turn(self._answer).touch()

    def pause(self) -> None:
        """Have the process and its children stand still."""
        self._tell(signal.SIGSTOP)

    def resume(self) -> None:
        """Have them go on."""
        self._tell(signal.SIGCONT)

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def cut(self, limit_s: float) -> dict[str, Any]:
        """Return what there is of a task that is given up."""
        return {"failed": f"cut after {limit_s:.0f} s"} | self._partial()

    def answer(self) -> dict[str, Any]:
        """Return the result of a process that is over, or {"failed": why}."""
        if self._answer.is_file():
            result: dict[str, Any] = json.loads(self._answer.read_text())
            return result
        log = self._log.read_text(errors="replace").replace(f"{Path.cwd()}{os.sep}", "")
        lines = log.strip().splitlines()  # files as the repository names them, wherever it lies
        code = self._process.returncode
        return {"failed": f"exit {code}", "log": lines[-12:]} | self._partial()

    def _partial(self) -> dict[str, Any]:
        saved = _saved(self._answer)
        return {"partial": json.loads(saved.read_text())} if saved.is_file() else {}

    def _end(self) -> None:
        """End the process group: compilers leave pools of workers behind."""
        self._tell(signal.SIGKILL)
        self._process.wait()

    def _tell(self, what: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # all of them may have ended already
            os.killpg(self._process.pid, what)

    def close(self) -> None:
        self._end()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._folder.cleanup()


@contextlib.contextmanager
def stopped_by_exception() -> Iterator[None]:
    """Raise SystemExit where this process is told to stop, so that a worker ends with it. Its
    group outlives it otherwise, and the next row shares the GPU with what it runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _saved(answer: Path) -> Path:
    return answer.with_suffix(".saved")


def _ready(answer: Path) -> Path:
    return answer.with_suffix(".ready")


def _turn(answer: Path) -> Path:
    return answer.with_suffix(".turn")


def _wait_for_turn(answer: Path) -> None:
    _ready(answer).touch()
    while not _turn(answer).exists():
        time.sleep(LOOK_S)


def _write(value: Any, path: Path) -> None:
    part = Path(f"{path}.part")
    part.write_text(json.dumps(value))
    part.replace(path)


def _save(answer: Path, found: dict[str, Any]) -> None:
    _write(found, _saved(answer))


def perform(task: Task, answer: Path) -> dict[str, Any]:
    """Run a task in this process; what it saves on the way lies beside ``answer``."""
    import torch

    from strop.bench import compile as compile_bench
    from strop.bench import infer, train
    from strop.bench.cases import case_named

    if task["do"] == "compile":
        case, device = case_named(task["case"]), torch.device(task["device"])
        return compile_bench.measure_here(case, device, task["cache_dir"], task["num_shapes"])
    save = partial(_save, answer)
    if task["do"] == "train":
        return train.perform(task, save)
    return infer.perform(task, save, partial(_wait_for_turn, answer))


def main() -> None:
    from strop.bench.models import load_libraries

    load_libraries()  # while nobody waits
    answer = Path(sys.argv[1])
    task = json.loads(sys.stdin.read())
    _write(perform(task, answer), answer)


if __name__ == "__main__":
    main()
