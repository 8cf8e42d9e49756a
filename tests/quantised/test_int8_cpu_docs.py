"""The Python of docs/int8-cpu.md runs as it stands."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "int8-cpu.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)


def run(number, folder, monkeypatch, capsys):
    pytest.importorskip("torchao", reason="needs torchao")
    pytest.importorskip("transformers", reason="needs transformers")
    monkeypatch.setenv("STROP_CACHE_DIR", str(folder))
    exec(compile(BLOCKS[number], "docs/int8-cpu.md", "exec"), {"__name__": "page"})
    printed = capsys.readouterr().out
    assert "(0 eager" in printed
    assert "codes_" in printed
    return printed


@pytest.mark.filterwarnings("ignore")
def test_a_small_bert(tmp_path, monkeypatch, capsys):
    printed = run(0, tmp_path, monkeypatch, capsys)
    errors = [float(text) for text in re.findall(r"^off by (\S+)$", printed, re.M)]
    assert len(errors) == 2
    assert all(0.005 < error < 0.05 for error in errors)
    assert "1 graph, 0 recompiles" in printed


@pytest.mark.filterwarnings("ignore")
def test_the_sprites_models(tmp_path, monkeypatch, capsys):
    assert "torch.Size([1, 4, 16, 24])" in run(1, tmp_path, monkeypatch, capsys)


def test_the_page_has_two_blocks():
    assert len(BLOCKS) == 2
