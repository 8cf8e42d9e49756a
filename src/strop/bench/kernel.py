"""Measure single norms, softmaxes and activations beside eager and Inductor (``strop bench
kernel``).

On a GPU every contender runs in a hand-made CUDA graph of many calls in a row, over several sets
of arguments, so that neither the host nor a warm cache decides. On a CPU whole calls are timed.
Strop and dynamic Inductor compile once for all rows of a number of features; static Inductor
compiles every shape anew.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

import strop
from strop.bench import environment, timer
from strop.bench.kernel_cases import (
    GROUP_NORM,
    LIMIT_BYTES,
    ROW_FAMILIES,
    Inputs,
    KernelCase,
    case_of,
    make,
)
from strop.options import Options

PEERS = ("eager", "inductor", "inductor-dynamic")
MAX_SETS = 4  # of arguments that a graph walks through
SETS_BYTES = 600e6  # all sets together
GRAPH_US, MAX_CALLS = 300.0, 48  # of one graph
ASSUMED_BYTES_PER_US = 2.5e6
CPU_SAMPLE_MS = 2.0
COPY_BYTES = 1 << 30  # what the ceiling is measured with on a GPU; a CPU's caches take no part
Forward = Callable[..., Any]


@dataclass
class Bench:
    """Keep compiled modules between the cases of one family and number of features."""

    device: torch.device
    dtype: torch.dtype
    peers: Sequence[str]
    samples: int
    build_workers: int = 0  # as in Options
    compiled: dict[tuple[str, str, int], Forward] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # of first calls, by contender

    def __post_init__(self) -> None:
        torch._dynamo.config.recompile_limit = 10_000

    def contenders(self, case: KernelCase) -> dict[str, Forward]:
        """Return calls that have not run yet. Weights are equal: they depend on the features
        alone."""
        found = {"strop": self._once("strop", case, self._optimised)}
        for peer in self.peers:
            if peer == "inductor-dynamic":
                found[peer] = self._once(peer, case, partial(_inductor, dynamic=True))
            else:
                module, _ = make(case, self.device, self.dtype)
                found[peer] = module if peer == "eager" else _inductor(module, dynamic=False)
        return found

    def _once(
        self, name: str, case: KernelCase, prepare: Callable[[nn.Module], Forward]
    ) -> Forward:
        key = (name, case.family, case.shape[1])
        if key not in self.compiled:
            self.compiled[key] = prepare(make(case, self.device, self.dtype)[0])
        return self.compiled[key]

    def _optimised(self, module: nn.Module) -> Forward:
        options = Options.from_environment(
            strict=True, cuda_graphs=False, build_workers=self.build_workers
        )
        return strop.optimize(module, options=options)

    def measure(self, case: KernelCase, bandwidth: float) -> dict[str, Any]:
        """Measure one row: the microseconds per call of every contender."""
        arguments = self.arguments(case)
        return self.timed(case, arguments, *self.first(case, arguments), bandwidth)

    def arguments(self, case: KernelCase) -> Inputs:
        return make(case, self.device, self.dtype)[1]

    def first(
        self, case: KernelCase, arguments: Inputs
    ) -> tuple[dict[str, Forward], dict[str, float]]:
        """Return the contenders, after a call of each, and its seconds: for compilers their
        work."""
        calls = self.contenders(case)
        firsts: dict[str, float] = {}
        with torch.no_grad():
            for name, call in calls.items():
                start = time.perf_counter()
                call(*arguments)
                timer.synchronise(self.device)
                firsts[name] = time.perf_counter() - start
                self.seconds[name] = self.seconds.get(name, 0.0) + firsts[name]
        return calls, firsts

    def timed(
        self,
        case: KernelCase,
        arguments: Inputs,
        calls: dict[str, Forward],
        firsts: Mapping[str, float],
        bandwidth: float,
    ) -> dict[str, Any]:
        with torch.no_grad():
            timed = self._timed(case, calls, arguments)
        moved = case.bytes_moved(self.dtype)
        floor = moved / bandwidth * 1e6
        return {
            "case": case.name,
            "family": case.family,
            "shape": case.shape,
            "bytes": moved,
            "us": timed,
            "first_s": {n: round(s, 4) for n, s in firsts.items()},
            "share_of_ceiling": round(floor / timed["strop"]["p50"], 4),
        }

    def _timed(
        self, case: KernelCase, calls: dict[str, Forward], arguments: tuple[Tensor, ...]
    ) -> dict[str, dict[str, float]]:
        moved = case.bytes_moved(self.dtype)
        if self.device.type == "cpu":
            bound = {name: partial(call, *arguments) for name, call in calls.items()}
            one = min(timer.elapsed_ms(call, self.device) for call in bound.values())
            inner = max(1, min(200, round(CPU_SAMPLE_MS / one)))
            return _microseconds(
                timer.time_calls(bound, self.device, samples=self.samples, inner=inner), 1
            )
        number = max(1, min(MAX_SETS, int(SETS_BYTES // moved)))
        sets = [arguments, *(tuple(t.clone() for t in arguments) for _ in range(number - 1))]
        count = GRAPH_US / max(moved / ASSUMED_BYTES_PER_US, 2.0)
        rounds = max(1, min(MAX_CALLS, int(count)) // number)
        replays = {
            name: timer.captured(partial(_all, call, sets, rounds)) for name, call in calls.items()
        }
        found = timer.time_calls(replays, self.device, samples=self.samples, inner=1)
        return _microseconds(found, rounds * number)


@dataclass(frozen=True, slots=True)
class Setting:
    """Say how cases are measured; ``until`` as ``time.time`` says it, for several processes."""

    device: torch.device
    dtype: torch.dtype
    peers: tuple[str, ...]
    samples: int
    bandwidth: float
    until: float

    def bench(self, build_workers: int = 0) -> Bench:
        return Bench(self.device, self.dtype, self.peers, self.samples, build_workers)


@dataclass(frozen=True, slots=True)
class Found:
    """Hold rows, names of cases that there was no time for, and seconds of first calls."""

    rows: list[dict[str, Any]]
    skipped: list[str]
    seconds: dict[str, float]


def _inductor(module: nn.Module, *, dynamic: bool) -> Forward:
    return torch.compile(own_code(module), dynamic=dynamic)


def own_code(module: nn.Module) -> Forward:
    """Return a forward whose code object is a copy: Dynamo keeps results, and what it learns of
    shapes, by code object."""
    forward = type(module).forward
    own = FunctionType(forward.__code__.replace(), forward.__globals__, closure=forward.__closure__)
    own.__kwdefaults__, own.__defaults__ = forward.__kwdefaults__, forward.__defaults__
    return MethodType(own, module)


def _all(call: Forward, sets: Sequence[tuple[Tensor, ...]], rounds: int) -> None:
    with torch.no_grad():
        for _ in range(rounds):
            for arguments in sets:
                call(*arguments)


def _microseconds(found: dict[str, timer.Timing], calls: int) -> dict[str, dict[str, float]]:
    scale = 1e3 / calls
    return {
        name: {
            "p20": round(t.p20_ms * scale, 3),
            "p50": round(t.p50_ms * scale, 3),
            "p80": round(t.p80_ms * scale, 3),
        }
        for name, t in found.items()
    }


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second of a large copy, read and written bytes counted: the ceiling."""
    size = COPY_BYTES if device.type == "cuda" else COPY_BYTES >> 2
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    call = partial(target.copy_, source)
    timing = timer.time_calls({"copy": call}, device, samples=10, inner=3)["copy"]
    return 2 * size / timing.p20_ms * 1e3


def random_cases(
    count: int, seed: int, device_type: str, dtype: torch.dtype
) -> tuple[KernelCase, ...]:
    """Draw so many cases of every family at sizes that nobody chose: log-uniform rows and cols."""
    source = random.Random(seed)
    most = LIMIT_BYTES[device_type]
    found = []
    for family in (*ROW_FAMILIES, GROUP_NORM):
        own: list[KernelCase] = []
        while len(own) < count:
            shape: tuple[int, ...]
            if family is GROUP_NORM:
                channels = 32 * source.randint(2, 80)
                shape = (source.randint(1, 4), channels, *(8 * source.randint(1, 24),) * 2)
            else:
                rows = round(math.exp(source.uniform(math.log(32), math.log(100_000))))
                cols = 8 * round(math.exp(source.uniform(math.log(8), math.log(5120))))
                shape = (rows, cols)
            case = case_of(family, shape)
            if case.bytes_moved(dtype) <= most:
                own.append(case)
        found += own
    return tuple(found)


def run(
    cases: Iterable[KernelCase],
    device: torch.device,
    dtype: torch.dtype,
    peers: Sequence[str] = PEERS,
    samples: int = 10,
    limit_s: float = math.inf,
    each: Callable[[dict[str, Any]], None] = lambda row: None,
    apart: bool = False,
    save: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Measure the cases in their order; ``each`` gets every row when it is done, and ``save`` all
    that there is so far.

    What is not measured when ``limit_s`` is over is listed under "skipped". ``apart``: each family
    is compiled in a process of its own, all at once, and then timed in turn.
    """
    from strop.bench import kernel_apart

    bandwidth, environs = copy_bandwidth(device), environment.describe(device)
    measure = kernel_apart.families if apart else _one_by_one
    rows, skipped, seconds = list[dict[str, Any]](), list[str](), dict[str, float]()
    result: dict[str, Any] = {}
    setting = Setting(device, dtype, tuple(peers), samples, bandwidth, time.time() + limit_s)
    for found in measure(tuple(cases), setting):
        rows += found.rows
        skipped += found.skipped
        for name, value in found.seconds.items():
            seconds[name] = seconds.get(name, 0.0) + value
        result = {
            "kind": "kernel",
            "environment": environs,
            "dtype": str(dtype),
            "copy_bytes_per_s": round(bandwidth),
            "samples": samples,
            "is_apart": apart,
            "rows": rows,
            "skipped": skipped,
            "first_call_s": {n: round(s, 2) for n, s in seconds.items()},
            "summary": summary(rows, peers),
        }
        save(result)
        for row in found.rows:
            each(row)
    return result


def _one_by_one(cases: Sequence[KernelCase], setting: Setting) -> Iterator[Found]:
    bench = setting.bench()
    for case in cases:
        if time.time() > setting.until:
            yield Found([], [case.name], {})
            continue
        before = dict(bench.seconds)
        rows = [bench.measure(case, setting.bandwidth)]
        spent = {name: s - before.get(name, 0.0) for name, s in bench.seconds.items()}
        yield Found(rows, [], spent)


def summary(rows: Sequence[dict[str, Any]], peers: Sequence[str]) -> list[dict[str, Any]]:
    """Return by family and peer how many times as long it takes: worst, median and geometric
    mean."""
    found = []
    for family in dict.fromkeys(row["family"] for row in rows):
        own = [row for row in rows if row["family"] == family]
        for peer in peers:
            ratios = sorted(
                (row["us"][peer]["p50"] / row["us"]["strop"]["p50"], row["case"]) for row in own
            )
            values = [ratio for ratio, _ in ratios]
            mean = math.exp(sum(map(math.log, values)) / len(values))
            found.append(
                {
                    "family": family,
                    "peer": peer,
                    "cases": len(own),
                    "worst": round(values[0], 3),
                    "worst_case": ratios[0][1],
                    "median": round(values[len(values) // 2], 3),
                    "geomean": round(mean, 3),
                    "slower": sum(v < 0.97 for v in values),
                }
            )
    return found


def rows_of(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table: its header, then one row per case."""
    names = list(result["rows"][0]["us"]) if result["rows"] else []
    table = [("case", *(f"{name} us" for name in names), "of ceiling")]
    for row in result["rows"]:
        times = (f"{row['us'][name]['p50']:.2f}" for name in names)
        table.append((row["case"], *times, f"{row['share_of_ceiling']:.0%}"))
    return table
