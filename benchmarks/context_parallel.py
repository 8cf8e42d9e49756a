"""Time a step of a transformer whose tokens several GPUs share, beside one GPU: D1x2-context.

torchrun --nproc-per-node 2 benchmarks/context_parallel.py --out FILE [--row D1] [--samples N]
    [--contenders eager-one,eager-context,strop-one,strop-context] [--tiny]

Each process has one GPU and a whole model with the same random weights, and the contenders take it
one after the other, all processes at once: "-one" leaves each GPU its own step, "-context" divides
the tokens of one step. Times are those of the slowest process, in ms: steps back to back, of which
a sample has --inner; each contender has the same numbers in all processes, as they wait for each
other. "ratio" is the median of "-one" divided by that of "-context". "rms" is the distance from the
same step in a wider type, relative to its size, "sent_bytes" what a process sends in a step.
Without a GPU, processes talk by gloo: times then say nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

import strop
import strop.api
from strop.bench import accuracy, environment, report, timer
from strop.bench.infer_contenders import DTYPES, Found
from strop.bench.infer_rows import InferRow, chosen_rows
from strop.bench.models import Workload
from strop.dispatch.parallel.context import Sharding

CONTENDERS = ("eager-one", "eager-context", "strop-one", "strop-context")
MUST, WRONG = 1.6, 0.3  # times as fast on two; of a result's size


def main() -> None:
    args = arguments()
    device = place()
    (row,) = chosen_rows([args.row], tiny=args.tiny)
    dtype = DTYPES[row.dtype if device.type == "cuda" else "fp32"]
    case = row.case(dtype)
    ((_, exact, _),) = accuracy.references(case, device)
    timer.give_back(device)
    workload = case.build(device)
    result = {
        "kind": "context_parallel",
        "row": {**asdict(row), "name": f"{row.name}x{dist.get_world_size()}-context"},
        "dtype": str(dtype),
        "processes": dist.get_world_size(),
        "environment": environment.describe(device),
    }
    found: dict[str, Found] = {}
    for name in args.contenders.split(","):
        found[name] = measured(name, workload, row, exact, args)
        if not dist.get_rank():
            print(line_of(name, found), flush=True)
            report.write_json({**result, "contenders": found, "ratio": ratios(found)}, args.out)
    dist.barrier()
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for every number")
    parser.add_argument("--row", default="D1", help="of strop bench infer: D1, D1w, D1q")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--inner", type=int, default=5, help="steps of a sample")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: to try this out")
    args = parser.parse_args()
    if unknown := {*args.contenders.split(",")} - {*CONTENDERS}:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(CONTENDERS)}")
    return args


def place() -> torch.device:
    """Return the GPU of this process, which has met the others then."""
    if not torch.cuda.is_available():
        torch.accelerator.device_count = dist_size  # type: ignore[assignment]
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    return device


def dist_size() -> int:
    """Stand for the number of GPUs, by which diffusers divides to name one."""
    return dist.get_world_size()


def measured(
    name: str, workload: Workload, row: InferRow, exact: Tensor, args: argparse.Namespace
) -> Found:
    """Set a contender up, time it, and leave the model as it was."""
    model, device = workload.target, exact.device
    way, _, how = name.partition("-")
    sharding = None
    if way == "strop":
        more = {"parallel": "context"} if how == "context" else {}
        strop.optimize(model, options=strop.Options.from_environment(), **more)
    elif how == "context":
        sharding = Sharding(model, dist.get_world_size())
    given = workload.inputs(row.size, row.batch)

    def call() -> Tensor:
        with torch.no_grad():
            return workload.call(model, given)

    off = max(accuracy.rms_error(call().clone(), exact) for _ in range(3))  # a CUDA graph's too
    for dispatcher in strop.api.dispatchers_of(model).values():
        dispatcher.variants.wait()  # for compilers beside what is timed
    dist.barrier()
    found: Found = {"rms": off}
    if not off <= WRONG:
        found["failed"] = f"its result is {off:.2g} of its size off"
    timing = timer.time_calls({name: call}, device, samples=args.samples, inner=args.inner)[name]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, timing.to_dict())
    found |= max(every, key=lambda times: times["p50_ms"])
    if way == "strop":
        graph = next(g for g in strop.explain(model).components[0].graphs if g.is_latest)
        found |= {"sent_bytes": graph.sent_bytes, "exchanges": dict(graph.exchanges)}
        strop.restore(model)
    if sharding is not None:
        sharding.undo()
    timer.give_back(device)
    dist.barrier()
    return found


def ratios(found: dict[str, Found]) -> dict[str, float]:
    """Return how many times as fast each is with shared tokens."""
    return {
        way: round(found[f"{way}-one"]["p50_ms"] / found[f"{way}-context"]["p50_ms"], 3)
        for way in ("eager", "strop")
        if f"{way}-one" in found and f"{way}-context" in found
    }


def line_of(name: str, found: dict[str, Found]) -> str:
    own, way = found[name], name.partition("-")[0]
    ratio = ratios(found).get(way)
    beside = f", {ratio} x one GPU (must {MUST})" if ratio and name.endswith("context") else ""
    sent = f", sends {own['sent_bytes'] / 1e6:.1f} MB" if own.get("sent_bytes") else ""
    return f"{name}: {own['p50_ms']:.2f} ms{beside}{sent}, off by {own['rms']:.2g}"


if __name__ == "__main__":
    main()
