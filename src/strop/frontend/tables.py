"""Tables are the weights of ``nn.Embedding``: how many rows one has is data, as its values are.

A textual inversion adds a row for each new token. A trace takes the number of rows for a size,
which every call solves from the table as it is, and against which indices are checked. This holds
as long as a table is looked into and nothing else: one that is an operand of a product too, as
where a language model gives scores by its own embedding, keeps the size it was traced with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from strop.ir.tensor_spec import TensorSpec

# Attributes that say how many rows there are: of the layer, and of models of transformers, which
# ``resize_token_embeddings`` writes there and in their configuration.
COUNTS = frozenset(("num_embeddings", "vocab_size"))
_LEAST = 2  # rows: a size of 1 could be broadcast


def table_names(parts: Iterable[tuple[str, nn.Module]]) -> Iterator[str]:
    """Yield the names of all tables of these modules with their paths. Those that another layer
    holds too are none."""
    parts = list(parts)
    elsewhere = {
        id(weight)
        for _, part in parts
        if not _is_embedding(part)
        for weight in part._parameters.values()
    }
    for path, part in parts:
        weight = part._parameters.get("weight")
        if _is_embedding(part) and _is_table(weight) and id(weight) not in elsewhere:
            yield f"{path}.weight" if path else "weight"


def _is_embedding(part: nn.Module) -> bool:
    return isinstance(part, nn.Embedding) and type(part).forward is nn.Embedding.forward


def _is_table(weight: Any) -> bool:
    is_plain = type(weight) in (Tensor, nn.Parameter) and weight.layout is torch.strided
    return is_plain and weight.dim() == 2 and len(weight) >= _LEAST and weight.is_contiguous()


def row_specs(
    tables: Sequence[Tensor], device: torch.device | None = None
) -> tuple[TensorSpec, ...]:
    """Return a spec of one dim for each table, whose size is its number of rows. They are on
    ``device``, if there is one."""
    places = enumerate(tables)
    return tuple(TensorSpec((f"rows{n}",), t.dtype, device or t.device) for n, t in places)


def fake_tables(
    state: Mapping[str, Tensor],
    specs: Mapping[str, TensorSpec],
    roots: Mapping[str, torch.SymInt],
) -> dict[str, Tensor]:
    """Return what stands for the tables in a trace, by name: ``specs`` has the roots of their
    sizes."""
    found = {}
    for name, spec in specs.items():
        sizes: Any = (roots[spec.shape[0]], state[name].shape[1])
        table = torch.empty(sizes, dtype=spec.dtype, device=spec.device)
        found[name] = table.requires_grad_(state[name].requires_grad)
    return found


def rows_read_otherwise(
    gm: GraphModule, names: Sequence[str], specs: Mapping[str, TensorSpec]
) -> frozenset[str]:
    """Return the roots of the tables that a graph does more with than look into them. ``names`` are
    those of all state, which are the graph's first arguments; ``specs`` are those of tables."""
    arguments = (node for node in gm.graph.nodes if node.op == "placeholder")
    found = set()
    for name, node in zip(names, arguments, strict=False):
        if name in specs and not all(_is_lookup(user, node) for user in node.users):
            found.add(specs[name].shape[0])
    return frozenset(found)


def _is_lookup(user: Any, table: Any) -> bool:
    is_embedding = user.target is torch.ops.aten.embedding.default
    return is_embedding and user.args[0] is table and table not in user.args[1:]
