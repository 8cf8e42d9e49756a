"""The kernels that the traced sizes run are begun while others are still lowered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from strop.codegen.assemble import Target
from strop.fusion.plan import CodedProduct, Group, Stitch
from strop.ir.device import Device
from strop.ir.graph import Graph
from strop.ir.loops import LoopKernel
from strop.ir.source import KernelSource
from strop.kernels import library


class KernelBuilder(Protocol):
    """This builds the kernels of one device."""

    device: Device

    def begin(self, sources: Sequence[KernelSource]) -> None: ...


class FirstKernels:
    """This has ``builder``, if there is one, begin each kernel as soon as it is printed."""

    def __init__(
        self, builder: KernelBuilder | None, target: Target, hints: Mapping[str, int]
    ) -> None:
        self.builder, self.target, self.hints = builder, target, hints
        self._done = set[Group]()
        self._printed: dict[int, LoopKernel] = {}  # by identity: groups that are alike share one
        self._begun = set[KernelSource]()

    def is_one(self, stitch: Stitch, whole: LoopKernel) -> bool:
        """Say whether the traced sizes run the kernel of the whole, which is then begun."""
        source = self.target.stitched_at(whole, self.hints)
        if source is not None:
            self._done |= {stitch.statistics, stitch.reader}
            self._begin(source)
        return source is not None

    def multiplies(self, found: CodedProduct, whole: LoopKernel) -> None:
        """Begin the kernel that decodes and multiplies, where the traced sizes run it."""
        if found.rows.eval(self.hints) <= found.most:
            self._done.add(found.decoding)
            self._begin(self.target.source_at(whole, self.hints))

    def needs(self, group: Group, kernel: LoopKernel) -> None:
        if self.builder is None or group in self._done or id(kernel) in self._printed:
            return
        self._printed[id(kernel)] = kernel
        self._begin(self.target.source_at(kernel, self.hints))

    def calls(self, graph: Graph) -> None:
        """Begin the kernels that the library chooses for calls; none waits for a plan."""
        if self.builder is None:
            return
        device, off = self.builder.device, self.target.kernels_off
        for node in graph.nodes:
            for source in library.sources_of(node, self.hints, device, off):
                self._begin(source)

    def _begin(self, source: KernelSource) -> None:
        if self.builder is not None and source not in self._begun:
            self._begun.add(source)
            self.builder.begin([source])
