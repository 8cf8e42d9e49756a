"""The generated kernels of one device stand behind one interface: build them, then bind and
call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

import torch

from strop.errors import CodegenError, UnsupportedError
from strop.ir.device import LEAST_ARCH, Device, GpuTarget
from strop.ir.source import KernelSource, Split
from strop.options import Options
from strop.runtime.build import compilers, cubin, driver, processors
from strop.runtime.build.artefact import StoredEntry
from strop.runtime.build.background import BackgroundBuild, BuildOrder
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.devices import gpu
from strop.runtime.build.driver import View
from strop.runtime.build.native import NativeKernels

Tell = Callable[[int, int], None]  # hears how many kernels are done, and of how many
TELL_S = 5.0  # after which it hears it again


class BoundKernel(Protocol):
    """A kernel with its arguments in place; pointers may be patched between calls."""

    def set_pointer(self, place: int, pointer: int) -> None: ...

    def __call__(self) -> None: ...


class KernelLoader(Protocol):
    """This loads the kernels of one device. ``build`` compiles what no cache holds, each kernel
    once."""

    device: Device

    def warm_up(self, workers: int | None = None) -> None:
        """Start what takes time to start: a compilation is about to come."""
        ...

    def cool_down(self) -> None:
        """Stop what is idle: no more compilation is about to come."""
        ...

    def build(self, sources: Sequence[KernelSource]) -> None: ...

    def begin(self, sources: Sequence[KernelSource]) -> None:
        """Begin to build these, which ``build`` will ask for."""
        ...

    def later(
        self, sources: Sequence[KernelSource], order: BuildOrder | None = None
    ) -> BackgroundBuild:
        """Return a build of these kernels for the background, in an order, not begun. It gets the
        processes that have been started and are not at work."""
        ...

    def watch(self, sources: Sequence[KernelSource]) -> Callable[[], int]:
        """Return a function that tells how many of these kernels are ready, while they are
        built."""
        ...

    def bind(
        self,
        source: KernelSource,
        pointers: Sequence[int],
        scalars: Sequence[int],
        stream: int,
        early: bool = False,
        views: Sequence[View] = (),
    ) -> BoundKernel:
        """Bind a kernel to its arguments. It is launched ``early``, before the last launch has
        ended, where that can be. ``views`` are those of each param that has a box, in order."""
        ...

    def splits(self, split: Split, sizes: Mapping[str, int]) -> int: ...

    @property
    def target_name(self) -> str:
        """Return what this device is called among the targets of an artefact."""
        ...

    def machine_code(self, sources: Sequence[KernelSource]) -> Iterator[StoredEntry]:
        """Build kernels, as far as they are not, and yield what an artefact holds of them."""
        ...

    @property
    def counts(self) -> tuple[int, int]:
        """Count the kernels built and the kernels found in the disk cache so far, while somebody
        waited."""
        ...


class BuiltAtOnce:
    """This has no processes, and begins nothing before all is asked for: one call makes it."""

    def warm_up(self, workers: int | None = None) -> None:
        pass

    def cool_down(self) -> None:
        pass

    def begin(self, sources: Sequence[KernelSource]) -> None:
        pass

    def later(
        self, sources: Sequence[KernelSource], order: BuildOrder | None = None
    ) -> BackgroundBuild:
        return BackgroundBuild(())


class CpuLoader(BuiltAtOnce):
    """This loads C++ functions from shared objects."""

    def __init__(self, cache: DiskCache, target: str = "") -> None:
        """``target`` is one that this processor can run, or the processor itself."""
        self.device = processors.processor(target)
        self._target = target or processors.target_name()
        self._native = NativeKernels(cache, target=self._target)
        self._functions = self._native.build(())

    def watch(self, sources: Sequence[KernelSource]) -> Callable[[], int]:
        before = sum(self.counts)
        return lambda: sum(self.counts) - before

    def build(self, sources: Sequence[KernelSource]) -> None:
        missing = [source for source in sources if source not in self._functions]
        if missing:
            self._functions = {**self._functions, **self._native.build(missing)}

    def bind(
        self,
        source: KernelSource,
        pointers: Sequence[int],
        scalars: Sequence[int],
        stream: int,
        early: bool = False,
        views: Sequence[View] = (),
    ) -> BoundKernel:
        return self._functions[source].bind(pointers, scalars)

    def splits(self, split: Split, sizes: Mapping[str, int]) -> int:
        raise UnsupportedError("C++ kernels cut their reductions themselves")

    @property
    def target_name(self) -> str:
        return self._target

    def machine_code(self, sources: Sequence[KernelSource]) -> Iterator[StoredEntry]:
        self.build(sources)
        return self._native.machine_code(sources)

    @property
    def counts(self) -> tuple[int, int]:
        return self._native.num_built, self._native.num_cached


class CudaLoader:
    """This loads cubins for one GPU, or for it as if it were of an older architecture."""

    def __init__(self, cache: DiskCache, workers: int, device: Device) -> None:
        self.device = device
        self._cache, self._workers = BytesByKey(cache), workers
        self._cubins: dict[KernelSource, cubin.Cubin] = {}
        self._is_warm = False

    def warm_up(self, workers: int | None = None) -> None:
        self._is_warm = True
        compilers.start_workers(workers or self._workers)

    def cool_down(self) -> None:
        self._is_warm = False
        compilers.stop_workers()

    def build(self, sources: Sequence[KernelSource]) -> None:
        missing = [s for s in dict.fromkeys(sources) if s not in self._cubins]
        if not missing:
            return
        try:
            built = compilers.build(missing, self.device.target, self._cache, self._workers)
        finally:
            if not self._is_warm:
                compilers.stop_workers()
        for made in built.values():
            self._check_shared(made)
        self._cubins.update(built)

    def _check_shared(self, made: cubin.Cubin) -> None:
        """Refuse a kernel that needs too much shared memory. The driver says so too, but knows
        nothing of the architecture that a card stands in for."""
        if made.shared > self.device.shared_bytes:
            raise CodegenError(
                f"{made.entry} needs {made.shared} bytes of shared memory, and a block on"
                f" {self.device.name} can have {self.device.shared_bytes}"
            )

    def begin(self, sources: Sequence[KernelSource]) -> None:
        target = self.device.target
        BackgroundBuild(sources, target, self._cache, self._workers, niceness=0).start()

    def later(
        self, sources: Sequence[KernelSource], order: BuildOrder | None = None
    ) -> BackgroundBuild:
        target = self.device.target
        later = BackgroundBuild(sources, target, self._cache, self._workers, order=order)
        later.keep_processes()
        return later

    def watch(self, sources: Sequence[KernelSource]) -> Callable[[], int]:
        return lambda: sum(compilers.BUILDS.has(source, self.device.target) for source in sources)

    def bind(
        self,
        source: KernelSource,
        pointers: Sequence[int],
        scalars: Sequence[int],
        stream: int,
        early: bool = False,
        views: Sequence[View] = (),
    ) -> BoundKernel:
        names = {f"s{i}": value for i, value in enumerate(scalars)}
        if source.split is not None:
            names["splits"] = scalars[-1]
        grid = [size.eval(names) for size in source.grid]
        function = driver.load(self._cubins[source])
        return function.bind(
            pointers, scalars, grid, stream, wide=source.wide, early=early, views=views
        )

    def splits(self, split: Split, sizes: Mapping[str, int]) -> int:
        return split.count(sizes, self.device.sms)

    @property
    def target_name(self) -> str:
        target = self.device.target
        return f"sm_{target.arch}" + ("" if target.is_native else f" on sm_{target.runs_on}")

    def machine_code(self, sources: Sequence[KernelSource]) -> Iterator[StoredEntry]:
        target = self.device.target
        return cubin_entries(sources, target, self._cache, self._workers)

    @property
    def counts(self) -> tuple[int, int]:
        return compilers.BUILDS.num_built, compilers.BUILDS.num_cached


def _unsupported(device: str, index: int) -> str:
    """Say why a device has no kernels, or nothing."""
    if device not in ("cpu", "cuda"):
        return f"there is no code generator for the device {device}"
    if device == "cpu":
        return ""
    if torch.version.hip is not None:
        return "this torch is built for AMD GPUs (ROCm), for which there is no code generator"
    capability = torch.cuda.get_device_capability(index)
    if 10 * capability[0] + capability[1] < LEAST_ARCH:
        name, least = torch.cuda.get_device_name(index), LEAST_ARCH / 10
        return (
            f"{name} has compute capability {capability[0]}.{capability[1]}; kernels need {least}"
        )
    return ""


class BytesByKey:
    """This is the disk cache as ``compilers.build`` wants it."""

    def __init__(self, cache: DiskCache) -> None:
        self._cache = cache

    def get(self, key: str) -> bytes | None:
        return self._cache.read("cubin", key)

    def put(self, key: str, data: bytes) -> None:
        self._cache.write("cubin", key, data)


def cubin_entries(
    sources: Sequence[KernelSource],
    target: GpuTarget,
    cache: compilers.Cache,
    workers: int,
    tell: Tell = lambda _done, _total: None,
) -> Iterator[StoredEntry]:
    """Build kernels, as far as they are not, and yield what an artefact holds of them. One that
    cannot be compiled is left out, with a warning, as it is when it is built ahead. ``tell`` hears
    every few seconds how many of how many are done."""
    build = BackgroundBuild(sources, target, cache, workers)
    while not build.wait(TELL_S):
        tell(build.num_done, build.total)
    for source in dict.fromkeys(sources):
        if (made := compilers.BUILDS.found(source, target)) is not None:
            yield StoredEntry("cubin", cubin.content_key(source, target), made.to_bytes())


TESTED = "Strop is tested on x86-64 processors (cpu) and on NVIDIA H100 (cuda)"


def default_workers() -> int:
    """Return how many processes compile. The 69 kernels that a UNet's first shape needs keep 16 of
    them, with 150 MB each, busy for 1 s."""
    return min(len(os.sched_getaffinity(0)), 16)


@lru_cache(maxsize=32)
def kernel_loader(
    device: str, index: int, cache_dir: str, workers: int, arch: int = 0, target: str = ""
) -> KernelLoader:
    """Return the one loader for a device and cache folder, which all programs of the process share.

    ``arch`` is an older architecture that a GPU stands in for, or 0. ``target`` is one of a
    processor that can do less, and for which kernels are compiled instead, or nothing.
    Raises UnsupportedError for a device that no code generator knows, OptionError for an ``arch``
    that is not one of the GPU's, or a ``target`` that this processor cannot run.
    """
    reason = _unsupported(device, index)
    if reason:
        raise UnsupportedError(f"{reason}; {TESTED}")
    cache = DiskCache(Options(cache_dir=cache_dir).cache_path)
    if device == "cpu":
        if target:
            processors.check_runs_here(target)
        return CpuLoader(cache, target)
    return CudaLoader(cache, workers or default_workers(), gpu(index).as_arch(arch))
