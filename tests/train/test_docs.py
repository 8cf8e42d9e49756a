"""The Python of docs/training.md runs as it stands, from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "training.md").read_text()


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.S | re.M)
    assert len(blocks) == 5
    exec(compile("\n".join(blocks), "docs/training.md", "exec"), {"__name__": "page"})
    assert (tmp_path / "unet_ema" / "config.json").exists()
    assert (tmp_path / "unet" / "config.json").exists()
