"""List what a user changes between two pictures, for ``benchmarks/waits.py``.

``CHANGES`` is the one list, a row a change, in the order in which they are timed. Those of a group
follow each other. Behind the last of a group no adapter is left, so that groups need no others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from strop.bench import wait_scene as scenes
from strop.bench.pipelines.actions_pipeline import scheduler_swapped
from strop.bench.wait_scene import Given, Scene

FIRST = "first"  # the group of the first picture, which runs begin with
LORA = "lora"


def _nothing(scene: Scene) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Change:
    """Describe a change. ``act`` is timed with the next picture; it gets what ``file`` has made
    before, as if it had been read already, and gives arguments for the pictures behind it."""

    name: str
    group: str
    act: Callable[[Scene, Any], Given | None]
    file: Callable[[Scene], Any] = _nothing


def other_size(scene: Scene, file: Any) -> Given:
    height, width = scene.model.sizes(scene.is_tiny)[1]
    return {"height": height, "width": width}


def two_pictures(scene: Scene, file: Any) -> Given:
    return scene.prompts(2)


def other_scheduler(scene: Scene, file: Any) -> None:
    scheduler_swapped(scene.pipe)


def load_checkpoint(scene: Scene, file: Any) -> None:
    scene.denoiser.load_state_dict(file)


def load_lora(name: str, scene: Scene, file: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")
        scene.pipe.load_lora_weights(file, adapter_name=name)


def load_first_lora(scene: Scene, file: Any) -> None:
    """Load a file; where others will be swapped into its place, the model is compiled then."""
    load_lora("one", scene, file)
    if scene.is_swapping:
        scene.compile()


def exchange_lora(scene: Scene, file: Any) -> None:
    """Swap another file into the place of the first where that is prepared; else unload that."""
    if scene.is_swapping:
        scene.pipe.load_lora_weights(file, adapter_name="one", hotswap=True)
        return
    scene.pipe.unload_lora_weights()
    load_lora("one", scene, file)


def add_lora(scene: Scene, file: Any) -> None:
    load_lora("two", scene, file)
    scene.pipe.set_adapters(["one", "two"], [0.8, 0.5])


def load_ip_adapter(scene: Scene, file: Any) -> Given:
    more: dict[str, Any] = {"subfolder": "", "weight_name": ""}
    encoder = "image_encoder_pretrained_model_name_or_path" if scene.is_flux else ""
    more[encoder or "image_encoder_folder"] = None
    scene.pipe.load_ip_adapter(file, **more)
    scene.pipe.set_ip_adapter_scale(0.7)
    return scenes.picture_shown(scene)


def scale_ip_adapter(scene: Scene, file: Any) -> Given:
    scene.pipe.set_ip_adapter_scale(0.2)
    return scenes.picture_shown(scene)


def add_controlnet(scene: Scene, file: Any) -> Given:
    scene.pipe = scenes.with_controlnet(scene, file)
    scene.adopt(file)
    return scenes.control_picture(scene)


def _on_pipe(name: str, *args: Any) -> Callable[[Scene, Any], None]:
    """Return an act that calls a method of the pipeline."""

    def act(scene: Scene, file: Any) -> None:
        getattr(scene.pipe, name)(*args)

    return act


def _a_lora(seed: int) -> Callable[[Scene], Any]:
    return partial(scenes.lora, seed=seed)


CHANGES: tuple[Change, ...] = (
    Change("the first picture", FIRST, lambda scene, file: None),
    Change("another size", "size", other_size),
    Change("two pictures", "batch", two_pictures),
    Change("another scheduler", "scheduler", other_scheduler),
    Change("another checkpoint", "checkpoint", load_checkpoint, scenes.checkpoint),
    Change("the first LoRA", LORA, load_first_lora, _a_lora(1)),
    Change("another scale", LORA, _on_pipe("set_adapters", ["one"], [0.4])),
    Change("another LoRA in its place", LORA, exchange_lora, _a_lora(2)),
    Change("a second LoRA beside it", LORA, add_lora, _a_lora(3)),
    Change("LoRA disabled", LORA, _on_pipe("disable_lora")),
    Change("LoRA enabled", LORA, _on_pipe("enable_lora")),
    Change("LoRA fused", LORA, _on_pipe("fuse_lora")),
    Change("LoRA unfused", LORA, _on_pipe("unfuse_lora")),
    Change("LoRA unloaded", LORA, _on_pipe("unload_lora_weights")),
    Change("an IP-Adapter", "ip-adapter", load_ip_adapter, scenes.ip_adapter),
    Change("its scale", "ip-adapter", scale_ip_adapter),
    Change("IP-Adapter unloaded", "ip-adapter", _on_pipe("unload_ip_adapter")),
    Change("a ControlNet", "controlnet", add_controlnet, scenes.controlnet),
)
GROUPS = tuple(dict.fromkeys(change.group for change in CHANGES))
