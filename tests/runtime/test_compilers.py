"""Machine code from sources: the disk cache, parallel builds, and what goes wrong."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from strop.codegen.triton import emit
from strop.errors import CacheError, CodegenError
from strop.ir.device import GpuTarget
from strop.ir.dims import const
from strop.ir.source import KernelSource
from strop.runtime.build import compilers as builds
from strop.runtime.build import driver
from strop.runtime.build.compilers import Builds, build
from strop.runtime.build.cubin import Cubin, cache_key
from tests.codegen.kernels import SAMPLES

pytest.importorskip("triton")


class MemoryCache:
    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}

    def get(self, key: str) -> bytes | None:
        return self.entries.get(key)

    def put(self, key: str, data: bytes) -> None:
        self.entries[key] = data


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Builds]:
    """A process that has built nothing yet."""
    made = Builds()
    monkeypatch.setattr(builds, "BUILDS", made)
    yield made
    made.close()


def source(name: str = "geglu", dtype: torch.dtype = torch.float16) -> KernelSource:
    return emit(SAMPLES[name](dtype).kernel).source


def test_builds_once_and_then_loads(fresh: Builds, monkeypatch: pytest.MonkeyPatch):
    cache, wanted = MemoryCache(), [source(), source("casts"), source()]
    first = build(wanted, GpuTarget(90), cache, workers=2)
    assert list(first) == [source(), source("casts")]
    assert (fresh.num_built, fresh.num_cached) == (2, 0)
    waited_s = fresh.seconds
    assert waited_s > 0.1
    build(wanted, GpuTarget(90), cache, workers=2)
    assert (fresh.num_built, fresh.num_cached) == (2, 0), "kept in memory"
    assert fresh.seconds < waited_s + 0.1

    other = Builds()
    monkeypatch.setattr(builds, "BUILDS", other)
    assert build(wanted, GpuTarget(90), cache, workers=2) == first
    assert (other.num_built, other.num_cached) == (0, 2)


def test_launches_of_one_text_share_a_build(fresh: Builds):
    other = dataclasses.replace(source(), grid=(const(3),))
    found = build([source(), other], GpuTarget(90), MemoryCache(), workers=2)
    assert fresh.num_built == 1
    assert found[source()] is found[other]


def test_threads_share_a_build(fresh: Builds):
    cache, results = MemoryCache(), []

    def ask() -> None:
        results.append(build([source(), source("softmax")], GpuTarget(90), cache, workers=1))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fresh.num_built == 2
    assert all(result == results[0] for result in results)


def test_refused_text_is_an_error_and_can_be_asked_again(fresh: Builds):
    wrong = dataclasses.replace(source(), text=source().text.replace("tl.erf", "tl.erg"))
    for _ in range(2):
        with pytest.raises(CodegenError, match="erg"):
            build([wrong], GpuTarget(90), MemoryCache(), workers=1)
    assert fresh.num_built == 0


def test_workers_can_start_early(fresh: Builds):
    builds.start_workers(1)
    assert build([source()], GpuTarget(90), MemoryCache(), workers=1)
    builds.stop_workers()


def test_key_holds_all_that_decides_the_code():
    base = source()
    changed = [
        dataclasses.replace(base, text=base.text + "\n"),
        dataclasses.replace(base, num_warps=8),
        dataclasses.replace(base, max_registers=128),
        dataclasses.replace(base, scalars=(1,)),
        base.with_constants(COLS=32),
        base.with_constants(EARLY=0),
        dataclasses.replace(base, params=(torch.bfloat16,) * 2),
    ]
    keys = {cache_key(each, GpuTarget(90)) for each in (base, *changed)} | {
        cache_key(base, GpuTarget(80))
    }
    assert len(keys) == 9


def test_a_hit_does_not_import_triton():
    code = (
        "import sys, strop.runtime.build.cubin, strop.runtime.build.driver, strop.codegen.triton\n"
    )
    code += "strop.runtime.build.cubin.triton_version()\nassert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bytes_round_trip():
    kernel = Cubin("geglu", b"\x7fELF\n\x00code", 2048, 4, 90)
    assert Cubin.from_bytes(kernel.to_bytes()) == kernel
    for damaged in (b"", b"{}\n", b"[1]\ncode", kernel.to_bytes()[:-1]):
        with pytest.raises(CacheError):
            Cubin.from_bytes(damaged)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a driver")
def test_no_driver_is_a_clear_error():
    with pytest.raises(CodegenError, match=r"libcuda\.so\.1"):
        driver.load(Cubin("k", b"", 0, 4, 90))
