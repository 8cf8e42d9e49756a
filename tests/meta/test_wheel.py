"""What ``pip install`` puts into an environment: every file of the package, and the command."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "from setuptools import build_meta; print('built', build_meta.build_wheel({folder!r}))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of a copy of the sources: a build leaves folders behind."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignored)
    done = subprocess.run(
        [sys.executable, "-c", BUILD.format(folder=str(folder))],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return zipfile.ZipFile(folder / done.stdout.split()[-1])


def test_no_file_of_the_package_is_missing(wheel: zipfile.ZipFile) -> None:
    """A header or a weight that is left out is missed only when a kernel is compiled with it."""
    package = ROOT / "src" / "strop"
    files = {
        str(path.relative_to(package.parent))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    inside = {name for name in wheel.namelist() if name.startswith("strop/")}
    assert files - inside == set()
    assert inside - files == set()


def test_it_brings_the_command_and_the_backend(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("/entry_points.txt"))
    entries = wheel.read(name).decode()
    assert "strop = strop.cli:main" in entries
    assert "[torch_dynamo_backends]\nstrop = strop.backend:dynamo_backend" in entries


def test_extras_that_messages_name_are_there(wheel: zipfile.ZipFile) -> None:
    """Whoever is told to install strop[serve] gets what is missing."""
    (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    given = set(re.findall(r"^Provides-Extra: (.+)$", wheel.read(name).decode(), re.MULTILINE))
    places = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    told: set[str] = set()
    for path in places:
        for extras in re.findall(r"strop\[([a-z0-9,]+)\]", path.read_text(encoding="utf-8")):
            told |= set(extras.split(","))
    assert told - given == set()
    assert {"diffusion", "train", "serve", "ray"} <= given
