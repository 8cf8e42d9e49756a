"""Say how long GEMMs take on a device, by tile and by library: the type of a fitted table.

A table is fitted on one card (``kernels.tuned``). Another card of the same architecture runs the
same steps at its own clock, reads weights at its own bandwidth, and has its own number of
multiprocessors; ``GemmTimes.on`` scales by these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from strop.ir.device import Device
from strop.kernels.gemm.tile import GemmTile


@dataclass(frozen=True, slots=True)
class Cost:
    """Hold the microseconds of a tile: to begin and end, of every further round of programs but its
    steps, and of a step of 64 channels. ``spared``: the share of a step that is spared where all
    other multiprocessors are idle, as programs share what memory and caches give."""

    begin: float
    again: float
    step: float
    spared: float = 0.0

    def times(self, factor: float) -> Cost:
        return replace(
            self, begin=self.begin * factor, again=self.again * factor, step=self.step * factor
        )

    def us(self, rounds: int, steps: float, idle: float) -> float:
        """Return the time of rounds of so many steps, with this share of the processors idle."""
        step = self.step * (1 - self.spared * idle)
        return self.begin + (rounds - 1) * self.again + rounds * steps * step


@dataclass(frozen=True, slots=True)
class LibraryTimes:
    """Hold what cuDNN, cuBLAS and the kernels around them reach: operations and bytes a
    microsecond, and microseconds to begin."""

    conv_ops: float
    conv_bytes: float
    conv_begin_us: float
    linear_ops: float
    linear_bytes: float  # of results
    linear_begin_us: float
    linear_depth: float  # channels a microsecond, of a product with few rows and columns
    gap_us: float  # what a launch costs that cannot come early
    weight_bytes: float  # of weights that no cache holds: each pass reads them again
    weight_begin_us: float
    row_bytes: float  # of rows that a product with few columns reads, which were just written
    row_begin_us: float
    behind_bytes: float  # of a kernel with gates, or a sum, behind a GEMM
    behind_begin_us: float
    adding_us: float  # a launch of torch's behind a GEMM

    def weights_us(self, size_bytes: float) -> float:
        """Return what so many bytes of weights take to come."""
        return size_bytes / self.weight_bytes + self.weight_begin_us


@dataclass(frozen=True, slots=True)
class GemmTimes:
    """Hold the times of GEMMs. ``tiles``: by the kind of GEMM, see ``rows.kind_of``. ``clusters``:
    how many clusters of so many programs, one a multiprocessor, the driver runs at a time."""

    tiles: Mapping[str, Mapping[GemmTile, Cost]]
    clusters: Mapping[int, int]
    library: LibraryTimes

    def busy_us(self, cost: Cost, num_tiles: int, steps: float, split: int = 1) -> float:
        """Return what so many tiles of so many steps take, where operands come as fast as they are
        multiplied."""
        most = self.clusters[split]
        rounds = -(-num_tiles // most)
        return cost.us(rounds, steps, 1 - num_tiles / (rounds * most))

    def on(self, device: Device, fitted: Device) -> GemmTimes:
        """The table for ``device``, by the rates of the card that it was fitted on."""
        clock = _ratio(fitted.clock_hz, device.clock_hz)
        tiles = {
            kind: {tile: cost.times(clock) for tile, cost in costs.items()}
            for kind, costs in self.tiles.items()
        }
        sms = _ratio(device.sms, fitted.sms)
        clusters = {programs: max(int(count * sms), 1) for programs, count in self.clusters.items()}
        return GemmTimes(tiles, clusters, self._library_on(device, fitted))

    def _library_on(self, device: Device, fitted: Device) -> LibraryTimes:
        flops = _ratio(device.half_flops, fitted.half_flops)
        bandwidth = _ratio(device.memory_bandwidth, fitted.memory_bandwidth)
        clock = _ratio(device.clock_hz, fitted.clock_hz)
        of = self.library
        return replace(
            of,
            conv_ops=of.conv_ops * flops,
            linear_ops=of.linear_ops * flops,
            linear_depth=of.linear_depth * clock,  # of one program
            conv_bytes=of.conv_bytes * bandwidth,
            linear_bytes=of.linear_bytes * bandwidth,
            weight_bytes=of.weight_bytes * bandwidth,
            row_bytes=of.row_bytes * flops,  # from a cache
            behind_bytes=of.behind_bytes * bandwidth,
        )


def _ratio(one: float, other: float) -> float:
    """Their ratio; 1 where a record lacks the number."""
    return one / other if one and other else 1.0
