"""One measurement in a process of its own: a fresh start, and a hang that can be cut."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Task = Mapping[str, Any]  # {"do": "peer" or "compile", "case": its name, "device": ..., ...}


def run_apart(task: Task, limit_s: float) -> dict[str, Any]:
    """The task's result, or {"failed": why}. The process and its children end at ``limit_s``."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log.txt"
        command = [sys.executable, "-m", "strop.bench.worker", json.dumps(dict(task)), str(answer)]
        with log.open("w") as stream:
            process = subprocess.Popen(
                command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return {"failed": f"cut after {limit_s:.0f} s"}
            finally:
                _end(process)
        if answer.is_file():
            result: dict[str, Any] = json.loads(answer.read_text())
            return result | {"process_s": round(time.perf_counter() - start, 2)}
        lines = log.read_text(errors="replace").strip().splitlines()
        return {"failed": f"exit {process.returncode}", "log": lines[-12:]}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process group: compilers leave pools of workers behind."""
    with contextlib.suppress(ProcessLookupError):  # all of them may have ended already
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def perform(task: Task) -> dict[str, Any]:
    """Run a task in this process."""
    import torch

    from strop.bench import compile as compile_bench
    from strop.bench import peers
    from strop.bench.cases import case_named

    case, device = case_named(task["case"]), torch.device(task["device"])
    if task["do"] == "peer":
        return peers.measure(case, device, task["peer"], task["samples"])
    return compile_bench.measure_here(case, device, task["cache_dir"], task["num_shapes"])


def main() -> None:
    result = perform(json.loads(sys.argv[1]))
    part = Path(sys.argv[2] + ".part")
    part.write_text(json.dumps(result))
    part.replace(sys.argv[2])


if __name__ == "__main__":
    main()
