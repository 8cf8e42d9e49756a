"""Draw latents with Forge's own backend, with and without the extension: run by a test, in a
process of its own, with a checkout of Forge in PYTHONPATH.

The backend's UNet, its operations, its LoRA loader and its sampling function are Forge's own. The
page and what calls scripts are not: they are the stand-in's.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

sys.argv = [sys.argv[0], "--always-cpu", "--attention-pytorch"]  # Forge reads them on import

from backend.modules.k_model import KModel  # noqa: E402
from backend.nn.unet import IntegratedUNet2DConditionModel  # noqa: E402
from backend.operations import using_forge_operations  # noqa: E402
from backend.patcher.unet import UnetPatcher  # noqa: E402
from backend.sampling.condition import ConditionCrossAttn  # noqa: E402
from backend.sampling.sampling_function import sampling_function_inner  # noqa: E402

from tests.webui import stand_in  # noqa: E402
from tests.webui.conftest import loaded  # noqa: E402

CPU = torch.device("cpu")
SHAPE = {
    "in_channels": 4, "model_channels": 64, "out_channels": 4, "num_res_blocks": 1,
    "channel_mult": (1, 2), "num_heads": 4, "use_spatial_transformer": True,
    "transformer_depth": [1, 1], "transformer_depth_middle": 1,
    "transformer_depth_output": [1, 1, 1, 1], "context_dim": 48,
}  # fmt: skip


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def unet_patcher() -> Any:
    """Return a small UNet of the kind of SD1.5's with random weights, as Forge holds it."""
    with using_forge_operations(device=CPU, dtype=torch.float32):
        unet = IntegratedUNet2DConditionModel(**SHAPE)
    shapes = reference_shapes()
    state = {
        name: torch.ones(shape) if len(shape) == 1 and "weight" in name
        else random(*shape, seed=n, scale=0.5 / max(1, torch.Size(shape[1:]).numel()) ** 0.5)
        for n, (name, shape) in enumerate(shapes.items())
    }  # fmt: skip
    unet.load_state_dict(state)
    unet.eval().requires_grad_(False)
    unet.storage_dtype = unet.computation_dtype = unet.dtype = torch.float32
    predictor = SimpleNamespace(
        calculate_input=lambda sigma, x: x / (sigma.view(-1, 1, 1, 1) ** 2 + 1).sqrt(),
        timestep=lambda sigma: sigma * 100,
        calculate_denoised=lambda sigma, out, x: x - out * sigma.view(-1, 1, 1, 1),
    )
    model = KModel(unet, None, k_predictor=predictor)
    return UnetPatcher(model, load_device=CPU, offload_device=CPU, current_device=CPU)


def reference_shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of this UNet. Forge's own layers have none before they are loaded."""
    unet = IntegratedUNet2DConditionModel(**SHAPE)
    return {name: tuple(value.shape) for name, value in unet.state_dict().items()}


class Control:
    """Stands where Forge's ControlNet does, and gives the lists that its UNet adds and empties."""

    previous_controlnet = None
    transformer_options: Any = None

    def get_control(self, x: Tensor, *_: Any) -> dict[str, list[Any]]:
        b, _, h, w = x.shape
        small = random(b, 128, (h + 1) // 2, (w + 1) // 2, seed=4)
        output = [random(b, 64, h, w, seed=5), None, small]  # the UNet takes the last one first
        return {"input": [None], "middle": [small], "output": output}


class Engine:
    """Stands where Forge's engine does. Its sampling function is Forge's."""

    def __init__(self, patcher: Any) -> None:
        self.forge_objects = SimpleNamespace(unet=patcher)

    def denoised(self, p: stand_in.Picture, x: Tensor, t: Tensor, context: Tensor) -> Tensor:
        conds = []
        for prompt in context.chunk(2):
            held = {"c_crossattn": ConditionCrossAttn(random(1, 7, 48, seed=int(prompt.sum() > 0)))}
            conds.append({"model_conds": held} | ({"control": p.control} if p.control else {}))
        patcher, size = self.forge_objects.unet, len(x) // 2
        _, wanted, unwanted = sampling_function_inner(
            patcher.model, x[:size], t[:size] / 1000 + 0.5, [conds[1]], [conds[0]], 5.0,
            patcher.model_options, return_full=True,
        )  # fmt: skip
        return torch.cat([wanted, unwanted])


def lora(patcher: Any, *seeds: int) -> None:
    """Have Forge's loader put LoRAs into the model."""
    patches: dict[Any, Any] = {}
    for seed in seeds:
        found = {}
        for n, (name, value) in enumerate(patcher.model.state_dict().items()):
            if name.endswith(("to_q.weight", "to_v.weight", "in_layers.2.weight")):
                rows, columns = value.flatten(1).shape
                parts = random(rows, 2, seed=n, scale=0.2), random(2, columns, seed=seed, scale=0.2)
                found[name] = [(1.0, ("lora", (*parts, 2.0, None, None, None)), 1.0, None, None)]
        patches[f"lora{seed}", 1.0, 1.0, False] = found
    patcher.lora_loader.refresh(patches)


def main() -> None:
    ui = stand_in.WebUi(is_forge=True)
    for name, module in ui.modules.items():
        if name != "modules_forge":  # the checkout has it
            sys.modules[name] = module
    script = loaded("strop_optimize").StropScript()
    patcher = unet_patcher()
    ui.shared.sd_model = Engine(patcher)
    errors, lines = [], set()
    with torch.inference_mode():
        for control in (None, Control()):
            for seeds in ((), (1,), (2,), (1, 2), ()):
                lora(patcher, *seeds)
                for size, batch in (((8, 8), 1), ((8, 12), 2), ((14, 8), 1)):
                    how: dict[str, Any] = {"size": size, "batch": batch, "control": control}
                    (plain,) = stand_in.process_images(stand_in.Picture(ui, **how))
                    p = stand_in.Picture(ui, **how)
                    (fast,) = stand_in.process_images(p, script)
                    span = float(plain.max() - plain.min())
                    errors.append(float((fast - plain).square().mean().sqrt()) / span)
                    lines.update(p.comments)
    compiled = sys.modules["strop_webui.compiled_unet"]._OF_OWNERS[patcher.model].module.forward
    result = {
        "worst": max(errors), "pictures": len(errors), "lines": sorted(lines),
        "graphs": len(compiled.variants.all), "eager": compiled.counters.eager_calls,
        "finite": all(e == e for e in errors),
        "restored": "forward" not in vars(patcher.model.diffusion_model),
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
