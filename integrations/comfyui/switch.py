"""Have every model that ComfyUI loads run compiled, without a node, if the user wants that.

The environment variable COMFYUI_STROP=1 turns it on when ComfyUI starts. Then this stands before
three functions of ComfyUI's: the one that collects a clone's wrappers before a sampling, and those
that make a ``VAE`` and a ``CLIP``.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from comfy.patcher_extension import WrappersMP

from .compiled_model import KEY, compiled_for, is_off
from .parts import CompiledText, CompiledVae, stand_in_for

log = logging.getLogger("strop.comfyui")
VARIABLE = "COMFYUI_STROP"


def install_if_wanted() -> None:
    """Raises ValueError for a value that says neither yes nor no."""
    value = os.environ.get(VARIABLE, "0")
    if value not in ("0", "1", ""):
        raise ValueError(f"{VARIABLE}={value!r}: it takes 1 to compile every model, or 0")
    if value == "1":
        install()
        log.info("Strop compiles every model that is loaded (%s=1)", VARIABLE)


def install() -> None:
    """Stand before ComfyUI's functions. Doing so twice is the same as once."""
    import comfy.sampler_helpers
    import comfy.sd

    helpers = comfy.sampler_helpers
    if hasattr(helpers.prepare_model_patcher, "__wrapped__"):
        return
    helpers.prepare_model_patcher = _with_wrapper(helpers.prepare_model_patcher)
    comfy.sd.VAE.__init__ = _with_stand_in(comfy.sd.VAE.__init__, "first_stage_model", CompiledVae)
    comfy.sd.CLIP.__init__ = _with_stand_in(
        comfy.sd.CLIP.__init__, "cond_stage_model", CompiledText
    )


def _with_wrapper(prepare: Any) -> Any:
    @functools.wraps(prepare)
    def prepared(model: Any, conds: Any, model_options: dict[str, Any]) -> Any:
        found = prepare(model, conds, model_options)
        if not is_off(model):
            wrappers = model_options["transformer_options"].setdefault("wrappers", {})
            own = wrappers.setdefault(WrappersMP.DIFFUSION_MODEL, {})
            own.setdefault(KEY, [compiled_for(model.model)])
        return found

    return prepared


def _with_stand_in(make: Any, name: str, kind: Any) -> Any:
    @functools.wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if getattr(self, name, None) is not None:  # not so for a clone, and for a file without one
            setattr(self, name, stand_in_for(self.patcher, kind, getattr(self, name)))

    return made
