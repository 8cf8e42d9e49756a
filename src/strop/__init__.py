"""Strop is a compiler and runtime that makes PyTorch diffusion models fast."""

from typing import TYPE_CHECKING, Any

from strop.options import Options

if TYPE_CHECKING:
    from strop import train
    from strop.api import (
        changing,
        explain,
        load,
        lora_rows,
        optimize,
        pattern,
        restore,
        save,
        warmup,
    )

__version__ = "0.1.0"

__all__ = [
    "Options",
    "__version__",
    "changing",
    "explain",
    "load",
    "lora_rows",
    "optimize",
    "pattern",
    "restore",
    "save",
    "train",
    "warmup",
]
_OF_API = {*__all__} - {"Options", "__version__", "train"}


def __getattr__(name: str) -> Any:
    """Import torch when something needs it: ``strop --help`` does not."""
    if name == "train":
        import importlib

        return importlib.import_module("strop.train")
    if name not in _OF_API:
        raise AttributeError(f"module 'strop' has no attribute {name!r}")
    from strop.dispatch.gc_pause import collection_paused

    with collection_paused():  # torch leaves a lot to walk over, a quarter of a second
        from strop import api

    return getattr(api, name)
