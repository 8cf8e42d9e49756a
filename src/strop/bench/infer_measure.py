"""What one process measures for ``strop bench infer``: rows, random shapes, switches, a start.

Every function works on rows of one model, and hands what it has so far to ``save``: a process that
is cut leaves the rest.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import strop
from strop.bench import accuracy, peers, timer
from strop.bench import compile as compile_bench
from strop.bench.infer_contenders import Clock, Field, Found, attempt, in_order, is_there
from strop.bench.infer_rows import Row
from strop.bench.models import Size
from strop.debug.explain import explain

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
DEFAULT_PEERS = ("eager", "eager-graph")
SAMPLE_MS, MAX_INNER = 30.0, 5  # calls back to back in one sample of a step
PICTURE_SAMPLES = 5
RANDOM_SAMPLES, RANDOM_CALLS = 8, 4
REFERENCE_S = 6.0  # the step in higher precision, on a GPU
Save = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure and for how long; plain data, which goes to a process as JSON."""

    device: str = "cuda"
    dtype: str = "fp16"
    peers: tuple[str, ...] = DEFAULT_PEERS
    samples: int = 20
    random: int = 0
    seed: int = 0
    ablate: bool = False

    @property
    def where(self) -> torch.device:
        return torch.device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


def measure_rows(rows: Sequence[Row], plan: Plan, clock: Clock, save: Save) -> dict[str, Found]:
    """Strop and its peers on the rows of one model, by the row's name."""
    with tempfile.TemporaryDirectory() as cache:
        group = Field(rows[0].case(plan.torch_dtype), plan.where,
                      strop.Options.from_environment(cache_dir=cache))  # fmt: skip
        results: dict[str, Found] = {}
        calls: dict[str, dict[str, timer.Call]] = {}
        for row in rows:
            refusal = clock.refusal(row.cost_s)
            if refusal:
                results[row.name] = {"skipped": refusal}
            else:
                results[row.name] = {"contenders": {}}
                note = partial(save, results)
                calls[row.name] = _measure(row, group, plan, clock, results[row.name], note)
            save(results)
        for row in rows:  # last: the profiler leaves its traces
            if row.name in calls and row.kind == "step":
                _count_launches(calls[row.name], results[row.name], group, clock)
    return results


def _measure(row: Row, group: Field, plan: Plan, clock: Clock, result: Found,
             note: Callable[[], None]) -> dict[str, timer.Call]:  # fmt: skip
    """Fill in ``result``; the calls of those that have run."""
    case = replace(group.case, name=row.name, sizes=(row.size,), batches=(row.batch,))
    judged = None
    if row.kind == "step":
        ((plain, exact),) = accuracy.references(case, plan.where)
        judged = (plain, exact)
    calls: dict[str, timer.Call] = {}
    outputs: dict[str, list[Tensor]] = {}
    names = ["strop", *in_order(plan.peers)]
    if row.kind == "memory":
        names = ["strop", "eager", "eager-naive"]
    for name in names:
        reason = _refused(name, case, plan.where, clock)
        found = {"skipped": reason} if reason else attempt(
            partial(_start, name, row, group, calls, outputs), _limit_s(name))  # fmt: skip
        result["contenders"][name] = found
        note()
    result["error"] = _error(outputs, judged)
    if "strop" in outputs:
        result["counts"] = explain(group.contender("strop").workload.target).summary()
    outputs.clear()
    del judged
    if row.kind != "memory":
        _time(row, calls, plan, clock, result)
    return calls


def _refused(name: str, case: Any, device: torch.device, clock: Clock) -> str:
    if name == "strop":
        return ""
    peer = peers.peer_named(name)
    return peer.serves(case, device) or clock.refusal(
        peer.first_s if device.type == "cuda" or not peer.is_slow else peer.first_s / 10
    )


def _limit_s(name: str) -> float:
    return 0.0 if name == "strop" else peers.peer_named(name).limit_s


def _start(name: str, row: Row, group: Field, calls: dict[str, timer.Call],
           outputs: dict[str, list[Tensor]]) -> Found:  # fmt: skip
    call, found, results = group.start(name, row.size, row.batch)
    calls[name] = call
    if name in ("strop", "eager"):
        outputs[name] = results
    return found


def _error(outputs: Mapping[str, list[Tensor]], judged: tuple[Tensor, Tensor] | None
           ) -> Found | None:  # fmt: skip
    """Of the first and of the second call, which may run another way (a CUDA graph)."""
    if "strop" not in outputs:
        return None
    if judged is not None:
        both = [accuracy.judge(found, *judged) for found in outputs["strop"]]
        return max(both, key=lambda e: (not e["is_good"], e["rms"]))
    if "eager" not in outputs:
        return None
    (eager, *_) = outputs["eager"]
    return {"psnr_to_eager_db": min(min(accuracy.psnr_db(found, eager), 200.0)
                                    for found in outputs["strop"])}  # fmt: skip


def _time(row: Row, calls: Mapping[str, timer.Call], plan: Plan, clock: Clock, result: Found
          ) -> None:  # fmt: skip
    if not calls:
        return
    measure = timer.elapsed_ms if row.kind == "step" else timer.wall_ms
    samples = plan.samples if row.kind == "step" else min(plan.samples, PICTURE_SAMPLES)
    ms = {name: measure(call, plan.where, 1) for name, call in calls.items()}
    inner = {name: inner_of(each) if row.kind == "step" else 1 for name, each in ms.items()}
    turn_s = sum(ms[name] * inner[name] for name in calls) / 1e3
    samples = max(3, min(samples, int(0.8 * clock.left() / turn_s)))
    times = timer.time_calls(calls, plan.where, samples=samples, inner=inner, warmup=1,
                             measure=measure)  # fmt: skip
    for name, timing in times.items():
        result["contenders"][name] |= timing.to_dict()


def inner_of(ms: float) -> int:
    """Calls back to back in a sample: a denoise loop's, but no longer than it takes to be sure."""
    return max(1, min(MAX_INNER, round(SAMPLE_MS / max(ms, 1e-3))))


def _count_launches(calls: Mapping[str, timer.Call], result: Found, group: Field, clock: Clock
                    ) -> None:  # fmt: skip
    """By the profiler, on a GPU, for everything whose graph is not made by hand."""
    if group.device.type != "cuda":
        return
    report = explain(group.contender("strop").workload.target)
    generated = {kernel.name for graph in report.graphs for kernel in graph.kernels}
    for name, call in calls.items():
        if name != "strop" and peers.peer_named(name).by_graph:
            continue
        refusal = clock.refusal(10.0)
        own = generated if name == "strop" else set[str]()
        found = {"skipped": refusal} if refusal else attempt(partial(timer.profiled, call, own))
        if is_there(found):
            found["top"] = found["top"][:20]
        result["contenders"][name]["profile"] = found


def measure_random(row: Row, plan: Plan, clock: Clock, save: Save) -> Found:
    """Random legal shapes beside the cheapest strong peer, in the order they are drawn.

    ``cold_s`` is the very first call, compile included; ``first_s`` the first call at every
    further shape, ``longest_s`` the longest of the calls after it, a capture included.
    """
    device = plan.where
    peer = "eager-graph" if device.type == "cuda" and row.kind == "step" else "eager"
    shapes = row.draws.some(plan.random, plan.seed)
    result: Found = {"peer": peer, "seed": plan.seed, "shapes": [], "skipped": []}
    with tempfile.TemporaryDirectory() as cache:
        group = Field(row.case(plan.torch_dtype), device,
                      strop.Options.from_environment(cache_dir=cache))  # fmt: skip
        group.contender("strop")
        longest = 0.0  # that a shape has taken
        for size, batch in shapes:
            refusal = clock.refusal(1.5 * longest)
            if refusal:
                result["skipped"].append({"size": size, "batch": batch, "why": refusal})
                continue
            before = clock.left()
            found = attempt(partial(_random_shape, row, group, peer, size, batch))
            result["shapes"].append({"size": size, "batch": batch, **found})
            if len(result["shapes"]) > 1:  # the first one compiles
                longest = max(longest, before - clock.left())
            timer.give_back(device)
            result["summary"] = random_summary(result)
            save(result)
        result["counts"] = explain(group.contender("strop").workload.target).summary()
    return result


def _random_shape(row: Row, group: Field, peer: str, size: Size, batch: int) -> Found:
    device = group.device
    is_cold = bool(group.contender("strop").since_optimize)
    ours, found, _ = group.start("strop", size, batch)
    later = [found["second_s"], *(timer.wall_ms(ours, device) / 1e3 for _ in range(RANDOM_CALLS))]
    theirs, _, _ = group.start(peer, size, batch)
    calls = {"strop": ours, peer: theirs}
    is_step = row.kind == "step"
    measure = timer.elapsed_ms if is_step else timer.wall_ms
    inner = {n: inner_of(measure(c, device, 1)) if is_step else 1 for n, c in calls.items()}
    times = timer.time_calls(calls, device, samples=RANDOM_SAMPLES if is_step else 2, inner=inner,
                             warmup=1, measure=measure)  # fmt: skip
    p50 = {name: timing.p50_ms for name, timing in times.items()}
    return {("cold_s" if is_cold else "first_s"): found["first_s"],
            "longest_s": round(max(later), 4), "p50_ms": p50,
            "ratio": round(p50[peer] / p50["strop"], 3)}  # fmt: skip


def random_summary(result: Mapping[str, Any]) -> Found:
    """How many times as long the peer takes: worst and median; the longest stalls."""
    shapes = [s for s in result["shapes"] if is_there(s)]
    if not shapes:
        return {}
    worst = min(shapes, key=lambda s: s["ratio"])
    firsts = [s["first_s"] for s in shapes if "first_s" in s]
    return {"count": len(shapes), "worst": worst["ratio"],
            "worst_shape": [*worst["size"], worst["batch"]],
            "median": round(statistics.median(s["ratio"] for s in shapes), 3),
            "first_s": max(firsts) if firsts else None,
            "longest_s": max(s["longest_s"] for s in shapes)}  # fmt: skip


def measure_switches(row: Row, plan: Plan, clock: Clock, save: Save) -> Found:
    """One run for each switch of ``Options`` alone switched off, one with all on, all off."""
    device, size, batch = plan.where, row.size, row.batch
    case = row.case(plan.torch_dtype)
    result: Found = {"switches": {}}
    calls: dict[str, timer.Call] = {}
    with tempfile.TemporaryDirectory() as cache:
        options = strop.Options.from_environment(cache_dir=cache)
        variants: dict[str, strop.Options] = {"all on": options}
        while variants:
            name, chosen = next(iter(variants.items()))
            del variants[name]
            taken = result["switches"].get("all on", {}).get("took_s", row.cost_s)
            refusal = clock.refusal(1.5 * taken)
            group = Field(case, device, chosen)
            before = clock.left()
            found = {"skipped": refusal} if refusal else attempt(
                partial(_switched, group, name, size, batch, calls))  # fmt: skip
            result["switches"][name] = {**found, "took_s": round(before - clock.left(), 2)}
            if name == "all on" and is_there(found):
                variants = _variants(options, group)
            save(result)
        if calls:
            is_step = row.kind == "step"
            measure = timer.elapsed_ms if is_step else timer.wall_ms
            inner = {n: inner_of(measure(c, device, 1)) if is_step else 1 for n, c in calls.items()}
            times = timer.time_calls(calls, device, samples=plan.samples if is_step else 3,
                                     inner=inner, measure=measure)  # fmt: skip
            for name, timing in times.items():
                result["switches"][name] |= timing.to_dict()
    return result


def _switched(group: Field, name: str, size: Size, batch: int, calls: dict[str, timer.Call]
              ) -> Found:  # fmt: skip
    calls[name], found, _ = group.start("strop", size, batch)
    report = explain(group.contender("strop").workload.target)
    return {**found, "num_launches": report.num_launches, "num_kernels": report.num_kernels,
            "fallbacks": report.fallbacks}  # fmt: skip


def _variants(options: strop.Options, group: Field) -> dict[str, strop.Options]:
    """Each knob that is on by default, and each pass that the compiler has run."""
    report = explain(group.contender("strop").workload.target)
    ran = dict.fromkeys(step[0] for graph in report.graphs for step in graph.passes)
    passes = [name for name in ran if name not in NEEDED_PASSES]
    knobs = [knob.name for knob in fields(options) if knob.default is True]
    off: dict[str, Any] = dict.fromkeys(knobs, False)
    found = {f"no {name}": replace(options, disable=(name,)) for name in passes}
    for name in knobs:
        found[f"no {name}"] = replace(options, **{name: off[name]})
    found["all off"] = replace(options, disable=tuple(passes), **off)
    return found


NEEDED_PASSES = ("channels_last",)  # without it there is no memory order to lower


def measure_start(row: Row, plan: Plan, clock: Clock, save: Save) -> Found:
    """Seconds from ``optimize`` to the first result, with an empty cache; where they went."""
    with tempfile.TemporaryDirectory() as cache:
        found = compile_bench.measure_here(row.case(plan.torch_dtype), plan.where, cache, 1)
    stages = found["stages_s"]
    split = {"capture": stages.get("capture", 0.0), "kernels": stages.get("kernels", 0.0)}
    split["passes + codegen"] = sum(stages.values()) - sum(split.values())
    split["first run"] = found["first_s"] - sum(stages.values())
    return {"contenders": {"strop": {"first_s": found["first_s"],
                                     "second_s": found["shapes"][0]["second_s"]}},
            "split_s": {name: round(s, 3) for name, s in split.items()},
            "stages_s": stages, "counts": found["counts"]}  # fmt: skip
