"""``enable_model_cpu_offload`` takes all models of a pipeline to the host, also at the end of each
picture. Compiled ones are let go of there instead of being copied (``dispatch.model_offload``)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from strop.diffusion.changes import Changes, in_force, mend
from strop.diffusion.denoise_loops import kinds
from strop.diffusion.parts import compiled_modules
from strop.dispatch.known_dispatchers import dispatcher_of
from strop.dispatch.model_offload import follow, known_offload

NAME = "enable_model_cpu_offload"


def offload_pinned(changes: Changes) -> None:
    """Have all pipelines do so."""
    for kind in kinds()[0]:
        if hasattr(kind, NAME):
            mend(kind, NAME)
            own = getattr(kind, NAME)
            changes.put([kind], NAME, functools.wraps(own)(_enabling(own)))


def _enabling(own: Callable[..., Any]) -> Callable[..., Any]:
    def enable_model_cpu_offload(pipe: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = compiled_modules(pipe).values() if in_force(enable_model_cpu_offload) else ()
        served = [d for d in map(dispatcher_of, compiled) if d is not None]
        for dispatcher in served:
            if (known := known_offload(dispatcher.component)) is not None:
                known.offload()
        result = own(pipe, *args, **kwargs)  # it removes all hooks, and sets new ones
        for dispatcher in served:
            follow(dispatcher.component, dispatcher)
        return result

    return enable_model_cpu_offload
