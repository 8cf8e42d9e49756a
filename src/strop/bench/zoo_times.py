"""Time models of the zoo in turns with their peers (``strop bench models --times``).

On a CPU each runs on one thread, by the time of the processor, beside eager. On a GPU it runs
beside eager, and beside eager and Inductor in CUDA graphs made by hand; Inductor compiles each
batch for itself, which is its fastest mode. Strop is timed as it is called, and in such a graph.
Widths are tiny, so a call is mostly what it costs to begin kernels.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import strop
from strop.bench import cpu_turns, timer
from strop.bench.kernel import own_code
from strop.bench.zoo_inputs import Inputs
from strop.bench.zoo_model import ZooModel
from strop.errors import OptionError
from strop.wording import counted

BATCHES = (1, 4, 16)
SAMPLES, WARM_UPS = 11, 3
INNER, SAMPLE_MS = 20, 20.0  # at most so many calls a sample on a GPU, or so many milliseconds
PEERS: Mapping[str, tuple[str, ...]] = {
    "cpu": ("eager",),
    "cuda": ("eager", "eager-graph", "inductor-graph"),
}
IN_GRAPH = "strop-graph"  # Strop's call in a CUDA graph made by hand
MOST_GRAPHS = 1000  # of torch's in one process: each batch of each model is one
Call = Callable[[], Any]
# how many times as long a peer takes as Strop, for each batch
Ratios = Callable[[Mapping[str, Any], str], Sequence[float | None]]
Found = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TimesPlan:
    """Say how to time: ``jobs`` models are prepared at the same time, each in a process of its
    own, and timed one after another; one job stays in this process."""

    device: str
    options: strop.Options
    batches: tuple[int, ...] = BATCHES
    peers: tuple[str, ...] = ("eager",)
    samples: int = SAMPLES
    jobs: int = 1
    budget_s: float = 3600.0
    num_shapes: int = 4  # that each is judged at


def peers_on(device: str, asked: Sequence[str]) -> tuple[str, ...]:
    """Return the peers of a device that are asked for. Raises OptionError where there is none."""
    found = tuple(peer for peer in PEERS[device] if peer in asked)
    if not found:
        raise OptionError(f"peers of --times are {', '.join(PEERS[device])} on this device")
    return found


def steps_of(model: ZooModel, plan: TimesPlan) -> Iterator[Any]:
    """Yield None as soon as all is compiled, and then, with a number for each batch, milliseconds
    of Strop (median) and how many times as long each peer takes: percentiles over the turns, or
    what it has raised."""
    torch._dynamo.config.recompile_limit = MOST_GRAPHS
    torch._dynamo.config.accumulated_recompile_limit = MOST_GRAPHS
    device = torch.device(plan.device)
    ours, eager = (model.made().to(device) for _ in range(2))
    strop.optimize(ours, options=plan.options)
    with torch.no_grad(), _one_thread(device):
        ready = {batch: _calls(model, ours, eager, batch, plan) for batch in plan.batches}
        yield None
        yield _packed([_timed(*calls, device, plan.samples) for calls in ready.values()], plan)


def given_to(model: ZooModel, batch: int, device: torch.device) -> Inputs:
    """Return inputs of the model's first shape, but for so many pictures, texts or the like."""
    given = model.given((batch, *model.sizes.first[0][1:]))
    moved: Inputs = pytree.tree_map_only(Tensor, lambda t: t.to(device), given)
    return moved


def _calls(
    model: ZooModel, ours: nn.Module, eager: nn.Module, batch: int, plan: TimesPlan
) -> tuple[dict[str, Call], Found]:
    """Return what can be timed, warm, and what peers have raised."""
    given = given_to(model, batch, torch.device(plan.device))
    calls, failed = {"strop": _called(ours, given)}, dict[str, Any]()
    _warm(calls["strop"])
    # in a graph as peers are: without what a call costs the host
    own = {IN_GRAPH: ours} if plan.device == "cuda" else {}
    for peer, module in {**own, **dict.fromkeys(plan.peers, eager)}.items():
        try:
            calls[peer] = _peer(peer, module, given)
            _warm(calls[peer])
        except Exception as error:
            calls.pop(peer, None)
            failed[peer] = failed_by(error)
    return calls, failed


def failed_by(error: Exception) -> Found:
    """Return what a row has in the place of times."""
    return {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def _called(forward: Callable[..., Any], given: Inputs) -> Call:
    return lambda: forward(**given)


def _warm(call: Call) -> None:
    for _ in range(WARM_UPS):
        call()


def _peer(name: str, module: nn.Module, given: Inputs) -> Call:
    if name == "eager":
        return _called(module, given)
    forward: Callable[..., Any] = module
    if name == "inductor-graph":
        forward = torch.compile(own_code(module), dynamic=False)
    return timer.captured(_called(forward, given))


def _timed(calls: Mapping[str, Call], failed: Found, device: torch.device, samples: int) -> Found:
    times = _gpu_ms(calls, device, samples) if device.type == "cuda" else _cpu_ms(calls, samples)
    found: Found = {"strop_ms": round(statistics.median(times["strop"]), 4)}
    if IN_GRAPH in times:
        found["graph_ms"] = round(statistics.median(times[IN_GRAPH]), 4)
    for name in (name for name in calls if name not in ("strop", IN_GRAPH)):
        of = timer.timing_of([a / b for a, b in zip(times[name], times["strop"], strict=True)])
        found[name] = {key: round(getattr(of, f"{key}_ms"), 2) for key in ("p20", "p50", "p80")}
    return {**found, **failed}


def _cpu_ms(calls: Mapping[str, Call], samples: int) -> cpu_turns.Times:
    return cpu_turns.in_turns(calls, samples)


def _gpu_ms(calls: Mapping[str, Call], device: torch.device, samples: int) -> cpu_turns.Times:
    times: dict[str, list[float]] = {name: [] for name in calls}
    first = {name: timer.elapsed_ms(call, device) for name, call in calls.items()}
    inner = {name: _calls_a_sample(ms) for name, ms in first.items()}
    for _ in range(samples):
        for name, call in calls.items():
            times[name].append(timer.elapsed_ms(call, device, inner[name]))
    return times


def _calls_a_sample(call_ms: float) -> int:
    """Slow calls, which vary less, are not repeated for long."""
    return max(1, min(INNER, int(SAMPLE_MS / max(call_ms, 1e-3))))


def _packed(rows: Sequence[Found], plan: TimesPlan) -> Found:
    found: Found = {"strop_ms": [row["strop_ms"] for row in rows]}
    if all("graph_ms" in row for row in rows):
        found["graph_ms"] = [row["graph_ms"] for row in rows]
    for peer in plan.peers:
        failed = [row[peer]["failed"] for row in rows if "failed" in row[peer]]
        each = {key: [row[peer].get(key) for row in rows] for key in ("p20", "p50", "p80")}
        found[peer] = {**each, **({"failed": failed[0]} if failed else {})}
    return found


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# ---- the table -----------------------------------------------------------------------------------


def header(result: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the titles of the columns, of which there are none without times."""
    told = result.get("times") or {"peers": (), "batches": ()}
    batches = ", ".join(map(str, told["batches"]))
    return tuple(
        f"{'in a graph, ' if ratios is _in_graphs else ''}times {peer}'s speed at {batches}"
        for peer, ratios in _compared(result)
    )


def cells(result: Mapping[str, Any], model: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(
        ", ".join("-" if each is None else f"{each:.2f}" for each in ratios(model, peer))
        for peer, ratios in _compared(result)
    )


def _compared(result: Mapping[str, Any]) -> list[tuple[str, Ratios]]:
    """Return what the columns compare: with a peer in a graph, Strop in one too, if it was timed
    so."""
    has_graphs = any("graph_ms" in _times(model) for model in result["models"])
    peers = (result.get("times") or {"peers": ()})["peers"]
    return [(p, _in_graphs if has_graphs and p.endswith("-graph") else _medians) for p in peers]


def _medians(model: Mapping[str, Any], peer: str) -> Sequence[float | None]:
    """Return a number for each batch, or nothing where the model was not timed."""
    found: Sequence[float | None] = _times(model).get(peer, {}).get("p50", ())
    return found


def verdict(result: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each peer, which names where it is faster, and one for each that is in
    a graph beside Strop in one."""
    found = []
    for peer in result["times"]["peers"]:
        found.append(_faster(result, peer, f"Beside {peer}", _medians))
        if peer.endswith("-graph") and any("graph_ms" in _times(m) for m in result["models"]):
            found.append(_faster(result, peer, f"In a graph, beside {peer}", _in_graphs))
    failed = [f"{m['name']} ({m['times']['failed']})" for m in result["models"] if _failed(m)]
    found += [f"Could not be timed: {', '.join(failed)}."] if failed else []
    over = ", ".join(result.get("not_begun", ()))
    return [*found, f"Not begun, as the budget was over: {over}."] if over else found


def _faster(
    result: Mapping[str, Any],
    peer: str,
    where: str,
    ratios: Ratios,
) -> str:
    rows = [
        (f"{model['name']} at {batch} ({ratio:.2f})", ratio)
        for model in result["models"]
        for batch, ratio in zip(result["times"]["batches"], ratios(model, peer), strict=False)
        if ratio is not None
    ]
    if not rows:
        return f"Nothing was timed beside {peer}."
    numbers = [ratio for _, ratio in rows]
    less = ", ".join(name for name, ratio in rows if ratio < 1.0) or "none"
    return (
        f"{where}, {counted(len(rows), 'row')}: median {statistics.median(numbers):.2f}"
        f" times as fast, least {min(numbers):.2f}. Slower: {less}."
    )


def _in_graphs(model: Mapping[str, Any], peer: str) -> Sequence[float | None]:
    """Return how many times as long the peer takes as Strop in a graph, for each batch."""
    times = _times(model)
    own = zip(times.get("strop_ms", ()), times.get("graph_ms", ()), strict=False)
    shares = [called / graph for called, graph in own]
    return [
        None if median is None else median * share
        for median, share in zip(_medians(model, peer), shares, strict=False)
    ]


def _times(model: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = model.get("times", {})
    return found


def _failed(model: Mapping[str, Any]) -> bool:
    return "failed" in _times(model)


def about(result: Mapping[str, Any]) -> list[str]:
    """Return the lines above the table that say what was timed, and who is faster."""
    where = "on one thread, by the time of the processor"
    if "gpu" in result["environment"]:
        where = "by the events of the GPU"
    batches = ", ".join(map(str, result["times"]["batches"]))
    return [
        f"`--times` tells how many times as fast as a peer a model is at batches {batches},",
        f"in fp32 {where}: medians of {result['times']['samples']} turns. Widths are tiny, so that",
        "a call is mostly what it costs to begin kernels.",
        "",
        *verdict(result),
    ]
