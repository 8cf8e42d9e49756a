"""Say which kernels a model's call spends a GPU's time in, for Strop and for peers.

python benchmarks/kernel_shares.py ROW --out FILE [--contenders strop,inductor-blocks-graph]
    [--without PASS,...] [--calls N] [--top N]

ROW is one of ``strop bench infer``. Each contender is built and run as there, and then profiled for
``--calls`` calls behind each other. Kernels are sorted into classes by their names: products,
attention, convolutions, copies and all others. "ms" is the GPU's time of a class in a call,
"gap_ms" what lies between kernels, "kernels" how many there are. ``--without`` measures Strop once
more with these passes switched off, as the contender "strop-without".
FILE is written after each contender.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from strop.bench import environment, report, timer
from strop.bench.infer_contenders import Field, Plan
from strop.bench.infer_rows import InferRow, chosen_rows

# The first pattern that a name has decides. These are names of cuBLAS, CUTLASS, cuDNN and flash
# attention.
CLASSES = (
    ("attention", r"flash|fmha|attention|sdpa|softmax.*matmul"),
    ("convolution", r"conv|fprop|implicit"),
    ("product", r"gemm|nvjet|cutlass|matmul|linear|wgmma|mm_|splitk"),
    ("copy", r"memcpy|memset|copy"),
)
OTHER = "other"


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Hold one kernel's run: when it began and ended, in microseconds."""

    name: str
    start_us: float
    end_us: float


def main() -> None:
    args = arguments()
    if not torch.cuda.is_available():
        raise SystemExit("kernels of a GPU are profiled: there is none here")
    (row,) = chosen_rows([args.row])
    plan = Plan(samples=1, calls=args.calls)
    result: dict[str, Any] = {
        "kind": "kernel_shares",
        "row": row.name,
        "environment": environment.describe(plan.where),
        "contenders": {},
    }
    for name in args.contenders.split(","):
        off = args.without.split(",") if name == "strop-without" else []
        with tempfile.TemporaryDirectory() as cache:
            field = Field.of(row, plan, cache)
            field.options = field.options.without(passes=off)
            found = shares_of(field, name.removesuffix("-without"), row, args.calls)
            del field
        result["contenders"][name] = {**found, "passes_off": off}
        report.write_json(result, args.out)
        print("\n".join(lines_of(name, found, args.top)), flush=True)
        timer.give_back(plan.where)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("row", help="of strop bench infer, such as D1")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for every number")
    parser.add_argument("--contenders", default="strop,inductor-blocks-graph")
    parser.add_argument("--without", default="", help="passes to switch off")
    parser.add_argument("--calls", type=int, default=5, help="that are profiled")
    parser.add_argument("--top", type=int, default=12, help="kernels to print")
    args = parser.parse_args()
    if args.without:
        args.contenders += ",strop-without"
    return args


def shares_of(field: Field, name: str, row: InferRow, calls: int) -> dict[str, Any]:
    call, _, _ = field.start(name, row.size, row.batch)
    field.wait()
    for _ in range(3):
        call()
    timer.synchronise(field.device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            call()
        timer.synchronise(field.device)
    finished: Any = profile.profiler
    on_gpu = [
        event
        for event in finished.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA
    ]
    kernels = [
        KernelTime(e.name(), e.start_ns() / 1e3, (e.start_ns() + e.duration_ns()) / 1e3)
        for e in on_gpu
    ]
    return summary(kernels, calls)


def summary(kernels: Iterable[KernelTime], calls: int) -> dict[str, Any]:
    """Add up times by class and by name, for one of ``calls`` calls."""
    ordered = sorted(kernels, key=lambda k: k.start_us)
    by_class = defaultdict[str, float](float)
    by_name = defaultdict[str, list[float]](list)
    busy_until, gap_us = None, 0.0
    for kernel in ordered:
        took_us = kernel.end_us - kernel.start_us
        by_class[class_of(kernel.name)] += took_us
        by_name[kernel.name].append(took_us)
        if busy_until is not None:
            gap_us += max(0.0, kernel.start_us - busy_until)
        busy_until = max(busy_until or kernel.end_us, kernel.end_us)
    names = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    return {
        "ms": {name: round(us / calls / 1e3, 4) for name, us in sorted(by_class.items())},
        "gap_ms": round(gap_us / calls / 1e3, 4),
        "kernels": round(len(ordered) / calls),
        "by_name": [
            {
                "name": name,
                "class": class_of(name),
                "count": round(len(times) / calls),
                "ms": round(sum(times) / calls / 1e3, 4),
            }
            for name, times in names
        ],
    }


def class_of(name: str) -> str:
    """Return the class of a kernel by its name."""
    found = (kind for kind, pattern in CLASSES if re.search(pattern, name, re.IGNORECASE))
    return next(found, OTHER)


def lines_of(name: str, found: Mapping[str, Any], top: int) -> list[str]:
    classes = ", ".join(f"{kind} {ms:.2f}" for kind, ms in found["ms"].items())
    lines = [f"{name}: {found['kernels']} kernels, ms: {classes}, gaps {found['gap_ms']:.2f}"]
    for each in found["by_name"][:top]:
        lines.append(f"  {each['ms']:8.3f} ms {each['count']:5} x {each['name'][:90]}")
    return lines


if __name__ == "__main__":
    main()
