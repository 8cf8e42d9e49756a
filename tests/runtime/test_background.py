"""Kernels that are built ahead: which ones, in what order, and what happens when the process ends.

Compiler processes are stood in for, but where their own end is the matter.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strop.codegen.triton import emit
from strop.dispatch import variants
from strop.dispatch.module_state import ModuleState
from strop.dispatch.signature import Beside, default_shapes, flatten
from strop.dispatch.varying_numbers import GivenCall
from strop.errors import CodegenError
from strop.ir.device import GpuTarget
from strop.ir.source import KernelSource
from strop.options import Options
from strop.runtime.build import background as ahead
from strop.runtime.build import compilers as builds
from strop.runtime.build.background import LOW_PRIORITY, BackgroundBuild
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.cubin import Cubin
from strop.runtime.build.loader import CudaLoader
from tests.codegen.kernels import SAMPLES
from tests.gpus import H100
from tests.waiting import LIMIT_S, wait_until

F16 = torch.float16


class Compilers:
    """What was compiled, by the priority of who asked. ``gate`` holds those back for which nobody
    waits, until it is opened, or for some of them."""

    def __init__(self) -> None:
        self.started: list[FakeWorker] = []
        self.seen: dict[int, list[KernelSource]] = {0: [], LOW_PRIORITY: []}
        self.gate = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.refused: KernelSource | None = None

    def __call__(self, niceness: int = 0) -> Any:
        self.started.append(FakeWorker(self, niceness))
        return self.started[-1]

    def open(self) -> None:
        self.gate.release(10_000)

    @property
    def left(self) -> list[FakeWorker]:
        return [worker for worker in self.started if worker.is_alive]


class FakeWorker:
    is_alive = True

    def __init__(self, compilers: Compilers, niceness: int) -> None:
        self.compilers, self.niceness = compilers, niceness

    def lower(self, niceness: int) -> None:
        self.niceness = niceness

    def compile(self, source: KernelSource, target: GpuTarget) -> Cubin:
        is_later = threading.current_thread() in ahead.LATER._threads
        self.compilers.seen[LOW_PRIORITY if is_later else 0].append(source)
        if is_later:
            assert self.niceness
            self.compilers.begun.release()
            assert self.compilers.gate.acquire(timeout=LIMIT_S)
        if source == self.compilers.refused:
            raise CodegenError("refused")
        return Cubin(source.name, source.text.encode(), 0, source.num_warps, target.arch)

    def dismiss(self) -> None:
        self.is_alive = False

    def terminate(self) -> None: ...
    def wait(self) -> None: ...


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compilers]:
    made = Compilers()
    monkeypatch.setattr(builds, "cores_are_taken", lambda: False)
    monkeypatch.setattr(builds, "BUILDS", builds.Builds())
    monkeypatch.setattr(builds, "Worker", made)
    yield made
    made.open()
    for queue in (ahead.SOON, ahead.LATER):
        for thread in list(queue._threads):
            thread.join()


class Softmax(nn.Module):
    """Its rows have an unknown length: one kernel in many forms, and another one."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) * 2 + 1


@pytest.fixture
def library(tmp_path: Path) -> CudaLoader:
    return CudaLoader(DiskCache(tmp_path), workers=4, device=H100)


@pytest.fixture
def store(library: CudaLoader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a module that lies on the CPU and is compiled for CUDA."""
    monkeypatch.setattr(variants, "library_for", lambda device, options: library)
    monkeypatch.setattr(variants, "device_of", lambda state, shapes: torch.device("cuda"))
    monkeypatch.setattr(variants.library_warm_up, "prime", lambda *args: 0)  # there may be no GPU
    pool = SimpleNamespace(has_one_caller=lambda: False)
    monkeypatch.setattr(variants.cuda_graphs, "pool_of", lambda device: pool)
    module = Softmax().eval()
    return variants.VariantStore(module, Options(cache_dir=str(tmp_path)), "it")


def variant_for(store: variants.VariantStore, *shape: int) -> variants.Variant:
    tensors: list[Tensor] = []
    skeleton = flatten(((torch.randn(shape, dtype=F16),), {}), tensors)
    return store.get(
        ModuleState(store.module),
        GivenCall(skeleton, tensors, skeleton, Beside()),
        default_shapes(tensors),
    )


def test_the_first_call_waits_for_its_own_forms_only(
    store: variants.VariantStore, library: CudaLoader, compilers: Compilers
) -> None:
    variant = variant_for(store, 3, 48, 8)
    program = variant.program
    env = variant.env([(3, 48, 8)], ModuleState(store.module))
    assert env is not None
    needed = program.sources_at(env)
    assert 0 < len(needed) < 5 < len(program.sources)
    assert sorted(map(hash, compilers.seen[0])) == sorted(map(hash, needed))
    assert not compilers.seen[LOW_PRIORITY]
    assert library.counts == (len(needed), 0)
    assert str(store.progress) == f"building kernels, {len(needed)} of {len(needed)}"
    assert variant.later.total == len(program.sources) - len(needed)

    assert [w.niceness for w in compilers.left] == [LOW_PRIORITY] * 3, "kept for later"

    # another shape, while the background stands still but for one kernel: it builds its own, each
    # once, by processes of the background
    variant.later.start()
    for _ in range(3):
        assert compilers.begun.acquire(timeout=LIMIT_S)
    other = program.sources_at({**env, **{name: 3000 for name in env if env[name] == 48}})
    wanted = [s for s in other if s not in needed and s not in compilers.seen[LOW_PRIORITY]]
    assert 0 < len(wanted) <= 3
    asks = threading.Thread(target=library.build, args=(wanted,))
    asks.start()
    wait_until(lambda: builds.BUILDS._num_asking == len(wanted))
    compilers.gate.release()
    asks.join(LIMIT_S)
    assert not asks.is_alive()
    assert set(compilers.seen[0][len(needed) :]) == set(wanted)
    assert len(compilers.started) == 4, "those of the first call"
    # one in work is waited for: not that of the background, whose process is free before it is kept
    wait_until(
        lambda: any(builds.BUILDS.has(s, GpuTarget(90)) for s in compilers.seen[LOW_PRIORITY])
    )
    in_work = next(
        s for s in compilers.seen[LOW_PRIORITY] if not builds.BUILDS.has(s, GpuTarget(90))
    )
    waits = threading.Thread(target=library.build, args=([in_work],))
    waits.start()
    assert waits.is_alive()
    compilers.open()
    waits.join()
    store.wait()
    everything = compilers.seen[0] + compilers.seen[LOW_PRIORITY]
    assert len(everything) == len(set(everything)) == len(program.sources)
    assert set(everything) == set(program.sources)
    assert library.counts[0] == len(needed) + len(wanted), "while somebody waited"
    assert variant.later.num_built == len(compilers.seen[LOW_PRIORITY])
    assert len(compilers.started) == 4
    wait_until(lambda: not compilers.left)


def test_a_stored_plan_finds_the_kernels_that_were_built(
    store: variants.VariantStore, compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilers.open()
    first = variant_for(store, 3, 48, 8)
    compiled = list(compilers.seen[0])
    monkeypatch.setattr(builds, "BUILDS", builds.Builds())  # a process that ended before the rest
    again = variants.VariantStore(store.module, store.options, "again")
    found = variant_for(again, 3, 48, 8)
    assert found.from_disk
    assert compilers.seen[0] == compiled
    again.wait()
    assert found.later.num_built == first.later.total


def test_a_kernel_that_is_refused_is_told_and_raises_where_it_is_needed(
    library: CudaLoader, compilers: Compilers, caplog: Any
) -> None:
    compilers.open()
    sources = [emit(SAMPLES[name](F16).kernel).source for name in ("geglu", "casts")]
    compilers.refused = sources[0]
    later = library.later(sources)
    later.wait()
    assert [record.getMessage() for record in caplog.records] == [
        "a kernel for other sizes could not be built ahead: refused"
    ]
    assert (later.num_built, later.num_done) == (1, 2)
    with pytest.raises(CodegenError, match="refused"):
        library.build(sources)
    compilers.refused = None
    library.build(sources)


def test_who_waits_gets_the_longest_text_first(library: CudaLoader, compilers: Compilers) -> None:
    queue = ahead.Queue(0)
    names = ("casts", "geglu", "softmax", "layer_norm")
    sources = [emit(SAMPLES[name](F16).kernel).source for name in names]
    soon = BackgroundBuild(sources, H100.target, library._cache, niceness=0)
    queue.add(soon, sources[:-1], workers=0)
    queue.add(soon, sources[-1:], workers=1)  # the first thread, which finds all of them
    for thread in list(queue._threads):
        thread.join()
    assert compilers.seen[0] == sorted(sources, key=lambda s: -len(s.text))


SCRIPT = """
import os, sys, threading, time
from dataclasses import replace
from pathlib import Path
import torch
from strop.codegen.triton import emit
from strop.runtime.build import compilers as builds
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.loader import CudaLoader
from tests.codegen.kernels import SAMPLES
from tests.gpus import H100

sources = [emit(make(dtype).kernel).source for make in SAMPLES.values()
           for dtype in (torch.float16, torch.bfloat16, torch.float32)]
# more than can be built while the others do what they do
sources = [replace(s, text=s.text + "#" * n) for n in range(int(sys.argv[3])) for s in sources]
library = CudaLoader(DiskCache(Path(sys.argv[2])), 8, H100)
if sys.argv[1] == "idle":  # the first call got its kernels, and failed for another reason
    library.warm_up(2)
    library.build(sources[:1])
    later = library.later(sources[1:])
    kept = builds.BUILDS._idle[:]
    library.cool_down()
    assert kept == builds.BUILDS._idle
    print(*[w._process.pid for w in kept])
    sys.exit(0)
later = library.later(sources)
later.start()
foreground = threading.Thread(target=library.build, args=(sources[-4:],), daemon=True)
foreground.start()
while not later.num_built:
    time.sleep(0.01)
if sys.argv[1] == "fork":
    child = os.fork()
    if not child:
        later.wait()  # nobody builds here: it is given up
        library.build(sources[:1])
        library.build([sources[20]])
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    library.build([sources[21]])
print(*[w._process.pid for w in builds.BUILDS._busy + builds.BUILDS._idle])
if sys.argv[1] == "exit":
    sys.exit(3)
"""


TIMES = 8


@pytest.mark.parametrize("how", ["end", "exit", "fork", "idle"])
def test_a_process_ends_cleanly_while_kernels_are_built(how: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    python = [sys.executable, "-W", "ignore::DeprecationWarning"]  # of forks with threads
    done = subprocess.run(
        [*python, "-c", SCRIPT, how, str(tmp_path / "c"), str(TIMES)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=3 * LIMIT_S,
    )
    assert done.returncode == (3 if how == "exit" else 0), done.stderr
    assert not done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert pids
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()], "a compiler lives on"
    assert not list(tmp_path.glob("strop-triton-*")), "its files were left"
    built = len(list((tmp_path / "c" / "cubin").iterdir()))
    assert 0 < built < len(SAMPLES) * 3 * TIMES, "what is not built is left"


def test_nothing_to_build_is_done_at_once() -> None:
    later = BackgroundBuild(())
    later.wait()
    assert later.is_done
    assert not later.num_done


def test_an_order_is_found_in_the_background(compilers: Compilers, library: CudaLoader) -> None:
    """By a thread of low priority, not by who starts it; kernels come in it."""
    base = emit(SAMPLES["geglu"](F16).kernel).source
    kernels = [dataclasses.replace(base, text=base.text + "#" * n) for n in range(5)]
    asked = list[threading.Thread]()

    def order(sources: Sequence[KernelSource]) -> dict[KernelSource, float]:
        asked.append(threading.current_thread())
        return {source: sources.index(source) / len(sources) for source in reversed(sources)}

    compilers.open()
    later = library.later(kernels, order)
    assert not asked
    later._workers = 1
    later.start()
    later.wait()
    assert len(asked) == 1
    assert asked[0] is not threading.current_thread()
    assert compilers.seen[LOW_PRIORITY] == kernels[::-1]
    assert later.num_built == 5


def test_what_is_wanted_comes_first_whichever_program_it_is_of(
    compilers: Compilers, library: CudaLoader
) -> None:
    """A ControlNet is called before its UNet: kernels of it that are rarely needed come last,
    though they have been there first, and those of programs without an order among them."""
    base = emit(SAMPLES["geglu"](F16).kernel).source
    kernels = [dataclasses.replace(base, text=base.text + "#" * n) for n in range(10)]
    first, plain, second = kernels[:5], kernels[5:6], kernels[6:]
    shares = dict(zip(kernels, (0.9, 0.5, 0.1, 0.0, 0.0, 0.0, 1.0, 0.4, 0.0, 0.0), strict=True))

    def order(sources: Sequence[KernelSource]) -> dict[KernelSource, float]:
        return {source: shares[source] for source in sources}

    controlnet, unet = (library.later(some, order) for some in (first, second))
    for later in (controlnet, other := library.later(plain), unet):
        later._workers = 1
        later.start()
        if later is controlnet:  # it is at work when the others come
            assert compilers.begun.acquire(timeout=LIMIT_S)
    compilers.open()
    for later in (controlnet, other, unet):
        later.wait()
    seen = compilers.seen[LOW_PRIORITY]
    assert [shares[source] for source in seen[:5]] == [0.9, 1.0, 0.5, 0.4, 0.1]
    assert seen[5:] == [*first[3:], *plain, *second[2:]]
