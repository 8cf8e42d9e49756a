"""Copies of 4 bytes from global to shared memory that a thread does not wait for (``cp.async``).

A part of ``ptx_machine``. What is on its way is NaN, and comes when the machine likes, at the
latest when its thread waits for it. To others it is a store of that thread, at its wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.kernels.ptx_instruction import Array, Maker, Run, lanes
from tests.kernels.ptx_text import LANES, Imm, PtxError

_SIZE = 4
_LANE = np.arange(LANES, dtype=np.uint8)
_AT_ONCE = 0.5  # the chance that a copy comes before somebody waits
Find = Callable[[Any], Array]


class _Copy:
    """One of some lanes of a warp."""

    def __init__(self, w: Any, m: int, places: Array, addresses: Array) -> None:
        self._on, self._mask, self._places, self._addresses = lanes(m), m, places, addresses
        self._found: Array | None = None
        self._store(w, np.full(len(places), 0xFFFFFFFF, np.uint32))
        if w.machine.rng.random() < _AT_ONCE:
            w.machine.later(lambda: self._land(w))

    def _land(self, w: Any) -> Array:
        if self._found is None:
            ids = w.ids[self._on]
            (self._found,) = w.machine.memory.load(self._addresses, _SIZE, 1, ids)
            w.cta.shared.words[_SIZE][self._places // _SIZE] = self._found
        return self._found

    def end(self, w: Any) -> None:
        self._store(w, self._land(w))

    def _store(self, w: Any, values: Array) -> None:
        memory, owners = w.cta.shared, w.owners[self._on]
        memory.store(w, self._places, _SIZE, [values], _LANE[self._on], owners)
        w.written.append((self._mask, memory, self._places, _SIZE, owners))


def begin(maker: Maker, shared: Callable[..., Find], far: Callable[..., Find]) -> Run:
    """``cp.async``; ``shared`` and ``far`` make what finds the addresses of operands."""
    maker.only("async", "ca", "shared", "shared::cta", "global")
    to, source, size = maker.args(3)
    if not isinstance(size, Imm) or size.value != _SIZE:
        raise PtxError(f"copies of other than {_SIZE} bytes are not known")
    at, of = shared(maker, to), far(maker, source)

    def run(w: Any, m: int) -> None:
        on = lanes(m)
        w.copies.append(_Copy(w, m, at(w)[on], of(w)[on]))

    return run


def wait(maker: Maker) -> Run:
    """``cp.async.wait_all``, of whole warps."""
    maker.only("async", "wait_all")
    maker.args(0)

    def run(w: Any, m: int) -> None:
        for copy in w.copies:
            copy.end(w)
        w.copies = []

    return run
