"""Prepare arguments on their way into a program, and its results on their way out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from strop.dispatch.aliases import AliasOfArgument
from strop.frontend.capture import Same
from strop.frontend.layout_reads import OF_STRIDES
from strop.ir.tensor_spec import TensorSpec
from strop.runtime.run.cpu_runs import FIRST

GAPS = (
    "its forward asks how arguments lie in memory ({}), and one of them has gaps or another order:"
    " make it contiguous"
)


def as_specified(tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> list[Tensor]:
    """Arguments in the type and layout that a program reads: adapters may want another type, and
    torch leaves it to a bit that numbers are conjugated or negated."""
    return [
        s.arranged(
            t
            if t.dtype is s.dtype and not (t.is_neg() or t.is_conj())  # these are cheaper to ask
            else t.resolve_conj().resolve_neg().to(s.dtype)
        )
        for t, s in zip(tensors, specs, strict=True)
    ]


def wants_none(tensors: Sequence[Tensor]) -> bool:
    """Tell whether no argument requires a gradient."""
    return not any(tensor.requires_grad for tensor in tensors)


def are_dense(
    tensors: Sequence[Tensor], specs: Sequence[TensorSpec], *, at_begin: bool = True
) -> bool:
    """Tell whether all lie as they have been traced, and ``at_begin`` of their memory."""
    lie_so = all(s.lies_so(t) for t, s in zip(tensors, specs, strict=True))
    return lie_so and not (at_begin and any(t.storage_offset() for t in tensors))


def returned(
    spec: pytree.TreeSpec,
    aliases: Sequence[AliasOfArgument],
    same: Sequence[Same],
    results: list[Any],
    tensors: Sequence[Tensor],
    state: Sequence[Tensor],
) -> Any:
    """Return what the module gives back. Arguments among it are the caller's own, not the dense
    copies that kernels read or what a CUDA graph keeps; weights are the module's."""
    for alias in aliases:
        own = alias.of(tensors[alias.argument])
        if own is not None and own.dtype == results[alias.place].dtype:
            results[alias.place] = own
    for known in same:
        of = {"argument": tensors, "state": state, "result": results}[known.kind]
        results[known.place] = of[known.number]
    return pytree.tree_unflatten(results, spec)


def misfit_in_memory(
    reads: Sequence[str], tensors: Sequence[Tensor], specs: Sequence[TensorSpec]
) -> str:
    """Say why a program whose forward asks these things about memory cannot have these arguments,
    or nothing."""
    at_begin = asks_begin(reads)
    if reads and not are_dense(tensors, specs, at_begin=at_begin):
        return GAPS.format(", ".join(reads))
    return ""


def asks_begin(reads: Sequence[str]) -> bool:
    """Tell whether only arguments at the beginning of their memory can be served."""
    return not set(reads) <= set(OF_STRIDES)


def structured(spec: pytree.TreeSpec, count: int) -> Callable[[list[Any]], Any]:
    """Return ``tree_unflatten`` of so many results, without its detours where they come in tuples
    and lists alone."""
    probe = [object() for _ in range(count)]
    found = pytree.tree_unflatten(probe, spec)
    if count == 1 and found is probe[0]:
        return FIRST
    if type(found) is tuple and found == tuple(probe):
        return tuple
    made = _made_of(found, {id(item): place for place, item in enumerate(probe)})
    return made or partial(pytree.tree_unflatten, treespec=spec)


def _made_of(value: Any, places: Mapping[int, int]) -> Callable[[list[Any]], Any] | None:
    """Return how to make what ``value`` stands for of results, each of which has one of ``places``;
    None where it holds anything but these in tuples and lists."""
    if id(value) in places:
        return itemgetter(places[id(value)])
    kind = type(value)
    if kind not in (tuple, list):
        return None
    parts = list[Callable[[list[Any]], Any]]()
    for item in value:
        part = _made_of(item, places)
        if part is None:
            return None
        parts.append(part)
    return lambda results: kind([part(results) for part in parts])
