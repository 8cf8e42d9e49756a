"""Draw latents with the UNet of A1111's checkout, with and without the extension: run by a test, in
a process of its own, with the original code's folder (``ldm``) in PYTHONPATH.

The UNet, A1111's ``modules/sd_unet.py`` and its changes to the UNet (``sd_hijack_utils``) are the
checkout's own. LoRA in layers, the page and what calls scripts are the stand-in's.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.webui import stand_in
from tests.webui.conftest import loaded

SHAPE = {
    "image_size": 8, "in_channels": 4, "out_channels": 4, "model_channels": 64,
    "attention_resolutions": [1, 2], "num_res_blocks": 1, "channel_mult": [1, 2], "num_heads": 4,
    "use_spatial_transformer": True, "transformer_depth": 1, "context_dim": stand_in.PROMPT,
    "use_checkpoint": False, "legacy": False,
}  # fmt: skip


def module_of(checkout: Path, name: str) -> Any:
    """Load one of the files of A1111's ``modules``, beside the stand-ins of the others."""
    spec = importlib.util.spec_from_file_location(
        f"modules.{name}", checkout / "modules" / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[f"modules.{name}"] = module
    setattr(sys.modules["modules"], name, module)
    spec.loader.exec_module(module)
    return module


def started(checkout: Path) -> stand_in.WebUi:
    """Return a web UI whose UNet and whose interface for one are the checkout's."""
    ui = stand_in.WebUi(is_forge=False)
    sys.modules.update(ui.modules)
    ui.sd_unet = module_of(checkout, "sd_unet")
    hijack = module_of(checkout, "sd_hijack_utils").CondFunc
    from ldm.modules.diffusionmodules import openaimodel

    kind = openaimodel.UNetModel
    kind.forward = ui.sd_unet.create_unet_forward(kind.forward)
    name = "ldm.modules.diffusionmodules.openaimodel.timestep_embedding"
    hijack(name, lambda original, *args, **kwargs: original(*args, **kwargs).to(torch.float32))
    for layer, torchs in stand_in.KINDS.items():
        torchs.forward = getattr(ui.networks, f"network_{layer}_forward")
    torch.manual_seed(0)
    unet = kind(**SHAPE).eval().requires_grad_(False)
    for number, value in enumerate(unet.parameters()):  # some are zeros before training
        if not value.any():
            value.copy_(random(*value.shape, seed=number, scale=0.05))
    ui.shared.sd_model = stand_in.LdmModel(unet)
    return ui


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def put_lora(ui: stand_in.WebUi, *seeds: int) -> None:
    found = []
    for seed in seeds:
        deltas = {}
        for n, (name, part) in enumerate(ui.shared.sd_model.model.diffusion_model.named_modules()):
            if name.endswith(("to_q", "to_v", "in_layers.2")):
                rows, columns = part.weight.flatten(1).shape
                parts = random(rows, 2, seed=n, scale=0.2), random(2, columns, seed=seed, scale=0.2)
                deltas[name.replace(".", "_")] = parts
        found.append(stand_in.Network(f"lora{seed}", deltas))
    ui.networks.loaded_networks[:] = found


def main() -> None:
    ui = started(Path(sys.argv[1]))
    script = loaded("strop_optimize").StropScript()
    errors, lines = [], set()
    for seeds in ((), (1,), (2,), (1, 2), ()):
        put_lora(ui, *seeds)
        for size, batch in (((8, 8), 1), ((8, 12), 2), ((14, 8), 1)):
            how: dict[str, Any] = {"size": size, "batch": batch}
            (plain,) = stand_in.process_images(stand_in.Picture(ui, **how))
            p = stand_in.Picture(ui, **how)
            (fast,) = stand_in.process_images(p, script)
            span = float(plain.max() - plain.min())
            errors.append(float((fast - plain).square().mean().sqrt()) / span)
            lines.update(p.comments)
    unets = sys.modules["strop_webui.compiled_unet"]
    compiled = unets._OF_OWNERS[ui.shared.sd_model].module.forward
    result = {
        "worst": max(errors), "pictures": len(errors), "lines": sorted(lines),
        "graphs": len(compiled.variants.all), "eager": compiled.counters.eager_calls,
        "finite": all(e == e for e in errors), "restored": ui.sd_unet.current_unet is None,
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
