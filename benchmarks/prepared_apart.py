"""Prepare contenders in processes of their own at the same time; let one after another measure.

A process calls ``reached`` with the name of each stage that it has behind it, ``wait_for_turn``,
and ``answer`` with its numbers. The one that started it prints each stage with its seconds on
stderr. A process that is not ready after ``limit_s`` ends, and is told with the stage that it was
in and where its code was. Nobody measures before all are ready, so that compilers disturb no
timing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STAGE, READY = "reached: ", "ready"
CACHES = ("STROP_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
LOOK_S = 1.0  # for the stack of a process that takes too long


@dataclass(slots=True)
class Contender:
    """Hold a process, its folder, and the seconds that its stages have taken. ``begun`` and
    ``last`` are times of the monotonic clock: of the start, and of the last stage."""

    scheme: str
    name: str
    folder: Path
    process: subprocess.Popen[str]
    begun: float
    stages: Sequence[str]
    last: float
    prepare_s: dict[str, float] = field(default_factory=dict)
    is_ready: bool = False
    failed: str = ""
    stack: list[str] = field(default_factory=list)

    @property
    def is_waited_for(self) -> bool:
        return not self.failed and not self.is_ready

    def reach(self, stage: str) -> None:
        now = time.monotonic()
        if stage == READY:
            self.is_ready = True
        else:
            self.prepare_s[stage] = round(now - self.last, 2)
        self.last = now
        self.tell(f"{stage}, {now - self.begun:.1f} s")

    def fail(self, why: str) -> None:
        self.failed = why
        self.tell(why)
        self.end()

    def tell(self, what: str) -> None:
        print(f"  {self.scheme} {self.name}: {what}", file=sys.stderr, flush=True)

    def cut(self, limit_s: float, what: str) -> None:
        """End it, and say which stage it was in, and where its code was."""
        before = len(self.errors())
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(LOOK_S)
        self.stack = [line.strip() for line in self.errors()[before:]][:16]
        stage = next((each for each in self.stages if each not in self.prepare_s), what)
        self.fail(f"took more than {limit_s:g} s to {what}: stage {stage!r}")

    def errors(self) -> list[str]:
        return (self.folder / "errors").read_text(errors="replace").strip().splitlines()

    def end(self) -> None:
        """End the group of processes: compilers leave pools of workers behind."""
        with contextlib.suppress(ProcessLookupError):  # all of them may have ended already
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def measure(self, limit_s: float) -> dict[str, Any]:
        """Let it measure if it is ready, and return its numbers, or why there are none."""
        if not self.failed:
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has failed, and its errors say why
                self.process.stdin.write("now\n")
                self.process.stdin.close()
            try:
                self.process.wait(limit_s)
            except subprocess.TimeoutExpired:
                self.cut(limit_s, "measure")
            self.end()
        if not self.failed and self.process.returncode:
            self.fail(last_of(self.errors()) or f"exit {self.process.returncode}")
        if self.failed:
            found = {"failed": self.failed, "prepare_s": self.prepare_s}
            return found | ({"stack": self.stack} if self.stack else {})
        numbers: dict[str, Any] = json.loads((self.folder / "answer.json").read_text())
        return numbers | {"prepare_s": self.prepare_s}


@contextmanager
def prepared(
    commands: dict[tuple[str, str], Callable[[Path], list[str]]],
    folder: Path,
    stages: Sequence[str],
    limit_s: float,
    threads: int,
) -> Iterator[list[Contender]]:
    """Start a process for each scheme and name, with empty caches, and yield them when each is
    ready, has failed, or has had ``limit_s``. ``commands`` give the words of a process from its
    folder; ``threads`` are the compilers that Inductor may run at a time in each. All processes
    end with the block."""
    contenders: list[Contender] = []
    listeners: list[threading.Thread] = []
    try:
        for (scheme, name), words in commands.items():
            own = folder / f"{scheme}-{name}"
            own.mkdir()
            contenders.append(_started(scheme, name, own, words(own), stages, threads))
        listeners += _wait_for_all(contenders, limit_s)
        yield contenders
    finally:
        for each in contenders:
            each.end()
        for listener in listeners:
            listener.join(LOOK_S)


def _started(
    scheme: str, name: str, own: Path, words: list[str], stages: Sequence[str], threads: int
) -> Contender:
    environment = os.environ | {each: str(own / each.lower()) for each in CACHES}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = str(threads)
    with (own / "errors").open("w") as errors:
        process = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            text=True,
        )
    now = time.monotonic()
    return Contender(scheme, name, own, process, now, stages, now)


def _wait_for_all(contenders: Sequence[Contender], limit_s: float) -> list[threading.Thread]:
    """Return the threads that listen to processes."""
    heard: queue.Queue[tuple[Contender, str]] = queue.Queue()
    listeners = [
        threading.Thread(target=_listen, args=(each, heard), daemon=True) for each in contenders
    ]
    for listener in listeners:
        listener.start()
    end = time.monotonic() + limit_s
    while any(each.is_waited_for for each in contenders):
        if (left := end - time.monotonic()) <= 0:
            break
        try:
            contender, line = heard.get(timeout=left)
        except queue.Empty:
            break
        if line.startswith(STAGE):
            contender.reach(line.removeprefix(STAGE).strip())
        elif not line and contender.is_waited_for:  # it has ended
            contender.process.wait()
            contender.fail(last_of(contender.errors()) or f"exit {contender.process.returncode}")
    for each in contenders:
        if each.is_waited_for:
            each.cut(limit_s, "get ready")
    return listeners


def _listen(contender: Contender, heard: queue.Queue[tuple[Contender, str]]) -> None:
    """Put the lines of a process into a queue, and an empty one when it has ended."""
    assert contender.process.stdout is not None
    with contender.process.stdout as lines:
        for line in lines:
            heard.put((contender, line))
    heard.put((contender, ""))


def last_of(lines: Sequence[str]) -> str:
    return lines[-1] if lines else ""


# In the process of a contender


def show_stack_when_asked() -> None:
    """Let the process print where its code is when it takes too long."""
    faulthandler.register(signal.SIGUSR1, all_threads=False)


def reached(stage: str) -> None:
    print(f"{STAGE}{stage}", flush=True)


def wait_for_turn() -> None:
    """Say that this process is ready, and wait until it may measure."""
    reached(READY)
    sys.stdin.readline()


def answer(folder: Path, numbers: dict[str, Any]) -> None:
    (folder / "answer.json").write_text(json.dumps(numbers))
