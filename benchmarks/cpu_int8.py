"""Measure int8 on a CPU: a small BERT, and products of codes by ours and by torch.

    python benchmarks/cpu_int8.py --out FILE [--products] [--inductor] [--samples N]

The model is BERT-mini's architecture (4 layers, 256 wide, 4 heads, 1,024 between) with random
weights, in bf16, of which torchao quantises every linear to int8 with dynamic rows. Contenders are
timed in turns on one thread, in CPU time of this process, since other work may run on the machine:
quote the ratios, medians of those of each turn. "strop int8, _int_mm" is Strop without its own
product of codes; "zero points" are those of rows, with torchao's ASYMMETRIC. "error" is that of the
hidden states, relative to fp64 by the norm. ``--inductor`` compiles with Inductor, too, which takes
a minute or more. ``--products`` times products instead, with the weight packed in each call, in
giga-operations a second. `strop bench cpu bert` measures OpenVINO and ONNX Runtime beside it.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import strop
from strop.bench import environment
from strop.bench.cpu_turns import in_turns, ratio
from strop.bench.cpu_workloads import VOCABULARY, bert, in_int8
from strop.bench.report import write_json
from strop.bench.timer import timing_of
from strop.kernels.gemm import code_sums
from strop.kernels.kernel import Problem
from strop.options import Options
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.native import NativeKernels
from strop.runtime.build.processors import processor
from strop.runtime.run.launched_calls import CallSite, Launched, scratch_bytes

SHAPES = ((8, 64), (1, 32), (32, 128))  # batch and length
PRODUCTS = tuple(
    (rows, columns, depth)
    for rows in (1, 4, 32, 512, 4096)
    for columns, depth in ((256, 256), (1024, 256), (256, 1024), (3072, 768))
)
Calls = Mapping[str, Callable[[], Any]]


# ---- the model ---------------------------------------------------------------------------------


def contenders(*, has_inductor: bool) -> dict[str, nn.Module]:
    model = bert()
    codes = in_int8(model)
    without = Options(kernels_off=("code_sums",))
    found: dict[str, Any] = {
        "eager fp32": model,
        "eager int8": codes,
        "strop fp32": strop.optimize(copy.deepcopy(model)),
        "strop bf16": strop.optimize(copy.deepcopy(model).bfloat16()),
        "strop int8, _int_mm": strop.optimize(copy.deepcopy(codes), options=without),
        "strop int8": strop.optimize(copy.deepcopy(codes)),
        "strop int8, zero points": strop.optimize(in_int8(model, has_zero_points=True)),
    }
    if has_inductor:
        found["inductor int8"] = torch.compile(copy.deepcopy(codes), dynamic=True)
    return found


def model_rows(samples: int, *, has_inductor: bool) -> Iterator[dict[str, Any]]:
    models = contenders(has_inductor=has_inductor)
    exact = copy.deepcopy(models["eager fp32"]).double()
    for batch, length in SHAPES:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, VOCABULARY, (batch, length), generator=generator)
        given = ids, torch.ones_like(ids)
        wanted = exact(*given)[0]
        errors = {name: _error(model(*given)[0], wanted) for name, model in models.items()}
        times = in_turns(
            {name: _calling(model, given) for name, model in models.items()}, samples, warm_ups=3
        )
        base = times["eager fp32"]
        yield {
            "shape": [batch, length],
            **{name: timing_of(found).to_dict() for name, found in times.items()},
            "speed over eager fp32": {name: ratio(base, found) for name, found in times.items()},
            "error": errors,
        }


def _calling(model: nn.Module, given: Sequence[Tensor]) -> Callable[[], Any]:
    return lambda: model(*given)


def _error(found: Tensor, wanted: Tensor) -> float:
    return float(((found.double() - wanted).norm() / wanted.norm()).item())


# ---- products ----------------------------------------------------------------------------------


class Kernels:
    """Bind the kernel on this processor."""

    def __init__(self) -> None:
        self.device = processor()
        self._native = NativeKernels(DiskCache(Options().cache_path))

    def build(self, sources: Sequence[Any]) -> Any:
        return self._native.build(sources)

    def bind(
        self, source: Any, pointers: Sequence[int], scalars: Sequence[int], *_: Any, **__: Any
    ) -> Any:
        return self.build([source])[source].bind(pointers, scalars)


def product_calls(
    kernels: Any, rows: int, columns: int, depth: int
) -> dict[str, Callable[[], Any]]:
    x, weight = (torch.randint(-128, 128, (n, depth), dtype=torch.int8) for n in (rows, columns))
    unsigned, out = (x.int() + 128).to(torch.uint8), torch.empty(rows, columns).int()
    problem = Problem("code_sums", (), ((rows, depth), (columns, depth)), torch.int8)
    launches = code_sums.launch(problem, kernels.device)
    assert launches is not None
    memory = torch.empty(scratch_bytes(launches), dtype=torch.uint8)
    launched = Launched(launches, CallSite(kernels, 0, is_early=False, is_steady=True), memory)
    return {
        "torch, signed": lambda: torch._int_mm(x, weight.t(), out=out),
        "torch, unsigned": lambda: torch._int_mm(unsigned, weight.t(), out=out),
        "ours": lambda: launched.run((x, weight), out),
    }


def product_rows(samples: int) -> Iterator[dict[str, Any]]:
    kernels = Kernels()
    for sizes in PRODUCTS:
        times = in_turns(product_calls(kernels, *sizes), samples, warm_ups=3)
        operations = 2 * math.prod(sizes)
        yield {
            "sizes": list(sizes),
            **{name: timing_of(found).to_dict() for name, found in times.items()},
            "gops": {
                name: round(operations / statistics.median(found) / 1e6, 1)
                for name, found in times.items()
            },
            "ratio": ratio(times["torch, unsigned"], times["ours"]),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--samples", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    kind = "cpu_int8_products" if args.products else "cpu_int8"
    found = (
        product_rows(args.samples)
        if args.products
        else model_rows(args.samples, has_inductor=args.inductor)
    )
    rows, here = [], environment.describe(torch.device("cpu"))
    for row in found:
        rows.append(row)
        print({k: v for k, v in row.items() if not isinstance(v, dict) or "p50_ms" not in v})
        write_json({"kind": kind, "environment": here, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
