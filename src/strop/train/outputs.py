"""The trained model, as a diffusers folder or as LoRA files."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from strop.errors import TrainingError
from strop.train import files, lora
from strop.train.model import Model
from strop.train.settings import Settings

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_INDEX = "model_index.json"


def save(settings: Settings, model: Model) -> None:
    """Write the weights that the modules have now into the output folder."""
    dtype = _DTYPES[settings.save_precision]
    _check_finite(model, dtype)
    if settings.task == "lora":
        lora.save(settings, model, settings.output, dtype)
    else:
        _save_pipeline(settings.output, model, dtype)


def _save_pipeline(output: Path, model: Model, dtype: torch.dtype) -> None:
    """Every part of the model it started from; what no training changes is copied.

    ``model_index.json`` comes last: a folder that has it is complete.
    """
    index = json.loads((model.folder / _INDEX).read_text(encoding="utf-8"))
    fresh = output / f"model{files.PART}"
    shutil.rmtree(fresh, ignore_errors=True)
    parts = [name for name, kind in index.items() if isinstance(kind, list) and kind[0]]
    for name in parts:
        _save_part(model, name, fresh / name, dtype)
    (output / _INDEX).unlink(missing_ok=True)
    for name in parts:
        files.publish(fresh / name, output / name)
    shutil.rmtree(fresh)
    files.write_json(output / _INDEX, index)


def _save_part(model: Model, name: str, folder: Path, dtype: torch.dtype) -> None:
    if name in model.modules:
        part: Any = nn.Module.to(copy.deepcopy(model.modules[name]), "cpu", dtype)
        part.save_pretrained(folder, safe_serialization=True)
        for file in folder.iterdir():
            file.chmod(0o644)  # safetensors lets nobody else read
    elif name == "scheduler":
        scheduler = model.scheduler
        config = type(scheduler).from_config(scheduler.config, prediction_type=model.prediction)
        config.save_pretrained(folder)
    else:
        shutil.copytree(model.folder / name, folder)


def _check_finite(model: Model, dtype: torch.dtype) -> None:
    for part, module in model.modules.items():
        for name, tensor in module.named_parameters():
            if not bool(torch.isfinite(tensor.detach().to(dtype)).all()):
                raise TrainingError(
                    f"{part}.{name} is not finite in {dtype}; use --save_precision fp32, or train "
                    "again with a lower rate"
                )
