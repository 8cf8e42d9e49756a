"""Compile the components of a diffusers pipeline in place, and mark its denoise loop."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from strop.api import optimize_module, restore
from strop.diffusion.denoise_loops import (
    COMPONENTS,
    around,
    is_watched,
    parts_of,
    watch_pipelines,
)
from strop.diffusion.denoise_loops import (
    DENOISERS as DENOISERS,
)
from strop.diffusion.noise import draw_without_waiting
from strop.diffusion.offloading import search_quickly
from strop.diffusion.pictures import convert_as_before, convert_on_device
from strop.errors import OptionError
from strop.options import Options
from strop.runtime.loop.denoise_loop import Loop

log = logging.getLogger("strop")


def compiled_modules(pipe: Any) -> dict[str, nn.Module]:
    """Return the modules of a pipeline that are compiled, by the path a user would write."""
    held = pipe.components
    return {
        path: module
        for name in COMPONENTS
        for path, module in parts_of(held.get(name), name).items()
    }


def optimize_pipeline(pipe: Any, options: Options) -> None:
    """Compile every known component. Adapters and schedulers stay diffusers' own, but that those
    which ask the GPU for the time in each step of a loop hear it from the host (``scheduler.py``),
    that diffusers looks for offloaded weights in less time (``offloading.py``), that nobody waits
    for noise on its way to the GPU (``noise.py``), and that pictures become bytes before they are
    copied to the host (``pictures.py``).

    Raises OptionError for a pipeline that has none of them.
    """
    loop, known = Loop(), compiled_modules(pipe)
    if not known:
        raise OptionError(_nothing_known(pipe))
    search_quickly()
    draw_without_waiting()
    convert_on_device(pipe)
    for name, module in known.items():
        optimize_module(
            module,
            options,
            name=name,
            loop=loop if name in DENOISERS else None,
            component=pipe.components[name.partition(".")[0]],
        )
    watch_pipelines()
    if isinstance(pipe.__dict__.get("progress_bar"), _MarkedBar):
        pipe.progress_bar.loop = loop
    elif hasattr(pipe, "progress_bar") and not is_watched(pipe):  # one of a class of its own
        pipe.progress_bar = _MarkedBar(pipe.progress_bar, loop, pipe)
    left = {name: part for name, part in _modules(pipe).items() if name not in COMPONENTS}
    if left:
        log.warning(
            "%s: not compiled: %s; a module by itself is: strop.optimize(pipe.%s)",
            type(pipe).__name__,
            _listed(left),
            next(iter(left)),
        )


def _modules(pipe: Any) -> dict[str, nn.Module]:
    return {n: part for n, part in pipe.components.items() if isinstance(part, nn.Module)}


def _listed(modules: Mapping[str, nn.Module]) -> str:
    return ", ".join(f"{name} ({type(module).__name__})" for name, module in modules.items())


def _nothing_known(pipe: Any) -> str:
    modules = _modules(pipe)
    has = _listed(modules) or "no module at all"
    advice = f": strop.optimize(pipe.{next(iter(modules))})" if modules else ""
    return (
        f"{type(pipe).__name__} has no component that strop.optimize knows"
        f" ({', '.join(COMPONENTS)}); it has {has}. Optimise a module by itself{advice}"
    )


def restore_pipeline(pipe: Any) -> None:
    for module in compiled_modules(pipe).values():
        restore(module)
    convert_as_before(pipe)
    if isinstance(pipe.__dict__.get("progress_bar"), _MarkedBar):
        del pipe.progress_bar


def _same(value: Any) -> Any:
    return value


class _MarkedBar:
    """Mark the ``progress_bar`` of a pipeline of a class of its own."""

    def __init__(self, original: Any, loop: Loop, pipe: Any) -> None:
        self.original, self.loop, self.pipe = original, loop, pipe

    def __call__(self, iterable: Any = None, total: int | None = None, **more: Any) -> Any:
        """Draw. ``more`` are arguments that the class adds, such as Marigold's ``desc``."""
        if iterable is not None:
            return self.original(iterable, total, **more)
        bar = functools.partial(self.original, total=total, **more)
        return around(self.pipe, [self.loop], bar)

    def __reduce__(self) -> Any:
        """Reduce a pipeline to a plain pipeline, for copies."""
        return _same, (self.original,)
