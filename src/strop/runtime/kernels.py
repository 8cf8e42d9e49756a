"""Built kernels behind one interface: ``bind`` them to pointers and sizes, then call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from strop.ir.source import KernelSource


class BoundKernel(Protocol):
    """A kernel with its arguments in place. ``pointers`` may be patched between calls."""

    pointers: Any

    def __call__(self) -> None: ...


class KernelLibrary(Protocol):
    """The kernels of one device. ``build`` compiles what no cache holds."""

    num_built: int
    num_cached: int

    def build(self, sources: Sequence[KernelSource]) -> None: ...

    def bind(
        self, source: KernelSource, pointers: Sequence[int], scalars: Sequence[int], stream: int
    ) -> BoundKernel: ...

    def splits(self, rows: int, parallel: int, min_rows: int) -> int: ...
