"""Measure products on a CPU, with packed weights and by ours, beside weights as they lie.

    python benchmarks/cpu_packed.py [--samples 9] [--out FILE]
    python benchmarks/cpu_packed.py --table FILE...
    python benchmarks/cpu_packed.py --unet [--first] [--out FILE]

Calls are timed in turns on one thread, in CPU time of this process, since other work may run on the
machine: quote the ratios. Between two calls the caches of the core are filled with other things, as
other calls of a model do. ``--table`` fits the lines of ``strop.kernels.packed.costs`` to sweeps,
and writes ``src/strop/kernels/tuned/packed_cpu.py``. ``--unet`` times steps of the sprites UNet
instead: eager, and compiled with and without packed weights, in fp32 and bf16. ``--first`` times
the first and the second call at sizes that were not met before.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import strop
from strop.bench import environment
from strop.bench.cpu_turns import Times, in_turns, seconds
from strop.bench.report import write_json
from strop.bench.timer import timing_of
from strop.kernels.conv import conv_cpu
from strop.kernels.gemm import linear_cpu
from strop.kernels.kernel import Late, Launch, Problem, Stride
from strop.kernels.packed.costs import CONV, Line, Work
from strop.models import sprites
from strop.options import Options
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.native import NativeKernels
from strop.runtime.build.processors import processor
from strop.runtime.derived.packed_weights import Fingerprint
from strop.runtime.run.library_calls import ALLOCATING, PLANNED_OUT
from strop.runtime.run.packed_calls import PRODUCTS

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "src/strop/kernels/tuned/packed_cpu.py"
CPU = torch.device("cpu")
DEVICE = processor()
EVICTING_BYTES = 4 << 20  # more than the caches of one core
FEW, SMALL_OPS = 5, 2e8  # times as many samples of calls with fewer operations
VECTOR = 16  # numbers
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OFF = ("packed_weights",)


@dataclass(frozen=True, slots=True)
class Case:
    """Describe a product: a linear of ``operand`` (M, K), or a convolution of (B, C, H, W), by a
    ``weight``, with a bias."""

    op: str
    operand: tuple[int, ...]
    weight: tuple[int, ...]

    @property
    def attrs(self) -> dict[str, Any]:
        if self.op != CONV:
            return {}
        pad = self.weight[2] // 2
        pairs = {"stride": (1, 1), "padding": (pad, pad), "dilation": (1, 1)}
        return {**pairs, "groups": 1}

    def work(self, dtype: torch.dtype) -> Work:
        shapes = (self.operand, self.weight)
        return Work.of(Problem(self.op, tuple(self.attrs.items()), shapes, dtype))

    def operands(self, dtype: torch.dtype) -> list[Tensor]:
        shapes = (self.operand, self.weight, self.weight[:1])
        x, *weights = (torch.randn(shape).to(dtype) for shape in shapes)
        return [x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x, *weights]


ROWS = (2, 8, 32, 77, 192, 768, 4096)
FEATURES = ((64, 64), (64, 512), (256, 64), (128, 1024), (320, 2560), (768, 768), (1280, 1280))
CHANNELS = ((4, 64), (64, 4), (64, 64), (96, 128), (256, 128), (320, 320), (640, 640))
PICTURES = ((2, 4, 6), (1, 8, 8), (2, 8, 12), (2, 16, 24), (1, 64, 64))
MOST_OPS = 3e9
GRID = tuple(
    case
    for case in (
        *(Case("linear", (m, k), (n, k)) for (k, n), m in itertools.product(FEATURES, ROWS)),
        *(
            Case(CONV, (batch, ins, *sides), (outs, ins, 3, 3))
            for (ins, outs), (batch, *sides) in itertools.product(CHANNELS, PICTURES)
        ),
    )
    if case.work(torch.float32).ops < MOST_OPS
)


def calls_of(case: Case, operands: Sequence[Tensor]) -> dict[str, Callable[[], object]]:
    """Return the product as a program calls it: ``plain``, and ``packed`` without a look at the
    weight."""
    product = PRODUCTS[case.op](case.attrs, case.operand)
    packed = product.pack(operands[1])
    if case.op == CONV:
        of_conv = ALLOCATING[CONV](case.attrs)
        plain: Callable[[], object] = lambda: of_conv(operands)  # noqa: E731
    else:
        of_rows = PLANNED_OUT[case.op](case.attrs)
        out = operands[0].new_empty(operands[0].shape[0], operands[1].shape[0])
        plain = lambda: of_rows(operands, out)  # noqa: E731
    calls = {"plain": plain, "packed": lambda: product.call(operands, packed)}
    if linear_cpu.can_multiply(operands[0].dtype, DEVICE.isa):
        calls["ours"] = ours(case, operands)
    return calls


def ours(case: Case, operands: Sequence[Tensor]) -> Callable[[], object]:
    """Return the product by our kernel, bound as a program binds it."""
    shapes, kernels = tuple(tuple(operand.shape) for operand in operands), _Kernels()
    problem = Problem(case.op, tuple(case.attrs.items()), shapes, operands[0].dtype)
    launches = (conv_cpu if case.op == CONV else linear_cpu).launch(problem, DEVICE)
    assert launches is not None
    out = operands[0].new_empty(launches.result or (case.operand[0], case.weight[0]))
    if case.op == CONV:
        out = out.contiguous(memory_format=torch.channels_last)
    given = (*operands[:2], out, *operands[2:])
    (part,) = launches.parts
    assert isinstance(part, Launch)
    scalars = [
        given[each.operand].stride(each.dim) if isinstance(each, Stride) else int(each)
        for each in part.scalars
        if not isinstance(each, Late)
    ]
    call = kernels.bind(part.source, [tensor.data_ptr() for tensor in given], scalars)
    return lambda: (call(), given)


def one_by_one(calls: Mapping[str, Callable[[], object]], samples: int) -> Times:
    """Return the milliseconds of CPU time of single calls, as they are in a model: what other calls
    have read and written lies in the caches then, and the code of others."""
    other = torch.zeros(EVICTING_BYTES, dtype=torch.uint8)
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    gc.disable()
    for _ in range(samples):
        for name, call in calls.items():
            other.add_(1)
            times[name].append(1e3 * seconds(call, 1))
    gc.enable()
    return times


def sweep(samples: int) -> Iterator[dict[str, Any]]:
    isa = processor().isa
    # oneDNN packs no weights in bf16 for processors without AVX-512
    dtypes = DTYPES if isa.startswith("avx512") else {"fp32": DTYPES["fp32"]}
    yield {"isa": isa, "watching_bytes_a_us": watching(samples)}
    for case in GRID:
        for name, dtype in dtypes.items():
            torch.manual_seed(0)
            calls = calls_of(case, case.operands(dtype))
            more = FEW if case.work(dtype).ops < SMALL_OPS else 1
            times = one_by_one(calls, more * samples)
            ratios = [a / b for a, b in zip(times["plain"], times["packed"], strict=True)]
            yield {
                "isa": isa,
                "dtype": name,
                "op": case.op,
                "operand": case.operand,
                "weight": case.weight,
                **{each: timing_of(found).to_dict() for each, found in times.items()},
                "us": {each: 1e3 * statistics.median(found) for each, found in times.items()},
                "ratio": round(statistics.median(ratios), 3),
            }


def watching(samples: int) -> float:
    """Return at how many bytes a microsecond weights of 24 MB are compared, as many as the sprites
    UNet has in fp32."""
    kernels = _Kernels()
    weights = [torch.randn(128, 128, 3, 3) for _ in range(40)]
    looks = [Fingerprint(weight, kernels) for weight in weights]
    times = in_turns({"all": lambda: [look.now() for look in looks]}, samples)["all"]
    return sum(weight.nbytes for weight in weights) / (1e3 * statistics.median(times))


class _Kernels:
    """Bind the kernels of this processor."""

    def __init__(self) -> None:
        self._native = NativeKernels(DiskCache(Options().cache_path))

    def build(self, sources: Sequence[Any]) -> Any:
        return self._native.build(sources)

    def bind(self, source: Any, pointers: Sequence[int], scalars: Sequence[int], *_: Any) -> Any:
        return self.build([source])[source].bind(pointers, scalars)


# ---- the sprites UNet --------------------------------------------------------------------------


def unet(
    dtype: torch.dtype, off: tuple[str, ...] | None
) -> Callable[[int, int], Callable[[], object]]:
    """Return what makes the arguments of a call of two pictures at a size of latents, and gives the
    call. ``off`` are kernels to do without; None leaves the UNet to eager."""
    module: Any = sprites.load().unet.to(dtype).eval()
    width = int(module.config.cross_attention_dim)
    if off is not None:
        strop.optimize(module, options=Options(kernels_off=off))

    def at(height: int, side: int) -> Callable[[], object]:
        torch.manual_seed(0)
        latents, text = torch.randn(2, 4, height, side), torch.randn(2, 77, width)
        given = latents.to(dtype), torch.tensor(500), text.to(dtype)

        def call() -> object:
            with torch.no_grad():
                return module(*given, return_dict=False)

        return call

    return at


def unet_rows(samples: int) -> Iterator[dict[str, Any]]:
    """Time steps of two pictures, of latents of 16x24 and 64x64."""
    modules = {
        "eager fp32": unet(torch.float32, None),
        "fp32, weights as they lie": unet(torch.float32, OFF),
        "fp32": unet(torch.float32, ()),
        "eager bf16": unet(torch.bfloat16, None),
        "bf16, weights as they lie": unet(torch.bfloat16, OFF),
        "bf16": unet(torch.bfloat16, ()),
    }
    for size in ((16, 24), (64, 64)):
        calls = {name: at(*size) for name, at in modules.items()}
        times = in_turns(calls, samples)
        base = times["eager fp32"]
        yield {
            "latents": [2, 4, *size],
            **{name: timing_of(found).to_dict() for name, found in times.items()},
            "speed over eager fp32": {
                name: round(statistics.median(a / b for a, b in zip(base, found, strict=True)), 2)
                for name, found in times.items()
            },
        }


NEW_SIZES = ((16, 16), (24, 24), (16, 32), (32, 32), (40, 24), (24, 16), (48, 32), (64, 64))


def first_rows() -> Iterator[dict[str, Any]]:
    """Time the first four calls at each of some sizes, after those of another."""
    for name, dtype, off in (
        ("eager fp32", torch.float32, None),
        ("fp32, weights as they lie", torch.float32, OFF),
        ("fp32", torch.float32, ()),
        ("bf16, weights as they lie", torch.bfloat16, OFF),
        ("bf16", torch.bfloat16, ()),
    ):
        at = unet(dtype, off)
        known = at(16, 24)
        for _ in range(3):
            known()
        for size in NEW_SIZES:
            call = at(*size)
            times = [1e3 * seconds(call, 1) for _ in range(4)]
            yield {
                "what": name,
                "latents": [2, 4, *size],
                "ms": [round(ms, 1) for ms in times],
                "first over second": round(times[0] / times[1], 2),
            }


# ---- the table ---------------------------------------------------------------------------------

HEAD = '''\
"""Hold what products take on CPUs, with weights as they lie, packed, and by ours, on one thread.

`python benchmarks/cpu_packed.py --table FILE...` writes this file from its own sweeps:
{files}.
"""

from __future__ import annotations

import torch

from strop.kernels.packed.costs import Line, PackedCase

F32, BF16 = torch.float32, torch.bfloat16
CASES = (
'''


def table(files: Sequence[Path]) -> str:
    found = [HEAD.format(files=",\n".join(f"`{file.name}`" for file in files))]
    for file in files:
        first, *rows = json.loads(file.read_text())["rows"]
        kinds = dict.fromkeys((row["dtype"], row["op"]) for row in rows)
        for dtype, op in kinds:
            some = [row for row in rows if (row["dtype"], row["op"]) == (dtype, op)]
            lines = list(map(_text, lines_of(some)))
            own = f"        {_text(ours_of(some))},\n" if "ours" in some[0]["us"] else ""
            name, watching = dtype.replace("fp", "f").upper(), first["watching_bytes_a_us"]
            found += [
                f'    PackedCase(\n        "{first["isa"]}",\n        {name},\n        "{op}",\n',
                *(f"        {line},\n" for line in lines),
                f"        {watching:.0f},\n{own}    ),\n",
            ]
    return "".join([*found, ")\n"])


def _text(line: Line) -> str:
    rates = (line.ops, line.weight_bytes)
    return f"Line({line.begin_us:.1f}, {', '.join(f'{rate:.0f}.0' for rate in rates)})"


NO_TIME = 1e9  # a rate at which nothing takes time


def lines_of(rows: Sequence[Mapping[str, Any]]) -> tuple[Line, Line]:
    """Fit the lines of plain and of packed products, which oneDNN sums at one rate in
    convolutions. Linears in fp32 are MKL's where they are plain."""
    works = [_work(row) for row in rows]
    times = {way: [row["us"][way] for row in rows] for way in ("plain", "packed")}
    parts = [[1.0, work.ops, work.weight_bytes] for work in works]
    packed = fitted(parts, times["packed"], times["packed"])
    if rows[0]["op"] != CONV:
        plain = fitted(parts, times["plain"], times["plain"])
    else:
        more = [a - b for a, b in zip(times["plain"], times["packed"], strict=True)]
        begin, of_weight = fitted([[1.0, each[2]] for each in parts], more, times["plain"])
        plain = [packed[0] + begin, packed[1], packed[2] + of_weight]
    return _as_line(plain), _as_line(packed)


def ours_of(rows: Sequence[Mapping[str, Any]]) -> Line:
    """Fit the line of our kernel, of the rows of which it is chosen in both types, and where not
    most lanes of a vector are empty."""
    some = [row for row in rows if _is_wide(row)]
    works, times = [_work(row) for row in some], [row["us"]["ours"] for row in some]
    parts = [[1.0, work.ops, work.weight_bytes] for work in works]
    return _as_line(fitted(parts, times, times))


def _is_wide(row: Mapping[str, Any]) -> bool:
    if row["op"] == CONV:
        return min(row["weight"][:2]) >= VECTOR
    return bool(row["operand"][0] >= linear_cpu.FEWEST_ROWS)


def _work(row: Mapping[str, Any]) -> Work:
    case = Case(row["op"], tuple(row["operand"]), tuple(row["weight"]))
    return case.work(DTYPES[row["dtype"]])


def _as_line(numbers: Sequence[float]) -> Line:
    begin, *inverse = numbers
    return Line(begin, *(1 / x if x > 1 / NO_TIME else NO_TIME for x in inverse))


def fitted(
    parts: Sequence[Sequence[float]], wanted: Sequence[float], scales: Sequence[float]
) -> list[float]:
    """Return factors of the parts, not below 0, by which their sums are nearest to what is wanted,
    relative to the scales."""
    scale = torch.tensor(scales, dtype=torch.float64)
    scaled = torch.tensor(parts, dtype=torch.float64) / scale[:, None]
    goal, width = torch.tensor(wanted, dtype=torch.float64) / scale, len(parts[0])
    best: tuple[float, list[float]] = (math.inf, [])
    for count in range(1, width + 1):
        for columns in itertools.combinations(range(width), count):
            some = torch.linalg.lstsq(scaled[:, columns], goal).solution
            error = float((scaled[:, columns] @ some - goal).square().sum())
            if error < best[0] and bool((some >= 0).all()):
                each = [0.0] * width
                for column, number in zip(columns, some.tolist(), strict=True):
                    each[column] = number
                best = error, each
    print(f"{math.sqrt(best[0] / len(wanted)):.3f} RMS relative error")
    return best[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--unet", action="store_true")
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.table:
        TABLE.write_text(table(arguments.table))
        return
    torch.set_num_threads(1)
    kind, rows = "cpu_packed", sweep(arguments.samples)
    if arguments.unet:
        kind = "cpu_packed_first" if arguments.first else "cpu_packed_unet"
        rows = first_rows() if arguments.first else unet_rows(arguments.samples)
    found = []
    for row in rows:
        found.append(row)
        print(_line(row), flush=True)
    if arguments.out:
        write_json(
            {"kind": kind, "environment": environment.describe(CPU), "rows": found}, arguments.out
        )


def _line(row: Mapping[str, Any]) -> str:
    if "op" not in row:
        return str({k: v for k, v in row.items() if not isinstance(v, dict) or "p50_ms" not in v})
    sizes = " by ".join("x".join(map(str, row[name])) for name in ("operand", "weight"))
    times = ", ".join(f"{name} {us:.1f} us" for name, us in row["us"].items())
    return f"{row['dtype']} {row['op']} {sizes}: {times}, {row['ratio']} times as fast"


if __name__ == "__main__":
    main()
