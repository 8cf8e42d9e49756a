"""PTX that touches memory: loads, stores, barriers and bulk copies.

A part of ``ptx_machine``. Bulk copies are left to the machine as events, which come when it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.kernels import ptx_copies
from tests.kernels.ptx_history import learn, tell
from tests.kernels.ptx_instruction import FULL, Array, Maker, Run, lanes, merge, put
from tests.kernels.ptx_memory import WINDOW, Barrier, SharedMemory, TensorMap
from tests.kernels.ptx_text import (
    LANES,
    Address,
    Operand,
    PtxError,
    Reg,
    Sink,
    Symbol,
    Vector,
    width,
)

BLOCKED = object()  # what an instruction returns that cannot go on yet
SPURIOUS, WAITING = 0.05, 0.5  # chances: of false though complete, of waiting though not
LANE = np.arange(LANES, dtype=np.uint8)
_OFFSET = (1 << WINDOW) - 1
SPACES = ("shared", "shared::cta", "shared::cluster")


def numbers_of(mask: int) -> Iterator[int]:
    return (n for n in range(LANES) if mask >> n & 1)


def shared_address(maker: Maker, operand: Operand) -> Callable[[Any], Array]:
    if not isinstance(operand, Address) or operand.coords:
        raise PtxError("an address is wanted")
    base, offset = maker.src(operand.base, "u32"), operand.offset
    return lambda w: base(w).astype(np.int64) + offset


def memory_at(w: Any, at: int) -> tuple[SharedMemory, int]:
    """Of an address of this cluster: whose memory it is, and where in it."""
    window, place = at >> WINDOW, at & _OFFSET
    if not window:
        return w.cta.shared, place
    if window > len(w.cta.cluster.ctas):
        raise PtxError(f"address {at:#x} is in no program of this cluster")
    return w.cta.cluster.ctas[window - 1].shared, place


def _in_parts(
    w: Any, m: int, at: Array, is_cluster: bool
) -> Iterator[tuple[int, SharedMemory, Array]]:
    """Lanes by the program whose memory they mean."""
    if not is_cluster:
        yield m, w.cta.shared, at if m == FULL else at[lanes(m)]
        return
    windows = at >> WINDOW
    for window in np.unique(windows[lanes(m)]):
        part = m & sum(1 << int(n) for n in np.flatnonzero(windows == window))
        here = at[lanes(part)]
        yield part, memory_at(w, int(here[0]))[0], here & _OFFSET


def _vector(maker: Maker, operand: Operand) -> tuple[Operand, ...]:
    counts = {"v2": 2, "v4": 4}
    count = next((counts[word] for word in maker.words if word in counts), 1)
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != count:
        raise PtxError(f"{len(items)} registers for {count}")
    return items


def _ld(maker: Maker) -> Run:
    space, kind = maker.words[1], maker.kind
    if space == "param":
        return _ld_param(maker)
    maker.only(space, "nc", "v2", "v4", "L1::no_allocate", "volatile", kind)
    into, address = maker.args(2)
    targets = [maker.dst(each, kind) for each in _vector(maker, into)]
    size = width(kind) // 8
    if size * len(targets) > 16 or size < 2:
        raise PtxError(f"{size * len(targets)} bytes at once")
    if space == "global":
        return _ld_global(maker, address, targets, size)
    if space not in SPACES:
        raise PtxError(f"loads from .{space} are not known")
    at, is_cluster = shared_address(maker, address), space == "shared::cluster"

    def run(w: Any, m: int) -> None:
        for part, memory, here in _in_parts(w, m, at(w), is_cluster):
            found = memory.load(w, here, size, len(targets), LANE[lanes(part)])
            _keep(w, part, targets, found, size)

    return run


def _keep(w: Any, m: int, targets: list[tuple[str, int]], found: list[Array], size: int) -> None:
    for (_, index), value in zip(targets, found, strict=True):
        raw = w.views[f"u{8 * size}"][index]
        if m == FULL:
            raw[:] = value
        else:
            raw[lanes(m)] = value


def _ld_param(maker: Maker) -> Run:
    into, address = maker.args(2)
    maker.only("param", maker.kind)
    view, index = maker.dst(into, maker.kind)
    if not isinstance(address, Address) or not isinstance(address.base, Symbol) or address.offset:
        raise PtxError("a param's name is wanted")
    name, size = address.base.name, width(maker.kind) // 8
    return lambda w, m: put(w, view, index, m, w.machine.param(name, size))


def _global_address(maker: Maker, operand: Operand) -> Callable[[Any], Array]:
    if not isinstance(operand, Address) or operand.coords:
        raise PtxError("an address is wanted")
    base, offset = maker.src(operand.base, "u64"), np.array([operand.offset]).astype(np.uint64)
    return lambda w: base(w) + offset


def _ld_global(maker: Maker, address: Operand, targets: list[tuple[str, int]], size: int) -> Run:
    at = _global_address(maker, address)

    def run(w: Any, m: int) -> None:
        found = w.machine.memory.load(at(w)[lanes(m)], size, len(targets), w.ids[lanes(m)])
        _keep(w, m, targets, found, size)

    return run


def _st(maker: Maker) -> Run:
    space, kind = maker.words[1], maker.kind
    maker.only(space, "v2", "v4", kind)
    address, values = maker.args(2)
    sources = [maker.src(each, f"b{width(kind)}") for each in _vector(maker, values)]
    size = width(kind) // 8
    if size * len(sources) > 16 or size < 2:
        raise PtxError(f"{size * len(sources)} bytes at once")
    if space == "global":
        at = _global_address(maker, address)

        def run(w: Any, m: int) -> None:
            on = lanes(m)
            given = [source(w)[on] for source in sources]
            w.machine.memory.store(at(w)[on], size, given, w.ids[on])

        return run
    if space not in SPACES:
        raise PtxError(f"stores to .{space} are not known")
    return _st_shared(shared_address(maker, address), space == "shared::cluster", sources, size)


def _st_shared(
    at: Callable[[Any], Array], is_cluster: bool, sources: list[Callable[[Any], Array]], size: int
) -> Run:
    def run(w: Any, m: int) -> None:
        for part, memory, here in _in_parts(w, m, at(w), is_cluster):
            on = lanes(part)
            given, owners = [source(w)[on] for source in sources], w.owners[on]
            memory.store(w, here, size, given, LANE[on], owners)
            w.written.append((part, memory, here, size * len(sources), owners))

    return run


def _fence(maker: Maker) -> Run:
    """By this thread, for what it wrote before. Fences among threads alone change nothing here."""
    what = maker.words[1]
    if what == "mbarrier_init":
        maker.only("mbarrier_init", "release", "cluster")

        def barriers(w: Any, m: int) -> None:
            for lane in numbers_of(m):
                for barrier in w.inits.pop(lane, ()):
                    barrier.is_fenced = True

        return barriers
    if what == "proxy":
        maker.only("proxy", "async", "async::generic", *SPACES)
        return _proxy_fence
    maker.only("acq_rel", "sc", "cta", "cluster", "gpu")
    return lambda w, m: None


def _proxy_fence(w: Any, m: int) -> None:
    for lane in numbers_of(m):
        for barrier in w.inits.pop(lane, ()):
            barrier.is_fenced = True
    left = []
    for part, memory, at, size, owners in w.written:
        on = lanes(m)[lanes(part)]
        memory.clean(at[on], size, owners[on])
        if part & ~m:
            left.append((part & ~m, memory, at[~on], size, owners[~on]))
    w.written = left


def _mapa(maker: Maker) -> Run:
    maker.only("shared::cluster", "u32")
    into, a, rank = maker.args(3)
    view, index = maker.dst(into, "u32")
    at, of = maker.src(a, "u32"), maker.src(rank, "u32")

    def run(w: Any, m: int) -> None:
        window = (of(w) + np.uint32(1)) << np.uint32(WINDOW)
        found = np.where(
            of(w) < len(w.cta.cluster.ctas),
            window | (at(w) & np.uint32(_OFFSET)),
            np.uint32(0xFFFFFFFF),
        )
        put(w, view, index, m, found)

    return run


_MEANT = ("release", "relaxed", "acquire", "cta", "cluster", *SPACES, "b64")


def _barrier_at(w: Any, at: int) -> Barrier:
    memory, place = memory_at(w, at)
    return memory.far_barrier(w, place)


def _mbarrier(maker: Maker) -> Run:
    op = maker.words[1]
    makers = {
        "init": _init,
        "arrive": _arrive,
        "try_wait": _wait,
        "test_wait": _wait,
        "expect_tx": _expect,
        "inval": _inval,
    }
    if op not in makers:
        raise PtxError(f"mbarrier.{op} is not known")
    return makers[op](maker)


def _init(maker: Maker) -> Run:
    maker.only("init", "shared", "shared::cta", "b64")
    address, count = maker.args(2)
    at, counts = shared_address(maker, address), maker.src(count, "u32")

    def run(w: Any, m: int) -> None:
        for lane in numbers_of(m):
            barrier = Barrier(int(counts(w)[lane]), w.cta.cluster.slots, w.machine.touch)
            w.cta.shared.begin_barrier(int(at(w)[lane]), barrier)
            w.inits.setdefault(lane, []).append(barrier)

    return run


def _inval(maker: Maker) -> Run:
    maker.only("inval", "shared", "shared::cta", "b64")
    at = shared_address(maker, maker.args(1)[0])

    def run(w: Any, m: int) -> None:
        for lane in numbers_of(m):
            place = int(at(w)[lane])
            w.cta.shared.barrier(place)
            del w.cta.shared.barriers[place]
            w.cta.shared.is_barrier[place >> 3] = 0

    return run


def _expect(maker: Maker) -> Run:
    maker.only("expect_tx", *_MEANT)
    address, count = maker.args(2)
    at, counts = shared_address(maker, address), maker.src(count, "u32")

    def run(w: Any, m: int) -> None:
        for lane in numbers_of(m):
            _barrier_at(w, int(at(w)[lane])).expect(int(counts(w)[lane]))

    return run


def _arrive(maker: Maker) -> Run:
    """Its result, a phase's token, is of no use here: waits are by parity."""
    expects, tells = "expect_tx" in maker.words, "relaxed" not in maker.words
    maker.only("arrive", "expect_tx", *_MEANT)
    state, address, *more = maker.args(2, 3)
    if expects and not more:
        raise PtxError("how many bytes?")
    token = maker.dst(state, "b64") if not isinstance(state, Sink) else None
    if token and "shared::cluster" in maker.words:
        raise PtxError("a far barrier gives no token")
    at, counts = shared_address(maker, address), maker.src(more[0], "u32") if more else None

    def run(w: Any, m: int) -> None:
        places, given = at(w), None if counts is None else counts(w)
        for lane in numbers_of(m):
            barrier = _barrier_at(w, int(places[lane]))
            if token:
                w.views[token[0]][token[1]][lane] = barrier.phase
            if tells:
                tell(w, barrier.coming)
            count = 1 if given is None else int(given[lane])
            if expects:
                barrier.expect(count)
            barrier.arrive(1 if expects else count)

    return run


def _wait(maker: Maker) -> Run:
    op = maker.words[1]
    maker.only(op, "parity", *_MEANT)
    if "parity" not in maker.words:
        raise PtxError("a wait by parity is wanted")
    into, address, parity, *_ = maker.args(3, 4)
    index, at = maker.pred_dst(into), shared_address(maker, address)
    of, learns = maker.src(parity, "u32"), "relaxed" not in maker.words

    def run(w: Any, m: int) -> Any:
        places, parities, found, rng = at(w), of(w), 0, w.machine.rng
        known = dict[tuple[int, int], bool]()
        if rng.random() < SPURIOUS:
            w.preds[index] = merge(w.preds[index], m, 0)
            return None
        for lane in numbers_of(m):
            key = int(places[lane]), int(parities[lane])
            if key not in known:
                known[key] = _is_past(w, key[0], key[1], learns)
            found |= known[key] << lane
        if not found and op == "try_wait":  # false once; then it waits till something changes
            if w.tried == w.machine.version or rng.random() < WAITING:
                return BLOCKED
            w.tried = w.machine.version
        w.preds[index] = merge(w.preds[index], m, found)
        return None

    return run


def _is_past(w: Any, at: int, parity: int, learns: bool) -> bool:
    memory, place = memory_at(w, at)
    if memory is not w.cta.shared:
        raise PtxError("waits at a barrier of another program")
    barrier: Barrier = memory.barrier(place)
    if barrier.is_past(parity) and learns:
        learn(w, barrier.told)
    return barrier.is_past(parity)


def _cp(maker: Maker) -> Run:
    words = maker.words
    if words[1:5] == ("reduce", "async", "bulk", "tensor"):
        return _bulk_store(maker)
    if words[1:3] == ("async", "ca"):
        return ptx_copies.begin(maker, shared_address, _global_address)
    if words[1:3] == ("async", "wait_all"):
        return ptx_copies.wait(maker)
    if words[1:3] != ("async", "bulk"):
        raise PtxError("copies other than these and bulk ones are not known")
    if words[3] in ("commit_group", "wait_group"):
        return _bulk_group(maker)
    if words[3] == "prefetch":
        return lambda w, m: None
    if words[3] != "tensor":
        raise PtxError("bulk copies without a tensor map are not known")
    if words[5:7] == ("global", "shared::cta"):
        return _bulk_store(maker)
    return _bulk_load(maker)


def _box(maker: Maker, operand: Operand) -> Callable[[Any, int], tuple[TensorMap, list[int]]]:
    """The map and the coordinates of a lane, outermost first."""
    rank = int(_rank(maker).removesuffix("d"))
    if not isinstance(operand, Address) or not operand.coords or operand.offset:
        raise PtxError("a map with coordinates is wanted")
    if len(operand.coords.items) != rank:
        raise PtxError(f"{len(operand.coords.items)} coordinates, not {rank}")
    of = maker.src(operand.base, "u64")
    coords = [maker.src(each, "s32") for each in reversed(operand.coords.items)]

    def find(w: Any, lane: int) -> tuple[TensorMap, list[int]]:
        found = w.machine.map_at(int(of(w)[lane]))
        if len(found.box) != rank:
            raise PtxError(f"a map of {len(found.box)} dims")
        return found, [int(coord(w)[lane]) for coord in coords]

    return find


def _rank(maker: Maker) -> str:
    return maker.words[maker.words.index("tensor") + 1]


def _bulk_load(maker: Maker) -> Run:
    multi = "multicast::cluster" in maker.words
    maker.only(
        "async",
        "bulk",
        "tensor",
        maker.words[4],
        "shared::cluster",
        "shared::cta",
        "global",
        "tile",
        "mbarrier::complete_tx::bytes",
        "multicast::cluster",
    )
    to, source, barrier, *more = maker.args(4 if multi else 3)
    at, bar = shared_address(maker, to), shared_address(maker, barrier)
    box, mask = _box(maker, source), maker.src(more[0], "u16") if multi else None

    def run(w: Any, m: int) -> None:
        for lane in numbers_of(m):
            tensor, corner = box(w, lane)
            place, signal = int(at(w)[lane]), int(bar(w)[lane])
            own, _ = memory_at(w, place)
            if mask is None:
                targets = [own]
            else:
                ctas, chosen = w.cta.cluster.ctas, int(mask(w)[lane])
                if not chosen or chosen >> len(ctas):
                    raise PtxError(f"multicast to programs {chosen:#b} of {len(ctas)}")
                targets = [cta.shared for n, cta in enumerate(ctas) if chosen >> n & 1]
            if memory_at(w, signal)[0] is not own:
                raise PtxError("the barrier is not where the box goes")
            for memory in targets:
                _begin_load(w, tensor, corner, memory, place & _OFFSET, signal & _OFFSET)

    return run


def _begin_load(
    w: Any, tensor: TensorMap, corner: list[int], memory: SharedMemory, place: int, signal: int
) -> None:
    units, barrier = tensor.units(place), memory.barrier(signal, is_far=True)
    memory.begin_load(w, units)

    def land() -> None:
        memory.end_load(units, tensor.load(corner), barrier)
        barrier.expect(-len(units) * 16)

    w.machine.later(land)


class BulkStore:
    """One that a thread waits for: first till memory has been read, then till it is written, or
    added to what is there (``adds``)."""

    def __init__(
        self, w: Any, tensor: TensorMap, corner: list[int], units: Array, lane: int, adds: bool
    ) -> None:
        self.memory, self.units, self.stage = w.cta.shared, units, 0
        self._corner, self._machine = corner, w.machine
        self._thread, self.is_released = int(w.ids[lane]), False
        self._data: Array = units
        self._leave = tensor.add if adds else tensor.store
        self.memory.begin_store(w, units, lane)
        w.machine.later(self._read)

    def _read(self) -> None:
        self._data, self.stage = self.memory.units[self.units], 1
        self._machine.later(self._write)

    def _write(self) -> None:
        self._leave(self._corner, self._data, self._thread)
        self.stage = 2

    def release(self, w: Any) -> None:
        if not self.is_released:
            self.memory.end_store(w, self.units)
            self.is_released = True


def _bulk_store(maker: Maker) -> Run:
    adds = maker.words[1] == "reduce"
    maker.only(
        *("reduce", "add") * adds,
        "async",
        "bulk",
        "tensor",
        _rank(maker),
        "global",
        "shared::cta",
        "tile",
        "bulk_group",
    )
    if ("add" in maker.words) != adds:
        raise PtxError("of what a copy does to what is there, additions alone are known")
    target, source = maker.args(2)
    at, box = shared_address(maker, source), _box(maker, target)

    def run(w: Any, m: int) -> None:
        for lane in numbers_of(m):
            tensor, corner = box(w, lane)
            units = tensor.units(int(at(w)[lane]) & _OFFSET)
            store = BulkStore(w, tensor, corner, units, lane, adds)
            w.stores.setdefault(lane, [[]])[-1].append(store)

    return run


def _bulk_group(maker: Maker) -> Run:
    is_read = "read" in maker.words
    maker.only("async", "bulk", "commit_group", "wait_group", "read")
    if maker.words[3] == "commit_group":
        maker.args(0)

        def commit(w: Any, m: int) -> None:
            for lane in numbers_of(m):
                w.stores.setdefault(lane, [[]]).append([])

        return commit
    left = _count(maker.args(1)[0])

    def wait(w: Any, m: int) -> Any:
        for lane in numbers_of(m):
            groups = w.stores.get(lane, [[]])
            done = groups[: max(len(groups) - 1 - left, 0)]
            if any(store.stage < (1 if is_read else 2) for group in done for store in group):
                return BLOCKED
            for store in (store for group in done for store in group):
                store.release(w)
        return None

    return wait


def _count(operand: Operand) -> int:
    value = getattr(operand, "value", None)
    if isinstance(operand, Reg) or not isinstance(value, int) or value < 0:
        raise PtxError("a constant is wanted")
    return value


MAKERS: dict[str, Callable[[Maker], Run]] = {
    "ld": _ld,
    "st": _st,
    "fence": _fence,
    "mapa": _mapa,
    "mbarrier": _mbarrier,
    "cp": _cp,
}
