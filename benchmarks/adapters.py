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
from strop.runtime.run import cuda_graphs

LAYERS = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out")
SIZES = {"sd15-unet": (512, 512), "sdxl-unet": (1024, 1024)}
# After each, the next call is timed.
CHANGES: dict[str, Callable[[Any, int], None]] = {
    "another call": lambda unet, rank: None,
    "one adapter": lambda unet, rank: add(unet, "a", rank),
    "a second adapter": lambda unet, rank: both(unet, rank),
    "another scale": lambda unet, rank: unet.set_adapters(["a", "b"], [0.3, 0.9]),
    "the first one alone": lambda unet, rank: unet.set_adapters(["a"], [1.0]),
    "disabled": lambda unet, rank: unet.disable_adapters(),
    "enabled": lambda unet, rank: unet.enable_adapters(),
    "fused": lambda unet, rank: unet.fuse_lora(),
    "unfused": lambda unet, rank: unet.unfuse_lora(),
    "unloaded": lambda unet, rank: unet.unload_lora(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default=",".join(SIZES), help="of strop bench infer")
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
    model = MODELS[name]
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    workload = (model.tiny if args.tiny else model.full)(1)(device, dtype)
    given = workload.inputs((64, 64) if args.tiny else SIZES[name], 2)
    unet: Any = workload.target

    def call() -> None:
        workload.call(unet, given)

    steps: dict[str, Any] = {}
    with torch.no_grad():
        strop.optimize(unet)
        waits = {"the first call": wait(unet, call)}
        for change, act in CHANGES.items():
            act(unet, args.rank)
            waits[change] = wait(unet, call)
            if change in ("another call", "a second adapter", "another scale"):
                steps[change] = samples(call)
        for change, one in waits.items():
            print(f"{name:10} {change:20} {one['seconds']:8.3f} s  {one}", flush=True)
        strop.restore(unet)
        steps["eager, without adapters"] = samples(call)
        both(unet, args.rank, first=True)
        steps["eager, two adapters"] = samples(call)
    for what, one in steps.items():
        print(f"{name:10} a step: {what:24} {min(one['samples']):8.3f} ms at least", flush=True)
    return {"waits": waits, "steps_ms": steps}


def add(unet: Any, name: str, rank: int) -> None:
    torch.manual_seed(rank)
    config = LoraConfig(r=rank, lora_alpha=rank, init_lora_weights=False, target_modules=[*LAYERS])
    unet.add_adapter(config, name)
    unet.to(unet.device, unet.dtype).eval()


def both(unet: Any, rank: int, *, first: bool = False) -> None:
    if first:
        add(unet, "a", rank)
    add(unet, "b", rank)
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
        "weight_writes": dispatcher.counters.weight_writes,
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
