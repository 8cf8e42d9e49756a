"""This says which modules of a pipeline are compiled, and which dispatchers it has."""

from __future__ import annotations

from typing import Any

from torch import nn

from strop.dispatch.dispatcher import Dispatcher
from strop.dispatch.features import forward_of

# Components that each step of a denoise loop calls. Wan 2.2 has a second transformer for the end.
DENOISERS = ("unet", "transformer", "transformer_2", "controlnet")
# component -> the modules in it whose forward does the work
COMPONENTS: dict[str, tuple[str, ...]] = {
    "text_encoder": ("",),
    "text_encoder_2": ("",),
    "text_encoder_3": ("",),
    "image_encoder": ("",),
    "adapter": ("",),
    **dict.fromkeys(DENOISERS, ("",)),
    "vae": ("encoder", "decoder"),
}


def parts_of(component: Any, name: str) -> dict[str, nn.Module]:
    """Return the modules of a component that are compiled, by the path a user would write."""
    found = {}
    for part in COMPONENTS.get(name, ()) if isinstance(component, nn.Module) else ():
        module = getattr(component, part, None) if part else component
        if isinstance(module, nn.Module):
            found[f"{name}.{part}" if part else name] = module
    return found


def modules_of(pipe: Any) -> dict[str, nn.Module]:
    """Return all components that are modules, by their names."""
    return {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}


def compiled_modules(pipe: Any) -> dict[str, nn.Module]:
    """Return the modules of a pipeline that are compiled, by the path a user would write."""
    held = pipe.components
    return {
        path: module
        for name in COMPONENTS
        for path, module in parts_of(held.get(name), name).items()
    }


def dispatcher_in(module: Any) -> Dispatcher | None:
    """Return the dispatcher that is the ``forward`` of a module, or stands inside of hooks that
    divide its tokens among processes."""
    own = forward_of(module) if isinstance(module, nn.Module) else None
    return own if isinstance(own, Dispatcher) and not own.has_left else None


def pipelines_dispatcher(module: Any) -> Dispatcher | None:
    """Return it if it is there because a pipeline was optimised, and not the module by itself."""
    own = dispatcher_in(module)
    return None if own is None or own.on_leave is None else own
