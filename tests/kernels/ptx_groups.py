"""PTX by which lanes, warps and programs of a cluster meet.

A part of ``ptx_machine``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.kernels.ptx_access import BLOCKED
from tests.kernels.ptx_history import Slots, learn, tell
from tests.kernels.ptx_instruction import FULL, Array, Maker, Run, lanes, merge, put
from tests.kernels.ptx_text import LANES, Imm, Operand, Pair, PtxError, Sink

_MOST_BARS = 16


def together(maker: Maker, mask: Operand | None = None) -> None:
    """All lanes, or those of a constant mask, run this in one go."""
    if mask is not None and not isinstance(mask, Imm):
        raise PtxError("a constant mask of lanes is wanted")
    maker.members = FULL if mask is None else int(mask.value) & FULL


def _warp_sync(w: Any, m: int) -> None:
    w.meets += 1


class Bar:
    """A barrier of bar.sync: ``turn`` counts how often it has opened, ``told`` is this turn's."""

    def __init__(self, slots: Slots) -> None:
        self.threads = self.count = self.turn = 0
        self._slots, self.told = slots, slots.clock()

    def arrive(self, w: Any, count: int) -> None:
        tell(w, self.told)
        if count % LANES or not count:
            raise PtxError(f"a barrier of {count} threads")
        if self.threads and count != self.count:
            raise PtxError(f"a barrier of {self.count} threads, here of {count}")
        self.count, self.threads = count, self.threads + LANES
        if self.threads == count:
            self.threads, self.turn, self.told = 0, self.turn + 1, self._slots.clock()


def _bar(maker: Maker) -> Run:
    op = maker.words[1]
    if op == "warp":
        maker.only("warp", "sync")
        together(maker, maker.args(1)[0])
        return _warp_sync
    if op not in ("sync", "arrive"):
        raise PtxError(f"bar.{op} is not known")
    maker.only(op, "cta")
    together(maker)
    return _bar_of(maker, op == "sync")


def _bar_of(maker: Maker, waits: bool) -> Run:
    name, *counts = maker.args(1, 2)
    if not (waits or counts):
        raise PtxError("how many threads?")
    of, count = maker.src(name, "u32"), maker.src(counts[0], "u32") if counts else None

    def run(w: Any, m: int) -> Any:
        if w.barred:
            bar, turn, told = w.barred
            return BLOCKED if bar.turn == turn else _passes(w, told)
        number = int(of(w)[0])
        if number >= _MOST_BARS:
            raise PtxError(f"barrier {number}")
        bar = w.cta.bars.setdefault(number, Bar(w.cta.cluster.slots))
        turn, told, threads = (
            bar.turn,
            bar.told,
            LANES * len(w.cta.warps) if count is None else int(count(w)[0]),
        )
        if threads > LANES * len(w.cta.warps):
            raise PtxError(f"a barrier of {threads} threads, of which there are fewer")
        bar.arrive(w, threads)
        w.machine.touch()
        if waits and bar.turn == turn:
            w.barred = bar, turn, told
            return BLOCKED
        return _passes(w, told) if waits else None

    return run


def _passes(w: Any, told: Array) -> None:
    w.barred = None
    w.meets += 1
    learn(w, told)


def _barrier(maker: Maker) -> Run:
    """barrier.cluster: lanes count, unless it is said that whole warps come."""
    if maker.words[1] != "cluster" or maker.words[2] not in ("arrive", "wait"):
        raise PtxError("unknown barrier")
    maker.only(
        "cluster",
        maker.words[2],
        "aligned",
        "acquire",
        *(("release", "relaxed") if maker.words[2] == "arrive" else ()),
    )
    maker.args(0)
    if "aligned" in maker.words:
        together(maker)
    if maker.words[2] == "wait":
        return _cluster_wait
    tells = "relaxed" not in maker.words
    return lambda w, m: _cluster_arrive(w, m, tells)


def _cluster_arrive(w: Any, m: int, tells: bool) -> None:
    """A relaxed arrival tells nothing of memory, but that this warp has come so far."""
    if w.owing & m:
        raise PtxError("a second arrival before the wait")
    w.arrived |= m
    w.owing |= m
    w.met = w.cta.cluster.told
    np.maximum(w.met[1], np.maximum(w.order, w.clock), out=w.met[1])
    if tells:
        tell(w, w.met[0])
    w.cta.cluster.settle()


def _cluster_wait(w: Any, m: int) -> Any:
    if m & ~w.owing:
        raise PtxError("a wait before the arrival")
    if w.arrived & m:
        return BLOCKED
    w.owing &= ~m
    w.meets += 1
    learn(w, w.met[0])
    np.maximum(w.order, w.met[1], out=w.order)
    return None


def _shfl(maker: Maker) -> Run:
    maker.only("sync", "idx", "bfly", "up", "down", "b32")
    mode = maker.words[2]
    into, a, distance, clamp, mask = maker.args(5)
    together(maker, mask)
    if isinstance(into, Pair):
        raise PtxError("shfl with a predicate is not known")
    view, index = maker.dst(into, "b32")
    values, by, bounds = maker.src(a, "b32"), maker.src(distance, "u32"), maker.src(clamp, "u32")

    def run(w: Any, m: int) -> None:
        source = _source_lanes(mode, by(w) & np.uint32(31), bounds(w))
        if (~lanes(m)[source] & lanes(m)).any():
            raise PtxError("shuffles from a lane that does not take part")
        put(w, view, index, m, values(w)[source])

    return run


def _source_lanes(mode: str, by: Array, bounds: Array) -> Array:
    lane, by, bounds = np.arange(LANES), by.astype(np.int64), bounds.astype(np.int64)
    fixed, most = bounds >> 8 & 31, bounds & 31
    limit = (lane & fixed) | (most & ~fixed)
    if mode == "up":
        source = lane - by
        return np.where(source >= limit, source, lane)
    if mode == "down":
        source = lane + by
    elif mode == "bfly":
        source = lane ^ by
    else:
        source = (lane & fixed) | (by & ~fixed)
    return np.where(source <= limit, source, lane)


def _vote(maker: Maker) -> Run:
    mode, kind = maker.words[2], maker.kind
    maker.only("sync", mode, kind)
    into, p, mask = maker.args(3)
    together(maker, mask)
    given = maker.pred(p)
    if (mode, kind) == ("ballot", "b32"):
        view, place = maker.dst(into, "b32")
        return lambda w, m: put(w, view, place, m, np.uint32(given(w) & m))
    if kind != "pred" or mode not in ("any", "all", "uni"):
        raise PtxError("form of vote not known")
    index = maker.pred_dst(into)
    verdicts: dict[str, Callable[[int, int], bool]] = {
        "any": lambda found, m: bool(found),
        "all": lambda found, m: found == m,
        "uni": lambda found, m: found in (0, m),
    }
    verdict = verdicts[mode]

    def run(w: Any, m: int) -> None:
        found = verdict(given(w) & m, m)
        w.preds[index] = merge(w.preds[index], m, FULL if found else 0)

    return run


def _elect(maker: Maker) -> Run:
    """Some lane: the first here."""
    maker.only("sync")
    into, mask = maker.args(2)
    together(maker, mask)
    if not isinstance(into, Pair):
        raise PtxError("d|p is wanted")
    target = None if isinstance(into.first, Sink) else maker.dst(into.first, "b32")
    index = maker.pred_dst(into.second)

    def run(w: Any, m: int) -> None:
        first = m & -m
        w.preds[index] = merge(w.preds[index], m, first)
        if target:
            put(w, *target, m, np.uint32(first.bit_length() - 1))

    return run


def _setmaxnreg(maker: Maker) -> Run:
    """By four warps together; how many registers there are is the assembler's to judge."""
    maker.only("inc", "dec", "sync", "aligned", "u32")
    together(maker)
    (count,) = maker.args(1)
    if not isinstance(count, Imm) or not 24 <= count.value <= 256 or count.value % 8:
        raise PtxError("a multiple of 8 from 24 to 256 is wanted")
    return lambda w, m: None


def _griddepcontrol(maker: Maker) -> Run:
    """Nothing: kernels run one after another."""
    maker.only("wait", "launch_dependents")
    maker.args(0)
    return lambda w, m: None


MAKERS: dict[str, Callable[[Maker], Run]] = {
    "bar": _bar,
    "barrier": _barrier,
    "shfl": _shfl,
    "vote": _vote,
    "elect": _elect,
    "setmaxnreg": _setmaxnreg,
    "griddepcontrol": _griddepcontrol,
}
