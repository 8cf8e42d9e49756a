"""Time a step of a model that has less GPU memory than its weights take, beside diffusers' ways.

python benchmarks/weights_budget.py --out FILE [--model flux|sdxl] [--budget-gib G]
    [--contenders NAME,...] [--samples N] [--minutes M] [--tiny]

A row is a contender: eager and Strop with all weights on the GPU ("eager", "strop"), Strop under
``weights_budget_bytes`` ("strop-budget"), and diffusers' group offload by blocks with a stream, as
it is ("group"), with ``torch.compile`` of the repeated blocks ("group-compile"), and with Strop,
whose budget follows from it ("strop-group"). With a stream diffusers takes one block a group.
"first_s" is the first call, and "timing" holds percentiles of those behind it. "peak_bytes" is the
most memory of the GPU in them, weights included, and "streamed_bytes" what a call copies there.
Rows that stream have "bounds": the step of the same
kind with all weights on the GPU, and the streamed bytes at "bus_gb_s", the measured rate of copies
from pinned memory. "limit_ms" is LIMIT times the longer one, and "ratio" the median to the longer
one. Under a budget, "stated_peak_bytes" is what Strop states, without the arguments.
"before_bytes" is what earlier rows have left on the GPU. "distance" is the RMS error of the result
to eager's, relative to its RMS; it is null where eager did not run in the same process.

Rows run in one process, one after the other, each with weights of its own, made at random on the
GPU. FILE is written after each row, and rows that it has are measured again only if they are
named. Behind --minutes no further contender begins, and the one that runs is cut off. The exit
status is 1 where a stated peak is off by more than PEAK_TOLERANCE.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

import strop
from benchmarks.offloading import bus_rate, rows_before
from strop.bench import environment, report, timer
from strop.bench.infer_contenders import DTYPES, Deadline, attempt
from strop.bench.infer_rows import InferRow, chosen_rows
from strop.runtime.run.layouts import bytes_of

CONTENDERS = ("eager", "strop", "strop-budget", "group", "group-compile", "strop-group")
RESIDENT = {
    "strop-budget": "strop",
    "strop-group": "strop",
    "group": "eager",
    "group-compile": "eager",
}
LIMIT = 1.08  # what a step may take, of the longer bound
PEAK_TOLERANCE = 0.05  # of what is stated
STEPS = {"flux": "D1", "sdxl": "P3"}  # rows of ``strop bench infer``
SAME = ("kind", "model", "budget_bytes", "is_tiny")  # in a file that rows are added to
CALLS = 3  # back to back in a sample, as in a denoise loop


@dataclass(slots=True)
class Trial:
    """Hold what all rows share: the step, its budget, and what eager gave."""

    step: InferRow
    device: torch.device
    budget_bytes: int
    samples: int
    expected: list[Tensor] = field(default_factory=list)

    def timed(self, call: Callable[[], Tensor]) -> dict[str, Any]:
        """Time the first call, and then those behind it, with their peak."""
        started = time.perf_counter()
        result = call()
        timer.synchronise(self.device)
        first_s = time.perf_counter() - started
        call()  # what is warmed up by the first one serves from here on
        timer.forget_peak(self.device)
        times = [timer.elapsed_ms(call, self.device, CALLS) for _ in range(self.samples)]
        return {
            "first_s": round(first_s, 3),
            "timing": timer.timing_of(times).to_dict(),
            "samples_ms": [round(each, 3) for each in times],
            "peak_bytes": timer.peak(self.device),
            "distance": self.distance(result),
        }

    def distance(self, result: Tensor) -> float | None:
        """Return the relative RMS error to eager's result; None before there is one."""
        if not self.expected:
            return None
        expected = self.expected[0].double()
        return float((result.cpu().double() - expected).norm() / expected.norm())


def main() -> None:
    args = arguments()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    (step,) = chosen_rows([STEPS[args.model]], tiny=args.tiny)
    trial = Trial(step, device, int(args.budget_gib * 2**30), args.samples)
    result: dict[str, Any] = {
        "kind": "weights_budget",
        "model": args.model,
        "is_tiny": args.tiny,
        "budget_bytes": trial.budget_bytes,
        "limit": LIMIT,
        "environment": environment.describe(device),
        "bus_gb_s": bus_rate(device),
    }
    rows, clock = rows_before(args.out, result, SAME), Deadline.of(60 * args.minutes)
    for name in args.contenders.split(","):
        rows[name] = row_of(name, trial, clock)
        timer.give_back(device)
        add_bounds(name, rows, result["bus_gb_s"])
        report.write_json({**result, "rows": rows}, args.out)
        print(line_of(name, rows[name]), flush=True)
    if wrong := [name for name, row in rows.items() if is_misstated(row)]:
        raise SystemExit(f"the peak is not what was stated: {', '.join(wrong)}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for every number")
    parser.add_argument("--model", choices=tuple(STEPS), default="flux")
    parser.add_argument("--budget-gib", type=float, default=12.0, help="GPU memory for weights")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--tiny", action="store_true", help="a tiny model: to try this out")
    args = parser.parse_args()
    if unknown := {*args.contenders.split(",")} - {*CONTENDERS}:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(CONTENDERS)}")
    return args


def row_of(name: str, trial: Trial, clock: Deadline) -> dict[str, Any]:
    if clock.left() <= 0:
        return {"skipped": "time was over"}
    return attempt(lambda: measured(name, trial), clock.left())


@torch.no_grad()
def measured(name: str, trial: Trial) -> dict[str, Any]:
    device, step = trial.device, trial.step
    row: dict[str, Any] = {"before_bytes": timer.allocated(device)}
    dtype = DTYPES[step.dtype] if device.type == "cuda" else torch.float32
    work = step.case(dtype).build(device)
    given = work.inputs(step.size, step.batch)
    model = work.target
    row["weights_bytes"] = bytes_of([*model.parameters()])
    set_up(name, trial, model)
    if name.startswith("group"):  # what has been fetched ahead lies on the GPU behind a call
        row["streamed_bytes"] = grouped_bytes(model)

    def call() -> Tensor:
        return work.call(model, given)

    try:
        if name == "eager":
            trial.expected[:] = [call().cpu()]
        row |= trial.timed(call)
        if name in ("strop-budget", "strop-group"):
            row |= stated(model, row["peak_bytes"])
        if name.startswith("strop"):
            (dispatcher,) = strop.api.dispatchers_of(model).values()
            row["eager_calls"] = dispatcher.counters.eager_calls
    finally:
        strop.restore(model)
        torch._dynamo.reset()
    return row


def set_up(name: str, trial: Trial, model: Any) -> None:
    """Have a model run as a contender does."""
    if name in ("strop", "strop-group"):
        strop.optimize(model)
    elif name == "strop-budget":
        strop.optimize(model, options=strop.Options(weights_budget_bytes=trial.budget_bytes))
    if "group" in name:
        on_gpu = trial.device.type == "cuda"
        model.enable_group_offload(
            onload_device=trial.device,
            offload_type="block_level",
            num_blocks_per_group=1,
            use_stream=on_gpu,
            record_stream=on_gpu,
        )
    if name == "group-compile":
        torch._dynamo.config.recompile_limit = 1000  # each block has hooks of its own
        model.compile_repeated_blocks()


def grouped_bytes(model: nn.Module) -> int:
    """Return what lies on the host between calls, and so is copied in each."""
    return bytes_of([weight for weight in model.parameters() if weight.device.type == "cpu"])


def stated(model: Any, peak_bytes: int) -> dict[str, Any]:
    """Return what Strop states of a model's budget, beside the measured peak."""
    (dispatcher,) = strop.api.dispatchers_of(model).values()
    budget = dispatcher.budget
    if budget is None:  # on a CPU
        return {"streamed_bytes": 0, "stated": str(dispatcher.hosted)}
    if not budget.serves():
        return {"streamed_bytes": 0, "stated": str(budget)}
    return {
        "streamed_bytes": budget.streamed_bytes,
        "stated": str(budget),
        "held_bytes": budget.held_bytes,
        "stated_peak_bytes": budget.peak_bytes,
        "peak_to_stated": round(peak_bytes / budget.peak_bytes, 4),
    }


def is_misstated(row: dict[str, Any]) -> bool:
    return abs(row.get("peak_to_stated", 1.0) - 1) > PEAK_TOLERANCE


def add_bounds(name: str, rows: dict[str, Any], bus_gb_s: float | None) -> None:
    """Set what a row that streams is held against, where both bounds have been measured."""
    row, resident = rows[name], rows.get(RESIDENT.get(name, ""), {})
    if bus_gb_s is None or "timing" not in row or "timing" not in resident:
        return
    bounds = {
        "resident_ms": resident["timing"]["p50_ms"],
        "bus_ms": round(row["streamed_bytes"] / bus_gb_s / 1e6, 3),
    }
    longer = max(bounds.values())
    row["bounds"] = bounds | {"of": RESIDENT[name], "limit_ms": round(LIMIT * longer, 3)}
    row["ratio"] = round(row["timing"]["p50_ms"] / longer, 4)


def line_of(name: str, row: dict[str, Any]) -> str:
    if "timing" not in row:
        return f"{name:14} {row}"
    line = f"{name:14} {row['timing']['p50_ms']:9.2f} ms, peak {row['peak_bytes'] / 1e9:.2f} GB"
    if "stated_peak_bytes" in row:
        line += f" ({row['peak_to_stated']:.3f} of the stated one)"
    if "bounds" in row:
        bounds = row["bounds"]
        line += (
            f"; resident {bounds['resident_ms']:.2f} ms, bus {bounds['bus_ms']:.2f} ms"
            f" ({row['ratio']:.3f} x the longer, at most {LIMIT:.2f})"
        )
    return f"{line}, first call {row['first_s']:.1f} s"


if __name__ == "__main__":
    main()
