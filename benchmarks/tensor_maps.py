"""Time what the host asks the driver for when launches are bound: tensor maps.

    python benchmarks/tensor_maps.py [--number 500] [--out FILE]

Each line is one way to get a CUtensorMap, in us: the first call, and percentiles, mean and worst
of ``number`` later ones. Addresses lie in memory of several kinds; then the same calls while the
GPU is busy, while a thread of Python is (a foreign call gives up the interpreter's lock, and one
that takes long may wait 5 ms for it), and with the lock kept. The last lines are Strop's own ways:
a map of a new geometry, one at a new address, and one that is known.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from strop.bench import environment
from strop.runtime.build import driver
from strop.runtime.build.cubin import Box
from strop.runtime.run.workspace import Workspace

HALF, SWIZZLE_128, PROMOTION = 6, 3, 2  # of the driver's enums
ROWS, COLS = 4096, 640
MANY = 2000  # pieces of memory that the driver knows of, as a large model has
Ask = Callable[[int], object]


class Encoder:
    """Encode a map by a library, at any address."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.memory, self.address = driver._map_memory()
        self._sizes, self._strides = (
            (ctypes.c_uint64 * 2)(COLS, ROWS),
            (ctypes.c_uint64 * 1)(COLS * 2),
        )
        self._box, self._steps = (ctypes.c_uint32 * 2)(64, 128), (ctypes.c_uint32 * 2)(1, 1)

    def encode(self, pointer: int) -> None:
        geometry = (self._sizes, self._strides, self._box, self._steps)
        code = self._library.cuTensorMapEncodeTiled(
            self.address, HALF, 2, pointer, *geometry, 0, SWIZZLE_128, PROMOTION, 0
        )
        assert code == 0, code

    def move(self, pointer: int) -> None:
        code = self._library.cuTensorMapReplaceAddress(self.address, pointer)
        assert code == 0, code


class Tenant:
    def let_go(self) -> None: ...


def times_us(ask: Ask, addresses: Iterator[int], number: int) -> dict[str, float]:
    times = []
    for pointer in itertools.islice(addresses, number):
        begin = time.perf_counter()
        ask(pointer)
        times.append(1e6 * (time.perf_counter() - begin))
    first, *later = times
    fifths = statistics.quantiles(later, n=5)
    found = {"first": first, "p20": fifths[0], "p50": statistics.median(later), "p80": fifths[3]}
    found |= {"mean": statistics.fmean(later), "worst": max(later)}
    return {name: round(us, 2) for name, us in found.items()}


def inside(memory: torch.Tensor) -> Iterator[int]:
    """Give addresses of this memory, over and over, 16 KiB apart."""
    begin, size = memory.data_ptr(), memory.nbytes
    return (begin + (n << 14) % (size >> 1) for n in itertools.count())


@contextlib.contextmanager
def busy_thread() -> Iterator[None]:
    """Have another thread of Python at work."""
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextlib.contextmanager
def busy_gpu() -> Iterator[None]:
    torch.cuda._sleep(2_000_000_000)
    yield
    torch.cuda.synchronize()


def measured(number: int) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = {}

    def note(name: str, ask: Ask, addresses: Iterator[int]) -> None:
        rows[name] = times_us(ask, addresses, number)
        print(f"{name:58s}", *(f"{k} {v:9.2f}" for k, v in rows[name].items()), flush=True)

    plain, locked = Encoder(driver._cuda()), Encoder(driver._cuda_with_lock())
    memory = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    ways = {"encode": plain.encode, "move": plain.move}
    for name, ask in ways.items():
        note(f"{name}, at no address of memory", ask, itertools.repeat(driver.NOWHERE))
        note(f"{name}, in memory of torch's", ask, inside(memory))
    mapped = Workspace(memory.device).reserve(256 << 20, Tenant())
    many = [torch.empty(21 << 20, dtype=torch.uint8, device="cuda") for _ in range(MANY)]
    scattered = itertools.cycle(each.data_ptr() for each in many)
    for name, ask in ways.items():
        note(f"{name}, in mapped memory", ask, inside(mapped))
        note(f"{name}, among {MANY} pieces of memory", ask, scattered)
    del many
    torch.cuda.empty_cache()
    for where, way in (("the GPU busy", busy_gpu), ("a thread busy", busy_thread)):
        for kept, encoder in (("", plain), (", the lock kept", locked)):
            with way():
                note(f"encode, {where}{kept}", encoder.encode, inside(memory))
                note(f"move, {where}{kept}", encoder.move, inside(memory))
    note("copy of a map", lambda pointer: bytes(plain.memory), inside(memory))
    for name, own in OWN.items():
        note(f"Strop's, {name}", own, iter(range(number)))
    return rows


def map_of(rows: int, pointer: int) -> driver.TensorMap:
    box, function = Box((128, 64), HALF, SWIZZLE_128), SimpleNamespace(context=0, cubin=None)
    function.cubin = SimpleNamespace(entry="benchmark")
    return driver.TensorMap(box, pointer, ((rows, COLS), (COLS, 1)), function)  # type: ignore


OWN: dict[str, Ask] = {
    "of a new geometry": lambda n: map_of(ROWS + n, 1 << 21),
    "at a new address": lambda n: map_of(ROWS, (2 + n) << 21),
    "that is known": lambda n: map_of(ROWS, (2 + n) << 21),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--number", type=int, default=500, help="calls of each kind")
    parser.add_argument("--out", type=Path, help="JSON file for every number")
    args = parser.parse_args()
    device = torch.device("cuda")
    torch.cuda.init()
    rows = measured(args.number)
    if args.out:
        described = environment.describe(device)
        text = json.dumps({"kind": "tensor-maps", "environment": described, "us": rows}, indent=1)
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
