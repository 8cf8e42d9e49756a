"""Time ``torch.compile(model, backend="strop")`` beside ``strop.optimize``, Inductor and eager.

python benchmarks/torch_compile.py [--rows sd15,sdxl,sd3,bert,resnet50,sd15-train,sd15-sizes]
    [--contenders backend,optimize,inductor,inductor-graph,eager] [--samples N] [--out FILE]
    [--tiny]

Each row of each contender has a process of its own with empty caches. "first_s" is the first call,
and "samples_ms" are calls after it, each behind the one before, as a denoise loop makes them. Rows
whose name ends in "-train" time a forward and its backward, and those that end in "-sizes" the
first call at each of six sizes in turn. "inductor" compiles the whole model; "-graph" captures one
call of it in a hand-made CUDA graph, where there is a GPU. "dynamo_s" is Dynamo's share,
as ``strop.explain`` says it. Weights are random, at full size.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROWS = {  # model, size or tokens, batch
    "sd15": ("sd15-unet", (512, 512), 2),
    "sdxl": ("sdxl-unet", (1024, 1024), 2),
    "sd3": ("sd3", (1024, 1024), 2),
    "bert": ("bert-base", (0, 0), 8),
    "resnet50": ("resnet50", (0, 0), 8),
    "sd15-train": ("sd15-unet", (512, 512), 4),
    "resnet50-train": ("resnet50", (0, 0), 8),
    "sd15-sizes": ("sd15-unet", (512, 512), 2),
}
SIX = (  # batch, height, width
    (2, 512, 512),
    (2, 512, 768),
    (4, 640, 512),
    (3, 768, 768),
    (2, 1024, 576),
    (6, 448, 640),
)
SD3 = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 192,
}
TINY_SD3 = SD3 | {
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 32,
}
TINY_ROWS = {"bert-base": "bert-tiny"}
SD3_TOKENS = 333
Call = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default="sd15,sdxl,sd3,bert,resnet50,sd15-train,sd15-sizes")
    parser.add_argument("--contenders", default="backend,optimize,inductor,inductor-graph,eager")
    parser.add_argument("--samples", type=int, default=50, help="calls after the first ones")
    parser.add_argument("--out", type=Path, help="JSON file for every number")
    parser.add_argument("--tiny", action="store_true", help="tiny models: to try this out")
    parser.add_argument("--one", nargs=2, metavar=("ROW", "CONTENDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured_here(*args.one, args.samples, is_tiny=args.tiny)))
        return
    import torch

    from strop.bench import environment

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {"kind": "torch-compile", "environment": environment.describe(device)}
    rows: dict[str, Any] = {}
    for row in args.rows.split(","):
        rows[row] = {}
        for contender in args.contenders.split(","):
            rows[row][contender] = found = measured_apart(row, contender, args)
            print(f"{row:15} {contender:15} {found}", flush=True)
            if args.out:
                part = args.out.with_suffix(".part")
                part.write_text(json.dumps({**result, "rows": rows}, indent=1))
                part.replace(args.out)


def measured_apart(row: str, contender: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure in a new process whose caches are empty."""
    command = [sys.executable, __file__, "--one", row, contender, "--samples", str(args.samples)]
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: f"{folder}/{name}" for name in ("STROP_CACHE_DIR", "TRITON_CACHE_DIR")}
        caches["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
        done = subprocess.run(
            [*command, *["--tiny"] * args.tiny],
            env=os.environ | caches,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured_here(row: str, contender: str, num_samples: int, *, is_tiny: bool) -> dict[str, Any]:
    import torch

    from strop.bench.timer import captured, synchronise

    name, size, batch = ROWS[row]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_trained, has_sizes = row.endswith("-train"), row.endswith("-sizes")
    model, inputs = built(name, device, is_tiny=is_tiny)
    if is_trained:
        model.requires_grad_(True)
    fast = prepared(model, contender, is_trained)
    sizes = [(batch, *size)] if not has_sizes else list(SIX)
    if is_tiny:
        sizes = [(batch, height // 8, width // 8) for batch, height, width in sizes]
    calls = [step_of(fast, inputs(*one), is_trained) for one in sizes]
    seconds = []
    for call in calls:
        synchronise(device)
        start = time.perf_counter()
        call()
        synchronise(device)
        seconds.append(round(time.perf_counter() - start, 3))
    found: dict[str, Any] = {"first_s": seconds[0]}
    if has_sizes:
        found |= {"sizes": sizes, "first_calls_s": seconds, "all_s": round(sum(seconds), 3)}
    if contender.endswith("-graph"):
        if device.type != "cuda" or is_trained:
            return {"left_out": "a hand-made graph needs a GPU, and a call without a backward"}
        with torch.no_grad():
            calls = [captured(call) for call in calls]
    found["samples_ms"] = [samples_of(call, device, num_samples) for call in calls]
    return found | counts_of(fast, contender)


def samples_of(call: Call, device: Any, count: int) -> list[float]:
    """Return milliseconds of calls one behind the other, after some that capture and warm up."""
    from strop.bench.timer import elapsed_ms

    for _ in range(5):
        call()
    return [round(elapsed_ms(call, device), 4) for _ in range(count)]


def built(name: str, device: Any, *, is_tiny: bool) -> tuple[Any, Callable[..., dict[str, Any]]]:
    """Return a model and what makes the arguments of a call with a batch and a size."""
    import torch

    from strop.bench.batches import NETWORKS
    from strop.bench.infer_rows import MODELS

    dtype = torch.float16 if device.type == "cuda" else torch.float32
    if name in MODELS:
        build = (MODELS[name].tiny if is_tiny else MODELS[name].full)(1)
        workload = build(device, dtype)
        return workload.target, lambda batch, *size: workload.inputs(size, batch)
    if name == "sd3":
        return sd3(device, dtype, is_tiny=is_tiny)
    named = TINY_ROWS.get(name, name) if is_tiny else name
    network = next(network for network in NETWORKS if network.name == named)
    torch.manual_seed(0)
    model = network.build().eval().requires_grad_(False).to(device, dtype)

    def given(batch: int, *size: int) -> dict[str, Any]:
        made = network.arguments(batch, dtype)
        return {key: value.to(device) for key, value in made.items()}

    return model, given


def sd3(device: Any, dtype: Any, *, is_tiny: bool) -> tuple[Any, Callable[..., dict[str, Any]]]:
    import torch
    from diffusers import SD3Transformer2DModel

    from strop.bench.models import made_on, random_tensor

    config = TINY_SD3 if is_tiny else SD3
    with made_on(device, dtype):
        model = SD3Transformer2DModel(**config).eval().requires_grad_(False)

    def given(batch: int, height: int, width: int) -> dict[str, Any]:
        shapes = {
            "hidden_states": (batch, config["in_channels"], height // 8, width // 8),
            "encoder_hidden_states": (batch, SD3_TOKENS, config["joint_attention_dim"]),
            "pooled_projections": (batch, config["pooled_projection_dim"]),
        }
        made = {key: random_tensor(shape, device, dtype) for key, shape in shapes.items()}
        return made | {"timestep": torch.full((batch,), 500.0, device=device, dtype=dtype)}

    return model, given


def prepared(model: Any, contender: str, is_trained: bool) -> Any:
    import torch

    import strop

    if contender == "optimize":
        return strop.optimize(model, train=is_trained)
    if contender == "backend":
        return torch.compile(model, backend="strop")
    if contender.startswith("inductor"):
        return torch.compile(model)
    if contender != "eager":
        raise SystemExit(f"there is no contender {contender!r}")
    return model


def step_of(model: Any, given: Any, is_trained: bool) -> Call:
    import torch

    def step() -> Any:
        with contextlib.nullcontext() if is_trained else torch.no_grad():
            result = model(**given)
        first = tensors_of(result)[0]
        if is_trained:
            first.float().square().mean().backward()
        return first

    return step


def tensors_of(result: Any) -> Sequence[Any]:
    from torch.utils import _pytree as pytree

    return pytree.tree_leaves(result.to_tuple() if hasattr(result, "to_tuple") else result)


def counts_of(model: Any, contender: str) -> dict[str, Any]:
    if contender not in ("backend", "optimize"):
        return {}
    import strop

    report = strop.explain(model)
    found: dict[str, Any] = {"stages_s": report.stage_seconds(), "counts": report.summary()}
    if contender == "backend":
        from strop.dispatch.torch_compile import FRAMES

        clock = FRAMES.clock
        found["dynamo_s"] = round(clock.dynamo_seconds, 3)
        found["num_traces"] = clock.num_traces
        found["notes"] = list(report.notes)
    return found


if __name__ == "__main__":
    main()
