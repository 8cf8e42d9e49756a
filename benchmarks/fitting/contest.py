"""What sweeps of single kernels share: a kernel of ours beside the library's, in turns."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.bench import environment, timer
from strop.bench.report import write_json
from strop.ir.source import KernelSource
from strop.runtime.build.loader import KernelLoader, kernel_loader
from strop.wording import counted

CALLS = 24  # of one graph
Call = Callable[[], object]
Shape = tuple[Any, ...]


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


def us_in_turns(calls: Mapping[str, Call], stream: torch.cuda.Stream) -> dict[str, Any]:
    """Microseconds of a call inside a CUDA graph of many, contenders in turns: medians as ``us``,
    and their spread."""
    replays = in_graphs(calls, stream)
    timed = timer.time_calls(replays, torch.device("cuda"), samples=11, inner=1)

    def each(name: str) -> dict[str, float]:
        return {who: round(getattr(t, name) * 1e3 / CALLS, 2) for who, t in timed.items()}

    return {"us": each("p50_ms"), "spread_us": {"p20": each("p20_ms"), "p80": each("p80_ms")}}


def hold(
    name: str,
    args: argparse.Namespace,
    sources: Iterable[KernelSource],
    shapes: Iterable[tuple[int, ...]],
    measure: Callable[[tuple[int, ...], KernelLoader], dict[str, Any]],
) -> None:
    """Build all kernels, measure shape by shape while there is time, and write after each. Rows
    have ``us`` and ``errors`` by contender: the library's first, ours in brackets."""
    start = time.monotonic()
    library, wanted = kernel_loader("cuda", 0, "", 0), list(dict.fromkeys(sources))
    library.build(wanted)
    print(f"{counted(len(wanted), 'kernel')} built in {time.monotonic() - start:.1f} s", flush=True)
    rows, where = list[dict[str, Any]](), environment.describe(torch.device("cuda"))
    for row in _rows(shapes, lambda shape: measure(shape, library), start + args.seconds):
        rows.append(row)
        path = write(name, args, {"environment": where, "rows": rows})
        if len(rows) == 1:
            print(path, flush=True)


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
    return {**us_in_turns(calls, stream), "errors": errors}


def launched_in_turn(
    library: KernelLoader,
    source: KernelSource,
    sets: Iterable[Sequence[int]],
    scalars: Sequence[int],
    stream: int,
    views: Sequence[Any],
) -> Callable[[], None]:
    """Return what launches a kernel on one set of pointers after the other, maybe early."""
    turns = itertools.cycle(
        [library.bind(source, each, scalars, stream, early=True, views=views) for each in sets]
    )
    return lambda: next(turns)()


def _rows(
    shapes: Iterable[Shape], measure: Callable[[Shape], dict[str, Any]], end: float
) -> Iterator[dict[str, Any]]:
    """Measure shape by shape while there is time, and say what was found."""
    for shape in shapes:
        if time.monotonic() > end:
            print("out of time")
            break
        row = {"shape": shape, **measure(shape)}
        us, errors = row["us"], row["errors"]
        best = sorted((us[n], n) for n in us if n.startswith("("))[:3]
        theirs = {n: us[n] for n in us if not n.startswith("(")}
        shown = [errors[n] for n in (next(iter(us)), *(n for _, n in best[:1]))]
        print(f"{shape}: {theirs}, ours {best}; errors {shown}", flush=True)
        yield row


def write(name: str, args: argparse.Namespace, found: Mapping[str, Any]) -> Path:
    """Write what was found, and where, into the folder, and return the file's path."""
    label, day = environment.device_label(torch.device("cuda")), found["environment"]["date"][:10]
    return write_json({"kind": name, **found}, args.out / f"{name}_{label}_{day}.json")
