"""``strop cache``: what it says, and what it removes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from strop.runtime.build.cache import DiskCache

from .conftest import Invoke, said


@pytest.fixture
def store(tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> DiskCache:
    """Two plans and a kernel, unused for 1, 10 and 100 days."""
    store = DiskCache(tmp_path / "cache")
    monkeypatch.setenv("STROP_CACHE_DIR", str(store.root))
    for days, (kind, key) in zip(
        (1, 10, 100), [("plan", "a"), ("plan", "b"), ("so", "c")], strict=True
    ):
        used = time.time() - days * 86400
        os.utime(store.write(kind, key, bytes(1000)), (used, used))
    return store


def keys(store: DiskCache) -> set[str]:
    return {entry.key for entry in store.entries()}


def test_list(invoke: Invoke, store: DiskCache) -> None:
    text = said(invoke("cache", "list"))
    assert "3 entries, 3.059 KiB" in text
    assert "plan 2 2.039 KiB last used 24 h ago, longest unused 10 d ago compiled graphs" in text
    assert "so 1 1.02 KiB last used 14 w ago" in text
    assert "so/c" not in text
    assert "so/c 1.02 KiB 14 w ago plan/b" in said(invoke("cache", "list", "--all"))


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["--age", "30d"], {"a", "b"}),
        (["--size", "2KiB"], {"a"}),
        (["--size", "1GB", "--age", "2d"], {"a"}),
        (["--size", "0"], set()),
    ],
    ids=" ".join,
)
def test_prune(invoke: Invoke, store: DiskCache, words: list[str], left: set[str]) -> None:
    result = invoke("cache", "prune", *words)
    assert result.exit_code == 0, result.output
    assert keys(store) == left
    assert f"removed {(3 - len(left)) * 1044 / 1024:.4g} KiB" in said(result)


def test_verify(invoke: Invoke, store: DiskCache) -> None:
    assert "3 entries sound, 0 removed" in said(invoke("cache", "verify"))
    path = store.path("plan", "b")
    path.write_bytes(path.read_bytes()[:-1])
    text = said(invoke("cache", "verify"))
    assert f"removed {path}: its checksum does not hold" in text
    assert "2 entries sound, 1 removed" in text
    assert keys(store) == {"a", "c"}


@pytest.mark.parametrize("verb", [["list"], ["verify"], ["prune", "--size", "0"]])
def test_an_empty_cache_says_so(
    invoke: Invoke, tmp_path: Path, verb: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STROP_CACHE_DIR", str(tmp_path / "never"))
    result = invoke("cache", *verb)
    assert result.exit_code == 0
    assert f"there is nothing of Strop's in {tmp_path / 'never'}" in said(result)
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("verb", [["list"], ["verify"], ["prune", "--size", "0"]])
def test_a_file_is_no_cache(
    invoke: Invoke, tmp_path: Path, verb: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STROP_CACHE_DIR", str(tmp_path / "file"))
    (tmp_path / "file").write_text("mine")
    result = invoke("cache", *verb)
    assert result.exit_code == 1
    assert "file is no folder: STROP_CACHE_DIR names the folder" in said(result)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["prune"], "--size 500MB, --age 30d"),
        (["prune", "--size", "much"], "write 500MB"),
        (["prune", "--age", "30"], "write 12h"),
    ],
)
def test_wrong_arguments(invoke: Invoke, words: list[str], expected: str) -> None:
    result = invoke("cache", *words)
    assert result.exit_code == 2
    assert expected in said(result)


@pytest.mark.parametrize(
    "verb", [[], ["explain"], ["cache"], ["repro"], ["minify"], ["bisect"], ["env"], ["generate"]]
)
def test_help_teaches(invoke: Invoke, verb: list[str]) -> None:
    result = invoke(*verb, "--help")
    assert result.exit_code == 0
    assert f"strop {' '.join(verb)}".strip() in said(result)
    assert "Examples" in result.output or not verb
