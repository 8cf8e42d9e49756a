"""A machine for PTX of sm_90a, for tests: it runs hand-written kernels on a CPU and finds races.

Instructions are those of https://docs.nvidia.com/cuda/parallel-thread-execution/. Time is its own
adversary: warps run in an order that a seed decides, bulk loads, bulk stores and products finish
when it likes.

What is checked: shared and global memory in ``ptx_memory``, what is ordered by what in
``ptx_history``, products and their registers in ``ptx_products``; and here registers that were not
written, barriers that more or fewer threads reach than they count, lanes that are apart where they
have to be together, programs that end while others need them, and standstill.

What is not: a fence.proxy.async between a thread's read of shared memory and a bulk load to the
same bytes (CUTLASS leaves it out, too); the scopes of fences and barriers; whether one lane may
tell a barrier, or be told by it, for all of its warp; ``bra.uni``; how many registers there are;
order through global memory. Kernels run one after another, so that griddepcontrol does nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from strop.ir.source import KernelSource
from tests.kernels import ptx_access, ptx_arithmetic, ptx_groups, ptx_products
from tests.kernels.ptx_access import BLOCKED
from tests.kernels.ptx_history import BARRIERS, Slots
from tests.kernels.ptx_instruction import FULL, Array, Instruction, Maker, Run
from tests.kernels.ptx_memory import MOST_SHARED, GlobalMemory, SharedMemory, TensorMap
from tests.kernels.ptx_text import LANES, Entry, Param, PtxError, parse

__all__ = ["PtxError", "launch"]

View = tuple[Sequence[int], ...]
_PARAMS_AT = 1 << 16  # the address of the first param
_MOST_IDLE = 500_000  # instructions that change nothing for others
_BUDGETS, _SOON = (3, 20, 100, 400), (0.02, 0.1, 0.3, 0.8)


class Program:
    """The text of a kernel, compiled."""

    def __init__(self, text: str) -> None:
        self.entry: Entry = parse(text)
        self.codes = [self._compiled(n) for n in range(len(self.entry.body))]
        used = {reg.number for code in self.codes for reg, _ in code.uses}
        for code in self.codes:
            code.touches = tuple(n for n in (*code.reads, *code.writes) if n in used)
        self.names = {reg.number: reg.name for reg in self.entry.registers.values()}

    def _compiled(self, place: int) -> Instruction:
        statement = self.entry.body[place]
        code, maker = Instruction(statement), Maker(statement)
        try:
            self._compile(code, maker)
        except PtxError as error:
            raise PtxError(f"{error}: {statement.text!r} of {self.entry.name}") from None
        code.reads, code.writes = tuple(dict.fromkeys(maker.reads)), tuple(maker.writes)
        code.members = maker.members
        return code

    def _compile(self, code: Instruction, maker: Maker) -> None:
        first, *mods = maker.words
        if first == "bra":
            maker.only("uni")
            if code.statement.target not in self.entry.labels:
                raise PtxError("no such label")
            code.target = self.entry.labels[code.statement.target]
            code.run = lambda w, m: None
        elif first in ("ret", "exit"):
            code.is_end, code.run = True, lambda w, m: None
        elif first == "wgmma":
            ptx_groups.together(maker)
            if mods[0] == "mma_async":
                code.run = ptx_products.make_product(maker, code)
            elif mods[0] in ptx_products.MAKERS:
                maker.only(mods[0], "sync", "aligned")
                code.run = ptx_products.MAKERS[mods[0]](maker)
        elif first in _MAKERS:
            code.run = _MAKERS[first](maker)
        if code.run is None:
            raise PtxError("unknown instruction")


_MAKERS: dict[str, Callable[[Maker], Run]] = {
    **ptx_arithmetic.MAKERS,
    **ptx_access.MAKERS,
    **ptx_groups.MAKERS,
    "mma": ptx_products.make_warp_product,
}


@lru_cache(maxsize=64)
def compiled(text: str) -> Program:
    return Program(text)


class Warp:
    """Lanes at the lowest place go on first; the others, where those cannot."""

    def __init__(self, cta: Cta, number: int) -> None:
        self.cta, self.number, self.machine = cta, number, cta.machine
        entry, regs = self.machine.program.entry, self.machine.program.entry.registers.values()
        self.views, self.raw = dict[str, list[Array]](), np.zeros((0, LANES), np.uint32)
        for bits in (16, 32, 64):
            raw = np.zeros((sum(reg.bits == bits for reg in regs), LANES), f"u{bits // 8}")
            self.raw = raw if bits == 32 else self.raw
            for kind in "usf":
                signed = {"u": "u", "s": "i", "f": "f"}[kind]
                self.views[f"{kind}{bits}"] = list(raw.view(f"{signed}{bits // 8}"))
        self.floats = self.raw.view(np.float32)
        self.preds = [0] * sum(reg.bits == 1 for reg in regs)
        self.ok, self.touched = [0] * len(regs), [-1] * len(regs)
        self.places, self.live = {0: FULL}, FULL
        threads = number * LANES + np.arange(LANES)
        self.ids = (cta.number * entry.threads + threads + 1).astype(np.int32)
        self.owners = (cta.rank * entry.threads + threads + 1).astype(np.uint16)
        self.written, self.inits, self.stores = list[Any](), dict[int, Any](), dict[int, Any]()
        self.copies = list[Any]()
        self.epoch, self.issued, self.uses = 0, 0, dict[int, int]()  # of products
        self.open, self.committed = list[Any](), list[list[Any]]()
        self.group: ptx_products.WarpGroup | None = None
        self.tried = -1  # the machine's version at which a wait was told to try again
        self.barred: Any = None  # the barrier, and which time, that this warp stands at
        self.arrived = self.owing = 0  # lanes: at the cluster's barrier, and before its wait
        self.meets, slots = 1, cta.cluster.slots  # how often all lanes have met
        self.slot, self.clock, self.order = slots.new(), slots.clock(), slots.clock()
        self.clock[self.slot] = 1
        self.met: Any = None  # what the cluster's barrier tells of the turn that this one is in
        self._specials = {
            "%tid.x": threads,
            "%laneid": np.arange(LANES),
            "%warpid": number,
            **cta.specials,
        }

    def special(self, name: str, size: Any) -> Array:
        if name not in self._specials:
            raise PtxError(f"unknown register {name}")
        return np.broadcast_to(np.asarray(self._specials[name]).astype(size), (LANES,))

    def symbol(self, name: str, size: Any) -> Array:
        entry = self.machine.program.entry
        if name in entry.shared:
            return np.full(LANES, self.cta.shared.base + entry.shared[name], size)
        return np.full(LANES, _PARAMS_AT + entry.params[name].offset, size)

    def run(self, budget: int) -> bool:
        """Whether it has used its budget, rather than come to where it has to wait."""
        self.cta.shared.has_started = True
        for _ in range(budget):
            for place in sorted(self.places) if len(self.places) > 1 else list(self.places):
                if self._step(place):
                    break
            else:
                return False
        return True

    def _step(self, place: int) -> bool:
        codes = self.machine.program.codes
        if place >= len(codes):
            raise PtxError("ran past the last instruction")
        code, mask = codes[place], self.places[place]
        try:
            on = mask if code.statement.guard is None else self._guarded(code, mask)
            if code.members:
                if code.members & self.live & ~mask:
                    return False
                if on and on != mask:
                    raise PtxError("a part of the lanes only")
            if on:
                self._check(code, on)
                if code.run(self, on) is BLOCKED:  # type: ignore[misc]
                    return False
        except PtxError as error:
            raise PtxError(f"{error}: {code.statement.text!r}, {self}") from None
        del self.places[place]
        if code.target >= 0:
            self._go(code.target, on)
            self._go(place + 1, mask & ~on)
        elif code.is_end:
            self._end(on)
            self._go(place + 1, mask & ~on)
        else:
            self._go(place + 1, mask)
        return True

    def _guarded(self, code: Instruction, mask: int) -> int:
        guard = code.statement.guard
        assert guard is not None
        if mask & ~self.ok[guard.number]:
            raise PtxError(f"{guard.name} was not written")
        return mask & (self.preds[guard.index] ^ (FULL if code.statement.flipped else 0))

    def _check(self, code: Instruction, mask: int) -> None:
        ok = self.ok
        for number in code.reads:
            if mask & ~ok[number]:
                raise PtxError(self._refusal(number, "not written"))
        for number in code.writes:
            if ok[number] > FULL:
                raise PtxError(self._refusal(number, ""))
            ok[number] |= mask
        for number in code.touches:
            self.touched[number] = self.epoch

    def _refusal(self, number: int, otherwise: str) -> str:
        name = self.machine.program.names[number]
        if self.ok[number] > FULL:
            return f"{name} belongs to a product that nobody has waited for"
        return f"{name} is read, but was {otherwise}"

    def _go(self, place: int, mask: int) -> None:
        if mask:
            self.places[place] = self.places.get(place, 0) | mask

    def _end(self, mask: int) -> None:
        self.live &= ~mask
        self.machine.touch()
        self.cta.cluster.settle()
        if not self.live:
            if self.open or self.committed:
                raise PtxError("a warp ends before its products")
            self.cta.warp_ends()

    def __str__(self) -> str:
        codes = self.machine.program.codes
        at = ", ".join(
            f"{mask:#x} at {place}: {codes[place].statement.text!r}"
            for place, mask in sorted(self.places.items())
        )
        return f"program {self.cta.number} warp {self.number} (lanes {at})"


class Cta:
    def __init__(self, cluster: Cluster, rank: int, number: int, base: int) -> None:
        self.cluster, self.rank, self.number = cluster, rank, number
        self.machine = machine = cluster.machine
        self.shared, grid = SharedMemory(base, machine.shared), machine.grid
        x, y, z = number % grid[0], number // grid[0] % grid[1], number // grid[0] // grid[1]
        threads, many = machine.program.entry.threads, machine.program.entry.cluster
        self.specials = {
            "%ctaid.x": x,
            "%ctaid.y": y,
            "%ctaid.z": z,
            "%nctaid.x": grid[0],
            "%nctaid.y": grid[1],
            "%nctaid.z": grid[2],
            "%ntid.x": threads,
            "%cluster_ctarank": rank,
            "%cluster_ctaid.x": rank,
            "%cluster_nctarank": many,
            "%cluster_nctaid.x": many,
            "%clusterid.x": x // many,
            "%nclusterid.x": grid[0] // many,
        }
        self.bars: dict[int, ptx_groups.Bar] = {}
        self.warps = [Warp(self, n) for n in range(threads // LANES)]
        for n in range(0, len(self.warps) - 3, 4):
            group = ptx_products.WarpGroup(machine, self.warps[n : n + 4], self.shared)
            for warp in self.warps[n : n + 4]:
                warp.group = group

    def warp_ends(self) -> None:
        if any(warp.live for warp in self.warps):
            return
        if self.shared.loads:
            raise PtxError("the program ends while bulk loads come to its memory")
        if self.shared.readers:
            raise PtxError("the program ends while bulk stores may read its memory")
        if any(bar.threads for bar in self.bars.values()):
            raise PtxError("the program ends with threads at a barrier")
        known = np.max([np.maximum(warp.clock, warp.order) for warp in self.warps], 0)
        if any(known[slot] < tick for slot, tick in self.shared.history.far.items()):
            raise PtxError("the program ends, and another one may still touch its memory")
        self.shared.is_gone = True


class Cluster:
    def __init__(self, machine: Machine, first: int) -> None:
        self.machine, entry = machine, machine.program.entry
        base, many = 1024 * machine.rng.randint(1, 8), entry.cluster
        self.slots = Slots(1 + many * (2 * entry.threads // LANES + 16 + BARRIERS))
        self.told = self.slots.clock(), self.slots.clock()
        self.ctas: list[Cta] = []
        for rank in range(many):
            self.ctas.append(Cta(self, rank, first + rank, base))

    def settle(self) -> None:
        """The barrier of all lanes that are still there."""
        warps = [warp for cta in self.ctas for warp in cta.warps]
        if any(warp.arrived for warp in warps) and not any(w.live & ~w.arrived for w in warps):
            for warp in warps:
                warp.arrived = 0
            self.told = self.slots.clock(), self.slots.clock()
            self.machine.touch()


class Machine:
    def __init__(
        self, source: KernelSource, grid: tuple[int, ...], seed: int, memory: GlobalMemory
    ) -> None:
        self.program, self.rng, self.memory = compiled(source.text), random.Random(seed), memory
        self.shared = self.program.entry.statics + dict(source.constants).get("SHARED", 0)
        self.grid = (*grid, 1, 1, 1)[:3]
        self.params: dict[str, int] = {}
        self.maps: dict[int, TensorMap] = {}
        self._events = list[Callable[[], None]]()
        self.version = 0
        self._check(source)

    def _check(self, source: KernelSource) -> None:
        entry = self.program.entry
        if entry.threads != LANES * source.num_warps:
            raise PtxError(f".reqntid {entry.threads} of a kernel of {source.num_warps} warps")
        if self.grid[0] % entry.cluster or not 1 <= entry.cluster <= 16:
            raise PtxError(f"{self.grid[0]} programs in clusters of {entry.cluster}")
        if self.shared > MOST_SHARED:
            raise PtxError(f"{self.shared} bytes of shared memory")

    def param(self, name: str, size: int) -> int:
        if name not in self.params or self.program.entry.params[name].size != size:
            raise PtxError(f"{name} is no param of {size} bytes with a value")
        return self.params[name]

    def map_at(self, address: int) -> TensorMap:
        if address - _PARAMS_AT not in self.maps:
            raise PtxError(f"no tensor map at {address:#x}")
        return self.maps[address - _PARAMS_AT]

    def touch(self) -> None:
        """Something changed that a warp may wait for."""
        self.version += 1

    def later(self, event: Callable[[], None]) -> None:
        self._events.append(event)

    def perhaps_now(self, event: Callable[[], None]) -> None:
        if self.rng.random() < 0.3:
            event()
        else:
            self.later(event)

    def run(self) -> None:
        many, grid, rng = self.program.entry.cluster, self.grid, self.rng
        waiting = list(range(0, grid[0] * grid[1] * grid[2], many))
        rng.shuffle(waiting)
        at_once, running = rng.choice((1, 1, 2, 3)), list[Cluster]()
        ready, stuck = list[Warp](), list[Warp]()
        turns = Turns(rng)
        while waiting or ready or stuck or self._events:
            running = [c for c in running if not all(cta.shared.is_gone for cta in c.ctas)]
            while waiting and len(running) < at_once:
                running.append(Cluster(self, waiting.pop()))
                ready += [warp for cta in running[-1].ctas for warp in cta.warps]
            self._turn(turns, ready, stuck)

    def _turn(self, turns: Turns, ready: list[Warp], stuck: list[Warp]) -> None:
        if self._events and (not ready or self.rng.random() < turns.soon):
            place = self.rng.randrange(len(self._events))
            self._events[place], self._events[-1] = self._events[-1], self._events[place]
            before, event = -1, self._events.pop()
            event()
        elif ready:
            warp, before = turns.next(ready), self.version
            budget = self.rng.randint(1, turns.budget)
            turns.idle += budget
            if not warp.run(budget):
                ready.remove(warp)
                if warp.live:
                    stuck.append(warp)
        else:
            where = "\n".join(map(str, stuck))
            raise PtxError(f"standstill, and nothing is on its way:\n{where}")
        if before != self.version:
            ready += stuck
            stuck.clear()
            turns.idle = 0
        if turns.idle > _MOST_IDLE:
            raise PtxError("warps go on, but change nothing:\n" + "\n".join(map(str, ready)))


class Turns:
    """Who is next: anybody, or by ranks which change now and then."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._by_rank = rng, rng.random() < 0.5
        self.budget, self.soon = rng.choice(_BUDGETS), rng.choice(_SOON)
        self._ranks: dict[Warp, float] = {}
        self.idle = 0

    def next(self, ready: list[Warp]) -> Warp:
        if not self._by_rank:
            return self._rng.choice(ready)
        for warp in ready:
            if warp not in self._ranks or self._rng.random() < 0.01:
                self._ranks[warp] = self._rng.random()
        return max(ready, key=self._ranks.__getitem__)


def launch(
    source: KernelSource,
    tensors: Sequence[Tensor],
    scalars: Sequence[int],
    *,
    seed: int = 0,
    views: Sequence[View] | None = None,
    grid: Sequence[int] | None = None,
    allow_rewrites: bool = False,
) -> None:
    """Runs a kernel on tensors of the CPU, one per param, whose results it writes into them.

    ``views``: sizes and strides of the params with a box, and sizes of the box where the source has
    none, else those of the tensors. ``grid``, else the source's. ``allow_rewrites``: several
    threads may store to the same bytes. Raises PtxError.
    """
    if source.language != "ptx" or source.scratch or source.split:
        raise PtxError(f"{source.name} is no kernel in PTX, or has scratch memory")
    sizes = {f"s{n}": value for n, value in enumerate(scalars)}
    found = tuple(grid or (each.eval(sizes) for each in source.grid))
    memory = GlobalMemory(allow_rewrites)
    machine = Machine(source, found, seed, memory)
    _bind(machine, source, tensors, scalars, views)
    with np.errstate(all="ignore"):
        machine.run()


def _bind(
    machine: Machine,
    source: KernelSource,
    tensors: Sequence[Tensor],
    scalars: Sequence[int],
    views: Sequence[View] | None,
) -> None:
    """Params in the order in which the runtime passes them."""
    if len(tensors) != len(source.params) or len(scalars) != len(source.scalars):
        raise PtxError(f"{len(tensors)} tensors and {len(scalars)} scalars for {source.name}")
    names, left = iter(machine.program.entry.params.values()), None if views is None else [*views]
    for n, tensor in enumerate(tensors):
        if tensor.dtype != source.params[n]:
            raise PtxError(f"param {n} of {source.name} is {source.params[n]}")
        if box := source.box(n):
            _bind_map(
                machine,
                names,
                tensor,
                _view_of(tensor) if left is None else left.pop(0),
                box,
                () if n else source.steps,
            )
        else:
            _set(machine, next(names, None), 8, machine.memory.pointer(tensor))
    for value in scalars:
        _set(machine, next(names, None), 8 if source.wide else 4, value)
    for _ in range(2):
        _set(machine, next(names, None), 8, 0)
    if left or next(names, None) is not None:
        raise PtxError(f"{source.name} has other params than the runtime passes")


def _bind_map(
    machine: Machine,
    names: Iterator[Param],
    tensor: Tensor,
    view: View,
    box: Sequence[int],
    steps: Sequence[int],
) -> None:
    param = next(names, None)
    if param is None or param.size != 128 or param.offset % 64:
        raise PtxError("no param for a tensor map where the runtime passes one")
    sizes, strides, *told = view
    if told and any(own not in (0, given) for own, given in zip(box, told[0], strict=True)):
        raise PtxError(f"a box {told[0]} for {box}")
    of_box = told[0] if told else box
    machine.maps[param.offset] = TensorMap(machine.memory, tensor, sizes, strides, of_box, steps)
    for size, values in zip((4, 8), (sizes, strides), strict=True):
        for value in values:
            _set(machine, next(names, None), size, value)


def _set(machine: Machine, param: Param | None, size: int, value: int) -> None:
    if param is None or param.size != size:
        raise PtxError(f"the kernel has no param of {size} bytes where the runtime passes one")
    machine.params[param.name] = int(value) % (1 << 8 * size)


def _view_of(tensor: Tensor) -> View:
    """The stride of a dim of one element is never used, but has to be a good one."""
    some = tensor.shape[-1]
    return tensor.shape, [
        s if n > 1 else some for n, s in zip(tensor.shape, tensor.stride(), strict=True)
    ]
