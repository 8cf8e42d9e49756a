"""Print a POINTWISE kernel that was cut into parts: a function for each, and programs of its own.

The grid has the tiles of all parts, one part behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strop.codegen import triton_pointwise
from strop.codegen.triton_lines import Lines
from strop.codegen.triton_text import Printer, TritonScalars
from strop.ir.dims import Expr, const
from strop.ir.functions import SM_90
from strop.ir.loops import LoopKernel


@dataclass(frozen=True, slots=True)
class Parts:
    """Hold the text of functions, and of the kernel that calls each for its programs."""

    functions: Lines
    body: Lines
    scalars: TritonScalars
    grid: Expr
    num_warps: int


def parts_of(
    name: str, parts: Sequence[LoopKernel], arguments: Sequence[str], most: int | None
) -> Parts:
    """Print the parts. ``arguments`` are the names of what all of them get, but for sizes."""
    scalars, grid, num_warps = TritonScalars(), const(0), 4
    printers: list[tuple[Printer, Expr]] = []
    for part in parts:
        printer = Printer(part, scalars=scalars, program="program")
        own_grid, warps = triton_pointwise.pointwise(printer, most)
        printers.append((printer, own_grid))
        num_warps = max(num_warps, warps)
    names = [*arguments, *(f"s{n}" for n in range(len(scalars.sizes)))]
    functions, body = Lines(depth=0), Lines()
    body.add("program = tl.program_id(0)")
    for number, (printer, own_grid) in enumerate(printers):
        given = {name: str(value) for name, value in printer.constants.items()}
        if any(SM_90 in line for line in printer.out.lines):
            given[SM_90] = SM_90  # which the target decides
        tile = [f"{constant}: tl.constexpr" for constant in given]
        functions.add("@triton.jit")
        functions.add(f"def {name}_{number}({', '.join(['program', *names, *tile])}):")
        functions.lines += [*printer.out.lines, "", ""]
        start, grid = grid, grid + own_grid
        with body.block(f"if (program >= {start}) & (program < {grid}):"):
            handed = [f"program - ({start})", *names, *given.values()]
            body.add(f"{name}_{number}({', '.join(handed)})")
    return Parts(functions, body, scalars, grid, num_warps)
