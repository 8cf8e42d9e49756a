"""Measure attention on a CPU, ours beside torch's, and write the table by which it is chosen.

    python benchmarks/cpu_attention.py [--isa avx512] [--unet] [--out FILE]
    python benchmarks/cpu_attention.py --table FILE...

Calls are timed in turns on one thread, in CPU time of this process, since other work may run on the
machine: quote the ratios. GF/s count 4 B H S T D operations, and half of them in a causal order.
``--isa`` takes the kernels of a processor that can do less. To have torch do less as well, set
ATEN_CPU_CAPABILITY=avx2 and MKL_ENABLE_INSTRUCTIONS=AVX2. ``--unet`` times the sprites UNet
instead: eager, and compiled with and without the kernel. ``--table`` writes
``src/strop/kernels/tuned/attention_cpu.py`` from the files of sweeps.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import strop
from strop.bench import environment
from strop.bench.cpu_turns import in_turns
from strop.bench.report import write_json
from strop.bench.timer import timing_of
from strop.ir.source import KernelSource
from strop.kernels.attention import cpu
from strop.kernels.kernel import Late, Launch, Problem, Stride
from strop.models import sprites
from strop.options import Options
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.native import NativeKernels
from strop.runtime.build.processors import processor
from strop.runtime.run.launched_calls import scratch_bytes

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "src/strop/kernels/tuned/attention_cpu.py"
CPU = torch.device("cpu")
TARGETS = {"avx512_bf16": "cpu-v4", "avx512": "cpu-v4", "avx2": "cpu-v3"}


@dataclass(frozen=True, slots=True)
class Case:
    """Describe operands. ``masking``: "none", "causal", or "numbers", a mask of all scores."""

    batch: int
    heads: int
    queries: int
    keys: int
    head: int
    masking: str = "none"

    @property
    def flops(self) -> int:
        both = 4 * self.batch * self.heads * self.queries * self.keys * self.head
        return both // 2 if self.masking == "causal" else both

    def operands(self, dtype: torch.dtype) -> list[Tensor]:
        """Heads lie beside each other in a row, as linears give them."""
        found = [
            torch.randn(self.batch, length, self.heads, self.head).to(dtype).transpose(1, 2)
            for length in (self.queries, self.keys, self.keys)
        ]
        if self.masking == "numbers":
            found.append(torch.randn(self.batch, 1, self.queries, self.keys).to(dtype))
        return found


MODELS = (  # the sprites UNet at 16x24 and 64x64, bert-mini at 8x64, 1x32 and 32x128
    *(Case(2, 4, n, n, 16) for n in (384, 4096)),
    *(Case(2, 4, n, n, 32) for n in (24, 96, 384, 1024, 4096)),
    *(Case(2, 4, n, 77, 32) for n in (96, 384, 4096)),
    Case(8, 4, 64, 64, 64),
    Case(1, 4, 32, 32, 64),
    Case(32, 4, 128, 128, 64),
)
GRID = (
    *(Case(1, 8, n, n, d) for d in (32, 40, 64, 80, 128, 160) for n in (16, 77, 256, 1024)),
    *(Case(1, 8, 1, n, d) for d in (64, 128) for n in (16, 128, 1024)),
    *(Case(1, 8, 4, n, 64) for n in (16, 128, 1024)),
    *(Case(1, 8, 1024, n, 64) for n in (8, 77)),
    *(Case(1, 8, n, n, d, m) for d in (32, 64, 128) for n in (16, 77, 256, 1024)
      for m in ("causal", "numbers")),
    *(Case(1, 8, 1, n, 64, "numbers") for n in (16, 128, 1024)),
)  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Kernels:
    """Bind the kernels of one target."""

    def __init__(self, isa: str) -> None:
        self.device = replace(processor(), isa=isa)
        self._native = NativeKernels(DiskCache(Options().cache_path), target=TARGETS[isa])

    def build(self, sources: Sequence[KernelSource]) -> Any:
        return self._native.build(sources)

    def bind(
        self,
        source: KernelSource,
        pointers: Sequence[int],
        scalars: Sequence[int],
        *_: Any,
        **__: Any,
    ) -> Any:
        return self.build([source])[source].bind(pointers, scalars)


def ours(kernels: Any, operands: Sequence[Tensor], *, causal: bool) -> Callable[[], object]:
    """Return the call as a program binds it, with memory at hand."""
    q, k, v, *masks = operands
    shapes = tuple(tuple(x.shape) for x in operands)
    attrs, mask = (("causal", causal), ("scale", None)), masks[0].dtype if masks else None
    problem = Problem("attention", attrs, shapes, q.dtype, mask)
    launches = cpu.launch(problem, kernels.device)
    assert launches is not None
    (part,) = launches.parts
    assert isinstance(part, Launch)
    out = q.new_empty([launches.result[dim] for dim in launches.order])
    back = sorted(range(len(launches.order)), key=launches.order.__getitem__)
    memory = torch.empty(scratch_bytes(launches), dtype=torch.uint8)
    given = (q, k, v, out.permute(back), memory, *masks)
    scalars = [
        given[each.operand].stride(each.dim) if isinstance(each, Stride) else int(each)
        for each in part.scalars
        if not isinstance(each, Late)
    ]
    call = kernels.bind(part.source, [tensor.data_ptr() for tensor in given], scalars)
    return lambda: (call(), given)


def torchs(operands: Sequence[Tensor], *, causal: bool) -> Callable[[], Tensor]:
    q, k, v, *masks = operands
    mask = masks[0] if masks else None
    return lambda: F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal)


def sweep(isa: str, samples: int) -> Iterator[dict[str, Any]]:
    kernels = Kernels(isa)
    for case in dict.fromkeys((*MODELS, *GRID)):
        for name, dtype in DTYPES.items():
            torch.manual_seed(0)
            operands, causal = case.operands(dtype), case.masking == "causal"
            calls: dict[str, Callable[[], object]] = {"torch": torchs(operands, causal=causal)}
            calls["ours"] = ours(kernels, operands, causal=causal)
            times = in_turns(calls, samples)
            ratios = [a / b for a, b in zip(times["torch"], times["ours"], strict=True)]
            yield {
                "isa": isa,
                "dtype": name,
                "sizes": [case.batch, case.heads, case.queries, case.keys, case.head],
                "masking": case.masking,
                **{each: timing_of(found).to_dict() for each, found in times.items()},
                "us": {each: 1e3 * statistics.median(found) for each, found in times.items()},
                "gflops": {
                    each: round(case.flops / statistics.median(found) / 1e6, 1)
                    for each, found in times.items()
                },
                "ratio": round(statistics.median(ratios), 3),
            }


# ---- the sprites UNet --------------------------------------------------------------------------


def unet_rows(samples: int) -> Iterator[dict[str, Any]]:
    """Time steps of two pictures, of latents of 16x24 and 64x64."""
    for height, width in ((16, 24), (64, 64)):
        torch.manual_seed(0)
        latents, text = torch.randn(2, 4, height, width), torch.randn(2, 77, 128)
        calls: dict[str, Callable[[], object]] = {}
        for name, dtype, off in (
            ("eager fp32", torch.float32, None),
            ("eager bf16", torch.bfloat16, None),
            ("torch's attention fp32", torch.float32, ("cpu_attention",)),
            ("fp32", torch.float32, ()),
            ("torch's attention bf16", torch.bfloat16, ("cpu_attention",)),
            ("bf16", torch.bfloat16, ()),
        ):
            unet = sprites.load().unet.to(dtype).eval()
            given = latents.to(dtype), torch.tensor(500), text[..., : _width(unet)].to(dtype)
            if off is not None:
                strop.optimize(unet, options=Options(kernels_off=off))
            calls[name] = _without_gradients(unet, given)
        times = in_turns(calls, samples)
        base = times["eager fp32"]
        yield {
            "latents": [2, 4, height, width],
            **{name: timing_of(found).to_dict() for name, found in times.items()},
            "speed over eager fp32": {
                name: round(statistics.median(a / b for a, b in zip(base, found, strict=True)), 2)
                for name, found in times.items()
            },
        }


def _width(unet: Any) -> int:
    return int(unet.config.cross_attention_dim)


def _without_gradients(unet: Any, given: Sequence[Tensor]) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return unet(*given, return_dict=False)

    return call


# ---- the table ---------------------------------------------------------------------------------

HEAD = '''\
"""Hold what attention takes on CPUs, by ours and by torch: microseconds of one thread.

`python benchmarks/cpu_attention.py --table FILE...` writes this file from its own sweeps:
{files}.
"""

from __future__ import annotations

import torch

from strop.kernels.attention.cpu_cases import CpuCase, CpuCases

F32, BF16 = torch.float32, torch.bfloat16
CASES: CpuCases = (
'''


def table(files: Sequence[Path]) -> str:
    rows = [row for file in files for row in json.loads(file.read_text())["rows"]]
    names = ",\n".join(f"`{file.name}`" for file in files)
    return "".join([HEAD.format(files=names),
                    *map(_table_row, rows), ")\n"])  # fmt: skip


def _table_row(row: Mapping[str, Any]) -> str:
    batch, heads, queries, keys, head = row["sizes"]
    is_masked = row["masking"] != "none"
    dtype = {"fp32": "F32", "bf16": "BF16"}[row["dtype"]]
    torch_us = row["us"]["torch"]
    sizes = f"{batch * heads}, {queries}, {keys}, {head}"
    ours_us = torch_us / row["ratio"]  # of turns: a neighbour slows both
    numbers = f"{_short(ours_us)}, {_short(torch_us)}"
    return f'    CpuCase("{row["isa"]}", {dtype}, {is_masked}, {sizes}, {numbers}),\n'


def _short(us: float) -> str:
    return f"{us:.{max(1, 3 - int(math.log10(max(us, 1.0))))}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--isa", choices=tuple(TARGETS), default=processor().isa)
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--unet", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.table:
        TABLE.write_text(table(arguments.table))
        return
    torch.set_num_threads(1)
    kind = "cpu_attention_unet" if arguments.unet else "cpu_attention"
    rows = (
        unet_rows(arguments.samples) if arguments.unet else sweep(arguments.isa, arguments.samples)
    )
    found = []
    for row in rows:
        found.append(row)
        print(row if arguments.unet else _line(row), flush=True)
    if arguments.out:
        write_json(
            {"kind": kind, "environment": environment.describe(CPU), "rows": found}, arguments.out
        )


def _line(row: Mapping[str, Any]) -> str:
    sizes, rates = "x".join(map(str, row["sizes"])), row["gflops"]
    return (
        f"{row['isa']} {row['dtype']} {sizes} {row['masking']}: torch {rates['torch']}, ours"
        f" {rates['ours']} GF/s, {row['ratio']} times as fast"
    )


if __name__ == "__main__":
    main()
