"""The code blocks of the README run as they stand, and its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from strop.models import sprites

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)


def test_the_quickstart_is_short() -> None:
    assert len(BLOCKS) == 3
    assert BLOCKS[0].count("\n") <= 15


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_code_block(number: int, tmp_path: Path) -> None:
    """In a process of its own, without warnings as errors: users have none either."""
    if "sprites" in BLOCKS[number] and not sprites.WEIGHTS.exists():
        pytest.skip("the weights are not trained yet")
    script = tmp_path / f"block_{number}.py"
    script.write_text(BLOCKS[number])
    environment = os.environ | {"STROP_CACHE_DIR": str(tmp_path / "cache"), "STROP_STRICT": "1"}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda f: str(f.relative_to(ROOT)))
def test_links(file: Path) -> None:
    text = re.sub(r"New file `[^`]+`", "", file.read_text())  # of a recipe
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (file.parent / target).exists(), f"{file.name} links to {target}"
    for path in re.findall(r"`((?:src|tests|docs|examples)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), f"{file.name} names {path}"
    for number in re.findall(r"decisions/(\d{4})", text):
        assert list((ROOT / "docs" / "decisions").glob(f"{number}-*.md")), number
