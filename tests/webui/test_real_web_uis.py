"""The extension with the web UIs' own code on a CPU, each in a process of its own.

FORGE_DIR names a checkout of Forge, WEBUI_DIR one of A1111 whose ``repositories`` have been cloned
(it does so when it starts first). WEBUI_PYTHON names a Python that has what they import, if that is
another one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FORGE, A1111 = os.environ.get("FORGE_DIR", ""), os.environ.get("WEBUI_DIR", "")
PYTHON = os.environ.get("WEBUI_PYTHON", sys.executable)
ROOT = Path(__file__).parents[2]


def drawn(cache_folder: Path, module: str, checkout: str, *also: str) -> Any:
    """Run a script of the tests with folders in its path. Return what it prints last."""
    paths = [*also, str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    run = subprocess.run(
        [PYTHON, "-m", module, checkout],
        env={**os.environ, "PYTHONPATH": ":".join(paths), "STROP_CACHE_DIR": str(cache_folder)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def assert_good(found: Any, pictures: int, graphs: int) -> None:
    assert found["finite"]
    assert found["worst"] <= 1e-3
    assert found["pictures"] == pictures
    assert found["lines"] == ["Strop ran 2 of 2 calls compiled"]
    assert (found["graphs"], found["eager"]) == (graphs, 0)
    assert found["restored"]


@pytest.mark.slow
@pytest.mark.skipif(not FORGE, reason="FORGE_DIR names no checkout of Forge")
def test_forge(cache_folder: Path) -> None:
    """3 sizes x 5 turns of LoRA x a ControlNet on and off: nothing in eager. There is a graph for
    each of the two, and none more for LoRA."""
    found = drawn(cache_folder, "tests.webui.forge_checkout", FORGE, FORGE)
    assert_good(found, pictures=30, graphs=2)


@pytest.mark.slow
@pytest.mark.skipif(not A1111, reason="WEBUI_DIR names no checkout of A1111")
def test_a1111(cache_folder: Path) -> None:
    """3 sizes x 5 turns of LoRA: one graph, nothing in eager."""
    original = f"{A1111}/repositories/stable-diffusion-stability-ai"
    found = drawn(cache_folder, "tests.webui.a1111_checkout", A1111, original)
    assert_good(found, pictures=15, graphs=1)
