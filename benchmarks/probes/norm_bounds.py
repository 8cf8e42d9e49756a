"""What could two things that are not built save of a step of a UNet, at most?

python benchmarks/probes/norm_bounds.py --out FOLDER [--seconds 60]

One H100, fp16, channels-last, batch 2: every size of such blocks in P1 and P3 (``strop bench
infer``). ``cat``: in up blocks GroupNorm, SiLU and a 3x3 convolution, and a 1x1 shortcut beside
them, read what comes up next to a skip connection. Today the kernel of the statistics reads both
and writes the concatenation, too; whoever makes them could write it in place. So "now" is given the
two, "free" the concatenation. ``statistics``: the second norm of a resnet reads what a 3x3
convolution makes, which could gather the statistics as well. So "now" is convolution, GroupNorm,
SiLU and convolution, "free" is given scales and shifts instead of the norm. The time embedding,
which is added before, is left out.

At most: what the makers would take longer is not counted, nor that what comes up is often a sum,
which somebody has to write in any case. Printed: microseconds of a block, in turns, in CUDA graphs
whose calls have arguments of their own, so that none reads what the call before it has left in L2;
what is saved of a block, and of all blocks of that size; at the end the sums, and their share of a
step. ``--seconds``: for the times, when all is built.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import contest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

import strop
from strop.api import dispatchers_of
from strop.bench import timer

DEVICE, HALF = torch.device("cuda"), torch.float16
BATCH, GROUPS, SAMPLES, FAR = 2, 32, 31, 5e-3
STEP_MS = {"P1": 4.55, "P3": 25.3}
Arguments = tuple[Tensor, ...]  # of one call


def laid_out(x: Tensor) -> Tensor:
    """As blocks of a model leave it; a result that says nothing gets another layout."""
    return x.contiguous(memory_format=torch.channels_last)


class Whole(nn.Module):
    """The first half of a resnet and its shortcut."""

    def __init__(self, first: int, second: int, outs: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, first + second)
        self.conv = nn.Conv2d(first + second, outs, 3, padding=1)
        self.shortcut = nn.Conv2d(first + second, outs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return laid_out(self.conv(silu(self.norm(x))) + self.shortcut(x))


class Pieces(nn.Module):
    def __init__(self, first: int, second: int, outs: int) -> None:
        super().__init__()
        self.whole = Whole(first, second, outs)

    def forward(self, hidden: Tensor, skip: Tensor) -> Tensor:
        result: Tensor = self.whole(torch.cat((hidden, skip), 1))
        return result


class Normed(nn.Module):
    """A resnet from its first convolution to its second."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(GROUPS, width)

    def forward(self, x: Tensor) -> Tensor:
        return laid_out(self.second(silu(self.norm(self.first(x)))))


class Scaled(nn.Module):
    """The same by statistics that are known."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return laid_out(self.second(silu(self.first(x) * scale + shift)))


@dataclass(frozen=True, slots=True)
class Idea:
    now: type[nn.Module]
    free: type[nn.Module]
    given: Callable[[tuple[int, ...], int], tuple[Arguments, Arguments]]  # of both, for a size


@dataclass(frozen=True, slots=True)
class Size:
    """Blocks of a model that are alike."""

    idea: str
    row: str
    side: int
    channels: tuple[int, ...]  # what the modules of the idea are made with
    count: int

    def __str__(self) -> str:
        channels = ", ".join(map(str, self.channels))
        return f"{self.row} {self.idea} {self.side}x{self.side} ({channels})"


def picture(channels: int, side: int) -> Tensor:
    return laid_out(torch.randn(BATCH, channels, side, side, device=DEVICE, dtype=HALF))


def of_cat(channels: tuple[int, ...], side: int) -> tuple[Arguments, Arguments]:
    pieces = tuple(picture(each, side) for each in channels[:2])
    return pieces, (laid_out(torch.cat(pieces, 1)),)


def of_statistics(channels: tuple[int, ...], side: int) -> tuple[Arguments, Arguments]:
    """With scales and shifts by which both do the same."""
    block: Any = compiled(Normed, channels)
    x = picture(*channels, side)
    norm, y = block.norm, block.first(x).float()
    variance, mean = torch.var_mean(y.reshape(BATCH, GROUPS, -1), 2, correction=0)
    per_group = norm.num_channels // GROUPS
    scale = (variance + norm.eps).rsqrt().repeat_interleave(per_group, 1) * norm.weight
    shift = norm.bias - mean.repeat_interleave(per_group, 1) * scale
    return (x,), (x, *(t.to(HALF)[:, :, None, None] for t in (scale, shift)))


IDEAS = {
    "cat": Idea(Pieces, Whole, of_cat),
    "statistics": Idea(Normed, Scaled, of_statistics),
}
SIZES = tuple(
    Size(*each)
    for each in (
        # every cat of the up blocks: channels that come up, of the skip, of the result
        ("cat", "P1", 64, (640, 320, 320), 1),
        ("cat", "P1", 64, (320, 320, 320), 2),
        ("cat", "P1", 32, (1280, 640, 640), 1),
        ("cat", "P1", 32, (640, 640, 640), 1),
        ("cat", "P1", 32, (640, 320, 640), 1),
        ("cat", "P1", 16, (1280, 1280, 1280), 2),
        ("cat", "P1", 16, (1280, 640, 1280), 1),
        ("cat", "P1", 8, (1280, 1280, 1280), 3),
        ("cat", "P3", 128, (640, 320, 320), 1),
        ("cat", "P3", 128, (320, 320, 320), 2),
        ("cat", "P3", 64, (1280, 640, 640), 1),
        ("cat", "P3", 64, (640, 640, 640), 1),
        ("cat", "P3", 64, (640, 320, 640), 1),
        ("cat", "P3", 32, (1280, 1280, 1280), 2),
        ("cat", "P3", 32, (1280, 640, 1280), 1),
        # every resnet: two of a down block, two in the middle, three of an up block
        ("statistics", "P1", 64, (320,), 5),
        ("statistics", "P1", 32, (640,), 5),
        ("statistics", "P1", 16, (1280,), 5),
        ("statistics", "P1", 8, (1280,), 7),
        ("statistics", "P3", 128, (320,), 5),
        ("statistics", "P3", 64, (640,), 5),
        ("statistics", "P3", 32, (1280,), 7),
    )
)


@cache
def compiled(kind: type[nn.Module], channels: tuple[int, ...]) -> nn.Module:
    """One for every side. Those of an idea have the same weights."""
    with DEVICE:
        module = kind(*channels).eval()
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    module.to(HALF, memory_format=torch.channels_last)
    return strop.optimize(module, options=strop.Options(strict=True, cuda_graphs=False))


def modules_of(size: Size) -> dict[str, nn.Module]:
    idea = IDEAS[size.idea]
    return {"now": compiled(idea.now, size.channels), "free": compiled(idea.free, size.channels)}


def apart(size: Size) -> float:
    """How far the results are from each other; both are compiled after this."""
    both = IDEAS[size.idea].given(size.channels, size.side)
    now, free = (
        module(*args) for module, args in zip(modules_of(size).values(), both, strict=True)
    )
    assert all(result.isfinite().all() for result in (now, free)), size
    far = contest.error(free.double(), now.double())
    assert far < FAR, (size, far)
    return far


def in_turn(module: nn.Module, sets: Sequence[Arguments]) -> contest.Call:
    numbers = itertools.cycle(sets)
    return lambda: module(*next(numbers))


def measure(size: Size, stream: torch.cuda.Stream) -> dict[str, Any]:
    given = [IDEAS[size.idea].given(size.channels, size.side) for _ in range(contest.CALLS)]
    calls = {
        name: in_turn(module, sets)
        for (name, module), sets in zip(
            modules_of(size).items(), zip(*given, strict=True), strict=True
        )
    }
    replays = contest.in_graphs(calls, stream)
    timed = timer.time_calls(replays, DEVICE, samples=SAMPLES, inner=1)
    us = {name: round(t.p50_ms * 1e3 / contest.CALLS, 2) for name, t in timed.items()}
    saved = round(us["now"] - us["free"], 2)
    in_step = round(saved * size.count, 2)
    print(
        f"{size}: now {us['now']:.2f} us, free {us['free']:.2f}; {saved:.2f} saved,"
        f" {size.count} times: {in_step:.2f}",
        flush=True,
    )
    return {
        "idea": size.idea,
        "row": size.row,
        "side": size.side,
        "channels": size.channels,
        "count": size.count,
        "us": us,
        "saved_us": saved,
        "of_step_us": in_step,
    }


def build() -> list[float]:
    """All modules at all sizes, until no compiler is at work beside what is to be timed. Their
    working memory, which captured graphs point to, has grown as large as it will be."""
    start = time.monotonic()
    errors = [apart(size) for size in SIZES]
    modules = {module for size in SIZES for module in modules_of(size).values()}
    for module in modules:
        for dispatcher in dispatchers_of(module).values():
            dispatcher.variants.wait()
    print(
        f"{len(modules)} modules built in {time.monotonic() - start:.1f} s; results at most"
        f" {max(errors):.1e} apart",
        flush=True,
    )
    return errors


def totals(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each idea could save of a step of each model."""
    us, counts = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for row in rows:
        us[row["row"], row["idea"]] += row["of_step_us"]
        counts[row["row"], row["idea"]] += row["count"]
    found = [
        {
            "row": row,
            "idea": idea,
            "blocks": counts[row, idea],
            "us": round(saved, 1),
            "percent": round(saved / STEP_MS[row] / 10, 2),
        }
        for (row, idea), saved in us.items()
    ]
    for each in found:
        print("{row} {idea}: {us} us in {blocks} blocks, {percent} % of a step".format(**each))
    return found


def main() -> None:
    args = contest.arguments_of(__doc__, seconds=60).parse_args()
    stream, rows = torch.cuda.Stream(), []
    with torch.cuda.stream(stream), torch.no_grad():
        errors = build()
        end = time.monotonic() + args.seconds
        for size, far in zip(SIZES, errors, strict=True):
            if time.monotonic() > end:
                print("out of time")
                break
            rows.append({**measure(size, stream), "apart": far})
    contest.write("norm_bounds", args, {"step_ms": STEP_MS, "rows": rows, "sums": totals(rows)})


if __name__ == "__main__":
    main()
