"""Kernels that the traced sizes run, begun while others are still lowered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from strop.codegen.assemble import Target
from strop.fusion.plan import Group, Stitch
from strop.ir.graph import Graph
from strop.ir.loops import Kernel
from strop.ir.source import KernelSource
from strop.kernels import library

Begin = Callable[[Sequence[KernelSource]], None]


class FirstKernels:
    """Tells ``begin``, if there is one, of each kernel as soon as it is printed."""

    def __init__(self, begin: Begin | None, target: Target, hints: Mapping[str, int]) -> None:
        self.begin, self.target, self.hints = begin, target, hints
        self._done = set[Group]()

    def is_one(self, stitch: Stitch, whole: Kernel) -> bool:
        """Whether the traced sizes run the kernel of the whole, which then is begun."""
        source = self.target.stitched_at(whole, self.hints)
        if source is not None:
            self._done |= {stitch.statistics, stitch.reader}
            self._begin(source)
        return source is not None

    def needs(self, group: Group, kernel: Kernel) -> None:
        if self.begin is not None and group not in self._done:
            self._begin(self.target.source_at(kernel, self.hints))

    def calls(self, graph: Graph) -> None:
        """Kernels for what else is left to a library; none waits for a plan."""
        for node in graph.nodes:
            if source := self.target.own_call(node):
                self._begin(source)
            for source in library.sources_of(node, self.target.families(node), self.hints):
                self._begin(source)

    def _begin(self, source: KernelSource) -> None:
        if self.begin is not None:
            self.begin([source])
