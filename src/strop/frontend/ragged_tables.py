"""Look up the ragged features of torchrec, in one graph for all lengths.

An ``EmbeddingBagCollection`` cuts the ids of a ``KeyedJaggedTensor`` into those of each feature, at
places that values decide. Here each table gets all ids, and the offsets of its feature's bags among
them: sums are the same, and no size depends on a value. What else cuts such ids runs in eager.

Source: https://github.com/meta-pytorch/torchrec, torchrec/modules/embedding_modules.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node as FxNode

from strop.errors import EagerOnlyError
from strop.frontend.differentiated import define, is_differentiated, is_transformed
from strop.frontend.quick import replaced_here
from strop.ir.dims import const
from strop.ir.graph import Node

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

_library = torch.library.Library("strop", "FRAGMENT")
_library.define("bags(Tensor table, Tensor ids, Tensor offsets, Tensor? weights) -> Tensor")
_MODULES, _JAGGED = "torchrec.modules.embedding_modules", "torchrec.sparse.jagged_tensor"
_CUTS = "_maybe_compute_length_per_key"  # asks how many ids each feature has
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_Run = Callable[..., Any]


def _sums(table: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    """Add up rows of a table: ``offsets`` say where bags begin, and where the last one ends."""
    part = slice(int(offsets[0]), int(offsets[-1]))
    own = None if weights is None else weights[part]
    begins = (offsets - offsets[0]).to(ids.dtype)
    options: dict[str, Any] = {"mode": "sum", "include_last_offset": True}
    return F.embedding_bag(ids[part], table, begins, per_sample_weights=own, **options)


def _shape(table: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    return table.new_empty(offsets.shape[0] - 1, table.shape[1])


define(_library, "bags", _sums, _shape)


def _bags(
    im: Importer, fx: FxNode, table: Any, ids: Any, offsets: Any, weights: Any
) -> Node | None:
    inputs = [im.node(each) for each in (table, ids, offsets, weights) if each is not None]
    rows, listed, begins = inputs[:3]
    shape = (begins.shape[0] - const(1), rows.shape[1])
    if listed.shape[0] == const(0):
        zero = im.builder.reshape(im.builder.constant(0.0, rows.dtype), (1, 1))
        return im.builder.expand(zero, shape)
    if rows.shape[0] == const(0):
        return None  # there is nothing to read, which torch says
    how: dict[str, Any] = {"kind": "sum", "ends": True, "padding": None, "is_part": True}
    return im.builder.make("bag", inputs, shape, rows.dtype, **how)


BAGS: dict[Any, Callable[..., Any]] = {torch.ops.strop.bags.default: _bags}


@contextmanager
def ragged_tables() -> Iterator[None]:
    """Look up whole tables within the body, in this thread, where torchrec is loaded."""
    modules, jagged = sys.modules.get(_MODULES), sys.modules.get(_JAGGED)
    with ExitStack() as stack:
        if modules is not None and jagged is not None:
            owner = modules.EmbeddingBagCollection
            stack.enter_context(replaced_here(owner, "forward", _looked_up))
            stack.enter_context(replaced_here(jagged, _CUTS, _refused))
        yield


def _looked_up(usual: _Run, tables: Any, features: Any) -> Any:
    jagged: Any = sys.modules[_JAGGED]
    if type(features) is not jagged.KeyedJaggedTensor:
        return usual(tables, features)
    return _pooled(tables, features, jagged.KeyedTensor)


def _refused(usual: _Run, *args: Any, **kwargs: Any) -> Any:
    raise EagerOnlyError("it asks how many ids a feature of a KeyedJaggedTensor has")


def _pooled(tables: Any, features: Any, made: Any) -> Any:
    """Return what the collection gives, a ``KeyedTensor``."""
    keys, ids = features.keys(), features.values()
    lengths, offsets = features.lengths_or_none(), features.offsets_or_none()
    if offsets is None:
        offsets = torch.cat([lengths.new_zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    if lengths is None:
        lengths = offsets[1:] - offsets[:-1]
    weights = features.weights() if tables.is_weighted() else None
    if (why := _why_not(tables, features, (ids, offsets, weights))) is not None:
        raise EagerOnlyError(f"an EmbeddingBagCollection {why}")
    batch, found = lengths.shape[0] // len(keys), []
    for table, names in zip(tables.embedding_bags.values(), tables._feature_names, strict=True):
        for name in names:
            first = keys.index(name) * batch
            bags = offsets[first : first + batch + 1]
            sums = torch.ops.strop.bags(table.weight, ids, bags, weights)
            if table.mode == "mean":
                counts = lengths[first : first + batch].clamp(min=1)
                sums = sums / counts.to(sums.dtype).unsqueeze(1)
            found.append(sums.float())
    widths = tables._lengths_per_embedding
    return made(tables._embedding_names, widths, torch.cat(found, dim=1))


def _why_not(tables: Any, features: Any, values: tuple[Tensor | None, ...]) -> str | None:
    """Say what stands against it, or nothing."""
    bags = list(tables.embedding_bags.values())
    if not all(map(_is_usual, bags)):
        return "has a table that is no usual EmbeddingBag of torch"
    weights = [bag.weight for bag in bags]
    if any(weight.device.type != "cpu" for weight in weights):
        return "is compiled on a CPU alone"
    if is_differentiated((weights, values)) or is_transformed():
        return "is compiled without gradients alone"
    if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
        return "is compiled for features of one batch size alone"
    known = features.keys()
    missing = [name for names in tables._feature_names for name in names if name not in known]
    return f"gets no feature {missing[0]!r}" if missing else None


def _is_usual(bag: nn.Module) -> bool:
    if type(bag) is not nn.EmbeddingBag or any(getattr(bag, name) for name in _HOOKS):
        return False
    is_plain = bag.max_norm is None and bag.padding_idx is None and not bag.sparse
    return is_plain and bag.mode in ("sum", "mean") and bag.weight.dtype is not torch.float64
