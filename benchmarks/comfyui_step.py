"""Time a step of SDXL's UNet in ComfyUI itself, with Strop's node and without it.

    COMFYUI_DIR=CHECKOUT python benchmarks/comfyui_step.py [--ways plain,strop,compile]
        [--size 1024] [--steps 20] [--rounds 5] [--out FILE] [--tiny]

Nothing of ComfyUI is started but its library: a model with random weights is written in its format,
loaded by it, and drawn with by its sampler (euler, guidance 7). Each way has a process of its own:

    plain     ComfyUI as it is
    strop     behind the node "Strop Optimize (model)": once with empty caches, once with full ones
    compile   behind ComfyUI's own node TorchCompileModel, with empty caches

A step is a round's seconds over its steps, in the median over rounds behind a first one, whose
seconds are those of a first picture without its VAE: they hold the compile. Latents of ``strop``
must be those of ``plain`` to 60 dB of their range. --tiny takes a narrow SD1.5 and small sizes, on
a CPU if there is no GPU. Exits with 1 if latents differ or a way fails.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.bench import environment, report

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("plain", "strop", "compile")
CACHES = {
    "STROP_CACHE_DIR": "strop",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}
LEAST_DB = 60.0  # of the range of latents
SHARED = {
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 320,
    "use_spatial_transformer": True,
}
# The options of ComfyUI's class UNetModel by which it knows the two models.
SDXL = {
    **SHARED,
    "num_classes": "sequential",
    "adm_in_channels": 2816,
    "num_res_blocks": [2, 2, 2],
    "channel_mult": [1, 2, 4],
    "transformer_depth": [0, 0, 2, 2, 10, 10],
    "transformer_depth_middle": 10,
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
    "use_linear_in_transformer": True,
    "context_dim": 2048,
    "num_head_channels": 64,
}
NARROW = {
    **SHARED,
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 1],
    "transformer_depth": [1, 0],
    "transformer_depth_middle": 0,
    "transformer_depth_output": [1, 1, 0, 0],
    "context_dim": 768,
    "num_heads": 8,
}


def weights(of: dict[str, Any], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Return random weights of a UNet that keep the size of what flows through it."""
    import comfy.ops
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    made = UNetModel(**of, dtype=dtype, device=device, operations=comfy.ops.disable_weight_init)
    generator = torch.Generator(device).manual_seed(0)
    for name, value in made.state_dict().items():
        if value.ndim == 1:  # of norms and biases
            value.fill_(float(name.endswith("weight")))
        else:
            scale = value[0].numel() ** -0.5
            value.normal_(0, scale, generator=generator)
    return {name: value.cpu() for name, value in made.state_dict().items()}


def with_node(model: Any) -> Any:
    sys.path.insert(0, str(ROOT / "integrations"))
    from comfyui.nodes import NODE_CLASS_MAPPINGS

    return NODE_CLASS_MAPPINGS["StropOptimizeModel"]().optimize(model)[0]


def with_compile(model: Any) -> Any:
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    clone = model.clone()
    set_torch_compile_wrapper(model=clone, backend="inductor")
    return clone


MAKE: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: model,
    "strop": with_node,
    "compile": with_compile,
}


def drawing(model: Any, args: argparse.Namespace, of: dict[str, Any]) -> Callable[[], Tensor]:
    import comfy.sample

    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    side = args.size // 8
    noise, latent = drawn(1, 4, side, side), torch.zeros(1, 4, side, side)
    prompts = [
        [[drawn(1, 77, of["context_dim"]), {"pooled_output": drawn(1, 1280)}]] for _ in range(2)
    ]

    def draw() -> Tensor:
        return comfy.sample.sample(
            model, noise, args.steps, 7.0, "euler", "normal", *prompts, latent, disable_pbar=True
        )

    return draw


def seconds(draw: Callable[[], Tensor]) -> tuple[float, Tensor]:
    begin = time.perf_counter()
    result = draw().cpu()
    return time.perf_counter() - begin, result


def run_child(args: argparse.Namespace) -> None:
    """Draw one way, and write its seconds and its latent."""
    sys.path.insert(0, os.environ["COMFYUI_DIR"])
    sys.argv = sys.argv[:1]
    if not torch.cuda.is_available():
        from comfy.cli_args import args as options

        options.cpu = options.use_pytorch_cross_attention = True
    import comfy.model_management
    import comfy.sd

    device = comfy.model_management.get_torch_device()
    of = NARROW if args.tiny else SDXL
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    model = comfy.sd.load_diffusion_model_state_dict(weights(of, dtype, device))
    with torch.inference_mode():
        draw = drawing(MAKE[args.child](model), args, of)
        first, latent = seconds(draw)
        rounds = [seconds(draw)[0] for _ in range(args.rounds)]
    torch.save(latent, args.folder / "latent.pt")
    found = {
        "first_s": round(first, 3),
        "round_s": round(statistics.median(rounds), 4),
        "step_ms": round(statistics.median(rounds) / args.steps * 1e3, 3),
        "samples_ms": [round(each / args.steps * 1e3, 3) for each in rounds],
        "model": type(model.model).__name__,
        "dtype": str(model.model.get_dtype()),
    }
    if device.type == "cuda":
        found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
    if args.child == "strop":
        from comfyui.compiled_model import compiled_for

        found["report"] = compiled_for(model.model).report()
    (args.folder / "found.json").write_text(json.dumps(found))


def run_way(way: str, args: argparse.Namespace, caches: Path) -> dict[str, Any]:
    """Return what a process of its own has found, or its last words."""
    with tempfile.TemporaryDirectory() as folder:
        words = [__file__, "--child", way, "--folder", folder, *(["--tiny"] if args.tiny else [])]
        for name in ("size", "steps", "rounds"):
            words += [f"--{name}", str(getattr(args, name))]
        env = os.environ | {name: str(caches / place) for name, place in CACHES.items()}
        done = subprocess.run(
            [sys.executable, *words], env=env, capture_output=True, text=True, check=False
        )
        if done.returncode:
            return {"failed": (done.stderr or done.stdout)[-2000:]}
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
        latent = torch.load(Path(folder) / "latent.pt", weights_only=True)
        return found | {"latent": latent}


def decibels(found: Tensor, expected: Tensor) -> float:
    """Return the signal of a latent to its error, over the range of what was expected."""
    error = (found.double() - expected.double()).square().mean().sqrt()
    span = expected.max() - expected.min()
    return float(20 * torch.log10(span / error.clamp_min(1e-30)))


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Return the times of all ways, ``strop`` twice: the second time what it compiled is there."""
    ways: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as caches:
        for way in args.ways:
            ways[way] = run_way(way, args, Path(caches))
            print(way, {k: v for k, v in ways[way].items() if k != "latent"}, flush=True)
            if way == "strop":
                again = run_way(way, args, Path(caches))
                ways[way]["cached_first_s"] = again.get("first_s")
    latents = {way: found.pop("latent") for way, found in ways.items() if "latent" in found}
    if "plain" in latents:
        for way in latents.keys() - {"plain"}:
            ways[way]["db"] = round(min(decibels(latents[way], latents["plain"]), 999.0), 1)
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", type=lambda text: text.split(","), default=[*WAYS])
    parser.add_argument("--size", type=int, help="pixels along a side [1024; tiny: 128]")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.size = args.size or (128 if args.tiny else 1024)
    if unknown := set(args.ways) - set(WAYS):
        parser.error(f"--ways knows {', '.join(WAYS)}, not {', '.join(sorted(unknown))}")
    if not Path(os.environ.get("COMFYUI_DIR", ""), "comfy").is_dir():
        parser.error("COMFYUI_DIR names no checkout of ComfyUI")
    if args.child:
        run_child(args)
        return
    ways = measured(args)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = {
        "kind": "comfyui_step",
        "environment": environment.describe(device),
        **{name: getattr(args, name) for name in ("size", "steps", "rounds", "tiny")},
        "ways": ways,
    }
    if args.out:
        report.write_json(result, args.out)
    bad = [way for way, found in ways.items() if "failed" in found]
    if "strop" in ways and ways["strop"].get("db", LEAST_DB) < LEAST_DB:
        bad.append("strop: other latents")
    if bad:
        sys.exit(f"failed: {', '.join(bad)}")


if __name__ == "__main__":
    main()
