"""Time pictures of a model in little memory: where its weights lie, times in what they are kept.

python benchmarks/memory_table.py --out FILE [--model sdxl|sd15|flux] [--placements resident,...]
    [--schemes bf16,...] [--contenders eager,compile,strop] [--steps N] [--pictures N]
    [--budget-share S] [--minutes M] [--tiny]

A placement says where the weights of the denoiser lie between their uses: "resident" on the GPU,
"model_offload" on the host between calls of ``enable_model_cpu_offload``, "group_offload" on the
host by diffusers' groups of blocks with a stream, "budget" under
``strop.Options(weights_budget_bytes=...)``, which is S of their size. A scheme of
``quantised_schemes.py`` says in what they are kept; "bf16" is as they are. A contender is eager,
``torch.compile`` of the denoiser (of its repeated blocks, where it says which repeat), or Strop.

A cell of the table is one of each. "first_s" is the first picture, and with it all that is
compiled; "timing" holds percentiles of a picture from the second one on, and "step_ms" what a step
more adds to it. "compile_s" is what the first picture takes longer than the median. "peak_bytes" is
the most memory of the GPU, weights included. "skipped" says why there is no such cell, "failed"
what went wrong in it. Each cell has a process with empty caches. FILE is written after each, and
cells that it has are not measured again; "run" is the day and the commit of a cell. Behind
--minutes no further cell begins.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

import strop
from benchmarks.new_process import measured_alone
from benchmarks.offloading import bus_rate
from benchmarks.quantised_schemes import SCHEMES, linears, quantise
from strop.bench import environment, report, timer
from strop.bench.wait_models import MODELS
from strop.runtime.run.layouts import bytes_of

PLACEMENTS = ("resident", "model_offload", "group_offload", "budget")
FEW_SCHEMES = ("bf16", "torchao-int8", "torchao-fp8", "gguf-q4_k", "nf4")
CONTENDERS = ("eager", "compile", "strop")


@dataclass(frozen=True, slots=True)
class Cell:
    """Name a cell of the table."""

    placement: str
    scheme: str
    contender: str

    def __str__(self) -> str:
        return f"{self.placement}/{self.scheme}/{self.contender}"

    def skipped(self, device: torch.device) -> str:
        """Return why there is no such cell, or nothing."""
        if self.placement == "budget" and self.contender != "strop":
            return "a budget is Strop's"
        if self.placement == "budget" and self.scheme != "bf16":
            return "quantised weights are not streamed"
        return SCHEMES[self.scheme].missing(device)


def main() -> None:
    args = arguments()
    if args.one:
        print(json.dumps(measured(Cell(*args.one), args)))
        return
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    head: dict[str, Any] = {
        "kind": "memory_table",
        "model": args.model,
        "steps": args.steps,
        "budget_share": args.budget_share,
        "is_tiny": args.tiny,
        "environment": environment.describe(device),
        "bus_gb_s": bus_rate(device),
    }
    run = run_name(head["environment"])
    cells, end = cells_before(args.out, head), time.monotonic() + 60 * args.minutes
    for cell in wanted_cells(args):
        if "timing" in cells.get(str(cell), {}):
            continue
        reason = cell.skipped(device)
        if not reason and time.monotonic() > end:
            reason = "time was over"
        cells[str(cell)] = (
            {"skipped": reason} if reason else {**in_own_process(cell, args), "run": run}
        )
        report.write_json({**head, "cells": cells}, args.out)
        print("  ".join(row_of(cell, cells[str(cell)])), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for every number")
    parser.add_argument("--model", choices=MODELS, default="sdxl")
    for name, every, usual in (
        ("placements", PLACEMENTS, PLACEMENTS),
        ("schemes", tuple(SCHEMES), FEW_SCHEMES),
        ("contenders", CONTENDERS, CONTENDERS),
    ):
        text = f"of {', '.join(every)}, with commas between"
        parser.add_argument(f"--{name}", default=",".join(usual), help=text)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--pictures", type=int, default=4, help="the first included")
    parser.add_argument("--budget-share", type=float, default=0.5, help="of the denoiser's weights")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--tiny", action="store_true", help="a tiny model: to try this out")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name, known in (
        ("placements", PLACEMENTS),
        ("schemes", SCHEMES),
        ("contenders", CONTENDERS),
    ):
        if unknown := {*getattr(args, name).split(",")} - {*known}:
            parser.error(f"--{name}: there is no {', '.join(sorted(unknown))}")
    if args.pictures < 2 or args.steps < 2:
        parser.error("--pictures and --steps take 2 or more")
    return args


def wanted_cells(args: argparse.Namespace) -> Iterator[Cell]:
    for placement in args.placements.split(","):
        for scheme in args.schemes.split(","):
            for contender in args.contenders.split(","):
                yield Cell(placement, scheme, contender)


def cells_before(path: Path, head: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cells of an earlier run of the same table."""
    if not path.is_file():
        return {}
    before: dict[str, Any] = json.loads(path.read_text())
    same = ("kind", "model", "steps", "budget_share", "is_tiny")
    if any(before.get(key) != head[key] for key in same):
        raise SystemExit(f"{path} has results of something else")
    cells: dict[str, Any] = before["cells"]
    return cells


def run_name(found: Mapping[str, Any]) -> str:
    """Return the day and the commit of a run, which each cell says: others may be of earlier
    runs."""
    return f"{found['date'][:10]} {found['commit']}"


def in_own_process(cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """Measure a cell in a process with caches of its own."""
    words = ["--one", cell.placement, cell.scheme, cell.contender, "--out", str(args.out)]
    words += ["--model", args.model, "--steps", str(args.steps), "--pictures", str(args.pictures)]
    words += ["--budget-share", str(args.budget_share), *["--tiny"] * args.tiny]
    return measured_alone(__file__, words)


def measured(cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """Build the pipeline of a cell, and time its pictures."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    model = MODELS[args.model]
    dtype = model.dtype if device.type == "cuda" else torch.float32
    pipe = model.build(args.tiny, device, dtype)
    denoiser: nn.Module = getattr(pipe, model.denoiser)
    if cell.scheme != "bf16":
        quantise(denoiser, SCHEMES[cell.scheme], list(linears(denoiser)))
    weights = bytes_of([*denoiser.parameters(), *denoiser.buffers()])
    draw = prepared(cell, args, pipe, denoiser, device, int(args.budget_share * weights))
    timer.give_back(device)
    timer.forget_peak(device)
    started = time.perf_counter()
    draw(args.steps)
    timer.synchronise(device)
    first_s = time.perf_counter() - started
    pictures = [timer.wall_ms(lambda: draw(args.steps), device) for _ in range(args.pictures - 1)]
    peak = timer.peak(device)
    half = args.steps // 2
    draw(half)
    fewer = [timer.wall_ms(lambda: draw(half), device) for _ in range(args.pictures - 1)]
    timing, short = timer.timing_of(pictures), timer.timing_of(fewer)
    return {
        "weights_bytes": weights,
        "first_s": round(first_s, 3),
        "compile_s": round(first_s - timing.p50_ms / 1e3, 3),
        "timing": timing.to_dict(),
        "pictures_ms": [round(each, 2) for each in pictures],
        "step_ms": round((timing.p50_ms - short.p50_ms) / (args.steps - half), 4),
        "peak_bytes": peak,
        "eager_calls": {
            name: d.counters.eager_calls for name, d in strop.api.dispatchers_of(pipe).items()
        },
    }


def prepared(
    cell: Cell,
    args: argparse.Namespace,
    pipe: Any,
    denoiser: nn.Module,
    device: torch.device,
    budget_bytes: int,
) -> Callable[[int], None]:
    """Set a pipeline up as a user of the contender would, and return what draws a picture in so
    many steps."""
    if cell.contender == "strop":
        is_streamed = cell.placement == "budget"
        if is_streamed:  # as for a model that does not fit
            denoiser.to("cpu")
        strop.optimize(
            pipe,
            options=strop.Options.from_environment(
                weights_budget_bytes=budget_bytes if is_streamed else 0
            ),
        )
    elif cell.contender == "compile":
        compile_denoiser(denoiser)
    if cell.placement == "model_offload":
        pipe.enable_model_cpu_offload(device=device)
    elif cell.placement == "group_offload":
        on_gpu = device.type == "cuda"
        grouped: Any = denoiser
        grouped.enable_group_offload(
            onload_device=device,
            offload_type="block_level",
            num_blocks_per_group=1,
            use_stream=on_gpu,
        )
    height, width = MODELS[args.model].sizes(args.tiny)[0]

    def draw(steps: int) -> None:
        generator = torch.Generator().manual_seed(0)
        size = {"height": height, "width": width}
        pipe(**prompt_of(pipe, device), num_inference_steps=steps, generator=generator, **size)

    return draw


def compile_denoiser(denoiser: Any) -> None:
    """Compile a denoiser as diffusers' pages recommend it."""
    if getattr(denoiser, "_repeated_blocks", None):
        denoiser.compile_repeated_blocks(fullgraph=True)
    else:
        denoiser.compile(fullgraph=True)


def prompt_of(pipe: Any, device: torch.device) -> dict[str, Any]:
    """Return a prompt, or its embeddings where no text encoder takes part."""
    if pipe.text_encoder is not None:
        return {"prompt": "a red fox"}
    config, made = pipe.transformer.config, torch.Generator().manual_seed(1)
    dtype = pipe.transformer.dtype
    shapes = {
        "prompt_embeds": (1, 512, config.joint_attention_dim),
        "pooled_prompt_embeds": (1, config.pooled_projection_dim),
    }
    return {
        name: torch.randn(shape, generator=made).to(device, dtype) for name, shape in shapes.items()
    }


def row_of(cell: Cell, found: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the parts of a line of the table."""
    names = (f"{cell.placement:13}", f"{cell.scheme:14}", f"{cell.contender:8}")
    for key in ("skipped", "failed"):
        if key in found:
            return (*names, f"{key}: {found[key]}")
    return (
        *names,
        f"{found['step_ms']:9.2f} ms a step",
        f"{found['timing']['p50_ms'] / 1e3:8.3f} s a picture",
        f"{found['peak_bytes'] / 2**30:6.2f} GiB",
        f"compiled in {found['compile_s']:.1f} s",
    )


if __name__ == "__main__":
    main()
