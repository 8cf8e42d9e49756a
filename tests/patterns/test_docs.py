"""The Python of docs/patterns.md runs as it stands, from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.patterns import registry
from tests.scripts import run_script

TEXT = (Path(__file__).parents[2] / "docs" / "patterns.md").read_text()


def page_of(tmp_path: Path) -> Path:
    """In a file: Triton reads the source of its kernels."""
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.S | re.M)
    assert len(blocks) == 5
    page = tmp_path / "page.py"
    page.write_text("\n".join(blocks))
    return page


def run_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STROP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("STROP_STRICT", "1")
    page = page_of(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(page.read_text(), str(page), "exec"), names)
    assert not registry.active()
    return names


@pytest.mark.skipif(torch.cuda.is_available(), reason="the test below runs it")
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    row = run_page(tmp_path, monkeypatch)["row"]
    shown = re.search(r"the last line prints `(.*?)`", TEXT)
    assert shown is not None
    assert f"{row.name} {len(row.origins)} {row.misses}" == shown[1]


def test_its_triton_kernel_in_the_interpreter(tmp_path: Path) -> None:
    """On a CPU, where the page itself leaves it out."""
    pytest.importorskip("triton")
    page = page_of(tmp_path)
    text = page.read_text()
    assert "when=fits_a_block, " in text
    page.write_text(text.replace("when=fits_a_block, ", ""))
    done = run_script(page, STROP_CHECK="1", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert done.stdout.endswith("triton_rms_norm 1 ()\n")
    assert "inaccurate" not in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_page_runs_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run_page(tmp_path, monkeypatch)
    assert (names["row"].origins, names["row"].misses) == (("RMSNorm",), ())
    assert names["norm"].forward.counters.replays == 2
