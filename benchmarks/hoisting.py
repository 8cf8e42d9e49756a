"""What step-invariant hoisting gains: UNet steps in denoise loops, with and without it, in turns.

    python benchmarks/hoisting.py [rounds]

On a GPU SD1.5 at 512² and SDXL at 1024², batch 2, fp16; on a CPU tiny models, whose times say
nothing. Prints the milliseconds of a step, whether results are equal, and what was hoisted.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import torch
from torch import Tensor

import strop
from strop.api import optimize_module
from strop.bench import models, timer
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


@torch.no_grad()
def measure(name: str, config: Any, side: int, rounds: int) -> None:
    both = [Contender(config, side, hoist=hoist) for hoist in (True, False)]
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


if __name__ == "__main__":
    for case, (model, pixels) in CASES.items():
        measure(case, model, pixels, int(sys.argv[1]) if len(sys.argv) > 1 else 20)
