"""Write weights that are sums: W = W0 + sum of s_i B_i A_i.

Sums are in fp32 (in fp64 for weights in fp64), start from W0, and are rounded once. Layers that
look alike are computed together, by as many launches as one layer takes: SDXL has 700 of them, in a
dozen shapes. Those where an adapter is no product of two factors, or rows are multiplied (DoRA),
are computed one by one.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.frontend.adapter_kinds import Term

# Memory for the sums of layers that are computed together.
MOST_BYTES = {"cuda": 1 << 28, "cpu": 1 << 22}


@dataclass(frozen=True, slots=True, eq=False)
class WeightSum:
    """This is written into ``weight``, which has the look of W0, ``base``."""

    weight: Tensor
    base: Tensor
    terms: tuple[Term, ...]


@torch.no_grad()
def write_sums(sums: Sequence[WeightSum]) -> None:
    """Write all weights. One without terms gets the very bits of its W0."""
    plain = [one for one in sums if not one.terms]
    if plain:
        torch._foreach_copy_([one.weight for one in plain], [one.base for one in plain])
    groups: dict[Hashable, list[WeightSum]] = defaultdict(list)
    with _exact_products():
        for one in sums:
            if one.terms and all(term.factors is not None for term in one.terms):
                groups[_look(one)].append(one)
            elif one.terms:
                _write_alone(one)
        for alike in groups.values():
            for part in _parts(alike):
                _write_together(part)


def _look(one: WeightSum) -> Hashable:
    """Return what layers must have in common to be computed together."""
    base, factors = one.base, [t for term in one.terms for t in term.factors or ()]
    looks = tuple((t.shape, t.dtype) for t in factors)
    return base.shape, base.dtype, base.device, one.weight.dtype, looks


def _parts(alike: list[WeightSum]) -> Iterator[list[WeightSum]]:
    base = alike[0].base
    num_bytes = base.numel() * _sum_dtype(base).itemsize
    step = max(1, MOST_BYTES.get(base.device.type, 0) // max(1, num_bytes))
    return (alike[start : start + step] for start in range(0, len(alike), step))


def _write_together(sums: Sequence[WeightSum]) -> None:
    """Write weights that look alike: W0 of all lie in one tensor, and so do their factors."""
    first, count = sums[0].base, len(sums)
    dtype, shape = _sum_dtype(first), (count, first.shape[0], first[0].numel())
    totals = torch.empty((count, *first.shape), dtype=dtype, device=first.device)
    torch._foreach_copy_(parts := list(totals.unbind()), [one.base for one in sums])
    lefts, rights = [], []
    for terms in zip(*(one.terms for one in sums), strict=True):
        left, right = (_stacked([t.factors[n] for t in terms if t.factors], dtype) for n in (0, 1))
        torch._foreach_mul_(list(right.unbind()), [term.scale for term in terms])
        lefts.append(left)
        rights.append(right)
    totals.view(shape).baddbmm_(torch.cat(lefts, 2), torch.cat(rights, 1))
    torch._foreach_copy_([one.weight for one in sums], parts)


def _stacked(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    first = tensors[0]
    stacked = torch.empty((len(tensors), *first.shape), dtype=dtype, device=first.device)
    torch._foreach_copy_(list(stacked.unbind()), list(tensors))
    return stacked


def _write_alone(one: WeightSum) -> None:
    total = one.base.to(_sum_dtype(one.base), copy=True)
    for term in one.terms:
        delta = term.delta().view(total.shape)
        total.add_(delta, alpha=term.scale)
        if term.lengths is not None:
            total.mul_(_factors_for(term.lengths.to(total.dtype), one.base, delta, term.scale))
    one.weight.copy_(total)


def _factors_for(lengths: Tensor, base: Tensor, delta: Tensor, scale: float) -> Tensor:
    """Return what rows of W0 and one adapter have to be multiplied by to have these lengths. Other
    adapters do not count, as peft has it."""
    rows = torch.add(base.to(lengths.dtype), delta, alpha=scale).flatten(1)
    by: Tensor = lengths.flatten() / torch.linalg.vector_norm(rows, dim=1)
    return by.view(-1, *(1,) * (base.dim() - 1))


def _sum_dtype(base: Tensor) -> torch.dtype:
    return torch.promote_types(base.dtype, torch.float32)


@contextlib.contextmanager
def _exact_products() -> Iterator[None]:
    """Multiply fp32 as such meanwhile, though a user may have allowed less for a model's own
    products."""
    settings = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [own.fp32_precision for own in settings]
    for own in settings:
        own.fp32_precision = "ieee"
    try:
        yield
    finally:
        for own, precision in zip(settings, before, strict=True):
            own.fp32_precision = precision
