"""Keep matrices in which the B's of several layers stand, each from a row and a column of its own
on, with zeros elsewhere: what one product of all these layers goes on over.

A B keeps its own memory, which other programs may read. It has one writer, who says when it has
been written; all places where it stands are then written too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from strop.ir.tensor_spec import at_corner, cornered

Corner = tuple[int, int]  # a row and a column


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A factor stands here."""

    whole: Tensor
    corner: Corner

    def view(self, factor: Tensor) -> Tensor:
        return at_corner(self.whole, factor, self.corner)


_PLACES = WeakIdKeyDictionary()  # of each factor: a list of Place


def standing(shape: Sequence[int], factors: Sequence[Tensor], corners: Sequence[Corner]) -> Tensor:
    """Return the matrix of this shape in which factors stand from these corners on, which is made
    at the first call."""
    known: list[Place] = _PLACES.get(factors[0], [])
    for place in known:
        are_all = all(map(_stands, factors, corners, [place.whole] * len(factors)))
        if are_all and place.whole.shape == torch.Size(shape):
            return place.whole
    with torch.inference_mode(False), torch.no_grad():  # it is written in place later
        whole = cornered(shape, factors, corners)
    for factor, corner in zip(factors, corners, strict=True):
        _PLACES.setdefault(factor, []).append(Place(whole, corner))
    return whole


def _stands(factor: Tensor, corner: Corner, whole: Tensor) -> bool:
    places: list[Place] = _PLACES.get(factor, [])
    return any(place.whole is whole and place.corner == corner for place in places)


def write_again(factors: Iterable[Tensor]) -> None:
    """Copy factors, which have been written, to all places where they stand."""
    found = [(f, place.view(f)) for f in factors for place in _PLACES.get(f, ())]
    if found:
        own, views = zip(*found, strict=True)
        torch._foreach_copy_(views, own)


def bytes_beside(factors: Iterable[Tensor]) -> int:
    """Return the bytes of all matrices in which factors stand."""
    wholes = {id(p.whole): p.whole.nbytes for f in factors for p in _PLACES.get(f, ())}
    return sum(wholes.values())
