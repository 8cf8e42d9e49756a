"""Time what a user of LoRA waits for: the next call after a change, and a step with adapters.

python benchmarks/adapters.py [--models sd15-unet,sdxl-unet] [--rank 16] [--parts calls,loops]
    [--out FILE] [--tiny]

Each model has random weights and gets two adapters on attention and feed-forward layers. After
each change the next call is timed in seconds, with what was traced, bound and written anew for it;
steps are timed in milliseconds, in queues of calls, beside eager torch. A call by itself looks for
changes of adapters each time; the steps of a pipeline's denoise loop do so once. They are timed in
whole pipelines ("loops"), with two adapters and without, in turns. STROP_LORA=unmerged times
adapters beside the weights.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from peft import LoraConfig

import strop
from strop.bench import environment, report
from strop.bench.adapted_loops import WITH, WITHOUT, loop_steps
from strop.bench.infer_rows import MODELS
from strop.bench.timer import give_back
from strop.bench.transformer_models import TRANSFORMERS
from strop.bench.wait_models import FLUX_LAYERS, UNET_LAYERS
from strop.bench.wait_models import MODELS as PIPELINES
from strop.runtime.run import cuda_graphs

# size, batch, layers with adapters
CASES: dict[str, tuple[tuple[int, int], int, tuple[str, ...]]] = {
    "sd15-unet": ((512, 512), 2, UNET_LAYERS),
    "sdxl-unet": ((1024, 1024), 2, UNET_LAYERS),
    "flux": ((1024, 1024), 1, FLUX_LAYERS),
}
# The pipeline whose loop is timed, and a small and a large number of its steps.
LOOPS = {"sd15-unet": ("sd15", (5, 55)), "sdxl-unet": ("sdxl", (5, 30)), "flux": ("flux", (2, 8))}
TINY_LOOP = (2, 4)
MUST_RATIO = 1.01  # of a step with adapters to one without, where they are merged
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
    parser.add_argument("--parts", default="calls,loops", help="calls, loops")
    parser.add_argument("--tiny", action="store_true", help="tiny models: to try this out")
    parser.add_argument("--out", type=Path, help="JSON file for every number")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "Already found a `peft_config`")
    diffusers.logging.set_verbosity_error()  # it speaks of each file
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {"kind": "adapters", "environment": environment.describe(device)}
    parts = [part for part in PARTS if part in args.parts.split(",")]
    for name in args.models.split(","):
        for part in parts:
            found = PARTS[part](name, device, args)
            result.setdefault("models", {}).setdefault(name, {}).update(found)
            give_back(device)
            if args.out:
                report.write_json(result, args.out)


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


def looped(name: str, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    pipeline, steps = LOOPS[name]
    found = loop_steps(
        PIPELINES[pipeline],
        device,
        TINY_LOOP if args.tiny else steps,
        rank=args.rank,
        is_tiny=args.tiny,
    )
    for part in (WITHOUT, WITH):
        print(f"{name:10} a step in a loop: {part:17} {found['step_ms'][part]['p50']:8.3f} ms")
    ratio = found["ratio"]
    spread = f"{ratio['p50']:.4f} ({ratio['p20']:.4f} to {ratio['p80']:.4f})"
    print(f"{name:10} a step in a loop: ratio {spread}, must {MUST_RATIO} if merged", flush=True)
    return {"loops": found | {"must_ratio": MUST_RATIO}}


PARTS = {"calls": measured, "loops": looped}


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
