"""A training step of a UNet, forward and backward: eager, Inductor, Strop.

    python benchmarks/train_compiled.py --out DIR [--model sd15] [--batch 8] [--pixels 512]
        [--dtype bf16] [--only eager,inductor,strop] [--budget 1.0] [--check]
    python benchmarks/train_compiled.py --tiny --out DIR    # on a CPU, to try the script out

One after the other in one process, each with a copy of the same weights, channels-last on a GPU,
fp32 under autocast (``--dtype fp32``: without), and the loss of a diffusers script: mean squared
error of the predicted noise. A time is that of forward, loss and backward, gradients set to None in
between. Inductor is compiled for these very sizes; Strop's graphs are symbolic. Peak memory is the
allocator's over a step, weights and gradients included. ``--check`` judges each contender's first
gradients by eager's in fp32 (no TF32): the relative error of each tensor, also as a multiple of
eager's under the same autocast.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.bench import environment, models
from strop.bench.timer import elapsed_ms, give_back, timing_of
from strop.options import Options

DTYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
MODELS = {"sd15": models.SD15_UNET, "sdxl": models.SDXL_UNET, "tiny": models.TINY_UNET}
Step = Callable[[], Tensor]


def make(model: str, device: torch.device) -> nn.Module:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    with torch.device(device):
        unet = UNet2DConditionModel(**MODELS[model])
    if device.type == "cuda":  # eager's backward in this layout dies on CPUs (torch 2.13)
        unet = unet.to(memory_format=torch.channels_last)
    return unet.train()


def inputs(model: str, batch: int, pixels: int, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    config = MODELS[model]

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    side = pixels // 8
    return {
        "sample": noise(batch, 4, side, side),
        "timestep": torch.randint(0, 1000, (batch,), generator=generator).to(device),
        "encoder_hidden_states": noise(batch, 77, config["cross_attention_dim"]),
    }


def eager(unet: nn.Module, options: Options) -> Callable[..., Any]:
    return unet


def inductor(unet: nn.Module, options: Options) -> Callable[..., Any]:
    return torch.compile(unet, dynamic=False)


def ours(unet: nn.Module, options: Options) -> Callable[..., Any]:
    return strop.optimize(unet, train=True, options=options)


CONTENDERS = {"eager": eager, "inductor": inductor, "strop": ours}


def step_of(
    call: Callable[..., Any],
    unet: nn.Module,
    given: dict[str, Any],
    target: Tensor,
    dtype: torch.dtype | None,
) -> Step:
    kind = target.device.type

    def step() -> Tensor:
        for parameter in unet.parameters():
            parameter.grad = None
        with torch.autocast(kind, dtype, enabled=dtype is not None):
            predicted = call(**given, return_dict=False)[0]
            loss = F.mse_loss(predicted.float(), target)
        loss.backward()
        return loss

    return step


def gradients(unet: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.detach().cpu() for n, p in unet.named_parameters() if p.grad is not None}


def exact_gradients(args: argparse.Namespace) -> dict[str, Tensor]:
    """Eager's, in fp32."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    step, unet = made("eager", args, None)
    step()
    torch.backends.cudnn.allow_tf32 = True
    return gradients(unet)


def judged(
    found: dict[str, Tensor], exact: dict[str, Tensor], eager: dict[str, float]
) -> dict[str, Any]:
    """``eager`` gets the errors of the first contender that is judged."""
    errors = {
        n: ((found[n].double() - e.double()).norm() / e.double().norm()).item()
        for n, e in exact.items()
        if e.count_nonzero()
    }
    if not eager:
        eager.update(errors)
    times = {n: error / max(eager[n], 1e-12) for n, error in errors.items()}
    worst = max(times, key=times.__getitem__)
    return {
        "median_error": statistics.median(errors.values()),
        "worst_error": max(errors.values()),
        "median_of_eagers": statistics.median(times.values()),
        "worst_of_eagers": [times[worst], worst],
    }


def peak_bytes(step: Step, device: torch.device) -> int | None:
    """None on a CPU, where nobody counts."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def made(name: str, args: argparse.Namespace, dtype: torch.dtype | None) -> tuple[Step, nn.Module]:
    device = torch.device(args.device)
    unet = make(args.model, device)
    given = inputs(args.model, args.batch, args.pixels, device)
    target = torch.randn(given["sample"].shape, generator=torch.Generator().manual_seed(2))
    options = Options.from_environment(memory_budget=args.budget)
    return step_of(CONTENDERS[name](unet, options), unet, given, target.to(device), dtype), unet


def measure(
    name: str, args: argparse.Namespace, exact: dict[str, Tensor], eager: dict[str, float]
) -> dict[str, Any]:
    device = torch.device(args.device)
    step, unet = made(name, args, DTYPES[args.dtype])
    started = time.perf_counter()
    loss = step().item()
    row: dict[str, Any] = {"first_step_s": round(time.perf_counter() - started, 2), "loss": loss}
    if args.check:
        row |= judged(gradients(unet), exact, eager)
    for _ in range(args.warm_up):
        step()
    row["peak_bytes"] = peak_bytes(step, device)
    row["ms"] = asdict(timing_of([elapsed_ms(step, device) for _ in range(args.samples)]))
    if name == "strop":
        report = strop.explain(unet)
        row["graphs"] = [_graph(graph) for graph in report.graphs]
        row["launches"], row["node_share"] = report.num_launches, report.compiled_node_share
        row["fallbacks"] = report.fallbacks
    return row


def _graph(graph: Any) -> dict[str, Any]:
    return {
        "role": graph.role,
        "nodes": graph.num_nodes,
        "in_kernels": graph.num_compiled_nodes,
        "kernels": len(graph.kernels),
        "calls": dict(graph.calls),
        "kept": graph.num_saved,
        "seconds": dict(graph.seconds),
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", choices=MODELS, default="sd15")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pixels", type=int, default=512)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--only", default=",".join(CONTENDERS))
    parser.add_argument("--budget", type=float, default=1.0)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a tiny UNet, few samples")
    args = parser.parse_args()
    if args.tiny:
        args.model, args.batch, args.pixels, args.samples = "tiny", 2, 64, 3
    return args


def main() -> int:
    args = parsed()
    exact = exact_gradients(args) if args.check else {}
    eager_errors: dict[str, float] = {}
    rows: dict[str, Any] = {}
    for name in args.only.split(","):
        torch._dynamo.reset()
        try:
            rows[name] = measure(name, args, exact, eager_errors)
        except torch.OutOfMemoryError as error:  # a result too: the step does not fit
            rows[name] = {"error": str(error).splitlines()[0]}
        give_back(torch.device(args.device))
        print(name, json.dumps({k: v for k, v in rows[name].items() if k != "graphs"}), flush=True)
    result = {
        "what": "train_compiled",
        "arguments": {k: str(v) for k, v in vars(args).items() if k != "out"},
        "environment": environment.describe(torch.device(args.device)),
        "rows": rows,
    }
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        name = f"train_compiled_{args.model}_b{args.batch}_{args.dtype}.json"
        (args.out / name).write_text(json.dumps(result, indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
