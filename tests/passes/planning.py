"""Compile a module for a GPU where there is none, for tests of passes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn

from strop.backend import Compiled, compile_graph
from strop.codegen.assemble import Signature
from strop.frontend.capture import capture
from strop.frontend.importer import import_graph
from strop.ir.tensor_spec import TensorSpec
from strop.options import Options

GPU = torch.device("cuda", 0)
HINTS: Mapping[str, int] = MappingProxyType({"b": 2, "s": 77})


def planned_by(
    module: nn.Module,
    specs: Mapping[str, tuple[str, ...]],
    options: Options,
    dtype: torch.dtype,
    hints: Mapping[str, int] = HINTS,
) -> tuple[Compiled, list[str]]:
    """Return what is compiled for a GPU, and the names of the weights among its arguments."""
    module = module.to(dtype).eval().requires_grad_(False)
    given = [TensorSpec(shape, dtype, GPU) for shape in specs.values()]
    captured = capture(module, module, given, dict(hints), device=GPU)
    imported = import_graph(
        captured.gm, captured.symbols, captured.hints, captured.origins, len(captured.state_names)
    )
    signature = Signature(imported.returned, captured.guards)
    made = compile_graph(imported.graph, signature, GPU.type, options)
    return made, [*captured.state_names]
