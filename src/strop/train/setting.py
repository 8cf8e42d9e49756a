"""Define one setting of a training: the metadata of a dataclass field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

TASKS = ("text-to-image", "dreambooth", "lora", "controlnet")
TRAINERS = ("text-to-image", "lora", "controlnet")  # tasks that read folders with captions
CONTROL = ("controlnet",)
FROZEN = ("lora", "controlnet")  # tasks that train beside a frozen UNet or transformer
SLOTS = 2  # for blocks on the device whose weights lie in the host's memory
SUBJECTS = ("dreambooth", "lora")  # tasks that read folders of one subject
SPRITES = "sprites"
SPRITES_DIT = "sprites-dit"


def setting(
    default: Any,
    kind: type,
    panel: str,
    doc: str,
    *,
    tasks: tuple[str, ...] = TASKS,
    alias: str = "",
    choices: tuple[str, ...] = (),
    least: float | None = None,
    above: float | None = None,
    fixed: bool = False,
    per_task: Mapping[str, Any] | None = None,
) -> Any:
    """Declare a setting. ``fixed``: a resumed training must have the same value. ``least`` is the
    smallest value; ``above``: it is smaller than all."""
    metadata = {
        "kind": kind,
        "panel": panel,
        "doc": doc,
        "tasks": tasks,
        "alias": alias,
        "choices": choices,
        "least": least,
        "above": above,
        "fixed": fixed,
        "per_task": per_task or {},
    }
    return field(default=default, metadata=metadata)
