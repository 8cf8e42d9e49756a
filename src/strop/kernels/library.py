"""Hold the kernel library: one row for each kernel written by hand and for each library that is
called.

``select`` is asked once for each call and each size. The first launch, the builds before it, those
in the background, ``explain``, the roofline and ``strop bench select`` all read its answer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from strop.ir.device import Device
from strop.ir.graph import Node
from strop.ir.source import KernelSource
from strop.kernels import libraries
from strop.kernels.attention import code_rows, cpu, short_rows, wide
from strop.kernels.attention import rows as attention
from strop.kernels.conv import code_conv, conv_cpu, folded_taps, narrow
from strop.kernels.gemm import (
    code_sums,
    geglu,
    linear_cpu,
    mixed_product,
    scaled_convs,
    scaled_rows,
    skinny,
    small_cpu,
    trimmed,
)
from strop.kernels.gemm import rows as gemm
from strop.kernels.kernel import NEVER, Call, Kernel, Launches, Problem
from strop.kernels.packed import rows as packed
from strop.kernels.recurrent import rows as recurrent
from strop.kernels.scan import rows as scan

# Rows of equal cost are preferred in this order.
KERNELS: tuple[Kernel, ...] = (
    skinny.ROW,
    gemm.ROW,
    code_rows.ROW,
    attention.WGMMA,
    attention.CROSS,
    attention.TMA,
    wide.ROW,
    short_rows.ROW,
    cpu.ROW,
    small_cpu.ROW,
    linear_cpu.ROW,
    conv_cpu.ROW,
    narrow.ROW,
    folded_taps.ROW,
    geglu.ROW,
    mixed_product.ROW,
    recurrent.ROW,
    scan.CPU_ROW,
    scan.GPU_ROW,
    trimmed.ROW,
    scaled_rows.ROW,
    scaled_convs.ROW,
    code_sums.ROW,
    code_conv.ROW,
    packed.ROW,
    packed.PLAIN,
    *libraries.ROWS,
)
LIBRARIES: tuple[Kernel, ...] = (packed.ROW, packed.PLAIN, *libraries.ROWS)
OURS: tuple[str, ...] = tuple(row.name for row in KERNELS if row not in LIBRARIES)
MAY_BE_OFF: tuple[str, ...] = (*OURS, packed.NAME)


def _by_op() -> dict[str, tuple[Kernel, ...]]:
    ops = dict.fromkeys(op for row in KERNELS for op in row.ops)
    return {op: tuple(row for row in KERNELS if op in row.ops) for op in ops}


BY_OP: Mapping[str, tuple[Kernel, ...]] = _by_op()


@dataclass(frozen=True, slots=True)
class Choice:
    """Say what runs a call at some sizes, and what it was compared with.

    ``launches`` is None where a library is called. ``beaten``: the rows that support the call and
    cost more, with microseconds as ``cost_us`` gives them. ``beside``: what the kernel's row says.
    """

    kernel: str
    cost_us: float
    launches: Launches | None = None
    beaten: tuple[tuple[str, float], ...] = ()
    beside: tuple[KernelSource, ...] = ()

    @property
    def sources(self) -> tuple[KernelSource, ...]:
        return self.beside if self.launches is None else self.launches.sources


TORCH = Choice("torch", NEVER)  # for operators without a row: torch computes them


def rows_for(call: Call, device: Device, off: Collection[str] = ()) -> tuple[Kernel, ...]:
    """The rows that may do a call on a device at some sizes."""
    rows = BY_OP.get(call.op, ())
    return tuple(r for r in rows if r.name not in off and not r.supports(call, device))


@lru_cache(maxsize=4096)
def _known(call: Call, device: Device, off: tuple[str, ...]) -> tuple[Kernel, ...]:
    return rows_for(call, device, off)


@lru_cache(maxsize=16384)
def select(call: Call, problem: Problem, device: Device, off: tuple[str, ...] = ()) -> Choice:
    """Choose what runs ``problem``, which is ``call`` at known sizes. ``off``: names of rows that
    may not run. On a GPU a row of a library is always there, so that there is a choice."""
    costs = {row: row.cost_us(problem, device) for row in _known(call, device, off)}
    best = min(costs, key=lambda row: costs[row], default=None)
    # a CPU may lack the instructions of the only kernel that artefacts hold for it
    if best is None or (not device.arch and best.name in OURS and costs[best] == NEVER):
        return TORCH
    beaten = tuple((row.name, us) for row, us in costs.items() if row is not best)
    return Choice(best.name, costs[best], best.launch(problem, device), beaten, best.beside)


def sources_of(
    node: Node, sizes: Mapping[str, int], device: Device, off: tuple[str, ...] = ()
) -> tuple[KernelSource, ...]:
    """Return what ``select`` launches for a node at these sizes."""
    if node.op not in BY_OP or not device.arch:  # most nodes: their sizes need not be known
        return ()
    call = Call.of(node)
    return select(call, call.at(sizes), device, off).sources


def forms(call: Call, device: Device, off: tuple[str, ...] = ()) -> Iterable[KernelSource]:
    """All kernels that ``select`` may choose for a call at any sizes, and possibly more."""
    for row in _known(call, device, off):
        yield from row.forms(call, device)
        yield from row.beside


def reasons(call: Call, device: Device, off: Collection[str] = ()) -> dict[str, str]:
    """Say why rows cannot do a call, by name, as clauses about the kernel."""
    found = {}
    for row in BY_OP.get(call.op, ()):
        reason = "is switched off" if row.name in off else row.supports(call, device)
        if reason:
            found[row.name] = reason
    return found
