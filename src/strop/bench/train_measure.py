"""Measure one contender for ``strop bench train`` in one process."""

from __future__ import annotations

import itertools
import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from strop.bench import timer, train_loader
from strop.bench.infer_contenders import Deadline, Found, Save
from strop.bench.train_loader import Pictures
from strop.bench.train_log import TrainLog
from strop.bench.train_loop import PARTS, Loop, can_graph
from strop.bench.train_models import modules_of, torch_set_for
from strop.bench.train_rows import BEST_GUESS, TINY_SWEEP, WORKERS
from strop.bench.train_work import MODELS, Contender, Loader, Setup
from strop.debug.explain import explain
from strop.options import Options
from strop.train.ranks import ALONE, Ranks

# The first loss may lie so far from eager's in fp32, relatively: rounding of latents, weights and
# products costs a mean over the whole batch that much.
LOSS_TOLERANCE = {"tf32": 1e-3, "fp16": 5e-3, "bf16": 1e-2}
SHARE_OF_TIME = 0.4  # of what the budget leaves that one series of samples may take
SPLIT_STEPS = 5
SWEEP_S = 10.0  # that another loader takes
WAIT_SHARE = 0.01  # of a step, for data, with which a loader keeps up
DECODED = 8  # pictures whose reading is timed
CAPTURES = 4  # steps until all CUDA graphs are there


@dataclass(frozen=True, slots=True)
class Plan:
    """Say how long to measure, and where; plain data, which goes to a process as JSON. ``pictures``
    is the folder that loaders read, which has so many ``files``."""

    device: str = "cuda"
    samples: int = 20
    warm_up: int = 5
    pictures: str = ""
    files: int = 0
    best_loader: tuple[int, bool] | None = None
    commit: str = ""  # instead of the checkout's
    series: int = 1  # of samples; their median counts
    processes: int = 1  # at least, each with a GPU
    row: str = ""
    log: str = ""  # the file of the steps' log
    log_freq: int = 10
    is_spread: bool = False  # over places that a launcher has started

    @property
    def where(self) -> torch.device:
        return torch.device(self.device)


def count_of(contender: Contender, plan: Plan) -> int:
    """Return how many processes it takes."""
    return max(plan.processes, contender.setup.gpus)


def refusal(contender: Contender, plan: Plan) -> str:
    """Return why it cannot be measured by this version, or on this machine, or nothing."""
    count = count_of(contender, plan)
    if contender.setup.graph == "needed" and not can_graph():
        return "not built: strop.train.compile_step, one CUDA graph of the whole step"
    if contender.setup.graph == "needed" and not _graph_holds_sums(contender.setup, count):
        return "not built: a CUDA graph of a step whose gradients are cut over several GPUs"
    return ""


def _graph_holds_sums(setup: Setup, count: int) -> bool:
    return count == 1 or setup.parallel == "average"


def setup_here(setup: Setup, count: int = 1) -> Setup:
    """Return the setup without what is optional and not built, here or for so many processes."""
    is_built = can_graph() and _graph_holds_sums(setup, count)
    return replace(setup, graph="") if setup.graph and not is_built else setup


def measure(
    contender: Contender, plan: Plan, clock: Deadline, save: Save, ranks: Ranks = ALONE
) -> Found:
    """Measure the first step, its loss, times, memory and split. ``save`` gets what is there so
    far. All ranks make the same steps; what rank 0 finds counts, beside what it is told."""
    torch._dynamo.reset()  # what other contenders have compiled in this process
    setup, device = setup_here(contender.setup, ranks.count), plan.where
    found: Found = {"setup": asdict(setup), "work": asdict(contender.work)}
    found["processes"] = ranks.count
    with (
        torch_set_for(setup, device),
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache,
    ):
        loop = Loop(contender.work, setup, device, ranks)
        reference = loop.reference_loss()
        timer.give_back(device)
        timer.forget_peak(device)
        budget = 0.5 if setup.recompute == "budget" and setup.compiler == "strop" else None
        wanted = {} if budget is None else {"memory_budget": budget}
        loop.prepare(Options.from_environment(cache_dir=cache, **wanted))
        found |= _first_step(loop, reference)
        save(found)
        if plan.log and ranks.is_first:
            about = _about(contender, plan, ranks)
            images = ranks.count * contender.work.batch
            loop.log = TrainLog(Path(plan.log), plan.log_freq, images, device, about)
        found |= _timed(loop, contender, plan, clock, found, save)
        if loop.log is not None:
            loop.log.end()
            loop.log = None
        found |= _of_ranks(loop, found)
        save(found)
        found["split_ms"] = split_ms(loop, SPLIT_STEPS)
        if setup.compiler == "strop":
            found["graphs"] = _graphs_of(loop)
        loop.feed = None  # ends its workers
    return found


def _about(contender: Contender, plan: Plan, ranks: Ranks) -> Found:
    return {
        "row": plan.row,
        "contender": contender.name,
        "compiler": contender.compiler,
        "processes": ranks.count,
        "batch": contender.work.batch,
        "every": plan.log_freq,
    }


def _of_ranks(loop: Loop, found: Found) -> Found:
    """Return what several ranks have found, and whether their weights are still the same."""
    if loop.ranks.count == 1:
        return {}
    sums = [
        p.detach().view(torch.int32).sum(dtype=torch.int64)
        for p in loop.network.trained
        if p.element_size() == 4
    ]
    weights = loop.ranks.all_of(torch.stack(sums).tolist())
    told = loop.ranks.all_of({k: found.get(k) for k in ("p50_ms", "peak_bytes", "reserved_bytes")})
    return {
        "ranks": told,
        "weights_agree": all(other == weights[0] for other in weights),
    }


def _first_step(loop: Loop, reference: float) -> Found:
    """Measure the seconds of each part of a step with a cold cache, and judge its loss."""
    seconds: defaultdict[str, float] = defaultdict(float)
    loss, norm = math.nan, None
    for name, part in loop.parts:
        start = time.perf_counter()
        part()
        timer.synchronise(loop.device)
        seconds[name] += time.perf_counter() - start
        if name in ("forward", "whole step"):
            loss = float(loop.loss.detach())
        if name in ("clip", "update", "whole step") and norm is None:
            norm = loop.stepping.norm()
    tolerance = LOSS_TOLERANCE[loop.setup.precision]
    pairs = loop.ranks.all_of((loss, reference))
    is_right = all(abs(a - b) <= tolerance * abs(b) for a, b in pairs)
    loss, reference = (statistics.fmean(side) for side in zip(*pairs, strict=True))
    return {
        "first_s": round(sum(seconds.values()), 3),
        "first_split_s": {name: round(s, 3) for name, s in seconds.items()},
        "loss": _finite(loss),
        "loss_reference": reference,
        "loss_tolerance": tolerance,
        "loss_ok": is_right,
        "grad_norm": _finite(norm),
    }


def _finite(value: torch.Tensor | float | None) -> float | None:
    """Return a number that JSON can hold: None for the overflow of a first step in fp16, too."""
    found = math.nan if value is None else float(value)
    return round(found, 6) if math.isfinite(found) else None


def _timed(
    loop: Loop, contender: Contender, plan: Plan, clock: Deadline, found: Found, save: Save
) -> Found:
    """Measure times and peak with each loader; those of the best one count."""
    loaders = _loaders(loop, contender, plan)
    if not loaders:
        return _series(loop, plan, clock)
    reasons = {
        loader: train_loader.refusal(loader, loop.batch.pictures.nbytes) for loader in loaders
    }
    if all(reasons.values()):
        reasons[Loader()] = ""
    tried: list[Found] = []
    for loader, reason in reasons.items():
        is_first = not any("mean_ms" in t for t in tried)
        reason = reason or ("" if is_first else clock.refusal(SWEEP_S))
        if loop.ranks.most(bool(reason)) and not reason:  # all ranks have to do the same
            reason = "another rank cannot"
        if not reason:
            loop.feed = _feed(loop, loader, plan)
        series = {"skipped": reason} if reason else _series(loop, plan, clock)
        tried.append({"loader": asdict(loader), **series})
        if len(reasons) > 1:
            save({**found, "loaders": tried})
        lags = loop.ranks.most(not _keeps_up(series))
        if loop.setup.takes_best_loader and not lags:
            break
    best = min((t for t in tried if "mean_ms" in t), key=lambda t: float(t["mean_ms"]))
    chosen = loop.ranks.all_of(best["loader"])[0]  # rank 0 tells the others
    best = next(t for t in tried if t["loader"] == chosen)
    loop.feed = _feed(loop, Loader(**chosen), plan)
    best["decode_ms"] = _decode_ms(loop, plan)
    return {**best, **({"loaders": tried} if len(tried) > 1 else {})}


def _loaders(loop: Loop, contender: Contender, plan: Plan) -> Sequence[Loader]:
    is_tiny = _is_tiny(contender)
    if loop.setup.takes_best_loader:
        usual = TINY_SWEEP[0] if is_tiny else BEST_GUESS
        best = usual if plan.best_loader is None else Loader(*plan.best_loader)
        more = [w for w in WORKERS if w > best.workers and not is_tiny]
        return (best, *(replace(best, workers=w) for w in more))
    swept = loop.setup.loaders
    return TINY_SWEEP if is_tiny and len(swept) > 1 else swept


def _keeps_up(series: Found) -> bool:
    """Tell whether no more workers are wanted: a faster step may need more than an earlier
    rung's."""
    return "mean_ms" in series and series["wait_ms"] <= WAIT_SHARE * series["mean_ms"]


def _is_tiny(contender: Contender) -> bool:
    return contender.work.model.startswith("tiny")


def _feed(loop: Loop, loader: Loader, plan: Plan) -> Iterator[list[torch.Tensor]]:
    loop.feed = None  # the workers of the last one end before new ones start
    return train_loader.batches(_pictures(loop, plan), loop.work.batch, loader)


def _pictures(loop: Loop, plan: Plan) -> Pictures:
    model, batch = MODELS[loop.work.model], loop.work.batch
    steps = max(plan.warm_up, CAPTURES) + plan.series * plan.samples + SPLIT_STEPS
    length = steps * batch
    first = length * loop.ranks.rank
    vocabulary = model.clip["vocab_size"]
    return Pictures(Path(plan.pictures), plan.files, model.pixels, vocabulary, length, first)


def _decode_ms(loop: Loop, plan: Plan) -> float:
    """Return the milliseconds that one reader takes for a picture: the median of some."""
    pictures = _pictures(loop, plan)
    spent = [
        timer.elapsed_ms(partial(pictures.__getitem__, n), torch.device("cpu"))
        for n in range(DECODED)
    ]
    return round(statistics.median(spent), 3)


def _series(loop: Loop, plan: Plan, clock: Deadline) -> Found:
    """Run steps back to back, after some that do not count, in as many series as are wanted."""
    device, ranks = loop.device, loop.ranks
    start = time.perf_counter()
    warm_up = max(plan.warm_up, CAPTURES if _has_graphs(loop.setup) else 1)
    for _ in range(warm_up):
        loop.step()
    timer.synchronise(device)
    step_s = (time.perf_counter() - start) / warm_up
    allowed = int(SHARE_OF_TIME * clock.left() / (plan.series * step_s))
    samples = ranks.all_of(max(3, min(plan.samples, allowed)))[0]  # rank 0 tells the others
    loop.waited_s = 0.0
    if not _has_graphs(loop.setup):  # what a replay uses was allocated at its capture
        timer.forget_peak(device)
    series = []
    for _ in range(plan.series):
        if loop.log is not None:
            loop.log.begin(loop.num_steps)
        series.append(_step_times(loop, samples))
    times = [ms for part, _ in series for ms in part]
    timing = timer.timing_of(times).to_dict()
    tflop = 0.0 if loop.work.trained == "lora" else MODELS[loop.work.model].tflop
    found: Found = {
        **timing,
        "mean_ms": round(statistics.fmean(times), 4),
        "host_ms": round(statistics.fmean(host for _, host in series), 4),
        **_speed(loop, [part for part, _ in series]),
        **_peaks(device),
    }
    if loop.feed is not None:
        found["wait_ms"] = round(1e3 * loop.waited_s / len(times), 3)
    return {**found, "tflops": round(tflop * found["img_s"], 1) or None}


def _speed(loop: Loop, series: Sequence[Sequence[float]]) -> Found:
    """Return pictures a second of all ranks: the median of the series, and what each has."""
    # queues of loaders give bursts of fast steps
    typical = statistics.median if loop.feed is None else statistics.fmean
    images = loop.ranks.count * loop.work.batch
    speeds = [round(1e3 * images / typical(times), 3) for times in series]
    return {
        "img_s": round(statistics.median(speeds), 3),
        "img_s_series": speeds,
        "img_s_a_gpu": round(statistics.median(speeds) / loop.ranks.count, 3),
    }


def _peaks(device: torch.device) -> Found:
    """Return the peaks of memory; None on a CPU, where nobody counts."""
    is_counted = device.type == "cuda"
    return {
        "peak_bytes": timer.peak(device) if is_counted else None,
        "reserved_bytes": timer.peak_reserved(device) if is_counted else None,
    }


def _has_graphs(setup: Setup) -> bool:
    return bool(setup.graph) or setup.compiler == "inductor-graphs"


def _step_times(loop: Loop, samples: int) -> tuple[list[float], float]:
    """Return the milliseconds of each step, and those of the host per step until all is
    enqueued."""
    if loop.device.type != "cuda":
        times = [timer.elapsed_ms(loop.step, loop.device) for _ in range(samples)]
        return times, statistics.fmean(times)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(samples + 1)]
    start = time.perf_counter()
    events[0].record()
    for event in events[1:]:
        loop.step()
        event.record()
    host_ms = 1e3 * (time.perf_counter() - start) / samples
    torch.cuda.synchronize(loop.device)
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)], host_ms


def split_ms(loop: Loop, steps: int) -> dict[str, float]:
    """Return the median milliseconds of each part. On a GPU they lie between events: what the host
    does while the GPU is busy costs nothing."""
    rows = [_split_of_one(loop) for _ in range(steps)]
    if loop.feed is None:
        rows = [{k: v for k, v in row.items() if k not in ("decode", "copy")} for row in rows]
    found = {name: statistics.median(row.get(name, 0.0) for row in rows) for name in PARTS}
    return {name: round(ms, 4) for name, ms in found.items() if ms}


def _split_of_one(loop: Loop) -> dict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    names = [name for name, _ in loop.parts]
    if loop.device.type != "cuda":
        for name, part in loop.parts:
            found[name] += timer.elapsed_ms(part, loop.device)
        return found
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(names) + 1)]
    events[0].record()
    for (_, part), event in zip(loop.parts, events[1:], strict=True):
        part()
        event.record()
    torch.cuda.synchronize(loop.device)
    for name, (begin, end) in zip(names, itertools.pairwise(events), strict=True):
        found[name] += begin.elapsed_time(end)
    return found


def _graphs_of(loop: Loop) -> Found:
    """Return what the compiler has made of the UNet; what it has left to torch, of all modules."""
    report = explain(loop.network.unet)
    fallbacks: Found = {}
    for module in modules_of(loop.network):
        fallbacks |= explain(module).fallbacks
    seconds: defaultdict[str, float] = defaultdict(float)
    for graph in report.graphs:
        for stage, s in graph.seconds.items():
            seconds[stage] += s
    return {
        "roles": [graph.role for graph in report.graphs],
        "launches": report.num_launches,
        "fallbacks": fallbacks,
        "seconds": {stage: round(s, 3) for stage, s in seconds.items()},
    }
