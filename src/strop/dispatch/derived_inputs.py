"""List the derived inputs of a module: what its programs read in the place of weights or arguments,
and what is made anew when its sources change.

``KINDS`` is the table of all there are. ``runtime.derived.sources`` says when one is made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from strop.dispatch.adapter_weights import AdapterWeights
from strop.dispatch.entry import Entry
from strop.dispatch.low_rank_weights import num_products
from strop.dispatch.module_state import ModuleState
from strop.dispatch.placed_weights import PlacedPieces
from strop.runtime.loop.denoise_loop import DenoiseLoop
from strop.runtime.loop.hoisting import Kept, Tally, read_by, read_by_all, written
from strop.runtime.run.executor import Bound
from strop.wording import counted


class ServedModule(NamedTuple):
    """This is what there is of one module. ``latest`` served the shape that was met last."""

    state: ModuleState
    loop: DenoiseLoop
    tally: Tally
    latest: Entry | None

    @property
    def bound(self) -> Bound | None:
        return next(iter(self.latest.bounds.values()), None) if self.latest else None

    @property
    def places(self) -> Sequence[Kept]:
        return list(self.loop.kept.values())


@dataclass(frozen=True, slots=True)
class DerivedInput:
    """Say how many there are of a kind, in how many bytes, copies to compare sources with included,
    and how many of these lie where weights do; how often they were made, and how many calls found
    them made before, where that is counted. ``remade`` says when they are made anew."""

    count: int
    size_bytes: int
    num_made: int
    num_reuses: int = 0
    detail: str = ""
    kind: str = ""
    unit: str = ""
    remade: str = ""
    shared_bytes: int = 0

    @property
    def beside_bytes(self) -> int:
        """Return the memory that they take beside the weights."""
        return self.size_bytes - self.shared_bytes

    def __str__(self) -> str:
        count, size = counted(self.count, self.unit), f"{self.size_bytes / 1e6:.2f} MB"
        if self.shared_bytes:
            size += f" ({self.beside_bytes / 1e6:.2f} MB of it beside the weights)"
        reused = f"used again {self.num_reuses}x" if self.num_reuses else ""
        facts = (count, size, self.detail, f"made {self.num_made}x", reused)
        return f"{self.kind}: {', '.join(filter(None, facts))}; anew when {self.remade}"


@dataclass(frozen=True, slots=True)
class DerivedKind:
    """Describe a kind of derived inputs: what is counted, when they are made anew, and how to find
    them."""

    name: str
    unit: str
    remade: str
    find: Callable[[ServedModule], DerivedInput]


def derived_inputs(served: ServedModule) -> tuple[DerivedInput, ...]:
    """Return the kinds of which a module has any."""
    found = (
        replace(kind.find(served), kind=kind.name, unit=kind.unit, remade=kind.remade)
        for kind in KINDS
    )
    return tuple(one for one in found if one.count)


def _merged(served: ServedModule) -> DerivedInput:
    return _placed(served, served.state.merged)


def _padded(served: ServedModule) -> DerivedInput:
    return _placed(served, served.state.padded)


def _placed(served: ServedModule, pieces: PlacedPieces) -> DerivedInput:
    detail = f"the largest of {pieces.most_bytes / 1e6:.2f} MB lay beside its parts when made"
    return DerivedInput(
        len(pieces),
        pieces.size_bytes,
        pieces.num_writes,
        detail=detail,
        shared_bytes=pieces.shared_bytes(served.state.tensors),
    )


def _coded(served: ServedModule) -> DerivedInput:
    weights = served.state.coded
    return DerivedInput(len(weights), weights.size_bytes, weights.num_writes)


def _packed(served: ServedModule) -> DerivedInput:
    weights = served.state.packed
    return DerivedInput(len(weights), weights.size_bytes, weights.num_made)


def _effective(served: ServedModule) -> DerivedInput:
    weights = served.state.effective
    return _written(weights.merged, weights.reason)


def _low_rank(served: ServedModule) -> DerivedInput:
    weights, latest = served.state.effective, served.latest
    count = num_products(latest.variant.program, latest.variant.state_names) if latest else 0
    a_layer = count / max(1, len(weights.low_rank))
    products = f"{counted(count, 'more product')} a call ({a_layer:.2f} a layer)"
    detail = f"up to rank {weights.low_rank.rank}, {products}"
    return _written(weights.low_rank, *filter(None, (detail, weights.reason)))


def _written(weights: AdapterWeights[Any], *details: str) -> DerivedInput:
    size_bytes = weights.size_bytes + weights.watch_bytes
    return DerivedInput(len(weights), size_bytes, weights.num_writes, detail=", ".join(details))


def _hoisted(served: ServedModule) -> DerivedInput:
    bound, tally = served.bound, served.tally
    size_bytes = sum(place.memory.nbytes for place in served.places)
    count, of_weights = len(bound.hoisted.steps) if bound else 0, _num_of_weights(bound)
    detail = f"{of_weights} of weights alone" if of_weights else ""
    return DerivedInput(count, size_bytes, tally.num_runs, tally.num_reuses, detail)


def _num_of_weights(bound: Bound | None) -> int:
    """Count the hoisted steps that read nothing but weights: sums of taps, weights in another
    type."""
    if bound is None:
        return 0
    known, count = read_by_all(bound.program, ()), 0
    for position in bound.hoisted.steps:
        step = bound.steps[position]
        if known >= set(read_by(step)):
            known.update(written(step))
            count += 1
    return count


def _timetables(served: ServedModule) -> DerivedInput:
    bound, tally = served.bound, served.tally
    size_bytes = sum(table.held_bytes for place in served.places for table in place.timetables)
    count = len(bound.timetable.steps) if bound else 0
    return DerivedInput(count, size_bytes, tally.num_timetables, tally.num_looked_up)


MERGED = "merged weights"
PADDED = "weights with rows of zeros behind them"
CODED = "weights in 8 bits"
PACKED = "weights packed for a CPU's products"
EFFECTIVE = "weights with adapters in them"
LOW_RANK = "factors of adapters beside the weights"
HOISTED = "hoisted out of denoise loops"
TIMETABLE = "computed for all timesteps at once"
_ADAPTERS = "adapters, their scales or values are others"
_LOOP = "a loop begins, or in it a weight or argument is another or written to"
KINDS = (
    DerivedKind(MERGED, "weight", "a part lies elsewhere in memory", _merged),
    DerivedKind(PADDED, "weight", "the weight lies elsewhere in memory", _padded),
    DerivedKind(CODED, "weight", "a weight is written to, or another", _coded),
    DerivedKind(PACKED, "weight", "its bits are others, at which each product looks", _packed),
    DerivedKind(EFFECTIVE, "layer", f"{_ADAPTERS}, or W0 is", _effective),
    DerivedKind(LOW_RANK, "layer", _ADAPTERS, _low_rank),
    DerivedKind(HOISTED, "launch", _LOOP, _hoisted),
    DerivedKind(TIMETABLE, "launch", _LOOP, _timetables),
)
