"""Graphs of modules whose layers have factors of adapters beside their weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from strop.frontend.capture import capture
from strop.frontend.importer import import_graph
from strop.frontend.low_rank_layers import DOWN, UP, is_factor, stand_in
from strop.ir.tensor_spec import TensorSpec
from tests.frontend.tracing import Traced

Chosen = Collection[str] | Callable[[str], bool]


def adapt(module: nn.Module, chosen: Chosen, rank: int = 16) -> nn.Module:
    """Give layers, by the ends of their names, factors of this rank."""
    for name, layer in module.named_modules():
        if type(layer) in (nn.Linear, nn.Conv2d) and _is_chosen(name, chosen):
            outs, *ins = layer.weight.shape
            ones = [1] * (len(ins) - 1)
            for key, shape in ((DOWN, (rank, *ins)), (UP, (outs, rank, *ones))):
                factor = torch.randn(shape, dtype=layer.weight.dtype) * shape[1] ** -0.5
                layer.register_parameter(key, nn.Parameter(factor, False))
            stand_in(layer)
    return module


def _is_chosen(name: str, chosen: Chosen) -> bool:
    return chosen(name) if callable(chosen) else name.endswith(tuple(chosen))


def traced(
    module: nn.Module,
    *shapes: str,
    dtype: torch.dtype = torch.float16,
    call: Callable[..., Any] | None = None,
    **hints: int,
) -> Traced:
    specs = [TensorSpec(tuple(shape.split()), dtype, torch.device("cpu")) for shape in shapes]
    captured = capture(module, call or module, specs, hints)
    small = {n for n, name in enumerate(captured.state_names) if is_factor(name)}
    imported = import_graph(
        captured.gm,
        captured.symbols,
        captured.hints,
        captured.origins,
        len(captured.state_names),
        small=small,
    )
    return Traced(captured, imported.graph, imported.returned)


def arguments(found: Traced, module: nn.Module, *given: Tensor) -> Mapping[int, Tensor]:
    """The arguments of a graph by index: weights, then what a call is given."""
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    tensors = [state[name].detach() for name in found.captured.state_names]
    return dict(enumerate((*tensors, *given)))
