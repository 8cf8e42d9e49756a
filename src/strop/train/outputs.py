"""Write the trained model or ControlNet as a diffusers folder, or adapters as LoRA files."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from strop.errors import TrainingError
from strop.train import controlnet, files, lora
from strop.train.model import DiffusionModel
from strop.train.settings import Settings

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_INDEX = "model_index.json"


def save(settings: Settings, model: DiffusionModel) -> None:
    """Write the weights that the modules have now into the output folder."""
    dtype = _DTYPES[settings.save_precision]
    for part in model.parts(settings):
        named = model.modules[part].named_parameters()
        _check_finite(part, ((name, p) for name, p in named if p.requires_grad), dtype)
    if settings.task == "lora":
        lora.save(settings, model, settings.output, dtype)
    elif settings.task == "controlnet":
        with files.writing(settings.output):
            controlnet.save(_on_cpu(model.modules[controlnet.PART], dtype), settings.output)
    else:
        with files.writing(settings.output):
            _save_pipeline(settings, model, dtype)


def _save_pipeline(settings: Settings, model: DiffusionModel, dtype: torch.dtype) -> None:
    """Save every part of the model it started from; what no training changes is copied.

    ``model_index.json`` comes last: a folder that has it is complete.
    """
    output = settings.output
    index = json.loads((model.folder / _INDEX).read_text(encoding="utf-8"))
    fresh = output / f"model{files.PART}"
    shutil.rmtree(fresh, ignore_errors=True)
    parts = [name for name, kind in index.items() if isinstance(kind, list) and kind[0]]
    for name in parts:
        _save_part(settings, model, name, fresh / name, dtype)
    (output / _INDEX).unlink(missing_ok=True)
    for name in parts:
        files.publish(fresh / name, output / name)
    shutil.rmtree(fresh)
    files.write_json(output / _INDEX, index)


def _save_part(
    settings: Settings, model: DiffusionModel, name: str, folder: Path, dtype: torch.dtype
) -> None:
    if name in model.modules:
        is_trained = name in model.trained(settings)
        part = _on_cpu(model.modules[name], dtype) if is_trained else _untrained(model, name, dtype)
        part.save_pretrained(folder, safe_serialization=True)
        for file in folder.iterdir():
            file.chmod(0o644)  # safetensors lets nobody else read
    elif name == "scheduler":
        model.pipeline.scheduler.save_pretrained(folder)
    else:
        shutil.copytree(model.folder_of(name), folder)


def _on_cpu(module: nn.Module, dtype: torch.dtype) -> Any:
    """Return a copy, for which a GPU needs no memory."""
    weights = {
        id(p): nn.Parameter(p.detach().to("cpu", dtype), requires_grad=False)
        for p in module.parameters()
    }
    return nn.Module.to(copy.deepcopy(module, weights), "cpu", dtype)


def _untrained(model: DiffusionModel, name: str, dtype: torch.dtype) -> Any:
    """Load a part from where it came from: mixed precision has rounded the one in memory."""
    part = type(model.modules[name]).from_pretrained(  # type: ignore[attr-defined]
        model.folder_of(name),
        dtype=torch.float32,
        use_safetensors=True,
        local_files_only=True,
    )
    _check_finite(name, part.named_parameters(), dtype)
    return nn.Module.to(part, dtype)


def _check_finite(part: str, named: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> None:
    for name, tensor in named:
        if not bool(torch.isfinite(tensor.detach().to(dtype)).all()):
            raise TrainingError(
                f"{part}.{name} is not finite in {dtype}; use --save_precision fp32, or train "
                "again with a lower rate"
            )
