"""Set up who takes part in a row of ``strop bench infer``: Strop and its peers, with what they
hold."""

from __future__ import annotations

import copy
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import strop
from strop.api import dispatchers_of
from strop.bench import peers, timer
from strop.bench.cases import BenchCase
from strop.bench.infer_rows import InferRow
from strop.bench.models import Size, Workload
from strop.bench.pipelines.tiny import modules_of
from strop.runtime.run.layouts import bytes_of

Found = dict[str, Any]  # for the JSON
Save = Callable[[Found], None]
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
DEFAULT_PEERS = ("eager", "eager-graph")
SAMPLE_MS = {"cuda": 150.0, "cpu": 30.0}  # of a step, at most
# Calls back to back in it, at most. A GPU has nothing to do until the host has come to its first
# launch, once a sample: as rarely as in a denoise loop, which has 20 steps and more.
LOOP_CALLS = 20
PICTURE_SAMPLES = 5  # at most
CONV_DIM = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """Say what to measure and for how long; plain data, which goes to a process as JSON."""

    device: str = "cuda"
    dtype: str = ""  # that of the row, or fp32 on a CPU
    peers: tuple[str, ...] = DEFAULT_PEERS
    samples: int = 20
    calls: int = LOOP_CALLS
    random: int = 0
    random_from: int = 0  # how many of these an earlier run has measured
    random_peer: str = ""  # eager in a CUDA graph where there may be one
    seed: int = 0
    ablate: bool = False
    variants: bool = False
    commit: str = ""  # instead of the checkout's

    @property
    def where(self) -> torch.device:
        return torch.device(self.device)

    def dtype_of(self, row: InferRow) -> str:
        return self.dtype or (row.dtype if self.where.type == "cuda" else "fp32")


@dataclass(frozen=True, slots=True)
class Deadline:
    """Tell when everything has to be over."""

    end: float

    @staticmethod
    def of(seconds: float) -> Deadline:
        return Deadline(time.monotonic() + seconds)

    def left(self) -> float:
        return self.end - time.monotonic()

    def refusal(self, needed_s: float) -> str:
        """Return why nothing that takes so long may begin, or nothing."""
        left = self.left()
        return (
            ""
            if left >= needed_s
            else f"{max(left, 0):.0f} s left of the budget, it takes {needed_s:.0f}"
        )


class OverLimitError(Exception):
    """A contender has had its time."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise OverLimitError in the code inside when so much time is over. Main thread only."""
    if not seconds:
        yield
        return

    def expire(number: int, frame: Any) -> None:
        raise OverLimitError

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt(work: Callable[[], Found], limit_s: float = 0.0) -> Found:
    """Return what ``work`` finds, or {"failed": why}: one contender's error must not cost the
    others.

    With the seconds that it took, from which budgets are made.
    """
    start = time.monotonic()
    found = _attempted(work, limit_s, start)
    return {**found, "took_s": round(time.monotonic() - start, 2)}


def _attempted(work: Callable[[], Found], limit_s: float, start: float) -> Found:
    try:
        with limited(limit_s):
            return work()
    except Exception as error:
        if limit_s and time.monotonic() - start >= limit_s:  # compilers wrap what they catch
            return {"failed": f"cut after {limit_s:.0f} s"}
        first = str(error).strip().partition("\n")[0]
        return {
            "failed": f"{type(error).__name__}: {first}"[:200],
            "log": [_without_machine(line) for line in traceback.format_exc().splitlines()[-12:]],
        }


def _without_machine(line: str) -> str:
    """Return a line of a traceback without the folders above the packages."""
    return re.sub(r'File ".*/(?:site-packages|src)/', 'File "', line)


def _weights_of(target: Any) -> list[Tensor]:
    """Return the weights and buffers of a module, or of all of a pipeline's."""
    modules = [target] if isinstance(target, nn.Module) else modules_of(target)
    return [weight for part in modules for weight in (*part.parameters(), *part.buffers())]


@dataclass
class Contender:
    """Hold a model set up in one way, and the bytes that it has come to hold, its weights
    included."""

    workload: Workload
    device: torch.device
    held_bytes: int = 0
    graphs_bytes: int = 0  # of graphs made by hand, which those that share the model have not
    weights_bytes: int = 0
    since_optimize: float = 0.0  # clock when it was handed to Strop; 0 once it has run

    @staticmethod
    def built(
        build: Callable[[], Workload], device: torch.device, *, is_shared: bool = False
    ) -> Contender:
        """Build one. Where it has the weights of all others, they count as if it were alone."""
        before = timer.allocated(device)
        found = Contender(build(), device)
        size_bytes = timer.allocated(device) - before
        if is_shared:
            size_bytes = bytes_of(_weights_of(found.workload.target))
        found.held_bytes = found.weights_bytes = size_bytes
        return found

    def run(
        self, work: Callable[[], list[Tensor]], *, by_graph: bool = False
    ) -> tuple[list[Tensor], int | None]:
        """Return the results, which nobody keeps for later rows, and the peak of everything that it
        holds meanwhile, weights and the workspaces of libraries included."""
        timer.forget_workspaces(self.device)  # of those who ran before, and the exact result's
        before, held = timer.allocated(self.device), self.held_bytes
        results, most = timer.with_peak(work, self.device)
        timer.forget_workspaces(self.device)
        peak = None if most is None else most + held + self.graphs_bytes * by_graph
        if most is not None:
            more = timer.allocated(self.device) - before - bytes_of(results)
            self.held_bytes += 0 if by_graph else more
            self.graphs_bytes += more if by_graph else 0
        return results, peak


@dataclass
class Field:
    """Hold the contenders of the rows of one model: each is built once, when it is first asked
    for."""

    case: BenchCase
    device: torch.device
    options: strop.Options
    built: dict[str, Contender] = field(default_factory=dict)
    parallel: str = ""  # how Strop spreads calls over devices
    first: Workload | None = None  # whose weights all have, where the case is large

    @staticmethod
    def of(row: InferRow, plan: Plan, cache: str) -> Field:
        options = strop.Options.from_environment(cache_dir=cache)
        if row.numerics:
            options = replace(options, numerics=tuple(row.numerics.split(",")))
        case = row.case(DTYPES[plan.dtype_of(row)])
        return Field(case, plan.where, options, parallel=row.parallel)

    @property
    def target(self) -> Any:
        """Return what Strop has optimised."""
        return self.contender("strop").workload.target

    def contender(self, name: str) -> Contender:
        """Return the contender of Strop or of a peer; peers with one setup share it."""
        key = name if name == "strop" else peers.peer_named(name).setup
        if key not in self.built:
            self.built[key] = Contender.built(
                lambda: self._workload(name), self.device, is_shared=self.case.is_large
            )
            if name == "strop":
                timer.synchronise(self.device)
                self.built[key].since_optimize = time.perf_counter()
                strop.optimize(self.built[key].workload.target, options=self.options, **self._how)
        return self.built[key]

    @property
    def _how(self) -> Found:
        """Return how calls are spread: over two parts of a CPU, for want of GPUs."""
        devices = None if self.device.type == "cuda" else ["cpu", "cpu"]
        return {"parallel": self.parallel, "devices": devices} if self.parallel else {}

    def wait(self) -> None:
        """Wait until no compiler of ours is at work beside what is to be timed."""
        if "strop" in self.built:
            for dispatcher in dispatchers_of(self.target).values():
                dispatcher.variants.wait()

    def _workload(self, name: str) -> Workload:
        workload = self._shared() if self.case.is_large else self.case.build(self.device)
        return workload if name == "strop" else peers.prepared(peers.peer_named(name), workload)

    def _shared(self) -> Workload:
        """Return a model of its own with the weights of the first one."""
        if self.first is None:
            self.first = self.case.build(self.device)
        weights = _weights_of(self.first.target)
        # a peer may lay those of a convolution out in another way
        same = {id(weight): weight for weight in weights if weight.dim() != CONV_DIM}
        return replace(self.first, target=copy.deepcopy(self.first.target, same))

    def start(
        self, name: str, size: Size, batch: int, *, num_calls: int = 2
    ) -> tuple[timer.Call, Found, list[Tensor]]:
        """Make a contender's call at a shape and run it twice, or as often as is said; return the
        call, what the first two cost, and the results."""
        by_graph = name != "strop" and peers.peer_named(name).by_graph
        who = self.contender(name)
        results: list[Tensor] = []
        seconds: list[float] = []
        given: dict[str, timer.Call] = {}

        def run_it() -> list[Tensor]:
            start = who.since_optimize or time.perf_counter()
            who.since_optimize = 0.0
            for _ in range(num_calls):
                if not given:
                    given["call"] = peers.caller(who.workload, size, batch, by_graph=by_graph)
                found = given["call"]()
                results.append(found.clone() if by_graph else found)  # others are the caller's own
                timer.synchronise(self.device)
                seconds.append(round(time.perf_counter() - start, 4))
                start = time.perf_counter()
            return results

        _, peak = who.run(run_it, by_graph=by_graph)
        found: Found = {
            "first_s": seconds[0],
            "peak_bytes": peak,  # weights included
            "weights_bytes": who.weights_bytes or None,
        }
        if num_calls > 1:
            found["second_s"] = seconds[1]
        return given["call"], found, results


def take_turns(
    calls: Mapping[str, timer.Call],
    kind: str,
    device: torch.device,
    samples: int,
    most: int = LOOP_CALLS,
    clock: Deadline | None = None,
    *,
    is_long: bool = False,
) -> dict[str, Found]:
    """Return the percentiles of calls that have run, and how many calls a sample has. Where the
    clock is short it takes fewer samples, but at least three.

    A step is timed as in a denoise loop, up to ``most`` calls back to back; a picture by the host's
    clock. Calls that are ``is_long`` are timed one by one, as they stand.
    """
    is_step = kind == "step"
    measure = timer.elapsed_ms if is_step else timer.wall_ms
    if is_long:
        once = timer.time_calls(calls, device, samples=samples, inner=1, warmup=0, measure=measure)
        return {name: {**timing.to_dict(), "calls": 1} for name, timing in once.items()}
    for call in calls.values():
        call()  # one that was made earlier captures again, where working memory has grown since
    ms = {name: measure(call, device, 1) for name, call in calls.items()}
    sample_ms = SAMPLE_MS[device.type]
    inner = {
        n: max(1, min(most, round(sample_ms / max(t, 1e-3)))) if is_step else 1
        for n, t in ms.items()
    }
    turn_s = sum(ms[name] * inner[name] for name in calls) / 1e3
    samples = samples if is_step else min(samples, PICTURE_SAMPLES)
    if clock is not None and calls:
        samples = max(3, min(samples, int(0.8 * clock.left() / turn_s)))
    times = timer.time_calls(calls, device, samples=samples, inner=inner, warmup=0, measure=measure)
    return {name: {**timing.to_dict(), "calls": inner[name]} for name, timing in times.items()}


def in_order(names: Sequence[str]) -> list[str]:
    """Return the peers once each, those of one setup side by side."""
    chosen = [peers.peer_named(name) for name in dict.fromkeys(names)]
    setups = list(dict.fromkeys(peer.setup for peer in chosen))
    return [p.name for p in sorted(chosen, key=lambda p: (setups.index(p.setup), p.by_graph))]


def is_there(found: Mapping[str, Any]) -> bool:
    """Tell whether a contender has run."""
    return not found.keys() & {"failed", "skipped"}
