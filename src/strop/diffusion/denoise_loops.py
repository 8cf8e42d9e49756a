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

from strop.diffusion.changes import Changes, in_force, is_around, mend
from strop.diffusion.optimised import record_of
from strop.diffusion.parts import DENOISERS, dispatcher_in, parts_of, pipelines_dispatcher
from strop.diffusion.scheduler import host_timesteps
from strop.diffusion.user_code import runs_user_code
from strop.dispatch.dispatcher import Dispatcher
from strop.runtime.loop.denoise_loop import DenoiseLoop

log = logging.getLogger("strop")

# Compiles a part of a pipeline, which has the given name, as another dispatcher compiles its own.
CompileLike = Callable[[Any, str, nn.Module, Dispatcher], object]
_PIPELINES = (("diffusers", "DiffusionPipeline"), ("diffusers", "ModularPipeline"))
_BLOCKS = ("diffusers.modular_pipelines.modular_pipeline", "LoopSequentialPipelineBlocks")
_running: ContextVar[Any] = ContextVar("the modular pipeline that runs", default=None)


def watch_pipelines(changes: Changes, compile_like: CompileLike) -> None:
    """Mark the loops of all pipelines that have compiled components, and see what is put into
    them."""
    setting = functools.partial(_compiling_like, compile_like)
    pipelines, blocks = kinds()
    for kind in pipelines:
        _replace(changes, kind, "__setattr__", setting)
        if hasattr(kind, "progress_bar"):
            _replace(changes, kind, "progress_bar", functools.partial(_marking, lambda pipe: pipe))
        else:
            _replace(changes, kind, "__call__", _noting)
    if blocks is not None:
        running = functools.partial(_marking, lambda _: _running.get())
        _replace(changes, blocks, "progress_bar", running)


def is_watched(pipe: Any) -> bool:
    """Tell whether the bar of a pipeline is one of those that are marked."""
    pipelines, _ = kinds()
    bar = getattr(type(pipe), "progress_bar", None)
    return isinstance(pipe, tuple(pipelines)) and (bar is None or is_around(bar))


def kinds() -> tuple[list[Any], Any]:
    """Return the classes of diffusers' pipelines, and that of blocks with a loop, or None."""
    pipelines = [_found(where, name) for where, name in _PIPELINES]
    return [kind for kind in pipelines if kind is not None], _found(*_BLOCKS)


def _found(where: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(where), name, None)
    except (ImportError, RuntimeError):  # diffusers is not there, or another edition
        return None


def _replace(
    changes: Changes, kind: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Put a function that is made of a method in its place; classes bind functions to objects."""
    mend(kind, name)
    own = getattr(kind, name)
    changes.put([kind], name, functools.wraps(own)(make(own)))


def _noting(own: Callable[..., Any]) -> Callable[..., Any]:
    def call(pipe: Any, *args: Any, **kwargs: Any) -> Any:
        if not in_force(call):
            return own(pipe, *args, **kwargs)
        token = _running.set(pipe)
        try:
            return own(pipe, *args, **kwargs)
        finally:
            _running.reset(token)

    return call


def _marking(pipe_of: Callable[[Any], Any], own: Callable[..., Any]) -> Callable[..., Any]:
    def progress_bar(bars: Any, iterable: Any = None, total: int | None = None) -> Any:
        pipe = pipe_of(bars)
        loops = loops_of(pipe) if iterable is None and in_force(progress_bar) else ()
        if not loops:
            return own(bars, iterable, total)
        return around(pipe, loops, functools.partial(own, bars, None, total), total)

    return progress_bar


def loops_of(pipe: Any) -> Sequence[DenoiseLoop]:
    """Return the loops of the compiled components that each step calls."""
    held = {} if pipe is None else pipe.__dict__
    modules = [m for name in DENOISERS for m in parts_of(held.get(name), name).values()]
    found = [_dispatcher_for(pipe, module) for module in modules]
    return list({id(d.loop): d.loop for d in found if d is not None}.values())


def _dispatcher_for(pipe: Any, module: Any) -> Dispatcher | None:
    """Return what serves a part of a pipeline. A user may have optimised one module of an optimised
    pipeline anew, by itself."""
    return (pipelines_dispatcher if record_of(pipe) is None else dispatcher_in)(module)


@contextmanager
def around(
    pipe: Any, loops: Sequence[DenoiseLoop], make_bar: Callable[[], Any], total: int | None = None
) -> Iterator[Any]:
    """Return a bar whose body is a denoise loop of ``total`` steps, if somebody knows them."""
    scheduler = getattr(pipe, "scheduler", None)  # which may be another one by now
    has_user_code = runs_user_code(pipe)
    with ExitStack() as ends:
        for loop in loops:
            ends.callback(loop.end)
            loop.begin(
                getattr(scheduler, "timesteps", None),
                has_user_code=has_user_code,
                num_calls=_num_calls(total, scheduler),
            )
        with host_timesteps(scheduler), make_bar() as bar:
            yield bar


def _num_calls(total: Any, scheduler: Any) -> int:
    """Return how often a loop calls its denoiser with each prompt: a scheduler of the second order,
    such as Heun's, does so twice in each step but the last. 0 where nobody knows."""
    order = getattr(scheduler, "order", 1)
    if not isinstance(total, int) or total < 1 or not isinstance(order, int) or order < 1:
        return 0
    return (total - 1) * order + 1


def _compiling_like(compile_like: CompileLike, own: Callable[..., Any]) -> Callable[..., Any]:
    def __setattr__(pipe: Any, name: str, value: Any) -> None:
        before = parts_of(pipe.__dict__.get(name), name)
        own(pipe, name, value)
        for path, module in parts_of(value, name).items() if in_force(__setattr__) else ():
            known = _dispatcher_for(pipe, before.get(path))
            is_ours = known is not None and known.is_made_by(known.how)  # none that trains
            if known is not None and is_ours and dispatcher_in(module) is None:
                compile_like(pipe, path, module, known)
                log.info(
                    "%s: %s, which is put in the place of a compiled one, is compiled as well",
                    type(pipe).__name__,
                    path,
                )

    return __setattr__
