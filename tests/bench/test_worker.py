"""The process that a benchmark measures in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from strop.bench import worker
from tests.waiting import wait_until

START_S = 60.0  # imports of torch are in it
STOPPED = """
import sys
from strop.bench import worker

class Sleeping(worker.Worker):
    def __init__(self):
        real, worker.sys.executable = sys.executable, sys.argv[1]
        super().__init__()
        worker.sys.executable = real
        print(self._process.pid, flush=True)

with Sleeping() as one:
    one.perform({}, 600.0)
"""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def catches(pid: int, kind: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (kind - 1) & 1)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_a_worker_stands_still_and_goes_on(tmp_path: Path) -> None:
    with worker.Worker() as one:
        pid = one._process.pid
        one.pause()
        wait_until(lambda: state_of(pid) == "T", START_S)
        one.resume()
        wait_until(lambda: state_of(pid) != "T", START_S)
        one.pause()
    assert not is_alive(pid), "one that stands still can be ended"
    one.resume()  # of none


def test_a_worker_ends_with_a_process_that_is_told_to_stop(tmp_path: Path) -> None:
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nsleep 600\n")
    sleeper.chmod(0o755)
    command = [sys.executable, "-c", STOPPED, str(sleeper)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert is_alive(pid)
        wait_until(lambda: catches(process.pid, signal.SIGTERM), START_S)  # it waits for the worker
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    wait_until(lambda: not is_alive(pid), START_S)
