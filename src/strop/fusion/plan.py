"""Hold the fusion plan: plain data, and its text form for people and golden tests."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from strop.ir.dims import Expr
from strop.ir.graph import Node
from strop.ir.loops import LoopKernel, Schedule


class Scheme(Enum):
    """Say how a value gets from producer to consumer (AStitch, ASPLOS '22)."""

    LOCAL = "local"  # in registers of one kernel
    REGIONAL = "regional"  # a reduction's result, shared inside one program
    GLOBAL = "global"  # through device memory


@dataclass(frozen=True, slots=True)
class Group:
    """Describe one kernel: it writes ``stores`` and computes whatever they need and nobody
    stored."""

    schedule: Schedule
    nodes: tuple[Node, ...]
    stores: tuple[Node, ...]

    @property
    def origin(self) -> str:
        return self.stores[-1].origin


@dataclass(frozen=True, slots=True)
class Stitch:
    """``whole`` computes what ``statistics`` and ``reader`` compute, at the place of ``host``.

    Values that only ``reader`` wanted are not stored.
    """

    statistics: Group
    reader: Group
    whole: Group
    host: Group


@dataclass(frozen=True, slots=True)
class CodedProduct:
    """``whole`` decodes the weight of ``call``, a linear, and computes its result, at the place of
    ``decoding``, where it has no more than ``most`` rows."""

    decoding: Group
    call: Node
    whole: Group
    rows: Expr
    most: int


@dataclass(frozen=True, slots=True)
class CodePanels:
    """``kernel`` does what the kernel of ``group`` does, and the work of ``calls``, whose sums of
    products of codes it makes itself, where there are no fewer ``rows`` than ``fewest``.
    ``buffers`` and ``offsets`` stand behind its params."""

    group: Group
    calls: tuple[Node, ...]
    kernel: LoopKernel
    buffers: tuple[Node, ...]
    offsets: tuple[Expr, ...]
    rows: Expr
    fewest: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """Say why a consumer did not join its producer's kernel."""

    producer: Node
    consumer: Node
    reason: str


@dataclass(frozen=True, slots=True)
class FusionPlan:
    """List ``steps`` in execution order: groups, and anchors or opaque calls as single nodes."""

    steps: tuple[Group | Node, ...]
    refusals: tuple[Refusal, ...]

    @property
    def groups(self) -> tuple[Group, ...]:
        return tuple(step for step in self.steps if isinstance(step, Group))

    def __str__(self) -> str:
        """Return stable text: nodes are numbered by position, not by serial."""
        number: dict[Node, str] = {}
        lines: list[str] = []
        for index, step in enumerate(self.steps):
            nodes = step.nodes if isinstance(step, Group) else (step,)
            for node in nodes:
                number[node] = f"n{len(number)}"
            if isinstance(step, Node):
                lines.append(f"call {index}  {_line(step, number)}")
                continue
            lines.append(f"group {index}  {step.schedule.name}  {step.origin}")
            for node in nodes:
                mark = " *" if node in step.stores else ""
                lines.append(f"  {_line(node, number)}{mark}")
        return "\n".join(lines)


def _line(node: Node, number: dict[Node, str]) -> str:
    sizes = ", ".join(map(str, node.shape))
    dtype = str(node.dtype).removeprefix("torch.")
    return f"{number[node]} {node.op} {dtype}[{sizes}]"
