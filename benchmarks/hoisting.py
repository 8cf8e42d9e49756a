"""What step-invariant hoisting gains: UNet steps in denoise loops, with and without it, in turns.

    python benchmarks/hoisting.py [rounds] [pictures]

On a GPU SD1.5 at 512² and SDXL at 1024², batch 2, fp16; on a CPU tiny models, whose times say
nothing. Prints the milliseconds of a step, whether results are equal, and what was hoisted;
``pictures``: those of so many pictures each, from prompt to picture (50 steps and 30), instead.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import strop
from strop.api import optimize_module
from strop.bench import models, timer
from strop.bench.infer_rows import ROWS, Row
from strop.debug.explain import report_of
from strop.runtime.dispatch import Dispatcher, Loop

STEPS = 20  # of a loop, behind the one that computes what depends on the prompt
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASES: dict[str, tuple[Any, int]] = (
    {"SD1.5 512²": (models.SD15_UNET, 512), "SDXL 1024²": (models.SDXL_UNET, 1024)}
    if DEVICE.type == "cuda"
    else {"tiny SD1.5": (models.TINY_UNET, 64), "tiny SDXL": (models.TINY_SDXL_UNET, 64)}
)


class Contender:
    """A UNet with hoisting or without."""

    def __init__(self, config: Any, side: int, *, hoist: bool) -> None:
        dtype = torch.float16 if DEVICE.type == "cuda" else torch.float32
        self.work, self.loop = models.unet_workload(config)(DEVICE, dtype), Loop()
        self.inputs = self.work.inputs((side, side), 2)
        options = strop.Options(hoist=hoist, strict=True)
        self.dispatcher: Dispatcher = optimize_module(self.work.target, options, loop=self.loop)
        self.ms: list[float] = []
        self.result: Tensor | None = None

    def call(self) -> Tensor:
        self.result = self.work.call(self.work.target, self.inputs)
        return self.result

    def round(self) -> float:
        """Milliseconds of a step of one loop."""
        self.loop.begin()
        self.call()
        found = timer.elapsed_ms(self.call, DEVICE, STEPS)
        self.loop.end()
        return found


class Artist(Contender):
    """The pipeline of a row of ``strop bench infer``, prompt to picture."""

    def __init__(self, row: Row, *, hoist: bool) -> None:
        row = row if DEVICE.type == "cuda" else row.tiny()
        case = row.case(torch.float16 if DEVICE.type == "cuda" else torch.float32)
        self.work = case.build(DEVICE)
        self.inputs = self.work.inputs(row.size, row.batch)
        strop.optimize(self.work.target, options=strop.Options(hoist=hoist, strict=True))
        self.dispatcher = self.work.target.unet.forward
        self.ms, self.result = [], None

    def round(self) -> float:
        return timer.wall_ms(self.call, DEVICE)


@torch.no_grad()
def measure(name: str, both: Sequence[Contender], rounds: int) -> None:
    for number in range(rounds + 2):
        for one in both:
            ms = one.round()
            one.ms += [ms] * (number >= 2)  # the first ones compile and capture
    (on, off), (least, other) = both, (min(one.ms) for one in both)
    assert on.result is not None
    assert off.result is not None
    row = report_of({"unet": on.dispatcher}).components[0]
    print(f"{name}: {least:.4f} ms with, {other:.4f} without ({other / least - 1:+.2%}); medians"
          f" {statistics.median(on.ms):.4f} and {statistics.median(off.ms):.4f}; results"
          f" {'equal' if torch.equal(on.result, off.result) else 'DIFFER'}")  # fmt: skip
    print(f"  {row.num_launches} launches a step; {row.hoisted}")


def main() -> None:
    given = [int(word) for word in sys.argv[1:]]
    rounds, pictures = (*given, *(20, 0)[len(given) :])
    if pictures:
        for name in ("P5-512", "P5x"):
            row = next(row for row in ROWS if row.name == name)
            measure(row.title, [Artist(row, hoist=hoist) for hoist in (True, False)], pictures)
        return
    for name, (config, side) in CASES.items():
        measure(name, [Contender(config, side, hoist=hoist) for hoist in (True, False)], rounds)


if __name__ == "__main__":
    main()
