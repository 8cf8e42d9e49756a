"""Print the sweeps over the rows of a panel: each goes over all rows before the next one begins.

A row ends each sweep with a few numbers, such as a mean, for which the next sweep waits: 100 to 200
cycles, as long as a sweep over 256 cols takes. The rows of a panel do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from strop.codegen.cpp_reduce import RowSweeps
from strop.codegen.cpp_text import scalar_type
from strop.ir.code_panel import MOST_BYTES, ROWS
from strop.ir.loops import Apply, Literal, Load, Position, Reduce, outs_of

MOST_KEPT = 1 << 16  # bytes of kept values: more would lie in no first cache from sweep to sweep
_OF_SOFTMAX = ("top", "powers")  # which leave more behind a sweep than numbers


class PanelSweeps(RowSweeps):
    """Print the sweeps over the cols of all rows of a panel, one after the other."""

    @property
    def fits(self) -> bool:
        """Tell whether a panel of kept values lies in a cache, and all that a row knows is numbers
        that can be kept beside them."""
        loops, panels = self.loops, self.loops.panels.values()
        if not panels or not loops.kernel.rows or loops.has_places or loops.staged or loops.bags:
            return False
        size = ROWS * loops.kernel.num_cols.value * sum(d.itemsize for d in self._dtypes().values())
        kept = 0 if self.result_row is not None else size
        if kept > MOST_KEPT or kept + sum(p.stack_bytes for p in panels) > MOST_BYTES:
            return False
        reduces = [stmt for stmt in loops.kernel.body if isinstance(stmt, Reduce)]
        return all(stmt.kind not in _OF_SOFTMAX for stmt in reduces)

    def _dtypes(self) -> dict[str, torch.dtype]:
        return {
            out: stmt.dtype
            for stmt in self.loops.kernel.body
            if isinstance(stmt, Apply | Literal | Load | Position | Reduce)
            for out in outs_of(stmt)
            if out in self.kept
        }

    def print_rows(self) -> None:
        """Print the loops over the rows of a task."""
        out, sweeps = self.loops.out, self.plan.sweeps
        cols, dtypes = self.loops.kernel.num_cols, self._dtypes()
        rows = {} if self.result_row is not None else {self.kept[v]: dtypes[v] for v in dtypes}
        for name, dtype in rows.items():
            out(f"alignas(64) {scalar_type(dtype)} {name}_rows[code_sums::PANEL * {cols}];")
        for name, scalar in self._known(sweeps[-1].level):
            out(f"{scalar} {name}_of[code_sums::PANEL];")
        for place, sweep in enumerate(sweeps):
            with self.loops.rows():
                for name, dtype in rows.items():
                    begin = f"{name}_rows + (row - begin) * {cols}"
                    out(f"{scalar_type(dtype)}* const {name} = {begin};")
                self.find_result_row()
                before = [*self._known(sweep.level)] if place else []
                for name, scalar in before:
                    out(f"const {scalar} {name} = {name}_of[row - begin];")
                self.print_sweep(place)
                if place + 1 < len(sweeps):
                    for name, _ in self._known(sweeps[place + 1].level):
                        if (name, _) not in before:
                            out(f"{name}_of[row - begin] = {name};")

    def _known(self, level: int) -> Iterator[tuple[str, str]]:
        """Yield what a row knows after so many reductions, and its type."""
        for stmt in self.loops.kernel.body:
            if isinstance(stmt, Apply | Literal | Load | Position | Reduce):
                for out in outs_of(stmt):
                    is_of_row = out in self.loops.outside and out not in self.loops.printed
                    if is_of_row and self.plan.levels[out] <= level:
                        yield out, scalar_type(stmt.dtype)
