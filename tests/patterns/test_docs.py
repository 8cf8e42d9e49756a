"""The Python of docs/patterns.md runs as it stands, from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.patterns import registry

TEXT = (Path(__file__).parents[2] / "docs" / "patterns.md").read_text()


def run_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STROP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("STROP_STRICT", "1")
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.S | re.M)
    assert len(blocks) == 5
    page = tmp_path / "page.py"  # Triton reads the source of its kernels
    page.write_text("\n".join(blocks))
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_page_runs_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run_page(tmp_path, monkeypatch)
    assert (names["row"].origins, names["row"].misses) == (("RMSNorm",), ())
    assert names["norm"].forward.counters.replays == 2
