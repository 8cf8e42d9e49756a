"""Describe a tiny pipeline: a class of diffusers, its components, and the arguments of a call."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from strop.bench.pipelines.parts import Parts, stir

Given = dict[str, Any]
STEPS = 3


@dataclass(frozen=True, slots=True)
class TinyPipeline:
    """Describe one pipeline of diffusers. ``kind`` is its class. ``parts`` makes components,
    drawing weights from torch's generator; what the constructor needs besides is None. ``given``
    are arguments of a call beside those of ``arguments``; a value may be a function without
    arguments that makes it. ``needs`` are packages that diffusers wants for it."""

    name: str
    kind: str
    parts: Callable[[], Parts]
    given: Mapping[str, Any] = field(default_factory=dict)
    made_by: Callable[[Any], Any] | None = None  # what is done to it once it is built
    needs: tuple[str, ...] = ()

    def made(self, seed: int = 0) -> Any:
        """Build the pipeline, with the same weights for the same seed."""
        kind = getattr(importlib.import_module("diffusers"), self.kind)
        torch.manual_seed(seed)
        pipe = kind(**_filled(kind, self.parts()))
        for part in modules_of(pipe):
            stir(part.eval().requires_grad_(False))
        if self.made_by is not None:
            self.made_by(pipe)
        pipe.set_progress_bar_config(disable=True)
        return pipe


def modules_of(pipe: Any) -> list[nn.Module]:
    found: list[nn.Module] = []
    for part in pipe.components.values():
        found += [
            p for p in (part if isinstance(part, list) else [part]) if isinstance(p, nn.Module)
        ]
    return found


def _filled(kind: type, parts: Parts) -> Parts:
    """Fill in the constructor's arguments, with None for what has neither a part nor a default."""
    taken = dict(inspect.signature(kind).parameters)
    left_out = {
        name: None
        for name, p in taken.items()
        if name not in parts and p.default is p.empty and name not in ("args", "kwargs")
    }
    safe = {"requires_safety_checker": False} if "requires_safety_checker" in taken else {}
    return safe | left_out | parts


def arguments(case: TinyPipeline, pipe: Any, seed: int = 3) -> Given:
    """Return what every pipeline is given as far as it takes it: a prompt, pictures, sizes, three
    steps and a generator of this seed."""
    generator = torch.Generator().manual_seed(seed)
    picture = torch.rand(1, 3, 16, 16, generator=generator)
    usual: Given = {
        "prompt": "a red cat",
        "negative_prompt": "blue",
        "height": 16,
        "width": 16,
        "num_inference_steps": STEPS,
        "image": picture,
        "num_frames": 5,
        "generator": generator,
        "mask_image": (picture[:, :1] > 0.5).float(),
        "control_image": picture,
        "guidance_scale": 4.0,
        "output_type": "pt",
    }
    taken = inspect.signature(pipe.__call__).parameters
    wanted = {name: value for name, value in usual.items() if name in taken}
    own = {
        name: value() if callable(value) else value
        for name, value in case.given.items()
        if name in taken or name not in usual
    }
    return {name: value for name, value in (wanted | own).items() if value is not LEFT_OUT}


LEFT_OUT = object()  # in ``given``: an argument that the pipeline is not to get


def takes(pipe: Any, name: str) -> bool:
    """Tell whether a call has an argument of this name."""
    return name in inspect.signature(pipe.__call__).parameters


def drawn(case: TinyPipeline, pipe: Any, seed: int = 3, **more: Any) -> list[Tensor]:
    """Return the tensors of what one call gives. Some pipelines draw from torch's own generator,
    too."""
    torch.manual_seed(seed)
    with torch.no_grad():
        found = pipe(**(arguments(case, pipe, seed) | more))
    return tensors_of(found)


def tensors_of(found: Any) -> list[Tensor]:
    """Return all arrays and tensors in a pipeline's output, in order."""
    if isinstance(found, Tensor):
        return [found]
    if hasattr(found, "__array__") and not isinstance(found, str | bytes):
        return [torch.as_tensor(found)]
    values = found.values() if isinstance(found, Mapping) else found
    if not isinstance(values, str | bytes) and hasattr(values, "__iter__"):
        return [tensor for value in values for tensor in tensors_of(value)]
    return []
