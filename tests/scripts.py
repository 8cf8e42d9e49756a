"""Run a user's script in a process of its own."""

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
