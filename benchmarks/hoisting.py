"""What step-invariant hoisting gains: UNet steps in denoise loops, in turns: with what depends on
the prompt and on the timestep hoisted, the prompt alone, and nothing.

    python benchmarks/hoisting.py [rounds [case]]

On a GPU SD1.5 at 512² and SDXL at 1024², batch 2, fp16; on a CPU tiny models, whose times say
nothing. Prints the milliseconds of a step, those of all timesteps at once among them, how far
results are apart, and what was hoisted.
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
from strop.dispatch.dispatcher import Dispatcher
from strop.runtime.loop.denoise_loop import DenoiseLoop
from strop.wording import counted

STEPS = 20  # of a loop
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASES: dict[str, tuple[Any, int]] = (
    {"SD1.5 512²": (models.SD15_UNET, 512), "SDXL 1024²": (models.SDXL_UNET, 1024)}
    if DEVICE.type == "cuda"
    else {"tiny SD1.5": (models.TINY_UNET, 64), "tiny SDXL": (models.TINY_SDXL_UNET, 64)}
)


class Contender:
    """A UNet, what of it is hoisted, and the times of its steps."""

    def __init__(self, config: Any, side: int, *, hoist: bool, knows_timesteps: bool) -> None:
        dtype = torch.float16 if DEVICE.type == "cuda" else torch.float32
        self.work, self.loop = models.unet_workload(config)(DEVICE, dtype), DenoiseLoop()
        self.inputs = self.work.inputs((side, side), 2)
        self.timesteps = torch.arange(STEPS * 20, 0, -20, device=DEVICE)
        self.knows_timesteps = knows_timesteps
        options = strop.Options(hoist=hoist, strict=True, graph_budget_bytes=16 << 30)
        self.dispatcher: Dispatcher = optimize_module(self.work.target, options, loop=self.loop)
        self.ms: list[float] = []
        self.result: Tensor | None = None

    def steps(self) -> None:
        """All of a loop."""
        for timestep in self.timesteps:
            given = {**self.inputs, "timestep": timestep}
            self.result = self.work.call(self.work.target, given)

    def round(self) -> float:
        """Milliseconds of a step of one loop, of which the first computes what is kept."""
        self.loop.begin(self.timesteps if self.knows_timesteps else None)
        found = timer.elapsed_ms(self.steps, DEVICE, 1) / STEPS
        self.loop.end()
        return found


CONTENDERS = {"prompt and timesteps": (True, True), "prompt": (True, False), "none": (False, False)}


@torch.no_grad()
def measure(name: str, config: Any, side: int, rounds: int) -> None:
    found = {
        who: Contender(config, side, hoist=hoist, knows_timesteps=knows)
        for who, (hoist, knows) in CONTENDERS.items()
    }
    for number in range(rounds + 2):
        for one in found.values():
            ms = one.round()
            one.ms += [ms] * (number >= 2)  # the first ones compile and capture
    truth = found["none"].result
    assert truth is not None
    for who, one in found.items():
        assert one.result is not None
        far = float((one.result - truth).norm() / truth.norm())
        print(
            f"{name}, {who}: median {statistics.median(one.ms):.4f} ms, least {min(one.ms):.4f};"
            f" {far:.1e} from none"
        )
        row = report_of({"unet": one.dispatcher}).components[0]
        print(f"  {counted(row.num_launches, 'launch')} a step", *row.derived, sep="\n  ")


if __name__ == "__main__":
    for case, (model, pixels) in CASES.items():
        if case.startswith(tuple(sys.argv[2:]) or ""):
            measure(case, model, pixels, int(sys.argv[1]) if len(sys.argv) > 1 else 20)
