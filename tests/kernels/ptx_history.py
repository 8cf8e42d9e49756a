"""Who touched shared memory when, and who may know of it: races are found in whatever order.

A part of ``ptx_machine``. Vector clocks (Lamport; as in FastTrack,
https://doi.org/10.1145/1542476.1542490): each warp, each group of warps with its products and each
barrier with its bulk loads has a slot, and each warp knows up to which tick of each slot it has
been told. An arrival tells the barrier, a wait tells the warp. What was touched at a tick that the
warp does not know of, it may not touch: reads meet writes, writes meet reads and writes.

Clocks are those of warps: whether one lane may tell for all of them is not judged. Words are four
bytes: two warps that share one with two numbers of 16 bits are taken for a race.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.kernels.ptx_instruction import Array
from tests.kernels.ptx_text import PtxError

NOBODY = 0  # a slot that everyone knows of
BARRIERS = 128  # of a program, at most
_EVER = np.iinfo(np.int32).max


class Slots:
    """Of a cluster."""

    def __init__(self, most: int) -> None:
        self.most, self.used = most, 1

    def new(self) -> int:
        if self.used == self.most:
            raise PtxError(f"more than {BARRIERS} barriers of a program")
        self.used += 1
        return self.used - 1

    def clock(self) -> Array:
        found = np.zeros(self.most, np.int32)
        found[NOBODY] = _EVER
        return found


class History:
    """Of one program's shared memory, by words of 4 and units of 16 bytes."""

    def __init__(self, room: int) -> None:
        words, units = room // 4, room // 16
        self.writer, self.written = np.zeros(words, np.int16), np.zeros(words, np.int32)
        self.written_lane, self.written_meet = np.zeros(words, np.uint8), np.zeros(words, np.int32)
        self.reader, self.read_lane = np.zeros(words, np.int16), np.zeros(words, np.uint8)
        self.read_meet = np.zeros(words, np.int32)
        self.loader, self.loaded = np.zeros(units, np.int16), np.zeros(units, np.int32)
        self.reads: dict[int, Array] = {}  # ticks at words, by warp
        self.products: dict[int, Array] = {}  # ticks at units, by group of warps
        self.far: dict[int, int] = {}  # last ticks of warps of other programs

    def read(self, w: Any, words: Array, numbers: Array) -> None:
        """By these lanes of a warp."""
        self._check_written(w, words, numbers)
        self._check_loaded(w, words >> 2)
        self._column(self.reads, w.slot, len(self.writer))[words] = w.clock[w.slot]
        self.reader[words], self.read_lane[words], self.read_meet[words] = w.slot, numbers, w.meets

    def write(self, w: Any, words: Array, numbers: Array) -> None:
        self._check_written(w, words, numbers)
        self._check_units(w, words >> 2)
        self._check_reads(w, words)
        late = (self.reader[words] == w.slot) & (self.read_meet[words] == w.meets)
        if (late & (self.read_lane[words] != numbers)).any():
            raise PtxError("race: another lane has read this, and no bar.warp.sync is between")
        self.writer[words], self.written[words] = w.slot, w.clock[w.slot]
        self.written_lane[words], self.written_meet[words] = numbers, w.meets

    def read_units(self, w: Any, units: Array, lane: int | None) -> None:
        """Of a product that this warp begins, or of a bulk store, by a lane."""
        self._check_loaded(w, units)
        self._check_written(w, _words(units), None if lane is None else np.uint8(lane))

    def note_product(self, slot: int, tick: int, units: Array) -> None:
        self._column(self.products, slot, len(self.loader))[units] = tick

    def note_read(self, w: Any, units: Array) -> None:
        """What this warp has waited for."""
        self._column(self.reads, w.slot, len(self.writer))[_words(units)] = w.clock[w.slot]

    def write_units(self, w: Any, units: Array) -> None:
        """Of a bulk load that this warp begins."""
        words = _words(units)
        self._check_units(w, units)
        self._check_written(w, words, None)
        self._check_reads(w, words)

    def note_load(self, slot: int, tick: int, units: Array) -> None:
        self.loader[units], self.loaded[units] = slot, tick

    @staticmethod
    def _column(columns: dict[int, Array], slot: int, size: int) -> Array:
        if slot not in columns:
            columns[slot] = np.zeros(size, np.int32)
        return columns[slot]

    def _check_written(self, w: Any, words: Array, numbers: Array | np.uint8 | None) -> None:
        writers = self.writer[words]
        if (w.clock[writers] < self.written[words]).any():
            raise PtxError("race: another warp has written this, and nothing tells when")
        if numbers is not None:
            late = (writers == w.slot) & (self.written_meet[words] == w.meets)
            if (late & (self.written_lane[words] != numbers)).any():
                raise PtxError("race: another lane has written this, no bar.warp.sync is between")

    def _check_loaded(self, w: Any, units: Array) -> None:
        if (w.clock[self.loader[units]] < self.loaded[units]).any():
            raise PtxError("race: this warp has not waited for the bulk load that wrote this")

    def _check_units(self, w: Any, units: Array) -> None:
        self._check_loaded(w, units)
        for slot, ticks in self.products.items():
            if (ticks[units] > w.clock[slot]).any():
                raise PtxError("race: a product may still read this, as far as this warp knows")

    def _check_reads(self, w: Any, words: Array) -> None:
        for slot, ticks in self.reads.items():
            if (ticks[words] > w.clock[slot]).any():
                raise PtxError("race: another warp may still read this, as far as this one knows")


def _words(units: Array) -> Array:
    return (units[:, None] * 4 + np.arange(4)).reshape(-1)


def tell(w: Any, told: Array) -> None:
    """What this warp knows, to a barrier; what it does from now on is another tick."""
    np.maximum(told, w.clock, out=told)
    w.clock[w.slot] += 1


def learn(w: Any, told: Array) -> None:
    np.maximum(w.clock, told, out=w.clock)
