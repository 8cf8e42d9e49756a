"""The content store: damage, races, privacy, pruning."""

from __future__ import annotations

import logging
import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from strop.errors import CacheError
from strop.runtime.build.cache import DiskCache


@pytest.fixture
def store(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path / "cache")


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 1000])
def test_what_is_written_is_read(store: DiskCache, data: bytes):
    path = store.write("plan", "0a1b", data)
    assert path == store.path("plan", "0a1b")
    assert store.read("plan", "0a1b") == data
    assert DiskCache(store.root).read("plan", "0a1b") == data
    assert store.read("so", "0a1b") is None


def test_a_second_write_replaces_the_first(store: DiskCache):
    store.write("plan", "4e", b"first")
    store.write("plan", "4e", b"second")
    assert store.read("plan", "4e") == b"second"
    assert [p.name for p in (store.root / "plan").iterdir()] == ["4e"]


@pytest.mark.parametrize("damage", ["cut", "flip", "append", "empty"])
def test_a_damaged_entry_is_removed(
    store: DiskCache, caplog: pytest.LogCaptureFixture, damage: str
):
    path = store.write("so", "4e", b"machine code" * 10)
    content = path.read_bytes()
    flipped = content[:5] + bytes([content[5] ^ 1]) + content[6:]
    path.write_bytes(
        {"cut": content[:-50], "flip": flipped, "append": content + b"!", "empty": b""}[damage]
    )
    with caplog.at_level(logging.WARNING):
        assert store.read("so", "4e") is None
    assert len(caplog.records) == 1
    assert str(path) in caplog.text
    assert not path.exists()
    assert store.read("so", "4e") is None
    assert len(caplog.records) == 1


def _write_often(root: Path, seed: int) -> None:
    store = DiskCache(root)
    for i in range(100):
        store.write("plan", "5ade", bytes([seed]) * (1000 + i))
        data = store.read("plan", "5ade")
        assert data is not None
        assert len(set(data)) == 1


def test_processes_may_race(store: DiskCache):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_write_often, args=(store.root, i)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert [p.name for p in (store.root / "plan").iterdir()] == ["5ade"]


def test_folders_are_private(store: DiskCache):
    path = store.write("so", "4e", b"x")
    for folder in (store.root, path.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_all_may_write_is_refused(tmp_path: Path):
    tmp_path.chmod(0o777)
    with pytest.raises(CacheError, match="writable by all"):
        DiskCache(tmp_path)


@pytest.mark.parametrize("key", ["../x", "a/b", "", ".", ".hidden", "notes.txt"])
def test_keys_are_hashes(store: DiskCache, key: str):
    with pytest.raises(CacheError, match="not a cache kind or key"):
        store.path("plan", key)


def test_other_kinds_are_refused(store: DiskCache):
    with pytest.raises(CacheError, match="not a cache kind or key: 'Documents'"):
        store.path("Documents", "4e")


def test_files_of_others_are_left_alone(store: DiskCache):
    """STROP_CACHE_DIR may be a folder that holds other things, such as a home."""
    ours = store.write("plan", "4e", b"x")
    theirs = [
        store.root / name
        for name in (
            ".ssh/id_rsa",
            "plan/letter.txt",
            "so/my.so",
            "a/4e",
            "Documents/.partial-letter",
        )
    ]
    for path in theirs:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"not of the cache")
        os.utime(path, (1, 1))
    assert [entry.path for entry in store.entries()] == [ours]
    assert store.verify() == []
    assert store.prune(0) == 1 + 44
    assert all(path.exists() for path in theirs)


def test_prune_removes_what_was_not_used_for_longest(store: DiskCache):
    for i, key in enumerate("abcd"):
        path = store.write("plan", key, bytes(1000))
        os.utime(path, (i + 1, i + 1))
    assert store.read("plan", "a") is not None  # now the newest
    removed = store.prune(2 * path.stat().st_size)
    assert removed == 2 * path.stat().st_size
    assert {p.name for p in (store.root / "plan").iterdir()} == {"a", "d"}
    assert store.prune(10**9) == 0


def test_prune_by_age(store: DiskCache):
    for i, key in enumerate("abc"):
        os.utime(store.write("plan", key, bytes(1000)), (i + 1, i + 1))
    assert [entry.key for entry in store.entries()] == ["a", "b", "c"]
    assert store.prune(unused_since_s=2.5) == 2 * store.entries()[0].num_bytes
    assert [(e.kind, e.key, e.used_s) for e in store.entries()] == [("plan", "c", 3.0)]
    assert store.prune(0, unused_since_s=1.0) > 0
    assert store.entries() == []


def test_verify_removes_what_is_damaged(store: DiskCache):
    bad, good = store.write("so", "bad", b"x" * 99), store.write("plan", "900d", b"y")
    content = bad.read_bytes()
    bad.write_bytes(b"z" + content[1:])
    assert [entry.path for entry in store.verify()] == [bad]
    assert [entry.path for entry in store.entries()] == [good]
    assert store.verify() == []


def test_a_failed_write_leaves_nothing(store: DiskCache, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError("no space left")

    store.write("plan", "4e", b"old")
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(CacheError, match="no space left"):
        store.write("plan", "4e", b"new")
    assert [p.name for p in (store.root / "plan").iterdir()] == ["4e"]
    assert store.read("plan", "4e") == b"old"
