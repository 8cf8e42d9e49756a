"""A whole step of full fine-tuning: forward, loss, backward, clip, AdamW and moving average.

    python benchmarks/train_whole_step.py --model sd15 --batch 8 --dtype bf16 --out DIR
        [--budget SECONDS] [--only eager,strop,strop-graph] [--pixels 512]
    python benchmarks/train_whole_step.py --model tiny --batch 2 --out DIR    # also on a CPU

``eager`` is a diffusers script with its quickest flags: autocast, ``clip_grad_norm_`` and
``EMAModel`` by foreach, torch's fused AdamW. ``strop`` is the compiled UNet with ``FusedAdamW``,
``strop-graph`` the same from CUDA graphs (on a CPU there are none). Latents and text are cached, as
random tensors; noise and timesteps are drawn in every step. Contenders run one after the other in
one process, each with new weights of one seed, and are freed before the next.

A sample is one step, by CUDA events on a GPU. The first steps, which compile and capture, are not
samples; their seconds are in the row. Memory is what torch's allocator had reserved: the pool of a
graph counts whether or not a tensor is in it. ``--budget`` is for all contenders together: samples
are taken until a contender's share is spent, three at least.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_compiled import DTYPES, MODELS, make

import strop
from strop.bench import environment
from strop.bench.timer import elapsed_ms, give_back, synchronise, timing_of
from strop.errors import StropError
from strop.train import FusedAdamW, compile_step

TFLOP_PER_IMAGE = {"sd15": 2.41}  # at 512 pixels, forward and backward
ARGUMENTS: dict[str, Any] = {"lr": 1e-5, "weight_decay": 1e-2}
LEAST_SAMPLES = 3
Step = Callable[[Tensor, Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


class Objective:
    """The loss of a diffusers script: mean squared error of the noise that the UNet predicts."""

    def __init__(self, unet: nn.Module, dtype: torch.dtype | None, device: torch.device) -> None:
        self.unet, self.dtype = unet, dtype
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, device=device).square()
        self.signal = (1 - betas).cumprod(0)

    def __call__(self, latents: Tensor, text: Tensor) -> Tensor:
        device = latents.device
        noise = torch.randn_like(latents)
        times = torch.randint(1000, (len(latents),), device=device)
        signal = self.signal[times][:, None, None, None]
        noisy = signal.sqrt() * latents + (1 - signal).sqrt() * noise
        with torch.autocast(device.type, self.dtype, enabled=self.dtype is not None):
            guess = self.unet(noisy, times, text, return_dict=False)[0]
        return F.mse_loss(guess.float(), noise)


def eager(unet: nn.Module, loss_of: Loss) -> Step:
    from diffusers.training_utils import EMAModel

    params = list(unet.parameters())
    optimizer = torch.optim.AdamW(params, fused=True, **ARGUMENTS)
    ema = EMAModel(params, decay=0.9999, foreach=True)

    def step(latents: Tensor, text: Tensor) -> Tensor:
        loss = loss_of(latents, text)
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        optimizer.step()
        ema.step(params)
        optimizer.zero_grad()
        return loss.detach()

    return step


def ours(unet: nn.Module, loss_of: Loss, *, graph: bool) -> Step:
    strop.optimize(unet, train=True)
    optimizer = FusedAdamW(unet.parameters(), max_grad_norm=1.0, ema_decay=0.9999, **ARGUMENTS)
    return compile_step(loss_of, optimizer, graph=graph)


def plain(unet: nn.Module, loss_of: Loss) -> Step:
    return ours(unet, loss_of, graph=False)


def graphed(unet: nn.Module, loss_of: Loss) -> Step:
    return ours(unet, loss_of, graph=True)


CONTENDERS: dict[str, Callable[[nn.Module, Loss], Step]] = {
    "eager": eager,
    "strop": plain,
    "strop-graph": graphed,
}


def batches(args: argparse.Namespace, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    side, width = args.pixels // 8, MODELS[args.model]["cross_attention_dim"]
    shapes = (args.batch, 4, side, side), (args.batch, 77, width)
    return [
        tuple(torch.randn(shape, generator=generator).to(device) for shape in shapes)
        for _ in range(4)
    ]


def samples_of(
    step: Callable[[], Tensor], device: torch.device, most: int, until: float
) -> list[float]:
    """Times of steps, as many as there is time for."""
    times: list[float] = []
    while len(times) < most and (len(times) < LEAST_SAMPLES or time.monotonic() < until):
        times.append(elapsed_ms(step, device))
    return times


def reserved_gib(device: torch.device, what: str) -> float | None:
    if device.type != "cuda":
        return None
    return round(getattr(torch.cuda, what)(device) / 2**30, 2)


def measure(name: str, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    device, until = torch.device(args.device), time.monotonic() + seconds
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    unet, turns = make(args.model, device), itertools.cycle(batches(args, device))
    step = CONTENDERS[name](unet, Objective(unet, DTYPES[args.dtype], device))
    torch.manual_seed(2)
    first, losses = [], []
    for _ in range(args.warm_up):
        started = time.perf_counter()
        losses.append(step(*next(turns)))
        synchronise(device)
        first.append(round(time.perf_counter() - started, 3))
    times = samples_of(lambda: step(*next(turns)), device, args.samples, until)
    timing = timing_of(times)
    row: dict[str, Any] = {
        "first_steps_s": first,
        "first_losses": torch.stack(losses).tolist(),
        "ms": asdict(timing),
        "images_per_s": {
            f"p{p}": round(1e3 * args.batch / getattr(timing, f"p{100 - p}_ms"), 2)
            for p in (20, 50, 80)
        },
        "peak_gib": reserved_gib(device, "max_memory_reserved"),
        "steady_gib": reserved_gib(device, "memory_reserved"),
    }
    if args.model in TFLOP_PER_IMAGE and args.pixels == 512:
        rate = row["images_per_s"]["p50"] * TFLOP_PER_IMAGE[args.model]
        row["tflop_per_s"] = round(rate, 1)
    if name != "eager":
        report = strop.explain(unet)
        row["step"] = asdict(step.report())  # type: ignore[attr-defined]
        row["launches"], row["fallbacks"] = report.num_launches, report.fallbacks
    return row


def line_of(name: str, row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{name:12} {row['error']}"
    ms, rate = row["ms"], row["images_per_s"]
    return (
        f"{name:12} {ms['p20_ms']:9.2f} {ms['p50_ms']:9.2f} {ms['p80_ms']:9.2f} ms"
        f" {rate['p20']:8.2f} {rate['p50']:8.2f} {rate['p80']:8.2f} img/s"
        f"  peak {row['peak_gib']} GiB, first step {row['first_steps_s'][0]} s"
    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", choices=MODELS, default="sd15")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pixels", type=int)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CONTENDERS))
    parser.add_argument("--budget", type=float, default=600.0, help="seconds, of all contenders")
    parser.add_argument("--warm-up", type=int, default=5, help="two run plainly before a capture")
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.pixels = args.pixels or (64 if args.model == "tiny" else 512)
    unknown = set(args.only) - set(CONTENDERS)
    if unknown:
        parser.error(f"--only knows {', '.join(CONTENDERS)}, not {', '.join(sorted(unknown))}")
    return args


def main() -> int:
    args = parsed()
    device, end = torch.device(args.device), time.monotonic() + args.budget
    rows: dict[str, Any] = {}
    for place, name in enumerate(args.only):
        torch._dynamo.reset()
        left = max(end - time.monotonic(), 0.0)
        try:
            rows[name] = measure(name, args, left / (len(args.only) - place))
        except (torch.OutOfMemoryError, StropError) as error:  # a result too
            rows[name] = {"error": str(error).splitlines()[0]}
        give_back(device)
        print(line_of(name, rows[name]), flush=True)
    result = {
        "case": f"train_whole_step-{args.model}-b{args.batch}-{args.dtype}",
        "arguments": {k: str(v) for k, v in vars(args).items() if k != "out"},
        "environment": environment.describe(device),
        "rows": rows,
    }
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        label, date = environment.device_label(device), result["environment"]["date"][:10]
        path = args.out / f"{result['case']}_{label}_{date}.json"
        path.write_text(json.dumps(result, indent=1, default=str) + "\n")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
