"""Allow one training at a time in an output folder.

Two processes that do not know of each other, as Slurm starts them or a script that is run twice,
would write one metrics file and each other's checkpoints. The lock is the kernel's (flock): it ends
with its process, however that ends. ``filelock`` knows what file systems do otherwise.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from strop.errors import TrainingError
from strop.train import files

NAME = ".lock"
HOLDER = ".lock.json"  # apart, as who asks for a lock empties its file


class Hold:
    """Hold an output folder that is this training's alone, until ``release`` or the process's
    end."""

    def __init__(self, output: Path, warn: Callable[[str], None]) -> None:
        """Raises TrainingError, which says who holds the folder."""
        self.output = output
        self._lock = FileLock(output / NAME, timeout=0, thread_local=False)
        try:
            self._lock.acquire()
        except Timeout:
            held = TrainingError(
                f"{output} is where another training writes: {_holder(output)}. Wait until it ends,"
                " or choose another --output_dir. (Processes train together only where torchrun,"
                " srun or --num_processes has started them as one group.)"
            )
            raise held from None
        except NotImplementedError:
            warn(f"the file system of {output} has no locks: no other training may write there")
            return
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        files.write_json(
            output / HOLDER,
            {"process": os.getpid(), "host": socket.gethostname(), "since": started},
        )

    def release(self) -> None:
        if self._lock.is_locked:
            (self.output / HOLDER).unlink(missing_ok=True)
            self._lock.release()


def _holder(output: Path) -> str:
    try:
        known = json.loads((output / HOLDER).read_text())
        return f"process {known['process']} on {known['host']}, since {known['since']}"
    except (OSError, ValueError, LookupError, TypeError):  # it has not written that yet
        return "a process that has just started"
