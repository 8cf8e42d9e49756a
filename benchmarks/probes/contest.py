"""What probes of single kernels share: a kernel of ours beside the library's, in turns."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.bench import environment, timer
from strop.ir.source import KernelSource
from strop.runtime.kernels import KernelLibrary, kernel_library

CALLS = 24  # of one graph
Call = Callable[[], object]


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


def us_in_turns(calls: Mapping[str, Call], stream: torch.cuda.Stream) -> dict[str, float]:
    """Median microseconds of a call inside a CUDA graph of many, contenders in turns."""
    replays: dict[str, Callable[[], Any]] = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                call()
        replays[name] = graph.replay
    timed = timer.time_calls(replays, torch.device("cuda"), samples=11, inner=1)
    return {name: round(t.p50_ms * 1e3 / CALLS, 2) for name, t in timed.items()}


def hold(name: str, args: argparse.Namespace, sources: Iterable[KernelSource],
         shapes: Iterable[tuple[int, ...]],
         measure: Callable[[tuple[int, ...], KernelLibrary], dict[str, Any]]) -> None:  # fmt: skip
    """Build all kernels, measure shape by shape while there is time, and write the report. Rows
    have ``us`` and ``errors`` by contender: the library's first, ours in brackets."""
    start, rows = time.monotonic(), list[dict[str, Any]]()
    library, wanted = kernel_library("cuda", 0, "", 0), list(dict.fromkeys(sources))
    library.build(wanted)
    print(f"{len(wanted)} kernels built in {time.monotonic() - start:.1f} s", flush=True)
    for shape in shapes:
        if time.monotonic() - start > args.seconds:
            print("out of time")
            break
        rows.append({"shape": shape, **measure(shape, library)})
        us, errors = rows[-1]["us"], rows[-1]["errors"]
        best = sorted((us[n], n) for n in us if n.startswith("("))[:3]
        theirs = {n: us[n] for n in us if not n.startswith("(")}
        shown = [errors[n] for n in (next(iter(us)), *(n for _, n in best[:1]))]
        print(f"{shape}: {theirs}, ours {best}; errors {shown}", flush=True)
    described = environment.describe(torch.device("cuda"))
    report = {"kind": name, "environment": described, "rows": rows}
    (args.out / f"{name}_h100.json").write_text(json.dumps(report, indent=1))
