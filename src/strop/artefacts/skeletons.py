"""Make a pipeline from its configuration, with weights that nobody has written to.

Weights get the sizes and types that ``from_pretrained`` would give them. Their memory is asked for
and never touched, so that a model of many GB takes next to none.

``presets`` holds the configurations of well-known models, with tokenizers that know the empty text
alone.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from strop.errors import OptionError

_PRESETS = Path(__file__).with_name("presets")
PRESETS = ("sd15", "sdxl", "flux")
_INDEX = "model_index.json"
# Checks of pictures that nobody has drawn
_LEFT_OUT = ("safety_checker", "feature_extractor")


def model_folder(model: str) -> Path:
    """Return where the configuration of a model lies, which is a preset's name or a folder."""
    return _PRESETS / model if model in PRESETS else Path(model)


def usual_dtype(folder: Path) -> torch.dtype:
    """Return the type of weights that a model mostly has on a GPU: bf16 for transformers, some of
    which go beyond the range of fp16."""
    return torch.bfloat16 if "transformer" in _index_of(folder) else torch.float16


def pipeline_of(folder: Path, dtype: torch.dtype) -> Any:
    """Make the pipeline that a diffusers folder describes. No weights need be there.

    Raises OptionError for a folder that describes none.
    """
    import diffusers

    index = _index_of(folder)
    kind = getattr(diffusers, str(index["_class_name"]), None)
    if kind is None:
        raise OptionError(
            f"{folder / _INDEX} names a {index['_class_name']}, which diffusers"
            f" {diffusers.__version__} does not have"
        )
    parts: dict[str, Any] = {}
    for name, value in index.items():
        if name.startswith("_"):
            continue
        is_part = isinstance(value, list) and len(value) == 2
        parts[name] = _part(folder / name, value, dtype) if is_part else value
    pipe = kind(**parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _index_of(folder: Path) -> Mapping[str, Any]:
    try:
        index = json.loads((folder / _INDEX).read_text())
    except (OSError, ValueError) as error:
        raise OptionError(
            f"{folder} is no model that can be built: its {_INDEX} cannot be read ({error}). Give"
            f" {', '.join(PRESETS)}, or a folder that pipe.save_pretrained has written; it needs no"
            " weights"
        ) from error
    if not isinstance(index, dict) or "_class_name" not in index:
        raise OptionError(f"{folder / _INDEX} does not name the class of a pipeline")
    return index


def _part(folder: Path, named: list[Any], dtype: torch.dtype) -> Any:
    """Make a component, which the index names by its library and class."""
    library, class_name = named
    if class_name is None or folder.name in _LEFT_OUT:
        return None
    try:
        kind = getattr(importlib.import_module(str(library)), str(class_name))
    except (ImportError, AttributeError) as error:
        raise OptionError(f"{folder} is a {library}.{class_name}, which is not there") from error
    if not issubclass(kind, nn.Module):
        return kind.from_pretrained(folder)
    with _without_memory(dtype):
        if hasattr(kind, "load_config"):  # diffusers'
            module = kind.from_config(kind.load_config(folder))
        else:
            module = kind._from_config(kind.config_class.from_pretrained(folder), dtype=dtype)
    _give_memory(module, dtype)
    if hasattr(module, "tie_weights"):  # transformers': some layers share a weight
        module.tie_weights()
    return module.eval()


def _give_memory(module: nn.Module, dtype: torch.dtype) -> None:
    """Put weights with memory in the place of those without."""
    kept = _kept_in_fp32(module, dtype)
    for path, part in module.named_modules():
        for name, weight in part._parameters.items():
            if weight is not None and weight.is_meta:
                is_kept = not kept.isdisjoint([*path.split("."), name])
                memory = torch.empty_like(
                    weight, device="cpu", dtype=torch.float32 if is_kept else None
                )
                part._parameters[name] = nn.Parameter(memory, requires_grad=weight.requires_grad)


def _kept_in_fp32(module: nn.Module, dtype: torch.dtype) -> set[str]:
    """Return the names of parts that ``from_pretrained`` leaves in fp32: transformers does so for
    some in fp16 alone."""
    if dtype == torch.float32:
        return set()
    names = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16 or hasattr(module, "load_config"):
        names |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
    return names


@contextmanager
def _without_memory(dtype: torch.dtype) -> Iterator[None]:
    """Make weights of a type without memory; buffers get theirs, as they hold what is computed."""
    from accelerate import init_empty_weights

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with init_empty_weights(include_buffers=False):
            yield
    finally:
        torch.set_default_dtype(before)
