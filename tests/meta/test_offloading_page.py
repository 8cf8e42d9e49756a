"""The code of docs/offloading.md runs, in a folder that holds what it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.scripts import run_script

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/offloading.md").read_text()
(BLOCK,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)


@pytest.mark.slow
def test_the_code_runs(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "my-model").symlink_to(tiny_model)
    page = tmp_path / "page.py"
    page.write_text(BLOCK)
    run_script(page)
    assert (tmp_path / "fox.png").exists()
