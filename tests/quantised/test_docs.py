"""The Python of docs/quantised.md runs as it stands."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "quantised.md"


def test_the_page_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torchao", reason="needs torchao")
    monkeypatch.setenv("STROP_CACHE_DIR", str(tmp_path))
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    exec(compile(block, "docs/quantised.md", "exec"), {"__name__": "page"})
    printed = capsys.readouterr().out
    assert "(0 eager" in printed
    assert "2 linear" in printed
