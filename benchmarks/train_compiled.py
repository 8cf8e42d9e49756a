"""A training step of a UNet, forward and backward: eager, Inductor, Strop.

    python benchmarks/train_compiled.py --out DIR [--model sd15] [--batch 8] [--pixels 512]
        [--dtype bf16] [--only eager,inductor,strop] [--budget 1.0] [--check]
    python benchmarks/train_compiled.py --tiny --out DIR    # on a CPU, to try the script out

One after the other in one process, each with a copy of the same weights, channels-last on a GPU,
fp32 under autocast (``--dtype fp32``: without), and the loss of a diffusers script: mean squared
error of the predicted noise. A time is that of forward, loss and backward, gradients set to None in
between. Inductor is compiled for these very sizes; Strop's graphs are symbolic. Peak memory is the
allocator's over a step, weights and gradients included. ``--check`` compares each contender's
gradients with eager's, which are no truth: tests/train judges with fp64.
"""

from __future__ import annotations

import argparse
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


def step_of(call: Callable[..., Any], unet: nn.Module, given: dict[str, Any], target: Tensor,
            dtype: torch.dtype | None) -> Step:  # fmt: skip
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


def worst_cosine(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[float, str]:
    """The gradient that points most elsewhere, but for those that are zero but for rounding."""
    largest = max(w.norm().item() / w.numel() ** 0.5 for w in wanted.values())
    rows = [(F.cosine_similarity(found[n].flatten(), w.flatten(), dim=0).item(), n)
            for n, w in wanted.items() if w.norm().item() / w.numel() ** 0.5 > 1e-6 * largest
            ]  # fmt: skip
    return min(rows)


def peak_bytes(step: Step, device: torch.device) -> int | None:
    """None on a CPU, where nobody counts."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def measure(name: str, args: argparse.Namespace, wanted: dict[str, Tensor]) -> dict[str, Any]:
    device = torch.device(args.device)
    unet = make(args.model, device)
    given = inputs(args.model, args.batch, args.pixels, device)
    target = torch.randn(given["sample"].shape, generator=torch.Generator().manual_seed(2))
    options = Options.from_environment(memory_budget=args.budget)
    call = CONTENDERS[name](unet, options)
    step = step_of(call, unet, given, target.to(device), DTYPES[args.dtype])
    started = time.perf_counter()
    loss = step().item()
    row: dict[str, Any] = {"first_step_s": round(time.perf_counter() - started, 2), "loss": loss}
    if args.check:
        found = gradients(unet)
        wanted.update({} if wanted else found)
        row["worst_cosine"] = worst_cosine(found, wanted)
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
    return {"role": graph.role, "nodes": graph.num_nodes, "in_kernels": graph.num_compiled_nodes,
            "kernels": len(graph.kernels), "calls": dict(graph.calls), "kept": graph.num_saved,
            "seconds": dict(graph.seconds)}  # fmt: skip


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
    wanted: dict[str, Tensor] = {}
    rows: dict[str, Any] = {}
    for name in args.only.split(","):
        torch._dynamo.reset()
        try:
            rows[name] = measure(name, args, wanted)
        except torch.OutOfMemoryError as error:  # a result too: the step does not fit
            rows[name] = {"error": str(error).splitlines()[0]}
        give_back(torch.device(args.device))
        print(name, json.dumps({k: v for k, v in rows[name].items() if k != "graphs"}), flush=True)
    result = {
        "what": "train_compiled",
        "arguments": {k: str(v) for k, v in vars(args).items()},
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
