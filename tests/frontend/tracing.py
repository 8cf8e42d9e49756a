"""Traces a function over symbolic sizes, for tests of every stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from strop.frontend.capture import Captured, capture
from strop.frontend.importer import import_graph
from strop.ir.graph import Graph, Node, Ref, compute_nodes
from strop.ir.tensor_spec import TensorSpec


class Function(nn.Module):
    """A function as a module without state."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


@dataclass(frozen=True)
class Traced:
    captured: Captured
    graph: Graph
    returned: list[Any]

    @property
    def outputs(self) -> list[Node]:
        return [self.graph.outputs[r.index] for r in self.returned if isinstance(r, Ref)]

    def ops(self) -> list[str]:
        return [n.op for n in compute_nodes(self.graph)]


def trace(
    module: nn.Module | Callable[..., Any],
    *shapes: str,
    dtype: torch.dtype = torch.float32,
    **hints: int,
) -> Traced:
    """``shapes`` as "b 4 8*h", one text an argument."""
    if not isinstance(module, nn.Module):
        module = Function(module)
    device = torch.device("cpu")
    specs = [TensorSpec(tuple(shape.split()), dtype, device) for shape in shapes]
    return trace_specs(module, module, specs, hints)


def trace_specs(
    module: nn.Module, call: Callable[..., Any], specs: list[TensorSpec], hints: Mapping[str, int]
) -> Traced:
    captured = capture(module, call, specs, hints)
    imported = import_graph(
        captured.gm, captured.symbols, captured.hints, captured.origins, len(captured.state_names)
    )
    return Traced(captured, imported.graph, imported.returned)
