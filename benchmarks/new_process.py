"""Run one measurement of a script in a new process whose caches of compilers are empty."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any


def measured_alone(script: str, words: Sequence[str]) -> dict[str, Any]:
    """Return what the script's last line says in JSON, or {"failed": the last line of its
    errors}."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: f"{folder}/{name}" for name in ("STROP_CACHE_DIR", "TRITON_CACHE_DIR")}
        caches["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
        done = subprocess.run(
            [sys.executable, script, *words],
            env=os.environ | caches,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
