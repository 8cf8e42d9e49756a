"""Run a user's script in a process of its own. Linears on a CPU are torch's, as in all tests but
those of our own (see conftest.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_script(script: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run it in its folder, with a cache there and Strop strict, and these variables. It has to
    end well."""
    folder = script.parent
    environment = os.environ | {"STROP_CACHE_DIR": str(folder / "cache"), "STROP_STRICT": "1"}
    if "TEST_CPU_LINEARS" not in os.environ:
        environment["STROP_KERNELS_OFF"] = "cpu_linear"
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env=environment | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done
