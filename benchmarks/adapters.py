"""Time what a user of LoRA waits for: the next call after a change, and a step with adapters.

python benchmarks/adapters.py [--models sd15-unet,sdxl-unet] [--rank 16] [--out FILE] [--tiny]

Each model has random weights and gets two adapters on attention and feed-forward layers. After
each change the next call is timed in seconds, with what was traced, bound and written anew for it;
steps are timed in milliseconds, in queues of calls, beside eager torch. STROP_LORA=unmerged times
adapters beside the weights.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

import strop
from strop.bench import environment
from strop.bench.infer_rows import MODELS
from strop.bench.transformer_models import TRANSFORMERS
from strop.runtime.run import cuda_graphs

LAYERS = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out")
FLUX_LAYERS = (
    *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2", "proj_mlp"),
    *("proj_out", "norm.linear", "norm1.linear", "norm1_context.linear"),
)
# size, batch, layers with adapters
CASES: dict[str, tuple[tuple[int, int], int, tuple[str, ...]]] = {
    "sd15-unet": ((512, 512), 2, LAYERS),
    "sdxl-unet": ((1024, 1024), 2, LAYERS),
    "flux": ((1024, 1024), 1, FLUX_LAYERS),
}
# After each, the next call is timed.
CHANGES: dict[str, Callable[[Any, LoraConfig], None]] = {
    "another call": lambda unet, config: None,
    "one adapter": lambda unet, config: add(unet, "a", config),
    "a second adapter": lambda unet, config: both(unet, config),
    "another scale": lambda unet, config: unet.set_adapters(["a", "b"], [0.3, 0.9]),
    "the first one alone": lambda unet, config: unet.set_adapters(["a"], [1.0]),
    "disabled": lambda unet, config: unet.disable_adapters(),
    "enabled": lambda unet, config: unet.enable_adapters(),
    "fused": lambda unet, config: unet.fuse_lora(),
    "unfused": lambda unet, config: unet.unfuse_lora(),
    "unloaded": lambda unet, config: unet.unload_lora(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="sd15-unet,sdxl-unet", help=", ".join(CASES))
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--tiny", action="store_true", help="tiny models: to try this out")
    parser.add_argument("--out", type=Path, help="JSON file for every number")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "Already found a `peft_config`")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {name: measured(name, device, args) for name in args.models.split(",")}
    result = {"kind": "adapters", "environment": environment.describe(device), "models": found}
    if args.out:
        part = args.out.with_suffix(".part")
        part.write_text(json.dumps(result, indent=1))
        part.replace(args.out)


def measured(name: str, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    size, batch, layers = CASES[name]
    if name in TRANSFORMERS:
        build, dtype = TRANSFORMERS[name][args.tiny], torch.bfloat16
    else:
        build = (MODELS[name].tiny if args.tiny else MODELS[name].full)(1)
        dtype = torch.float16
    workload = build(device, dtype if device.type == "cuda" else torch.float32)
    given = workload.inputs((64, 64) if args.tiny else size, batch)
    unet: Any = workload.target

    config = LoraConfig(
        r=args.rank, lora_alpha=args.rank, init_lora_weights=False, target_modules=[*layers]
    )

    def call() -> None:
        workload.call(unet, given)

    steps: dict[str, Any] = {}
    with torch.no_grad():
        strop.optimize(unet)
        waits = {"the first call": wait(unet, call)}
        for change, act in CHANGES.items():
            act(unet, config)
            waits[change] = wait(unet, call)
            if change in ("another call", "a second adapter", "another scale"):
                steps[change] = samples(call)
        for change, one in waits.items():
            print(f"{name:10} {change:20} {one['seconds']:8.3f} s  {one}", flush=True)
        strop.restore(unet)
        steps["eager, without adapters"] = samples(call)
        both(unet, config, first=True)
        steps["eager, two adapters"] = samples(call)
    for what, one in steps.items():
        print(f"{name:10} a step: {what:24} {min(one['samples']):8.3f} ms at least", flush=True)
    return {"waits": waits, "steps_ms": steps}


def add(unet: Any, name: str, config: LoraConfig) -> None:
    torch.manual_seed(config.r)
    unet.add_adapter(config, name)
    unet.to(unet.device, unet.dtype).eval()


def both(unet: Any, config: LoraConfig, *, first: bool = False) -> None:
    if first:
        add(unet, "a", config)
    add(unet, "b", config)
    unet.set_adapters(["a", "b"], [0.8, 0.5])


def wait(unet: Any, call: Callable[[], None]) -> dict[str, Any]:
    """Return the seconds of a call, and what had been done by its end."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    seconds, dispatcher = time.perf_counter() - start, unet.forward
    return {
        "seconds": round(seconds, 4),
        "traces": dispatcher.variants.num_captures,
        "rebinds": dispatcher.counters.rebinds,
        "graphs": sum(pool.num_captures for pool in cuda_graphs._POOLS.values()),
        "weight_writes": dispatcher.state.effective.num_writes,
        "eager_calls": dispatcher.counters.eager_calls,
        "launches": dispatcher.counters.launches,
        "derived_mb": round(dispatcher.state.effective.size_bytes / 1e6, 1),
    }


def samples(call: Callable[[], None], count: int = 12) -> dict[str, Any]:
    """Return the milliseconds of a call in each of some queues of calls."""
    for _ in range(4):
        call()
    found = []
    for _ in range(5):
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        synchronize()
        found.append(round(1e3 * (time.perf_counter() - start) / count, 4))
    return {"samples": found}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
