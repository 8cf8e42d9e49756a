"""The parameter step alone: clip, AdamW and moving average over every parameter of a UNet.

    python benchmarks/train_step.py --out DIR [--grads fp32] [--rounds 2] [--only strop,...]
    python benchmarks/train_step.py --check       # the GPU's kernels against fp64, in seconds
    python benchmarks/train_step.py --sweep --out DIR   # block sizes and warps of both sweeps;
                                                        # of 8-bit states with --states 8bit

Contenders, one after the other in one process, each with its own states, freed before the next:
``recipe`` is what diffusers' scripts do (torch's default AdamW, ``clip_grad_norm_``, ``EMAModel``),
``fused`` torch's fused AdamW with ``clip_grad_norm_(foreach=True)`` and an average by
``torch._foreach_lerp_``, ``strop`` our step, ``strop-fresh`` the same with gradients at new
addresses in every step, ``strop-graph`` a CUDA graph of it, ``strop-shadow`` with bf16 copies,
``strop-8bit`` with moments in 8 bits.
With ``--grads bf16`` or ``fp16`` only ours has such gradients: torch's want those of the parameter.
``--device cpu --model tiny`` tries the script out.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from strop.bench import environment, models
from strop.bench.timer import forget_peak, peak, timing_of
from strop.train import EMASchedule, FusedAdamW
from strop.wording import counted

ROOT = Path(__file__).resolve().parents[1]
CEILING_GBS = 2980.0  # a copy on an H100 80GB
MODELS = {"sd15": models.SD15_UNET, "sdxl": models.SDXL_UNET, "tiny": models.TINY_UNET}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ARGUMENTS: dict[str, Any] = {"lr": 1e-5, "weight_decay": 1e-2}
Step = Callable[[], None]


class Weights:
    """Random fp32 parameters with gradients, shaped as a model's."""

    def __init__(self, model: str, device: torch.device, grads: torch.dtype) -> None:
        from diffusers import UNet2DConditionModel

        with torch.device("meta"):
            shapes = [p.shape for p in UNet2DConditionModel(**MODELS[model]).parameters()]
        self.device = device
        self.params = [nn.Parameter(torch.randn(s, device=device) * 0.02) for s in shapes]
        self.numel = sum(p.numel() for p in self.params)
        self.grads = self.new_gradients(grads)
        self.hand_out(self.grads)

    def new_gradients(self, dtype: torch.dtype) -> list[Tensor]:
        return [torch.randn(p.shape, device=self.device, dtype=dtype) * 1e-3 for p in self.params]

    def hand_out(self, grads: list[Tensor]) -> None:
        for p, g in zip(self.params, grads, strict=True):
            p.grad = None
            p.grad_dtype = g.dtype
            p.grad = g


def recipe(w: Weights) -> Step:
    from diffusers.training_utils import EMAModel

    optimizer = torch.optim.AdamW(w.params, **ARGUMENTS)
    ema = EMAModel(w.params)

    def step() -> None:
        nn.utils.clip_grad_norm_(w.params, 1.0)
        optimizer.step()
        ema.step(w.params)

    return step


def fused(w: Weights) -> Step:
    optimizer = torch.optim.AdamW(w.params, fused=True, **ARGUMENTS)
    averages = [p.detach().clone() for p in w.params]
    schedule, count = EMASchedule(), itertools.count(1)

    @torch.no_grad()
    def step() -> None:
        nn.utils.clip_grad_norm_(w.params, 1.0, foreach=True)
        optimizer.step()
        torch._foreach_lerp_(averages, w.params, 1 - schedule.decay_at(next(count)))

    return step


def ours(w: Weights, **more: Any) -> FusedAdamW:
    return FusedAdamW(w.params, max_grad_norm=1.0, ema_decay=0.9999, **ARGUMENTS, **more)


def strop(w: Weights) -> Step:
    return ours(w).step


def strop_shadow(w: Weights) -> Step:
    return ours(w, shadow_dtype=torch.bfloat16).step


def strop_8bit(w: Weights) -> Step:
    return ours(w, states="8bit").step


def strop_fresh(w: Weights) -> Step:
    optimizer = ours(w)
    sets = itertools.cycle((w.grads, w.new_gradients(w.grads[0].dtype)))

    def step() -> None:
        for p, g in zip(w.params, next(sets), strict=True):
            p.grad = g
        optimizer.step()

    return step


def strop_graph(w: Weights) -> Step:
    optimizer = ours(w)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph.replay


CONTENDERS = {
    "recipe": recipe,
    "fused": fused,
    "strop": strop,
    "strop-fresh": strop_fresh,
    "strop-graph": strop_graph,
    "strop-shadow": strop_shadow,
    "strop-8bit": strop_8bit,
}


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def times_ms(
    step: Step, device: torch.device, warm_up: int, samples: int
) -> tuple[list[float], float]:
    """Milliseconds of each step on the device, and of the host to enqueue one."""
    for _ in range(warm_up):
        step()
    if device.type != "cuda":
        times = []
        for _ in range(samples):
            start = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - start))
        return times, sum(times) / samples
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(samples + 1)]
    start = time.perf_counter()
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    host = 1e3 * (time.perf_counter() - start) / samples
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)], host


# Bytes a parameter beside the gradients: parameter, average and two moments, read and written.
# In 8 bits a moment has a scale for each 256.
BYTES = {"strop-shadow": 34, "strop-8bit": 8 + 8 + 4 * (1 + 4 / 256)}


def bytes_of(name: str, grads: torch.dtype) -> float | None:
    """Bytes a parameter that our two sweeps read and write."""
    if not name.startswith("strop"):
        return None
    return 2 * grads.itemsize + BYTES.get(name, 32)


def measure(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    grads = DTYPES[args.grads]
    pooled: dict[str, list[float]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for _, name in itertools.product(range(args.rounds), args.only):
        ours_only = name.startswith("strop")
        if name == "strop-graph" and device.type != "cuda":
            continue
        torch.manual_seed(0)
        weights = Weights(args.model, device, grads if ours_only else torch.float32)
        forget_peak(device)
        begin = time.perf_counter()
        step = CONTENDERS[name](weights)
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        first_s = time.perf_counter() - begin
        times, host = times_ms(step, device, 3, args.samples)
        pooled.setdefault(name, []).extend(times)
        row = rows.setdefault(name, {"first_step_s": round(first_s, 2), "host_ms": round(host, 3)})
        row |= asdict(timing_of(pooled[name]))
        per_param = bytes_of(name, grads)
        if per_param is not None:
            row["gb_per_s"] = round(per_param * weights.numel / row["p50_ms"] / 1e6, 1)
            row["of_ceiling"] = round(row["gb_per_s"] / CEILING_GBS, 3)
        if device.type == "cuda":
            row["peak_gb"] = round(peak(device) / 1e9, 2)
        row["params"] = weights.numel
        print(f"{name:13s}", json.dumps(row), flush=True)
        del weights, step
        free(device)
    return rows


def candidates() -> Iterator[tuple[str, Any]]:
    """Tunings of one sweep with the other as it is."""
    from strop.train.sources import Tuning, Tunings

    usual = Tunings()
    yield "usual", usual
    for tile, warps in itertools.product((512, 1024, 2048, 4096), (2, 4, 8, 16)):
        if tile // (32 * warps) not in (4, 8, 16):
            continue
        for steps in (1, 2, 4):
            tuning = Tuning(tile * steps, tile, warps)
            yield "update", replace(usual, update=tuning, quantized=tuning)
    for tile, warps in itertools.product((1024, 2048, 4096), (4, 8, 16)):
        if tile // (32 * warps) not in (4, 8, 16):
            continue
        for steps in (1, 4, 8):
            yield "gradient", replace(usual, gradient=Tuning(tile * steps, tile, warps))


def sweep(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Whole steps for every tuning: what differs is the sweep that was tuned."""
    weights = Weights(args.model, device, DTYPES[args.grads])
    shadow = {"shadow_dtype": torch.bfloat16} if args.shadow else {}
    optimizer = ours(weights, states=args.states, **shadow)
    optimizer.step()
    stepper = optimizer.stepper
    found = list(candidates())
    begin = time.perf_counter()
    stepper.prepare([tunings for _, tunings in found])
    print(
        f"{counted(len(found), 'tuning')} compiled in {time.perf_counter() - begin:.1f} s",
        flush=True,
    )
    rows = []
    for _, (kind, tunings) in itertools.product(range(args.rounds), found):
        stepper.tune(tunings)
        times, _ = times_ms(optimizer.step, device, 2, max(args.samples // 2, 3))
        rows.append({"kind": kind, **asdict(tunings), **asdict(timing_of(times))})
    rows.sort(key=lambda row: row["p50_ms"])
    for row in rows[:12] + rows[-3:]:
        print(json.dumps(row), flush=True)
    return {"tunings": rows}


def check(device: torch.device) -> None:
    """Errors of a training loop against fp64, beside torch's; raises if ours are larger."""
    sys.path.insert(0, str(ROOT))
    from tests.train import judge

    steps, name = 100, device.type
    expected = judge.judge(steps, judge.INFINITE.__contains__)
    peer = judge.torch_run(steps, name)
    limits = [
        judge.errors(peer.params, expected.params),
        judge.errors(peer.averages, expected.averages),
    ]
    print("torch fused", [[f"{e:.1e}" for e in errors] for errors in limits])
    for kind in (torch.amp.GradScaler, judge.train.GradScaler):
        run, _ = judge.strop_run(steps, name, kind=kind)
        found = [
            judge.errors(run.params, expected.params),
            judge.errors(run.averages, expected.averages),
        ]
        print(kind.__module__, [[f"{e:.1e}" for e in errors] for errors in found])
        if run.scales != peer.scales:
            raise SystemExit(f"scales differ: {run.scales} {peer.scales}")
        worse = [
            (a, b)
            for x, y in zip(found, limits, strict=True)
            for a, b in zip(x, y, strict=True)
            if a > 1.1 * b
        ]
        if worse:
            raise SystemExit(f"errors above torch's: {worse}")
    print("ok")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", choices=MODELS, default="sd15")
    parser.add_argument("--grads", choices=DTYPES, default="fp32")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CONTENDERS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shadow", action="store_true", help="with --sweep: keep bf16 copies")
    parser.add_argument("--states", choices=("fp32", "8bit"), default="fp32", help="with --sweep")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.check:
        check(device)
        return
    rows = sweep(args, device) if args.sweep else measure(args, device)
    result = {
        "kind": "train_step",
        "case": f"train_step-{args.model}-{args.grads}{'-sweep' if args.sweep else ''}",
        "environment": environment.describe(device),
        "ceiling_gb_per_s": CEILING_GBS,
        "rows": rows,
    }
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        label, date = environment.device_label(device), result["environment"]["date"][:10]
        path = args.out / f"{result['case']}_{label}_{date}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main()
