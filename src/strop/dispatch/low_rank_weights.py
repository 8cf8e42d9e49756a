"""Keep the factors of all adapters that count, side by side, where a layer's weight stays as it is:
y = W0 x + B (A x), with a scale in each column of B.

The memory is that of the factors, not of the weights. The rank is padded with zeros to a power of
two that only grows while there are adapters: others of any ranks below it are written where the
latest ones lie, so nothing is traced or bound anew. A scale is multiplied in fp32 and B rounded
once. Eager rounds W0 x, A x, B (A x), its product with the scale and the sum; here are no more
roundings of a size with those.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from strop.dispatch.adapter_weights import AdapterWeights, WrappedLayer
from strop.dispatch.cornered_factors import bytes_beside, write_again
from strop.errors import ShapeError, UnsupportedError
from strop.frontend.adapted_layers import active_adapters
from strop.frontend.low_rank_layers import DOWN, ROWS, UP, has_low_rank, is_factor
from strop.ir.program import Program
from strop.wording import counted

LEAST_RANK = 16
MOST_ROWS = 128  # of a batch in which rows have adapters of their own


@dataclass(frozen=True, slots=True)
class RowAdapters:
    """Say which adapter each picture of a batch has, if any, and by what its scale is multiplied.
    A batch of several times as many rows has them again and again, as under guidance."""

    names: tuple[str | None, ...]
    scales: tuple[float, ...]

    def check(self, batch: int) -> None:
        """Raise ShapeError where a call has other rows than these adapters are for."""
        if not batch or batch % len(self.names) or batch > MOST_ROWS:
            named = counted(len(self.names), "row")
            raise ShapeError(
                f"strop.lora_rows names adapters for {named}, but a call has {batch}; it takes"
                f" that many or several times as many, up to {MOST_ROWS}"
            )

    def table(self, columns: Mapping[str, range], rank: int) -> Tensor:
        """Return what each row takes of each rank, on the host."""
        taken = torch.zeros(MOST_ROWS, rank)
        for row in range(MOST_ROWS):
            place = row % len(self.names)
            name, scale = self.names[place], self.scales[place]
            if name is not None and name in columns:
                taken[row, columns[name].start : columns[name].stop] = scale
        return taken


@dataclass(frozen=True, slots=True, eq=False)
class LowRankLayer(WrappedLayer):
    """A wrapped layer, and the two factors that the program reads."""

    down: nn.Parameter
    up: nn.Parameter

    @property
    def written(self) -> dict[str, nn.Parameter]:
        return {DOWN: self.down, UP: self.up}

    def fits(self, wrapped: Any, rank: int, *, may_lie_apart: bool) -> bool:
        """Tell whether the factors can be those of this layer. Where they ``may_lie_apart``, they
        lie on another device than its weight if they like."""
        weight, (down, up) = wrapped.base_layer.weight, _shapes(wrapped, rank)
        alike = self.down.dtype == weight.dtype and self.down.is_meta == weight.is_meta
        alike &= may_lie_apart or self.down.device == weight.device
        return alike and (self.down.shape, self.up.shape) == (down, up)


class LowRankWeights(AdapterWeights[LowRankLayer]):
    """Hold the factors of all layers of one module whose weights stay as they are."""

    def __init__(self, least_rank: int = 0) -> None:
        super().__init__()
        self.may_lie_apart = False  # factors, from their weights
        self.rank = 0
        self.rows: RowAdapters | None = None
        self._least = max(least_rank, LEAST_RANK)
        self._table: nn.Parameter | None = None

    @property
    def size_bytes(self) -> int:
        held = super().size_bytes + bytes_beside(layer.up for layer in self._layers.values())
        return held + (self._table.nbytes if self._table is not None else 0)

    @property
    def tables(self) -> Mapping[int, dict[str, Any]]:
        table = {} if self._table is None else {ROWS: self._table}
        return {number: own | table for number, own in super().tables.items()}

    def scan(self, wrapped: Sequence[nn.Module]) -> None:
        """Take these layers. Those that are known keep their factors, at the same place."""
        needed = padded(_rank_of(wrapped, self.rows), self._least)
        self.rank = max(self.rank, needed) if wrapped else 0
        found: dict[int, LowRankLayer] = {}
        for part in wrapped:
            base: Any = part.base_layer
            known = self._layers.get(id(base))
            if known is not None and known.fits(part, self.rank, may_lie_apart=self.may_lie_apart):
                found[id(base)] = LowRankLayer(part, known.down, known.up)
            else:
                found[id(base)] = _new(part, self.rank)
        self._take(found)
        self._hold_table()

    def _hold_table(self) -> None:
        """Hold a table for rows while these have adapters of their own."""
        if self.rows is None or not self._layers:
            self._table = None
            return
        device = next(iter(self._layers.values())).down.device
        shape = (MOST_ROWS, self.rank)
        if self._table is None or (self._table.shape, self._table.device) != (shape, device):
            empty = torch.empty(shape, dtype=torch.float32, device=device)
            self._table = nn.Parameter(empty, requires_grad=False)

    def _serves(self) -> bool:
        """Tell whether all layers have a low-rank part, for which there is room, and rows have
        neither begun nor ceased to have adapters of their own."""
        if (self.rows is None) != (self._table is None):
            return False
        wrapped = [layer.wrapped for layer in self._layers.values()]
        return all(map(has_low_rank, wrapped)) and _rank_of(wrapped, self.rows) <= self.rank

    def _write(self, layers: Sequence[LowRankLayer], scale: float) -> None:
        columns = columns_of((layer.wrapped for layer in layers), self.rows)
        _write_factors(layers, columns, self.rows, scale)
        if self._table is not None and self.rows is not None:
            self._table.copy_(self.rows.table(columns, self.rank))


def scales_of(wrapped: Any, rows: RowAdapters | None) -> dict[str, float]:
    """Return the adapters that count in a layer, each with its scale."""
    if rows is None:
        names = active_adapters(wrapped)
        return {name: names.count(name) * float(wrapped.scaling[name]) for name in names}
    if wrapped.merged_adapters:
        raise UnsupportedError(
            f"strop.lora_rows cannot take adapters by row while {wrapped.merged_adapters} are"
            " fused: unfuse_lora() first"
        )
    if wrapped.disable_adapters:
        return {}
    given = dict.fromkeys(name for name in rows.names if name is not None)
    return {name: float(wrapped.scaling[name]) for name in given if name in wrapped.lora_A}


def columns_of(wrapped: Iterable[Any], rows: RowAdapters | None) -> dict[str, range]:
    """Return which ranks each adapter has in all layers: as many as in that where it has most."""
    widths: dict[str, int] = {}
    for layer in wrapped:
        for name in scales_of(layer, rows):
            width = layer.lora_A[name].weight.shape[0]
            widths[name] = max(width, widths.get(name, 0))
    columns, start = {}, 0
    for name, width in widths.items():
        columns[name] = range(start, start + width)
        start += width
    return columns


def num_products(program: Program, state_names: Sequence[str]) -> int:
    """Return how many calls of a program multiply by a factor of low rank."""
    small = {n for n, name in enumerate(state_names) if is_factor(name)}
    small |= {n for n, spec in enumerate(program.inputs) if not small.isdisjoint(spec.merged)}
    places = {n for n, b in enumerate(program.buffers) if b.kind == "input" and b.index in small}
    factors = ([ref.buffer for ref in step.inputs[1:4:2]] for step in program.call_steps)
    return sum(not places.isdisjoint(of_step) for of_step in factors)


def padded(rank: int, least: int) -> int:
    """Return the smallest power of two that is no less than both."""
    return 1 << (max(rank, least) - 1).bit_length()


def _rank_of(wrapped: Iterable[Any], rows: RowAdapters | None) -> int:
    return sum(map(len, columns_of(wrapped, rows).values()))


def _shapes(wrapped: Any, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of A and B; those of a convolution are windows."""
    outs, *ins = wrapped.base_layer.weight.shape
    return (rank, *ins), (outs, rank, *(1 for _ in ins[1:]))


def _new(wrapped: Any, rank: int) -> LowRankLayer:
    weight = wrapped.base_layer.weight
    down, up = (
        nn.Parameter(torch.zeros(shape, dtype=weight.dtype, device=weight.device), False)
        for shape in _shapes(wrapped, rank)
    )
    return LowRankLayer(wrapped, down, up)


def _write_factors(
    layers: Sequence[LowRankLayer],
    columns: Mapping[str, range],
    rows: RowAdapters | None,
    scale: float,
) -> None:
    """Write A and scaled B of each adapter into its ranks, and zeros into all others; a few
    launches do that for all layers."""
    factors: list[Tensor] = [t for layer in layers for t in (layer.down, layer.up)]
    torch._foreach_zero_(factors)
    increment_version(factors)  # torch counts no write of that on a GPU
    places, given, scaled, scales = list[Tensor](), list[Tensor](), list[Tensor](), list[float]()
    ups = list[Tensor]()
    for layer in layers:
        for name, own in scales_of(layer.wrapped, rows).items():
            down, up = (f[name].weight for f in (layer.wrapped.lora_A, layer.wrapped.lora_B))
            start, width = columns[name].start, down.shape[0]
            places.append(layer.down[start : start + width])
            given.append(down)
            ups.append(layer.up[:, start : start + width])
            scaled.append(up.float())
            scales.append(own * scale)
    if places:
        torch._foreach_copy_(places, given)
        torch._foreach_copy_(ups, torch._foreach_mul(scaled, scales))
    write_again(layer.up for layer in layers)
