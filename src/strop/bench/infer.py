"""``strop bench infer``: a call of ours and of the peers, in turns, with its error."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import strop
from strop.bench import accuracy, environment, peers, report, timer
from strop.bench.cases import BenchCase
from strop.bench.models import Size, Workload
from strop.bench.worker import run_apart

DEFAULT_PEERS = ("eager", "eager-graph")


def run(
    case: BenchCase, out: Path | None = None, device: str = "cuda",
    peer_names: Sequence[str] = DEFAULT_PEERS, iterations: int = 20, *,
    options: strop.Options | None = None, peer_limit_s: float = 600.0,
) -> dict[str, Any]:  # fmt: skip
    """Measure ``case``; write JSON into the folder ``out``, if any, and return the same.

    Each of the ``iterations`` samples is the mean of five calls back to back (of one call for
    a whole pipeline). A peer that fails or hangs gets a row that says so. ``peak_bytes`` is the
    most memory beside weights, inputs and what ran before, over a contender's first calls.
    """
    from strop.debug.explain import explain

    where = torch.device(device)
    chosen = [peers.peer_named(name) for name in peer_names]
    result: dict[str, Any] = {"case": case.name, "kind": "infer",
                              "environment": environment.describe(where)}  # fmt: skip
    judged = accuracy.references(case, where)
    ours = case.build(where)
    strop.optimize(ours.target, options=options)
    errors, peaks = [], []
    for shape, pair in zip(case.shapes, judged, strict=True):
        error, peak = timer.with_peak(partial(_error, case, ours, shape, *pair), where)
        errors.append(error)
        peaks.append(peak)
    del judged
    beside = [p for p in chosen if not p.is_apart and not p.serves(case, where)]
    rows = _timed(case, where, ours, beside, iterations)
    for row, error, peak in zip(rows, errors, peaks, strict=True):
        row["error"], row["peak_bytes"]["strop"] = error, peak
    result["rows"] = rows
    result["counts"] = explain(ours.target).summary()
    result["peers_apart"] = _apart(case, where, chosen, iterations, peer_limit_s)
    if out is not None:
        result["file"] = str(report.write(result, out, where))
    return result


def _error(case: BenchCase, ours: Workload, shape: tuple[Size, int], eager: torch.Tensor,
           exact: torch.Tensor) -> dict[str, Any]:  # fmt: skip
    """Of the first and of the second call, which may run another way (a CUDA graph)."""
    given = ours.inputs(*shape)
    found = [accuracy.run(ours, given) for _ in range(2)]
    if case.kind == "pipe":
        return {"psnr_to_eager_db": min(accuracy.psnr_db(f, eager) for f in found),
                "psnr_to_exact_db": min(accuracy.psnr_db(f, exact) for f in found),
                "psnr_eager_to_exact_db": accuracy.psnr_db(eager, exact)}  # fmt: skip
    both = [accuracy.judge(f, eager, exact) for f in found]
    return max(both, key=lambda e: (not e["is_good"], e["rms"]))


def _timed(case: BenchCase, device: torch.device, ours: Workload, beside: Sequence[peers.Peer],
           iterations: int) -> list[dict[str, Any]]:  # fmt: skip
    """One row a shape, with the times of everything that runs in this process."""
    others = {peer: peers.prepared(peer, case, device) for peer in beside}
    inner = 5 if case.kind == "step" else 1
    rows = []
    for size, batch in case.shapes:
        calls = {"strop": peers.caller(ours, size, batch)}
        peaks: dict[str, int | None] = {}
        for peer, workload in others.items():
            make = partial(_started, workload, size, batch, peer.by_graph)
            calls[peer.name], peaks[peer.name] = timer.with_peak(make, device)
        times = timer.time_calls(calls, device, samples=iterations, inner=inner)
        rows.append({"size": size, "batch": batch,
                     "times": {n: t.to_dict() for n, t in times.items()},
                     "peak_bytes": peaks})  # fmt: skip
    return rows


def _started(workload: Workload, size: Size, batch: int, by_graph: bool) -> timer.Call:
    """A contender that has run: its memory has been asked for."""
    call = peers.caller(workload, size, batch, by_graph=by_graph)
    call()
    return call


def _apart(case: BenchCase, device: torch.device, chosen: Sequence[peers.Peer], iterations: int,
           limit_s: float) -> dict[str, Any]:  # fmt: skip
    """Peers with a process of their own, and a reason for each that was left out."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    found: dict[str, Any] = {}
    for peer in chosen:
        reason = peer.serves(case, device)
        if reason:
            found[peer.name] = {"failed": reason}
        elif peer.is_apart:
            task = {"do": "peer", "case": case.name, "device": str(device), "peer": peer.name,
                    "samples": iterations}  # fmt: skip
            found[peer.name] = run_apart(task, limit_s)
    return found
