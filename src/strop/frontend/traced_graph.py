"""Make a module of its own of a graph that Dynamo has traced.

Dynamo hands over a graph whose arguments are everything: weights, sizes, tensors. In the module
made here weights are its own Parameters and buffers, sizes are read off the tensors, and a call
brings nothing but the tensors, so that it can be captured and served as any other module.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.fx import Graph, GraphModule
from torch.fx import Node as FxNode
from torch.utils._sympy.functions import Mod, PythonMod

from strop.errors import UnsupportedError
from strop.frontend.graph_blocks import GraphBlocks
from strop.frontend.module_parts import graph_module_like

_NAME = "w{}"  # of a weight, by its number
_ROOT = re.compile(r"L\['(\w+)'\]")  # the local variable that a source begins with
# They change torch's mode for what follows: an error amid them would leave it changed.
_MODES = (
    *("_enter_autocast", "_exit_autocast", "_set_grad_enabled", "_set_deterministic"),
    *("_enter_dual_level", "_exit_dual_level"),  # operators of ours know no such level of a node
)
# Eager looks at what these have computed and raises an error of its own, of which our trace keeps
# nothing; AOTAutograd does. Other functions of torch.linalg have no such errors.
_UNCHECKED = {
    f"linalg_{name}"
    for name in ("norm", "vector_norm", "matrix_norm", "cross", "vecdot", "multi_dot", "diagonal")
}
_CHECKED = {"inverse", "cholesky"}


@dataclass(frozen=True, slots=True)
class TracedGraph:
    """Hold such a module, and where its tensors are among the arguments of Dynamo's graph.

    ``shapes`` has a name for each symbolic size of the given tensors, or a multiple of one such as
    "8*d2", and the others as numbers.
    ``sources`` are Dynamo's names for weights, ``owner`` is the local variable of the traced frame
    that all of them begin with, or nothing. ``text`` is
    equal for graphs that compute the same of arguments that look the same.
    """

    module: GraphModule  # its own weights are None: each set of them has a copy of it
    state: tuple[int, ...]  # places of weights, in the order of the module's
    given: tuple[int, ...]  # places of tensors that a call brings
    shapes: tuple[tuple[str, ...], ...]
    sources: tuple[str, ...]
    owner: str
    text: str

    @property
    def constants(self) -> list[Tensor]:
        """Return the tensors that Dynamo keeps in the graph itself."""
        return [buffer for buffer in self.module._buffers.values() if buffer is not None]

    def with_weights(self, state: Sequence[Tensor]) -> GraphModule:
        """Return a copy with these weights. It has the class of all others, and their code."""
        made = graph_module_like(self.module)
        for number, tensor in enumerate(state):
            name = _NAME.format(number)
            if isinstance(tensor, nn.Parameter):
                made._parameters[name] = tensor
            else:
                made._buffers[name] = tensor
        return made


def traced_graph(
    gm: GraphModule, *, has_blocks: bool
) -> tuple[TracedGraph, list[Tensor], list[Tensor]]:
    """Return the module with the real weights and the real tensors of the call that was traced.
    ``has_blocks``: blocks of it that repeat are modules of their own. Raises UnsupportedError for
    what can be no argument or node of such a module."""
    _refuse_nodes(gm)
    placeholders = gm.graph.find_nodes(op="placeholder")
    arguments = [_argument(place, node) for place, node in enumerate(placeholders)]
    state = [a for a in arguments if a.is_state]
    state.sort(key=lambda a: not isinstance(a.value, nn.Parameter))  # as a module has them
    given = [a for a in arguments if isinstance(a.value, Tensor) and not a.is_state]
    names, shapes = _shapes(given)
    blocks = GraphBlocks(gm.graph if has_blocks else Graph())
    module = _module(gm, state, given, names, blocks)
    owners = {match.group(1) if match else "" for match in (_ROOT.match(a.source) for a in state)}
    found = TracedGraph(
        module,
        tuple(a.place for a in state),
        tuple(a.place for a in given),
        shapes,
        tuple(a.source for a in state),
        owners.pop() if len(owners) == 1 else "",
        _text(module, shapes),
    )
    return found, [a.value for a in state], [a.value for a in given]


def _refuse_nodes(gm: GraphModule) -> None:
    """Raise UnsupportedError for nodes that a trace of the module would run in Python alone."""
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", str(node.target))
        if isinstance(node.target, HigherOrderOperator) or node.op == "call_module":
            raise UnsupportedError(f"its graph has a part of its own ({name})")
        if name in _MODES:
            raise UnsupportedError(f"its graph changes torch's mode ({name})")
        if (name.startswith("linalg_") and name not in _UNCHECKED) or name in _CHECKED:
            raise UnsupportedError(f"torch looks at the result of {name}")


@dataclass(frozen=True, slots=True)
class _Argument:
    """Hold one argument of Dynamo's graph: its node, and the real value of the call."""

    place: int
    node: FxNode
    value: Any
    source: str

    @property
    def is_state(self) -> bool:
        is_buffer = "._buffers['" in self.source and isinstance(self.value, Tensor)
        return isinstance(self.value, nn.Parameter) or is_buffer


def _argument(place: int, node: FxNode) -> _Argument:
    kept = node.meta["grapharg"]
    if kept.source is None or kept.pass_arg_as_tensor:
        raise UnsupportedError("a number among the arguments comes as a tensor")
    name = kept.source.name
    source = str(name() if callable(name) else name)  # a method before torch 2.12
    value = kept.example
    if not isinstance(value, Tensor | torch.SymInt):
        raise UnsupportedError(f"its graph has an argument of type {type(value).__name__}")
    return _Argument(place, node, value, source)


def _shapes(
    given: Sequence[_Argument],
) -> tuple[dict[str, tuple[_Argument, int]], tuple[tuple[str, ...], ...]]:
    """Return where each symbol of torch's is a size, and the shapes in names of our own."""
    where: dict[str, tuple[_Argument, int]] = {}
    names: dict[str, str] = {}
    shapes = []
    for argument in given:
        shape = []
        for dim, size in enumerate(argument.node.meta["example_value"].shape):
            if not isinstance(size, torch.SymInt):
                shape.append(str(int(size)))
                continue
            where.setdefault(str(size.node._expr), (argument, dim))
            # Its own symbol, or what it was replaced by since: Dynamo has found sizes to be equal.
            known, fixed = str(size.node.expr), size.node.maybe_as_int()
            if fixed is not None:
                shape.append(str(fixed))
                continue
            name, factor = names.setdefault(known, f"d{len(names)}"), _factor(size)
            shape.append(name if factor == 1 else f"{factor}*{name}")
        shapes.append(tuple(shape))
    return where, tuple(shapes)


def _factor(size: torch.SymInt) -> int:
    """Return what Dynamo has found a size to be a multiple of, such as 8 for the sides of a UNet's
    picture: all sizes in it are then products, and those that are equal look equal. Dynamo asks
    before each call whether it is one."""
    found = 1
    for guard in size.node.shape_env.guards:
        whole = guard.expr.lhs if isinstance(guard.expr, sympy.Eq) and guard.expr.rhs == 0 else None
        if isinstance(whole, Mod | PythonMod) and whole.args[0] == size.node.expr:
            found = math.lcm(found, int(whole.args[1])) if whole.args[1].is_Integer else found
    return found


def _module(
    gm: GraphModule,
    state: Sequence[_Argument],
    given: Sequence[_Argument],
    where: Mapping[str, tuple[_Argument, int]],
    blocks: GraphBlocks,
) -> GraphModule:
    root, graph = nn.Module(), Graph()
    copies: dict[FxNode, FxNode] = {}
    for argument in given:
        copies[argument.node] = graph.placeholder(argument.node.name)
    for number, argument in enumerate(state):
        name, is_parameter = _NAME.format(number), isinstance(argument.value, nn.Parameter)
        (root.register_parameter if is_parameter else root.register_buffer)(name, argument.value)
        copies[argument.node] = graph.get_attr(name)
    for node in gm.graph.find_nodes(op="get_attr"):
        _share(root, gm, str(node.target))
        copies[node] = graph.node_copy(node)
    for node in gm.graph.nodes:
        if node in copies:
            continue
        if node.op == "placeholder":
            symbol = str(node.meta["example_value"].node._expr)
            if symbol not in where:
                raise UnsupportedError("a whole number among the arguments is no size of a tensor")
            argument, dim = where[symbol]
            copies[node] = graph.call_method("size", (copies[argument.node], dim))
            continue
        if not blocks.put(node, root, graph, copies):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    module = GraphModule(root, graph, class_name="TracedGraphModule").eval()
    for table in (module._parameters, module._buffers):
        table |= {name: None for name in table if name.startswith("w")}
    return module


def _share(root: nn.Module, gm: GraphModule, name: str) -> None:
    """Give the module a constant of Dynamo's graph, under its name."""
    value = getattr(gm, name, None)
    if not isinstance(value, Tensor) or "." in name or hasattr(root, name):
        raise UnsupportedError(f"its graph has an attribute that is no tensor of its own ({name})")
    root.register_buffer(name, value)


def _text(module: GraphModule, shapes: Sequence[Sequence[str]]) -> str:
    """Write out the code, and which objects it names that it cannot spell."""
    constants = [(name, id(kept)) for name, kept in module._buffers.items() if kept is not None]
    graphs = {part.graph: path for path, part in module.named_modules()}
    blocks = [(path, graphs[part.graph]) for path, part in module.named_children()]
    return "\n".join([*map(_code, graphs), str(blocks), str(constants), str(list(shapes))])


def _code(graph: Graph) -> str:
    code = graph.python_code("self")
    return f"{code.src}\n{sorted((name, id(value)) for name, value in code.globals.items())}"
