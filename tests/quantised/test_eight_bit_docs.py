"""The Python of docs/eight-bit.md runs as it stands, and its table has a line for each rule."""

import re
from pathlib import Path

import pytest

from strop.passes.eight_bit_rules import LEAST_WIDTH, RULES

PAGE = Path(__file__).parents[2] / "docs" / "eight-bit.md"


@pytest.mark.filterwarnings("ignore")
def test_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("STROP_CACHE_DIR", str(tmp_path))
    names = {"__name__": "page"}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "docs/eight-bit.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "80 linears in int8" in printed
    assert "(0 eager" in printed
    assert len(names["errors"]) > 80
    assert names["refused"] == ()


def test_the_page_has_the_numbers_of_the_rules():
    text = PAGE.read_text()
    table = text.partition("| exact | because |")[2].partition("\n\n")[0].strip().splitlines()[1:]
    assert len(table) == len(RULES) - 2  # three of weights and factors are one line
    assert f"fewer than {LEAST_WIDTH} channels" in text
