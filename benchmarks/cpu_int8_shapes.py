"""Measure products of int8 codes at random sizes beside oneDNN's, with packed weights.

    python benchmarks/cpu_int8_shapes.py --out FILE [--shapes 200] [--samples 5]

Rows m go from 1 to 2,048, columns n and depth k from 16 to 2,048, each by chance and evenly by
its logarithm, so that most are no multiple of anything. All sizes run one compiled kernel. On one
thread, in CPU time of this process, in turns: quote the ratios. Each result is compared with exact
sums.

"ours" is the kernel as it runs by itself, which packs the weight in each call, to int32. "ours,
packed" is the product that kernels of a model contain, with the weight packed before and no look
at its bits, to int32. "library, packed" is oneDNN's linear with a packed weight, to fp32, and
"library" torch's ``_int_mm`` of the weight as it lies, to int32; both get unsigned codes. The
library's best is that of its two at each size; "of best" has the shares of "ours, packed" in the
single turns.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cpu_int8 import Kernels
from strop.bench import environment
from strop.bench.cpu_turns import in_turns
from strop.bench.report import write_json
from strop.ir.code_panel import ROWS, header, packed_words, row_words
from strop.ir.source import KernelSource
from strop.kernels.gemm import code_sums
from strop.kernels.kernel import Problem
from strop.runtime.run.launched_calls import CallSite, Launched, scratch_bytes

MOST_ROWS, LEAST_WIDTH, MOST_WIDTH = 2048, 16, 2048
MUST = 0.85  # of the library's speed, at each size
OURS = ("ours", "ours, packed")
LIBRARY = ("library", "library, packed")
_INT8, _INT32 = torch.int8, torch.int32
_PACK = f"""\
#include "vmath.h"

{header()}
extern "C" void pack_codes(void* const* buffers, const int64_t* scalars) {{
  code_sums::pack(static_cast<const int8_t*>(buffers[0]), scalars[0], scalars[1],
                  static_cast<code_sums::Word*>(buffers[1]));
}}
"""
_MULTIPLY = f"""\
#include "vmath.h"

{header()}
extern "C" void multiply_packed(void* const* buffers, const int64_t* scalars) {{
  using namespace code_sums;
  const int8_t* const x = static_cast<const int8_t*>(buffers[0]);
  const Word* const packed = static_cast<const Word*>(buffers[1]);
  Word* const copied = static_cast<Word*>(buffers[2]);
  int32_t* const out = static_cast<int32_t*>(buffers[3]);
  const int64_t rows = scalars[0], columns = scalars[1], depth = scalars[2];
  int32_t* const begins = reinterpret_cast<int32_t*>(copied + PANEL * row_words(depth));
  begins_of(packed, columns, depth, 0, begins);
  for (int64_t row = 0; row < rows; row += PANEL) {{
    const int64_t some = least(PANEL, rows - row);
    const int8_t* const from = x + row * depth;
    int32_t* const to = out + row * columns;
    if (has_vnni()) part<true>(from, some, columns, depth, packed, begins, copied, to);
    else part<false>(from, some, columns, depth, packed, begins, copied, to);
  }}
}}
"""
PACK = KernelSource("pack_codes", "cpp", _PACK, (_INT8, _INT32), scalars=(1,) * 2)
MULTIPLY = KernelSource(
    "multiply_packed", "cpp", _MULTIPLY, (_INT8, _INT32, _INT32, _INT32), scalars=(1,) * 3
)
Shape = tuple[int, int, int]


def random_shapes(count: int, seed: int = 0) -> list[Shape]:
    """Return sizes (m, n, k)."""
    chance = random.Random(seed)
    ends = (1, MOST_ROWS), (LEAST_WIDTH, MOST_WIDTH), (LEAST_WIDTH, MOST_WIDTH)

    def one(least: int, most: int) -> int:
        return round(math.exp(chance.uniform(math.log(least), math.log(most))))

    return [tuple(one(*each) for each in ends) for _ in range(count)]  # type: ignore[misc]


class Product:
    """Hold operands of one size. Each of its ways to multiply them returns its sums."""

    def __init__(self, kernels: Kernels, shape: Shape) -> None:
        rows, columns, depth = shape
        self.x, self.weight = (
            torch.randint(-128, 128, (n, depth), dtype=_INT8) for n in (rows, columns)
        )
        self._unsigned = (self.x.int() + 128).to(torch.uint8)
        self._sums = torch.empty(rows, columns, dtype=_INT32)
        self._of_library = torch.empty_like(self._sums)
        self._packed = torch.empty(packed_words(columns, depth), dtype=_INT32)
        begins = -(-columns // 16) * 16
        self._copied = torch.empty(ROWS * row_words(depth) + begins, dtype=_INT32)
        self._blocks = torch.ops.onednn.qlinear_prepack(self.weight, [rows, depth])
        self._scales = torch.ones(columns), torch.zeros(columns, dtype=torch.int64)
        pointers = [self.weight.data_ptr(), self._packed.data_ptr()]
        kernels.bind(PACK, pointers, [columns, depth])()
        operands = (self.x, self._packed, self._copied, self._sums)
        pointers = [tensor.data_ptr() for tensor in operands]
        self._multiply = kernels.bind(MULTIPLY, pointers, [rows, columns, depth])
        problem = Problem("code_sums", (), ((rows, depth), (columns, depth)), _INT8)
        launches = code_sums.launch(problem, kernels.device)
        assert launches is not None
        memory = torch.empty(scratch_bytes(launches), dtype=torch.uint8)
        site = CallSite(kernels, 0, is_early=False, is_steady=True)  # type: ignore[arg-type]
        self._launched = Launched(launches, site, memory)

    def ours(self) -> Tensor:
        self._launched.run((self.x, self.weight), self._sums)
        return self._sums

    def ours_packed(self) -> Tensor:
        self._multiply()
        return self._sums

    def library(self) -> Tensor:
        """Return sums of the codes that are 128 more than x."""
        torch._int_mm(self._unsigned, self.weight.t(), out=self._of_library)
        return self._of_library

    def library_packed(self) -> Tensor:
        linear = torch.ops.onednn.qlinear_pointwise.default
        given = (self._unsigned, 1.0, 128, self._blocks, *self._scales, None, 1.0, 0)
        found: Tensor = linear(*given, torch.float32, "none", [], "")
        return found

    def ways(self) -> dict[str, Callable[[], Tensor]]:
        ours, library = (self.ours, self.ours_packed), (self.library, self.library_packed)
        return dict(zip((*OURS, *LIBRARY), (*ours, *library), strict=True))

    def check(self) -> None:
        """Raise SystemExit where sums are not exact: fp32 rounds whole numbers beyond 2^24."""
        exact = self.x.double() @ self.weight.double().t()
        more = 128 * self.weight.double().sum(1)
        wanted = dict.fromkeys(OURS, exact) | {LIBRARY[0]: exact + more, LIBRARY[1]: exact.float()}
        for name, way in self.ways().items():
            if not torch.equal(way().double(), wanted[name].double()):
                raise SystemExit(f"{name} is wrong at {list(self._sums.shape)}, {self.x.shape[1]}")


def shape_rows(shapes: Sequence[Shape], samples: int) -> Iterator[dict[str, Any]]:
    kernels = Kernels()
    for shape in shapes:
        product = Product(kernels, shape)
        product.check()
        times = in_turns(product.ways(), samples, warm_ups=2)
        us = {name: 1e3 * statistics.median(each) for name, each in times.items()}
        rounded = {name: round(time, 2) for name, time in us.items()}
        best = min(LIBRARY, key=us.__getitem__)
        yield {"shape": list(shape), "us": rounded, "of best": _turns(times[best], times[OURS[1]])}


def _turns(base: Sequence[float], found: Sequence[float]) -> dict[str, float]:
    """Return how many times as long the first takes, in the single turns."""
    ratios = sorted(a / b for a, b in zip(base, found, strict=True))
    ends = (round(share * (len(ratios) - 1)) for share in (0.2, 0.5, 0.8))
    return {f"p{p}": round(ratios[n], 3) for p, n in zip((20, 50, 80), ends, strict=True)}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how fast ours are, as shares of the library with packed weights, and of its best."""
    return {
        f"{name}, of {others}": _shares(rows, name, library)
        for name in OURS
        for others, library in (("library, packed", LIBRARY[1:]), ("library's best", LIBRARY))
    }


def _shares(rows: Sequence[Mapping[str, Any]], name: str, library: Sequence[str]) -> dict[str, Any]:
    found = [min(row["us"][n] for n in library) / row["us"][name] for row in rows]
    pairs = zip(rows, found, strict=True)
    below = Counter(_kind(row["shape"]) for row, share in pairs if share < MUST)
    return {
        "least": round(min(found), 3),
        "median": round(statistics.median(found), 3),
        "most": round(max(found), 3),
        "below must": sum(below.values()),
        "below must, by rows": dict(sorted(below.items())),
    }


def _kind(shape: Sequence[int]) -> str:
    rows = shape[0]
    return "1 to 15 rows" if rows < 16 else "16 to 127 rows" if rows < 128 else "128 rows and more"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", type=int, default=200)
    parser.add_argument("--samples", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    here = environment.describe(torch.device("cpu"))
    rows = list(shape_rows(random_shapes(args.shapes), args.samples))
    found = summary(rows)
    for name, shares in found.items():
        print(name, shares)
    content = {"kind": "cpu_int8_shapes", "environment": here, "summary": found, "rows": rows}
    write_json(content, args.out)


if __name__ == "__main__":
    main()
