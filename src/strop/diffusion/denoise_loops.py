"""Mark where the denoise loops of pipelines begin and end, and what stands in them.

A progress bar surrounds the loop of every pipeline of diffusers. Any pipeline with compiled
components has its loop marked, also one that was made of another's (``from_pipe``,
``Img2Img(**pipe.components)``), and so has a modular one, whose bars belong to its blocks. A
component that is put in the place of a compiled one is compiled as that was.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from strop.api import optimize_module
from strop.diffusion.scheduler import host_timesteps
from strop.diffusion.user_code import runs_user_code
from strop.dispatch.dispatcher import Dispatcher
from strop.runtime.loop.denoise_loop import Loop

log = logging.getLogger("strop")

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
_PIPELINES = (("diffusers", "DiffusionPipeline"), ("diffusers", "ModularPipeline"))
_BLOCKS = ("diffusers.modular_pipelines.modular_pipeline", "LoopSequentialPipelineBlocks")
_running: ContextVar[Any] = ContextVar("the modular pipeline that runs", default=None)


def parts_of(component: Any, name: str) -> dict[str, nn.Module]:
    """Return the modules of a component that are compiled, by the path a user would write."""
    found = {}
    for part in COMPONENTS.get(name, ()) if isinstance(component, nn.Module) else ():
        module = getattr(component, part, None) if part else component
        if isinstance(module, nn.Module):
            found[f"{name}.{part}" if part else name] = module
    return found


def dispatcher_in(module: nn.Module | None) -> Dispatcher | None:
    own = module.__dict__.get("forward") if module is not None else None
    return own if isinstance(own, Dispatcher) else None


def watch_pipelines() -> None:
    """Mark the loops of all pipelines, once in a process, and see what is put into them."""
    for where, name in _PIPELINES:
        kind = _found(where, name)
        if kind is None:
            continue
        _replace(kind, "__setattr__", _compiling_like)
        if hasattr(kind, "progress_bar"):
            _replace(kind, "progress_bar", functools.partial(_marking, lambda pipe: pipe))
        else:
            _replace(kind, "__call__", _noting)
    blocks = _found(*_BLOCKS)
    if blocks is not None:
        _replace(blocks, "progress_bar", functools.partial(_marking, lambda _: _running.get()))


def is_watched(pipe: Any) -> bool:
    """Tell whether the bar of a pipeline is one of those that are marked."""
    kinds = [_found(where, name) for where, name in _PIPELINES]
    bar = getattr(type(pipe), "progress_bar", None)
    return any(kind is not None and isinstance(pipe, kind) for kind in kinds) and (
        bar is None or hasattr(bar, "is_strop")
    )


def _found(where: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(where), name, None)
    except (ImportError, RuntimeError):  # diffusers is not there, or another edition
        return None


def _replace(
    kind: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    own = getattr(kind, name)
    if not hasattr(own, "is_strop"):
        ours: Any = functools.wraps(own)(make(own))
        ours.is_strop = True
        setattr(kind, name, ours)


def _noting(own: Callable[..., Any]) -> Callable[..., Any]:
    def call(pipe: Any, *args: Any, **kwargs: Any) -> Any:
        token = _running.set(pipe)
        try:
            return own(pipe, *args, **kwargs)
        finally:
            _running.reset(token)

    return call


def _marking(pipe_of: Callable[[Any], Any], own: Callable[..., Any]) -> Callable[..., Any]:
    def progress_bar(bars: Any, iterable: Any = None, total: int | None = None) -> Any:
        pipe = pipe_of(bars)
        loops = loops_of(pipe) if iterable is None else ()
        if not loops:
            return own(bars, iterable, total)
        return around(pipe, loops, functools.partial(own, bars, None, total))

    return progress_bar


def loops_of(pipe: Any) -> Sequence[Loop]:
    """Return the loops of the compiled components that each step calls."""
    held = {} if pipe is None else pipe.__dict__
    found = [dispatcher_in(m) for n in DENOISERS for m in parts_of(held.get(n), n).values()]
    return list({id(d.loop): d.loop for d in found if d is not None}.values())


@contextmanager
def around(pipe: Any, loops: Sequence[Loop], make_bar: Callable[[], Any]) -> Iterator[Any]:
    """Return a bar whose body is a denoise loop."""
    scheduler = getattr(pipe, "scheduler", None)  # which may be another one by now
    has_user_code = runs_user_code(pipe)
    with ExitStack() as ends:
        for loop in loops:
            ends.callback(loop.end)
            loop.begin(getattr(scheduler, "timesteps", None), has_user_code=has_user_code)
        with host_timesteps(scheduler), make_bar() as bar:
            yield bar


def _compiling_like(own: Callable[..., Any]) -> Callable[..., Any]:
    def __setattr__(pipe: Any, name: str, value: Any) -> None:
        before = parts_of(pipe.__dict__.get(name), name)
        own(pipe, name, value)
        for path, module in parts_of(value, name).items():
            known = dispatcher_in(before.get(path))
            if known is not None and dispatcher_in(module) is None and type(known) is Dispatcher:
                loop = known.loop if name in DENOISERS else None
                optimize_module(module, known.options, name=path, loop=loop)
                log.info(
                    "%s: %s, which is put in the place of a compiled one, is compiled as well",
                    type(pipe).__name__,
                    path,
                )

    return __setattr__
