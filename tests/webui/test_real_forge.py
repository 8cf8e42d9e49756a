"""The extension with Forge's own backend, from the checkout that FORGE_DIR names, on a CPU.

FORGE_PYTHON names a Python that has what the backend imports, if that is another one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = os.environ.get("FORGE_DIR", "")
PYTHON = os.environ.get("FORGE_PYTHON", sys.executable)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="FORGE_DIR names no checkout of Forge"),
]


def test_latents_are_those_without_the_extension(cache_folder: Path) -> None:
    """3 sizes x 4 sets of LoRA x a ControlNet on and off: two graphs, nothing in eager."""
    root = Path(__file__).parents[2]
    paths = [CHECKOUT, str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")]
    run = subprocess.run(
        [PYTHON, "-m", "tests.webui.forge_checkout"],
        env={**os.environ, "PYTHONPATH": ":".join(paths), "STROP_CACHE_DIR": str(cache_folder)},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["finite"]
    assert found["worst"] <= 1e-3
    assert found["pictures"] == 30
    assert found["lines"] == ["Strop ran 2 of 2 calls compiled"]
    assert (found["graphs"], found["eager"]) == (2, 0)
    assert found["restored"]
