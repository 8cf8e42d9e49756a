"""Say how one tensor argument of a program looks: symbolic sizes, type, device, order in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.ir.dims import Expr, parse


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Describe one tensor argument: sizes as text over root names, for example ("b", "4", "8*h",
    "8*w")."""

    shape: tuple[str, ...]
    dtype: torch.dtype
    device: torch.device
    order: tuple[int, ...] | None = None  # of dims in memory, outermost first; None: as they are

    @property
    def sizes(self) -> tuple[Expr, ...]:
        return tuple(parse(size) for size in self.shape)

    def empty(self, sizes: Sequence[int]) -> Tensor:
        """Return a tensor of these sizes that lies as the argument is traced."""
        if self.order is None:
            return torch.empty(sizes, dtype=self.dtype, device=self.device)
        moved = torch.empty(
            [sizes[dim] for dim in self.order], dtype=self.dtype, device=self.device
        )
        return moved.permute(_inverse(self.order))

    def lies_so(self, t: Tensor) -> bool:
        """Tell whether a tensor is dense in the order of the argument."""
        return (t if self.order is None else t.permute(self.order)).is_contiguous()

    def arranged(self, t: Tensor) -> Tensor:
        """Return ``t`` itself if it is dense in this order, or else a copy that is."""
        if self.order is None:
            return t.contiguous()
        moved = t.permute(self.order)
        return t if moved.is_contiguous() else moved.contiguous().permute(_inverse(self.order))


def cornered(
    shape: Sequence[int], parts: Sequence[Tensor], corners: Sequence[tuple[int, int]]
) -> Tensor:
    """Return a matrix of zeros in which each part stands from its corner on: a row and a
    column."""
    whole = torch.zeros(tuple(shape), dtype=parts[0].dtype, device=parts[0].device)
    for part, corner in zip(parts, corners, strict=True):
        at_corner(whole, part, corner).copy_(part.detach())
    return whole


def at_corner(whole: Tensor, part: Tensor, corner: tuple[int, int]) -> Tensor:
    """Return the piece of a matrix in which a part stands from a row and a column on."""
    (row, column), (rows, columns) = corner, part.shape
    return whole[row : row + rows, column : column + columns]


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
