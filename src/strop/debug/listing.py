"""Write programs and graphs as text: one line a step or node, in execution order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from strop.fusion.plan import FusionPlan
from strop.ir.graph import Graph, Node
from strop.ir.program import Buffer, CallStep, Program, Step


def listing(program: Program) -> str:
    return "\n".join(_line(program, number, step) for number, step in enumerate(program.steps))


def graph_text(graph: Graph) -> str:
    """Print one line per node under its module's path. Names count inside a module, for ``diff``,
    so that a node that comes or goes renames nothing elsewhere."""
    counts: Counter[tuple[str, str]] = Counter()
    name: dict[Node, str] = {}
    lines, where = [], None
    for node in graph.nodes:
        if node.origin != where:
            where = node.origin
            lines.append(f"{where or 'the module'}:")
        if node.op == "input":
            name[node] = f"in{node.attrs['index']}"
        else:
            name[node] = f"{node.op}_{counts[node.op, node.origin]}"
            counts[node.op, node.origin] += 1
        lines.append("  " + _node_line(node, name))
    lines.append(f"return {', '.join(_named(o, '', name) for o in graph.outputs)}")
    return "\n".join(lines) + "\n"


def _node_line(node: Node, name: dict[Node, str]) -> str:
    hidden = ("index",) if node.op == "input" else ()
    attrs = [f"{k}={_text(v)}" for k, v in sorted(node.attrs.items()) if k not in hidden]
    operands = [_named(i, node.origin, name) for i in node.inputs]
    order = f" order {node.order}" if node.order else ""
    return f"{name[node]} = {node.op}({', '.join(operands + attrs)}) -> {type_text(node)}{order}"


def _named(node: Node, where: str, name: dict[Node, str]) -> str:
    """Return a value's name as code of the module ``where`` says it."""
    if node.op == "input" or node.origin == where:
        return name[node]
    return f"{node.origin}/{name[node]}"


def type_text(node: Node) -> str:
    """Write a type as in "float16[2*b, 320]"."""
    return f"{str(node.dtype).removeprefix('torch.')}[{', '.join(map(str, node.shape))}]"


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    return str(value)


def plan_text(plan: FusionPlan) -> str:
    """Print the plan, then each refused edge with its reason."""
    refused = [
        f"  {r.producer.op} -> {r.consumer.op} ({r.consumer.origin or 'the module'}): {r.reason}"
        for r in plan.refusals
    ]
    return "\n".join([str(plan), "", f"refused edges: {len(refused)}", *refused]) + "\n"


def _line(program: Program, number: int, step: Step) -> str:
    if isinstance(step, CallStep):
        made = [buffer_text(program.buffers[n], n) for n in step.outputs if n >= 0]
        read = [buffer_text(program.buffers[r.buffer], r.buffer) for r in step.inputs]
        what = f"call   {call_text(step.op, dict(step.attrs))}"
    else:
        made = [buffer_text(program.buffers[n], n) for n in step.writes]
        read = [buffer_text(program.buffers[n], n) for n in step.buffers if n not in step.writes]
        what = f"kernel {program.sources[step.kernel].name}"
    return f"{number:4d} {what}({', '.join(read)}) -> {', '.join(made)}  # {step.origin}"


def call_text(op: str, attrs: Mapping[str, Any]) -> str:
    """Return "linear", the ATen overload of an opaque call or of one that changes an argument in
    place, or the pattern whose replacement it is."""
    if op == "pattern":
        return f"pattern {attrs['name']}"
    return str(attrs["target"]) if op in ("aten", "write") and "target" in attrs else op


def buffer_text(buffer: Buffer, number: int) -> str:
    dtype = str(buffer.dtype).removeprefix("torch.")
    sizes = ", ".join(map(str, buffer.shape))
    return f"{buffer.kind}{number}:{dtype}[{sizes}]"
