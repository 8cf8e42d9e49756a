"""What is checked in: small, and the same on every machine."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_TREE_BYTES = 40 << 20
# Written apart, so that this file passes its own test.
MACHINE_PATH = re.compile(rb"(?<![\w.<>-])/(?:" + rb"work|root|home|mnt|Users" + rb")/\w")

pytestmark = pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="not a git checkout"
)


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    return [ROOT / name for name in listed.stdout.decode().split("\0") if (ROOT / name).is_file()]


def test_the_tree_is_small() -> None:
    sizes = {file: file.stat().st_size for file in tracked()}
    largest = sorted(sizes, key=lambda file: -sizes[file])[:3]
    assert sum(sizes.values()) <= MAX_TREE_BYTES, f"the largest files are {largest}"


def test_no_path_of_one_machine() -> None:
    for file in tracked():
        data = file.read_bytes()
        if b"\0" in data[:8192]:
            continue
        found = MACHINE_PATH.search(data)
        assert found is None, f"{file.relative_to(ROOT)} names {found and found[0].decode()}..."
