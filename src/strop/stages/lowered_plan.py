"""The kernels of a plan are lowered here, and nodes are found that cannot be in one."""

from __future__ import annotations

from collections.abc import Set

from strop.errors import UnsupportedError
from strop.fusion.coded_products import coded_products
from strop.fusion.plan import CodedProduct, CodePanels, FusionPlan, Group, Stitch
from strop.fusion.planner import computed_by
from strop.fusion.stitch import stitches
from strop.ir.graph import Graph, Node
from strop.ir.loops import Schedule
from strop.lowering.alike import Lower
from strop.lowering.lower import Lowered, OutOfPlaceError
from strop.stages.code_panels import panels_of, readers_of_sums
from strop.stages.first_kernels import FirstKernels


class LoweredPlan:
    """``lowered`` holds the kernel of each group, those of ``stitches`` among them. ``failed``
    holds the nodes whose kernel cannot be written; they want to be ``apart``, or if they are so
    already, that is an error. Kernels that take longest to compile are lowered, and begun,
    first."""

    def __init__(
        self,
        graph: Graph,
        fusion: FusionPlan,
        apart: Set[Node],
        lower: Lower,
        first: FirstKernels,
        *,
        has_panels: bool = False,
    ) -> None:
        """Begin with nothing. ``has_panels`` says whether kernels may make the sums of products of
        codes that they read."""
        self._graph, self._fusion, self._first = graph, fusion, first
        self._apart, self._lower = apart, lower
        self.lowered: dict[Group, Lowered] = {}
        self.stitches: list[Stitch] = []
        self.products: list[CodedProduct] = []
        self.panels: list[CodePanels] = []
        self._readers = readers_of_sums(graph, fusion) if has_panels else {}
        self.failed: frozenset[Node] = frozenset()
        self._stored = {node for group in fusion.groups for node in group.stores}

    def stitch(self) -> None:
        """Add the kernels of pairs that are one where a row fits on chip, and of the column
        reductions that stay alone."""
        for stitch in stitches(self._graph, self._fusion):
            inside = set(stitch.whole.nodes) - set(stitch.whole.stores)
            try:
                whole = self._lower(stitch.whole, self._stored - inside)
            except UnsupportedError:
                continue  # its indices do not divide: it stays two kernels
            self.lowered[stitch.whole] = whole
            self.stitches.append(stitch)
            if not self._first.is_one(stitch, whole.kernel):
                self._add(stitch.statistics)

    def multiply_codes(self) -> None:
        """Add the kernels that multiply a few rows by the weight that they decode."""
        for found in coded_products(self._graph, self._fusion):
            decoded = set(found.decoding.stores)
            try:
                whole = self._lower(found.whole, self._stored - decoded)
            except UnsupportedError:
                continue  # its indices do not divide: the weight is decoded in any case
            self.lowered[found.whole] = whole
            self.products.append(found)
            self._first.multiplies(found, whole.kernel)

    def lower_all(self) -> None:
        for group in sorted(self._fusion.groups, key=lambda g: g.schedule is not Schedule.COLUMN):
            if group not in self.lowered:
                self._add(group)

    def _add(self, group: Group) -> None:
        try:
            self.lowered[group] = self._lower(group, self._stored)
        except UnsupportedError as error:
            members = computed_by(group, self._stored)
            if isinstance(error, OutOfPlaceError) and error.values - self._apart:
                members = error.values
            if members <= self._apart:
                raise
            self.failed |= members
        else:
            self._needs(group)

    def _needs(self, group: Group) -> None:
        """Begin the kernel of a group, or what runs in its place."""
        low = self.lowered[group]
        made = panels_of(group, low, self._readers)
        if made is not None:
            self.panels.append(made)
        has_few = made is None or made.rows.eval(self._graph.hints) < made.fewest
        self._first.needs(group, low.kernel if made is None or has_few else made.kernel)
