"""Hold a pipeline in which a benchmark changes things, and what a user gives it and loads into
it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strop.bench.models import made_on, random_tensor
from strop.bench.pipelines.parts import image_processor
from strop.bench.pipelines.stable import ip_adapter_state
from strop.bench.wait_models import WaitModel

Given = dict[str, Any]  # arguments of a call
State = dict[str, Tensor]
PICTURED = 1024  # channels of a picture's embedding, as CLIP's ViT-H makes them
_ROWS_SHOWN = 4  # that an IP-Adapter makes of such an embedding
_FLUX_WORDS = 512


@dataclass
class Scene:
    """Hold a pipeline and how it is called. ``pipe`` draws the next picture: with a ControlNet it
    is another one than before. ``is_swapping``: whether another LoRA is swapped into the place of
    the last; ``compile`` is then what is done once the first is there. ``adopt``: what is done to a
    ControlNet that joins."""

    model: WaitModel
    is_tiny: bool
    device: torch.device
    dtype: torch.dtype
    steps: int
    rank: int
    pipe: Any
    is_swapping: bool = False
    compile: Callable[[], object] = bool
    adopt: Callable[[Any], object] = id

    @staticmethod
    def of(
        model: WaitModel, device: torch.device, *, is_tiny: bool, steps: int, rank: int
    ) -> Scene:
        dtype = model.dtype if device.type == "cuda" else torch.float32
        pipe = model.build(is_tiny, device, dtype)
        pipe.register_modules(feature_extractor=image_processor())  # loaders look for one
        return Scene(model, is_tiny, device, dtype, steps, rank, pipe)

    @property
    def denoiser(self) -> Any:
        return getattr(self.pipe, self.model.denoiser)

    @property
    def is_flux(self) -> bool:
        return self.model.denoiser == "transformer"

    def draw(self, **more: Any) -> Tensor:
        """Draw as a user does; ``more`` are arguments of this call."""
        height, width = self.model.sizes(self.is_tiny)[0]
        given: Given = {
            "height": height,
            "width": width,
            "num_inference_steps": self.steps,
            "generator": torch.Generator().manual_seed(0),
            "output_type": "pt",
        }
        found: Tensor = self.pipe(**(self.prompts(1) | given | more)).images
        return found

    def prompts(self, count: int) -> Given:
        """Return arguments of a call: what is to be seen in each of some pictures."""
        if not self.is_flux:
            return {"prompt": ["a red circle above a blue square"] * count}
        config, words = self.denoiser.config, 7 if self.is_tiny else _FLUX_WORDS
        return {
            "prompt_embeds": self.random(count, words, config.joint_attention_dim, seed=2),
            "pooled_prompt_embeds": self.random(count, config.pooled_projection_dim, seed=2),
        }

    def random(self, *shape: int, seed: int = 1) -> Tensor:
        return random_tensor(shape, self.device, self.dtype, seed)


def lora(scene: Scene, seed: int) -> State:
    """Return what a file of diffusers holds: two factors for each adapted layer."""
    torch.manual_seed(seed)
    found: State = {}
    for name, part in scene.denoiser.named_modules():
        weight = getattr(part, "weight", None)
        if not name.endswith(scene.model.adapted) or not isinstance(weight, Tensor):
            continue
        start, (rows, columns, *window) = f"{scene.model.denoiser}.{name}", weight.shape
        first, second = (scene.rank, columns, *window), (rows, scene.rank, *(1 for _ in window))
        for key, shape in (("lora_A", first), ("lora_B", second)):
            found[f"{start}.{key}.weight"] = (torch.randn(shape) / 50).to(scene.dtype)
    return found


def checkpoint(scene: Scene) -> State:
    return {name: value * 0.9 for name, value in scene.denoiser.state_dict().items()}


def controlnet(scene: Scene) -> Any:
    with made_on(scene.device, scene.dtype):
        return scene.model.net(scene.denoiser, scene.is_tiny).eval().requires_grad_(False)


def with_controlnet(scene: Scene, net: Any) -> Any:
    """Return a pipeline of the same parts with a ControlNet."""
    kind: Any = getattr(importlib.import_module("diffusers"), scene.model.control)
    made = kind.from_pipe(scene.pipe, controlnet=net, dtype=scene.dtype)
    made.set_progress_bar_config(disable=True)
    return made


def control_picture(scene: Scene) -> Given:
    name = "control_image" if scene.is_flux else "image"
    return {name: scene.random(1, 3, *scene.model.sizes(scene.is_tiny)[0], seed=4).sigmoid()}


def ip_adapter(scene: Scene) -> dict[str, State]:
    """Return what a file of an IP-Adapter holds."""
    if scene.is_flux:
        return {"image_proj": _flux_projection(scene), "ip_adapter": _flux_layers(scene)}
    made = ip_adapter_state(scene.denoiser, pictured=PICTURED)
    return {
        part: {key: value.to(scene.dtype) for key, value in values.items()}
        for part, values in made.items()
    }


def _flux_projection(scene: Scene) -> State:
    width = scene.denoiser.config.joint_attention_dim
    rows = _ROWS_SHOWN * width
    return {
        "proj.weight": scene.random(rows, PICTURED),
        "proj.bias": scene.random(rows),
        "norm.weight": scene.random(width),
        "norm.bias": scene.random(width),
    }


def _flux_layers(scene: Scene) -> State:
    config, rows = scene.denoiser.config, scene.denoiser.inner_dim
    found: State = {}
    for number in range(config.num_layers):
        for part in ("to_k_ip", "to_v_ip"):
            found[f"{number}.{part}.weight"] = scene.random(rows, config.joint_attention_dim) / 50
            found[f"{number}.{part}.bias"] = scene.random(rows)
    return found


def picture_shown(scene: Scene) -> Given:
    """Return arguments of a call: the embedding of the picture that an IP-Adapter is shown."""
    if not scene.is_flux:
        return {"ip_adapter_image_embeds": [scene.random(2, 1, PICTURED, seed=3)]}
    one = [scene.random(1, 1, PICTURED, seed=3)]
    return {"ip_adapter_image_embeds": one, "negative_ip_adapter_image_embeds": one}
