"""What probes of single kernels share: a kernel of ours beside the library's, in turns."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.bench import environment, timer
from strop.ir.source import KernelSource
from strop.runtime.build.loader import KernelLoader, kernel_loader

CALLS = 24  # of one graph
WORKERS = 12
Call = Callable[[], object]
Shape = tuple[Any, ...]
Run = Callable[[Shape, Any], None]


def arguments_of(description: str | None, seconds: float) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=seconds)
    return parser


def scratch_of(source: KernelSource, sizes: Sequence[int]) -> list[Tensor]:
    """Zeroed working memory of a kernel on the GPU."""
    names = {f"s{i}": size for i, size in enumerate(sizes)}
    return [torch.zeros(s.numel.eval(names), device="cuda", dtype=s.dtype) for s in source.scratch]


def error(result: Tensor, truth: Tensor) -> float:
    return round(float((result - truth).norm() / truth.norm()), 6)


def in_graphs(calls: Mapping[str, Call], stream: torch.cuda.Stream) -> dict[str, Call]:
    """Each as a CUDA graph of ``CALLS`` calls."""
    replays: dict[str, Call] = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                call()
        replays[name] = graph.replay
    return replays


def us_in_turns(calls: Mapping[str, Call], stream: torch.cuda.Stream) -> dict[str, float]:
    """Median microseconds of a call inside a CUDA graph of many, contenders in turns."""
    replays = in_graphs(calls, stream)
    timed = timer.time_calls(replays, torch.device("cuda"), samples=11, inner=1)
    return {name: round(t.p50_ms * 1e3 / CALLS, 2) for name, t in timed.items()}


def hold(
    name: str,
    args: argparse.Namespace,
    sources: Iterable[KernelSource],
    shapes: Iterable[tuple[int, ...]],
    measure: Callable[[tuple[int, ...], KernelLoader], dict[str, Any]],
) -> None:
    """Build all kernels, measure shape by shape while there is time, and write the report. Rows
    have ``us`` and ``errors`` by contender: the library's first, ours in brackets."""
    start = time.monotonic()
    library, wanted = kernel_loader("cuda", 0, "", 0), list(dict.fromkeys(sources))
    library.build(wanted)
    print(f"{len(wanted)} kernels built in {time.monotonic() - start:.1f} s", flush=True)
    report(name, args, shapes, lambda shape: measure(shape, library), start + args.seconds)


def report(
    name: str,
    args: argparse.Namespace,
    shapes: Iterable[Shape],
    measure: Callable[[Shape], dict[str, Any]],
    end: float,
) -> None:
    """Measure shape by shape until then, and write what was found."""
    write(name, args, {"rows": _rows(shapes, measure, end)})


def judged(
    calls: Mapping[str, Call], turns: int, out: Tensor, truth: Tensor, stream: torch.cuda.Stream
) -> dict[str, Any]:
    """A row: the error of ``out`` behind ``turns`` calls, of which one writes it, and the times."""
    errors = {}
    for name, call in calls.items():
        for _ in range(turns):
            call()
        torch.cuda.synchronize()
        errors[name] = error(out, truth)
    return {"us": us_in_turns(calls, stream), "errors": errors}


def _rows(
    shapes: Iterable[Shape], measure: Callable[[Shape], dict[str, Any]], end: float
) -> list[dict[str, Any]]:
    """Measure shape by shape while there is time, and say what was found."""
    rows = list[dict[str, Any]]()
    for shape in shapes:
        if time.monotonic() > end:
            print("out of time")
            break
        rows.append({"shape": shape, **measure(shape)})
        us, errors = rows[-1]["us"], rows[-1]["errors"]
        best = sorted((us[n], n) for n in us if n.startswith("("))[:3]
        theirs = {n: us[n] for n in us if not n.startswith("(")}
        shown = [errors[n] for n in (next(iter(us)), *(n for _, n in best[:1]))]
        print(f"{shape}: {theirs}, ours {best}; errors {shown}", flush=True)
    return rows


def write(name: str, args: argparse.Namespace, found: Mapping[str, Any]) -> None:
    """What was found, and where, into the folder."""
    report = {"kind": name, "environment": environment.describe(torch.device("cuda")), **found}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}_h100.json").write_text(json.dumps(report, indent=1))


def _failures(run: Run, work: Sequence[tuple[Shape, Any]]) -> list[tuple[Shape, Any, str]]:
    found = []
    for shape, tile in work:
        try:
            run(shape, tile)
            torch.cuda.synchronize()
        except Exception as error:  # a tile that does not fit is a result, too
            found.append((shape, tile, str(error)[:120]))
    return found


def hold_jit(
    name: str,
    args: argparse.Namespace,
    shapes: Sequence[Shape],
    tiles: Callable[[Shape], Iterable[Any]],
    run: Run,
    measure: Callable[[Shape, Sequence[Any]], dict[str, Any]],
) -> None:
    """As ``hold``, of kernels that Triton launches itself. ``run`` launches a tile once, in
    processes of their own, so that Triton's cache on disk has all; ``measure`` gets those that
    run."""
    start = time.monotonic()
    work = [(shape, tile) for shape in shapes for tile in tiles(shape)]
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        shares = [work[n::WORKERS] for n in range(WORKERS)]
        failed = [each for found in pool.map(partial(_failures, run), shares) for each in found]
    print(f"{len(work)} built in {time.monotonic() - start:.1f} s; failed: {failed}", flush=True)
    bad = [each[:2] for each in failed]

    def measured(shape: Shape) -> dict[str, Any]:
        return measure(shape, [tile for tile in tiles(shape) if (shape, tile) not in bad])

    rows = _rows(shapes, measured, start + args.seconds)
    write(name, args, {"failed": [str(each) for each in failed], "rows": rows})
