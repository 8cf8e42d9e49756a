"""Is GroupNorm + SiLU faster as one kernel whose programs wait for each other's statistics?

python benchmarks/probes/norm_resident.py --out FOLDER [--seconds 60]

One H100, fp16, channels-last, the norms of SD1.5's UNet whose groups fit on no multiprocessor
alone, but all together do: each program keeps its slab of pixels, all channels, in registers, so
memory is read once, not twice. At most one program a multiprocessor, all of them running at once.
Beside the two kernels that Strop generates today. Errors are against fp64.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import contest
import torch
from torch import Tensor, nn

import strop
from strop.ir.dims import symbol
from strop.ir.source import KernelSource, Scratch

SHAPES = ((2, 320, 64), (2, 640, 64), (2, 960, 64), (2, 640, 32), (2, 960, 32), (2, 1280, 32),
          (2, 1920, 32), (2, 2560, 16), (1, 512, 64), (8, 320, 64))  # fmt: skip
NUM_SMS, GROUPS, SETS = 132, 32, 6
WIDTHS, WARPS = (64, 128), (4, 8, 16)

HEAD = """\
import triton
import triton.language as tl


@triton.jit
def norm_resident(x, w, b, out, own, parts, arrivals, pixels, slabs, pictures, C: tl.constexpr,
                  G: tl.constexpr, CG: tl.constexpr, CG2: tl.constexpr, ROWS: tl.constexpr,
                  COLS: tl.constexpr, SLABS: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slab = tl.program_id(0)
    picture = tl.program_id(1)
    program = picture * slabs + slab
    rows = slab * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    at = (picture * pixels + rows).to(tl.int64) * C
    own += program * (2 * C)
"""
PIECE = """\
    v{n} = tl.load(x + at + {first} + col).to(tl.float32)
    m{n} = tl.sum(v{n}, 0, keep_dims=True) / ROWS
    d{n} = v{n} - m{n}
    tl.store(own + {first} + col, m{n})
    tl.store(own + C + {first} + col, tl.sum(d{n} * d{n}, 0, keep_dims=True))
"""
MIDDLE = """\
    tl.debug_barrier()
    group = tl.arange(0, G)[:, None]
    lane = tl.arange(0, CG2)[None, :]
    place = own + group * CG + lane
    mean = tl.load(place, mask=lane < CG, other=0.0)
    rest = tl.load(place + C, mask=lane < CG, other=0.0)
    middle = tl.sum(mean, 1, keep_dims=True) / CG
    off = tl.where(lane < CG, mean - middle, 0.0)
    spread = tl.sum(rest + ROWS * off * off, 1, keep_dims=True)
    tl.store(parts + program * (2 * G) + group, middle)
    tl.store(parts + program * (2 * G) + G + group, spread)
    tl.debug_barrier()
    tl.atomic_add(arrivals + 2 * picture, 1, sem="acq_rel", scope="gpu")
    while tl.atomic_add(arrivals + 2 * picture, 0, sem="acq_rel", scope="gpu") < slabs:
        pass
    leaving = tl.atomic_add(arrivals + 2 * picture + 1, 1, sem="acq_rel", scope="gpu")
    if leaving == slabs - 1:
        tl.store(arrivals + 2 * picture, 0)
        tl.store(arrivals + 2 * picture + 1, 0)
    part = tl.arange(0, SLABS)[:, None]
    groups = tl.arange(0, G)[None, :]
    every = parts + (picture * slabs + part) * (2 * G) + groups
    known = part < slabs
    means = tl.load(every, mask=known, other=0.0, cache_modifier=".cg")
    spreads = tl.load(every + G, mask=known, other=0.0, cache_modifier=".cg")
    mean_g = tl.sum(means, 0, keep_dims=True) / slabs
    off_g = tl.where(known, means - mean_g, 0.0)
    total = tl.sum(spreads + ROWS * CG * off_g * off_g, 0, keep_dims=True)
    rstd_g = tl.rsqrt(total / (pixels * CG).to(tl.float32) + 1e-05)
    tl.store(own + groups, mean_g)
    tl.store(own + C + groups, rstd_g)
    tl.debug_barrier()
"""
APPLY = """\
    g{n} = ({first} + col) // CG
    scale{n} = tl.load(own + C + g{n}) * tl.load(w + {first} + col).to(tl.float32)
    y{n} = (v{n} - tl.load(own + g{n})) * scale{n} + tl.load(b + {first} + col).to(tl.float32)
    y{n} = y{n} / (1.0 + tl.exp(-y{n}))
    tl.store(out + at + {first} + col, y{n}.to(out.dtype.element_ty))
"""


def source_of(channels: int, rows: int, cols: int, slabs: int, warps: int, dtype: torch.dtype
              ) -> KernelSource:  # fmt: skip
    size = channels // GROUPS
    pieces = range(channels // cols)
    text = HEAD + "".join(PIECE.format(n=n, first=n * cols) for n in pieces)
    text += MIDDLE + "".join(APPLY.format(n=n, first=n * cols) for n in pieces)
    constants = {"C": channels, "G": GROUPS, "CG": size, "CG2": 1 << (size - 1).bit_length(),
                 "ROWS": rows, "COLS": cols, "SLABS": 1 << (slabs - 1).bit_length(),
                 "EARLY": 1}  # fmt: skip
    numel = symbol("s2") * symbol("s1")
    return KernelSource(
        "norm_resident", "triton", text, (dtype,) * 4, (1,) * 3,
        grid=(symbol("s1"), symbol("s2")),
        scratch=(Scratch(torch.float32, numel * (2 * channels)),
                 Scratch(torch.float32, numel * (2 * GROUPS)),
                 Scratch(torch.int32, symbol("s2") * 2, zeroed=True)),
        constants=tuple(constants.items()), num_warps=warps,
    )  # fmt: skip


def candidates(shape: tuple[int, ...], dtype: torch.dtype
               ) -> Iterator[tuple[str, KernelSource, int]]:  # fmt: skip
    n, channels, side = shape
    rows = 1
    while side * side // rows * n > NUM_SMS:
        rows *= 2
    for cols, warps in itertools.product(WIDTHS, WARPS):
        held = rows * channels // (32 * warps)
        if channels % cols == 0 and rows * cols >= 32 * warps and held <= 80:
            slabs = side * side // rows
            name = f"({rows}x{cols}, {warps} warps)"
            yield name, source_of(channels, rows, cols, slabs, warps, dtype), slabs


class Norm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, channels)
        nn.init.normal_(self.norm.weight, 1, 0.1)
        nn.init.normal_(self.norm.bias, 0, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(self.norm(x))


def bound(source: KernelSource, slabs: int, sets: list[tuple[Tensor, Tensor]], norm: nn.GroupNorm,
          library: Any, stream: int) -> tuple[Callable[[], None], list[Tensor]]:  # fmt: skip
    n, _, height, width = sets[0][0].shape
    sizes = [height * width, slabs, n]
    scratch = contest.scratch_of(source, sizes)
    launches = itertools.cycle([
        library.bind(source, [t.data_ptr() for t in (x, norm.weight, norm.bias, out, *scratch)],
                     sizes, stream)
        for x, out in sets
    ])  # fmt: skip
    return lambda: next(launches)(), scratch


def arguments(shape: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    n, channels, side = shape
    found = []
    for seed in range(SETS):
        torch.manual_seed(seed)
        x = torch.randn(n, channels, side, side, device="cuda", dtype=torch.float16) * 2 + 0.5
        x = x.to(memory_format=torch.channels_last)
        found.append((x, torch.empty_like(x)))
    return found


def measure(shape: tuple[int, ...], library: Any) -> dict[str, Any]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        torch.manual_seed(0)
        module = Norm(shape[1]).cuda().half()
        sets, kept = arguments(shape), []
        x, out = sets[0]
        truth = copy.deepcopy(module).double()(x.double())
        today = strop.optimize(module.eval(), options=strop.Options(cuda_graphs=False, strict=True))
        numbers = itertools.cycle(sets)
        calls: dict[str, Callable[[], Any]] = {"today": lambda: today(next(numbers)[0])}
        errors = {"today": contest.error(today(x), truth)}
        for name, source, slabs in candidates(shape, x.dtype):
            calls[name], scratch = bound(source, slabs, sets, module.norm, library,
                                         stream.cuda_stream)  # fmt: skip
            kept.append(scratch)
            for _ in range(SETS):
                calls[name]()
            torch.cuda.synchronize()
            errors[name] = contest.error(out, truth)
        return {"us": contest.us_in_turns(calls, stream), "errors": errors}


def main() -> None:
    args = contest.arguments_of(__doc__, seconds=60).parse_args()
    sources = [s for shape in SHAPES for _, s, _ in candidates(shape, torch.float16)]
    contest.hold("norm_resident", args, sources, SHAPES, measure)


if __name__ == "__main__":
    main()
