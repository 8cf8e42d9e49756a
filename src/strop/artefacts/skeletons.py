"""Make a pipeline from its configuration, with weights that nobody has written to.

Weights get the sizes and types that ``from_pretrained`` would give them. Their memory is asked for
and never touched, so that a model of many GB takes next to none.
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

_INDEX = "model_index.json"
# Checks of pictures that nobody has drawn
_LEFT_OUT = ("safety_checker", "feature_extractor")


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
            f"{folder} is no model that can be built: its {_INDEX} cannot be read ({error}). Give a"
            " folder that pipe.save_pretrained has written; it needs no weights"
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
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None and weight.is_meta:
                memory = torch.empty_like(weight, device="cpu")
                part._parameters[name] = nn.Parameter(memory, requires_grad=weight.requires_grad)
    return module.eval()


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
