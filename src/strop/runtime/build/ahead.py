"""Kernels are compiled here for devices that this machine need not have: they are kept, not
loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from strop.errors import UnsupportedError
from strop.ir.device import Device
from strop.ir.source import KernelSource, Split
from strop.options import Options
from strop.runtime.build import native
from strop.runtime.build.artefact import StoredEntry
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.driver import View
from strop.runtime.build.loader import (
    BoundKernel,
    BuiltAtOnce,
    BytesByKey,
    Tell,
    cubin_entries,
    default_workers,
)
from strop.runtime.build.processors import compiler_for


class AheadLoader(BuiltAtOnce):
    """This stands in the place of a loader while a module is compiled ahead. Kernels are compiled
    when ``machine_code`` is asked for, all at once."""

    def __init__(
        self,
        target_name: str,
        device: Device,
        options: Options,
        tell: Tell = lambda _done, _total: None,
        compiler: str = "",
    ) -> None:
        """Compile for ``device``, or for the processor that ``target_name`` names. ``tell`` hears
        how far it is. ``compiler`` is the command for processors of another kind than this
        machine's."""
        self.target_name, self.device, self._compiler = target_name, device, compiler
        self._cache = DiskCache(options.cache_path)
        self._workers, self._tell = options.build_workers or default_workers(), tell

    def build(self, sources: Sequence[KernelSource]) -> None:
        pass

    def watch(self, sources: Sequence[KernelSource]) -> Callable[[], int]:
        return lambda: 0

    def bind(
        self,
        source: KernelSource,
        pointers: Sequence[int],
        scalars: Sequence[int],
        stream: int,
        early: bool = False,
        views: Sequence[View] = (),
    ) -> BoundKernel:
        raise UnsupportedError(f"{self.target_name} is compiled for, and not run on")

    def splits(self, split: Split, sizes: Mapping[str, int]) -> int:
        return split.count(sizes, self.device.sms)

    def machine_code(self, sources: Sequence[KernelSource]) -> Iterator[StoredEntry]:
        """Compile kernels, as far as no cache holds them, and yield what an artefact holds."""
        if self.device.arch:
            cache = BytesByKey(self._cache)
            target = self.device.target
            return cubin_entries(sources, target, cache, self._workers, self._tell)
        compiler = compiler_for(self.target_name, self._compiler)
        kernels = native.NativeKernels(self._cache, compiler, self.target_name)
        kernels.make(sources)
        return kernels.machine_code(sources)

    @property
    def counts(self) -> tuple[int, int]:
        return 0, 0
