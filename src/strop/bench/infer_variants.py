"""Measure in one process what lies around a row of ``strop bench infer``: random shapes, and
switches.

Every function hands what it has so far to ``save``: a process that is cut leaves that.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from torch import Tensor

import strop
from strop.bench import accuracy, timer
from strop.bench.infer_contenders import (
    Deadline,
    Field,
    Found,
    Plan,
    Save,
    attempt,
    is_there,
    take_turns,
)
from strop.bench.infer_rows import InferRow
from strop.bench.models import Size
from strop.debug.explain import explain
from strop.kernels.library import OURS
from strop.runtime.build.compilers import BUILDS

SAMPLES, PICTURE_SAMPLES = 6, 2  # of a random shape
VARIANT_SAMPLES = 3  # where all choices of kernels are beside it: a tenth is looked for
LATER_CALLS = 3  # that are timed one by one
MAX_STEPS = 10  # of a picture
MOST_GRAPH_BYTES = 16 << 30  # of many contenders
OF_LOOPS = ("hoist",)  # which a step has not
# Kernels, and passes for kernels, that are faster at some sizes and not at others; for --variants.
CHOOSING = (
    "wgmma_attention",
    "cross_attention",
    "tma_attention",
    "wgmma_gemm",
    "product_sum",
    "upsampled_conv",
)
NEEDED_PASSES = ("channels_last",)  # without it there is no memory order to lower


def measure_random(row: InferRow, plan: Plan, clock: Deadline, save: Save) -> Found:
    """Measure random legal shapes beside the cheapest strong peer, in the order in which they are
    drawn.

    ``cold_s`` is the very first call, compile included; ``first_s`` the first call at every
    further shape, ``longest_s`` the longest of the calls after it, a capture included;
    ``kernels_s`` of all of them went by waiting for kernels, of which so many were built meanwhile.
    Where the plan wants ``variants``, the row without each of ``CHOOSING`` is beside it.
    """
    device = plan.where
    usual = "eager-graph" if device.type == "cuda" and row.kind == "step" else "eager"
    peer = plan.random_peer or usual
    row = replace(row, steps=min(row.steps, MAX_STEPS))
    result: Found = {
        "peer": peer,
        "seed": plan.seed,
        "number_of_first": plan.random_from,
        "steps": row.steps,
        "shapes": [],
        "left_out": [],
    }
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        group = Field.of(row, plan, cache)
        if plan.variants:
            group = _roomy(group)
        others = _others(group) if plan.variants else {}
        longest = 0.0  # that a shape has taken
        drawn = row.draws.some(plan.random, plan.seed)[plan.random_from :]
        for number, (size, batch) in enumerate(drawn):
            shape: Found = {"size": size, "batch": batch}
            refusal = clock.refusal(1.5 * longest)
            if refusal:
                result["left_out"].append(shape | {"skipped": refusal})
                continue
            shape |= attempt(
                partial(_random_shape, row, group, peer, others, size, batch, not number)
            )
            result["shapes"].append(shape)
            if number:  # the first one compiles
                longest = max(longest, shape["took_s"])
            timer.give_back(device)
            result["summary"] = random_summary(result)
            save(result)
        result["counts"] = explain(group.target).summary()
    return result


def without(options: strop.Options, name: str) -> strop.Options:
    """Return the options with a kernel or a pass of this name switched off."""
    is_kernel = name in OURS
    return options.without(kernels=(name,)) if is_kernel else options.without(passes=(name,))


def _roomy(group: Field) -> Field:
    """Give the group room for graphs of all contenders; otherwise each graph would be captured
    again in its turn."""
    return replace(group, options=replace(group.options, graph_budget_bytes=MOST_GRAPH_BYTES))


def _others(group: Field) -> dict[str, Field]:
    """Return contenders like this one, each with another choice of kernels."""
    return {
        f"no {name}": replace(group, options=without(group.options, name), built={})
        for name in CHOOSING
    }


def _random_shape(
    row: InferRow,
    group: Field,
    peer: str,
    others: Mapping[str, Field],
    size: Size,
    batch: int,
    is_cold: bool,
) -> Found:
    waited_s, built = BUILDS.seconds, BUILDS.num_built
    ours, found, mine = group.start("strop", size, batch)
    alone = [timer.wall_ms(ours, group.device) / 1e3 for _ in range(LATER_CALLS)]
    kernels = {
        "kernels_s": round(BUILDS.seconds - waited_s, 4),
        "kernels": BUILDS.num_built - built,
    }
    theirs, _, other = group.start(peer, size, batch)
    of_step = VARIANT_SAMPLES if others else SAMPLES
    samples = of_step if row.kind == "step" else PICTURE_SAMPLES
    calls = {"strop": ours, peer: theirs}
    for name, each in others.items():
        calls[name], _, _ = each.start("strop", size, batch)
        each.wait()
    times = take_turns(calls, row.kind, group.device, samples)
    p50 = {name: timing["p50_ms"] for name, timing in times.items()}
    best = min((name for name in p50 if name != peer), key=lambda name: p50[name])
    beside = {"best": best, "to_best": round(p50["strop"] / p50[best], 4)} if others else {}
    return {
        "cold_s" if is_cold else "first_s": found["first_s"],
        "longest_s": round(max(found["second_s"], *alone), 4),
        **kernels,
        "p50_ms": p50,
        "ratio": round(p50[peer] / p50["strop"], 3),
        **beside,
        "rms_to_peer": max(_difference(result, other[0]) for result in mine),
    }


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the RMS of the difference, in units of the RMS of their result; inf where one of them
    has no number."""
    wide = theirs.double()
    found = float((ours.double() - wide).square().mean().sqrt() / wide.square().mean().sqrt())
    return found if math.isfinite(found) else math.inf


def random_summary(result: Mapping[str, Any]) -> Found:
    """Return how many times as long the peer takes: worst and median; the longest stalls."""
    shapes = [s for s in result["shapes"] if is_there(s)]
    if not shapes:
        return {}
    worst = min(shapes, key=lambda s: s["ratio"])
    firsts = [s["first_s"] for s in shapes if "first_s" in s]
    slower = [s["to_best"] for s in shapes if "to_best" in s]
    return {
        "count": len(shapes),
        "worst": worst["ratio"],
        "worst_shape": [*worst["size"], worst["batch"]],
        "median": round(statistics.median(s["ratio"] for s in shapes), 3),
        "first_s": max(firsts) if firsts else None,
        "longest_s": max(s["longest_s"] for s in shapes),
        "to_best": max(slower) if slower else None,
        "rms_to_peer": max(s["rms_to_peer"] for s in shapes),
    }


def measure_switches(row: InferRow, plan: Plan, clock: Deadline, save: Save) -> Found:
    """Measure one run for each switch of ``Options`` switched off alone, one with all on, and one
    with all off; each is judged as the row is."""
    switches: dict[str, Found] = {}
    calls: dict[str, timer.Call] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        first = Field.of(row, plan, cache)
        right: list[Any] = []
        judge = attempt(partial(_right, row, first, right))
        needed_s = row.cost_s
        fields_of = {"all on": first}
        while fields_of:
            name = next(iter(fields_of))
            group = fields_of.pop(name)
            refusal = clock.refusal(needed_s)
            found = (
                {"skipped": refusal}
                if refusal
                else attempt(partial(_switched, row, group, name, calls, right))
            )
            switches[name] = found
            if group is first and is_there(found):
                needed_s = 1.2 * float(found["took_s"])
                fields_of = {
                    name: replace(first, options=options, built={})
                    for name, options in variants(first.options, first.target, row.kind).items()
                }
            save({"switches": switches, "judge": judge})
        right.clear()
        times = take_turns(calls, row.kind, plan.where, plan.samples, plan.calls, clock)
        for name, timing in times.items():
            switches[name] |= timing
    return {"switches": switches, "judge": judge}


def _right(row: InferRow, group: Field, right: list[Any]) -> Found:
    """Leaves what results are judged by: eager's, and of a step those in higher precision."""
    if row.kind == "step":
        right += accuracy.references(group.case, group.device)[0]
    else:
        _, _, (eager, *_) = group.start("eager", row.size, row.batch)
        right += [eager, None]
        del group.built["eager"]
    timer.give_back(group.device)
    return {}


def _switched(
    row: InferRow,
    group: Field,
    name: str,
    calls: dict[str, timer.Call],
    right: Sequence[Any],
) -> Found:
    calls[name], found, results = group.start("strop", row.size, row.batch)
    report = explain(group.target)
    error = accuracy.worst(results, *right) if right else None
    return {
        **found,
        "num_launches": report.num_launches,
        "num_kernels": report.num_kernels,
        "fallbacks": report.fallbacks,
        "error": error,
    }


def variants(options: strop.Options, target: Any, kind: str) -> dict[str, strop.Options]:
    """Return each option that is on by default, each pass that the compiler has run for
    ``target``, and each kernel of ours switched off. ``kind`` is that of a row."""
    ran = dict.fromkeys(step[0] for graph in explain(target).graphs for step in graph.passes)
    passes = tuple(name for name in ran if name not in NEEDED_PASSES)
    off: dict[str, Any] = {
        knob.name: False
        for knob in fields(options)
        if knob.default is True and (kind == "picture" or knob.name not in OF_LOOPS)
    }
    found = {f"no {name}": replace(options, disable=(name,)) for name in passes}
    for name, value in off.items():
        found[f"no {name}"] = replace(options, **{name: value})
    found |= {f"no {name}": without(options, name) for name in OURS}
    found["all off"] = replace(options, disable=passes, kernels_off=OURS, **off)
    return found
