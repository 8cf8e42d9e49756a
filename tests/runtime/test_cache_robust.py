"""The disk cache among processes that race, are killed in the middle of a write, and find files
damaged: results are right, what is missing is built again, and one line says so."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.ir.device import GpuTarget
from strop.runtime.build import compilers as builds
from strop.runtime.build.cache import TEMPORARY_SECONDS, DiskCache
from strop.runtime.build.loader import BytesByKey
from tests.codegen.kernels import SAMPLES
from tests.runtime import cache_jobs


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.runtime.cache_jobs"])
    return context


def start(
    context: ForkServerContext, job: Callable[..., None], folder: Path, *more: Any
) -> tuple[BaseProcess, Any]:
    answers, theirs = context.Pipe(duplex=False)
    process = context.Process(target=job, args=(folder, theirs, *more), daemon=True)
    process.start()
    theirs.close()
    return process, answers


def ran(context: ForkServerContext, folder: Path) -> tuple[int, int, list[str]]:
    """Graphs traced, kernels built and lines logged by a process whose results were right."""
    process, answers = start(context, cache_jobs.run, folder)
    is_right, *rest = answers.recv()
    process.join()
    assert is_right
    return tuple(rest)


def partial_files(folder: Path) -> list[Path]:
    return list(folder.glob("*/.partial-*"))


def test_processes_race_on_an_empty_cache(processes: ForkServerContext, tmp_path: Path):
    together = [start(processes, cache_jobs.run, tmp_path) for _ in range(3)]
    found = [answers.recv() for _, answers in together]
    for process, _ in together:
        process.join()
        assert process.exitcode == 0
    assert all(is_right and not lines for is_right, _, _, lines in found)
    assert not partial_files(tmp_path)
    assert ran(processes, tmp_path) == (0, 0, [])
    assert DiskCache(tmp_path).verify() == []


def test_killed_at_each_write(processes: ForkServerContext, tmp_path: Path):
    """No line is logged, since whatever has a name is whole."""
    for number in range(20):
        when = ("before", "after")[number % 2]
        process, _ = start(processes, cache_jobs.run_until_write, tmp_path, number, when)
        process.join()
        if process.exitcode == 0:  # it had fewer entries to write
            break
        assert process.exitcode == -signal.SIGKILL
        assert len(partial_files(tmp_path)) == number // 2 + 1
    assert number > 2
    assert ran(processes, tmp_path) == (0, 0, [])


def test_killed_at_random_instants(processes: ForkServerContext, tmp_path: Path):
    clock = random.Random(0)
    for _ in range(25):
        process, answers = start(processes, cache_jobs.write_for_ever, tmp_path)
        assert answers.recv() == "writing"
        time.sleep(clock.random() * 0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    store = DiskCache(tmp_path)
    assert store.verify() == []
    for entry in store.entries():
        data = store.read(entry.kind, entry.key)
        assert data is not None
        assert len(data) == cache_jobs.MEGABYTE
        assert len(set(data)) == 1


def test_what_a_killed_process_left_is_removed(tmp_path: Path):
    store = DiskCache(tmp_path)
    kept = store.write("so", "4e", b"x")
    old, new = (kept.with_name(f".partial-{name}") for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(bytes(100))
    long_ago = time.time() - 2 * TEMPORARY_SECONDS
    os.utime(old, (long_ago, long_ago))
    assert store.prune() == 100
    assert partial_files(tmp_path) == [new]  # somebody may be writing it
    assert store.read("so", "4e") == b"x"


def cut_in_half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip_middle(data: bytes) -> bytes:
    place = len(data) // 2
    return data[:place] + bytes([data[place] ^ 64]) + data[place + 1 :]


def flip_last(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 128])


DAMAGES = (cut_in_half, flip_middle, flip_last)  # more of them in test_cache.py


@pytest.fixture(scope="module")
def filled(processes: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("filled")
    assert ran(processes, folder)[0] == 1
    return folder


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ["plan", "cpp", "so"])
def test_damage(
    processes: ForkServerContext, filled: Path, kind: str, damage: Callable[..., bytes]
):
    path = sorted((filled / kind).iterdir())[0]
    path.write_bytes(damage(path.read_bytes()))
    captures, built, lines = ran(processes, filled)
    assert len(lines) == 1
    assert str(path) in lines[0]
    assert (captures > 0) == (kind == "plan")
    assert (built > 0) == (kind != "plan")
    assert DiskCache(filled).verify() == []


@pytest.mark.parametrize("damage", [cut_in_half, flip_middle], ids=lambda f: f.__name__)
def test_damaged_cubins(
    damage: Callable[..., bytes], tmp_path: Path, caplog: Any, monkeypatch: Any
):
    pytest.importorskip("triton")
    from strop.codegen.triton import emit

    source, cache = (
        emit(SAMPLES["silu_flat"](torch.float16).kernel).source,
        BytesByKey(DiskCache(tmp_path)),
    )

    def built() -> tuple[Any, int]:
        monkeypatch.setattr(builds, "BUILDS", builds.Builds())
        result = builds.build([source], GpuTarget(90), cache, workers=1)
        builds.BUILDS.close()
        return result, builds.BUILDS.num_built

    first, count = built()
    assert count == 1
    (path,) = (tmp_path / "cubin").iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert built() == (first, 1)
    (line,) = (r.getMessage() for r in caplog.records if r.name.startswith("strop"))
    assert str(path) in line
    assert built() == (first, 0)
