"""Compile the components of a diffusers pipeline in place, and mark its denoise loop."""

from __future__ import annotations

import functools
import gc
import importlib
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from torch import nn

from strop.api import optimize_module, restore
from strop.diffusion.adapter_loading import ROADS, check_adapters
from strop.diffusion.changes import Changes, SharedChanges, in_force, undo_at
from strop.diffusion.denoise_loops import around, is_watched, kinds, watch_pipelines
from strop.diffusion.model_offload import offload_pinned
from strop.diffusion.noise import PLACE, draw_without_waiting
from strop.diffusion.offloading import HOOKS, QUICK, search_quickly
from strop.diffusion.optimised import is_claimed, new_record, record_of
from strop.diffusion.parts import COMPONENTS, DENOISERS, compiled_modules, modules_of
from strop.diffusion.pictures import NAME, convert_on_device
from strop.dispatch.dispatcher import Dispatcher
from strop.dispatch.features import place_for
from strop.dispatch.known_dispatchers import dispatcher_of
from strop.dispatch.parallel.context import UNABLE
from strop.dispatch.parallel.settings import CONTEXT
from strop.dispatch.step_cache.served import StepCacheDispatcher
from strop.errors import OptionError
from strop.options import Options
from strop.runtime.loop.denoise_loop import DenoiseLoop

log = logging.getLogger("strop")
NOTHING: Mapping[str, Any] = MappingProxyType({})


def optimize_pipeline(
    pipe: Any, options: Options, of_denoisers: Mapping[str, Any] = NOTHING, **how: Any
) -> None:
    """Compile every known component. Adapters and schedulers stay diffusers' own, but that those
    which ask the GPU for the time in each step of a loop hear it from the host (``scheduler.py``),
    that diffusers looks for offloaded weights in less time (``offloading.py``), that nobody waits
    for noise on its way to the GPU (``noise.py``), and that pictures become bytes before they are
    copied to the host (``pictures.py``). Files with adapters are looked at before they are loaded
    (``adapter_loading.py``). All of it is for optimised pipelines alone.

    ``how`` is what ``optimize_module`` takes for each component, ``of_denoisers`` what it takes for
    the denoisers beside that: those whose calls are split over devices.

    What is compiled as it is to be already, for a pipeline that this one was made of, stays so.
    Raises OptionError for a pipeline that has none of them.
    """
    known = compiled_modules(pipe)
    if not known:
        raise OptionError(_nothing_known(pipe))
    own_options = options_of_parts(known, options)
    further = dict.fromkeys(_split(pipe, known, of_denoisers), of_denoisers)
    further |= _with_step_cache(pipe, known, options)
    kept = _kept(pipe, known, own_options, further)
    loop = next((kept[name].loop for name in kept if name in DENOISERS), DenoiseLoop())
    record = new_record(pipe)
    changes = Changes() if record is None else record.changes
    _import_diffusers()
    with SHARED.kept():
        if record is not None:
            record.note(pipe.components, known.values())
        convert_on_device(pipe, changes)
        for name, module in known.items():
            own = loop if name in DENOISERS else None
            if name not in kept or (own is not None and kept[name].loop is not own):
                made = {**how, **further.get(name, NOTHING)}
                _compile(module, own_options[name], name, own, _part_of(pipe, name), **made)
        _mark_own_bar(pipe, loop, changes)
    left = {name: part for name, part in modules_of(pipe).items() if name not in COMPONENTS}
    if left:
        log.warning(
            "%s: not compiled: %s; a module by itself is: strop.optimize(pipe.%s)",
            type(pipe).__name__,
            _listed(left),
            next(iter(left)),
        )


def options_of_parts(known: Mapping[str, nn.Module], options: Options) -> dict[str, Options]:
    """Return the options of each part. A budget for weights is that of the denoisers, which have it
    in proportion to their sizes; other parts have none. Nor do these have 8 bits: they run once a
    picture, and all of it would inherit their error."""
    if not options.weights_budget_bytes:
        return {name: options if name in DENOISERS else options.exactly for name in known}
    sizes = {n: sum(w.nbytes for w in known[n].parameters()) for n in known if n in DENOISERS}
    if not sizes:
        raise OptionError(
            f"weights_budget_bytes={options.weights_budget_bytes} is for the denoisers of a"
            f" pipeline ({', '.join(DENOISERS)}), and this one has none: optimise a part by itself"
        )
    total = max(sum(sizes.values()), 1)
    budgets = {n: max(options.weights_budget_bytes * size // total, 1) for n, size in sizes.items()}
    return {n: replace(options, weights_budget_bytes=budgets.get(n, 0)) for n in known}


def _split(pipe: Any, known: Mapping[str, nn.Module], of_denoisers: Mapping[str, Any]) -> list[str]:
    """Return the denoisers whose calls are split over devices. Raises OptionError where it is asked
    for and nobody knows how."""
    if not of_denoisers:
        return []
    denoisers = {name: module for name, module in known.items() if name in DENOISERS}
    kind, mode = of_denoisers["kind"], of_denoisers["wanted"][0]
    found = [name for name, module in denoisers.items() if kind.is_able(module)]
    left = {name: module for name, module in denoisers.items() if name not in found}
    if mode == CONTEXT and (left or not found):  # what computes all tokens gives them to the others
        has = _listed(left) or "no denoiser"
        raise OptionError(f"parallel={mode!r}: {type(pipe).__name__} has {has}: {UNABLE}")
    for name in found:
        kind.check(known[name], of_denoisers["wanted"])
    if not found:
        raise OptionError(
            f"parallel={mode!r}: {type(pipe).__name__} has no denoiser whose calls Strop knows how"
            f" to split; it has {_listed(left) or 'none'}"
        )
    if left:
        log.warning(
            "%s: not split over devices: %s, of which nothing says which arguments have a row for"
            " each picture",
            type(pipe).__name__,
            _listed(left),
        )
    return found


def _with_step_cache(
    pipe: Any, known: Mapping[str, nn.Module], options: Options
) -> dict[str, Mapping[str, Any]]:
    """Return how the denoisers are served that get a step cache. Raises OptionError where it is
    asked for and there is none that can have one. ControlNets have none: they run in each step."""
    if not options.step_cache:
        return {}
    found, reasons = dict[str, Mapping[str, Any]](), list[str]()
    for name in (n for n in known if n in DENOISERS and n != "controlnet"):
        try:
            StepCacheDispatcher.check(known[name], options)
        except OptionError as error:
            reasons.append(f"{name}: {error}")
        else:
            found[name] = {"kind": StepCacheDispatcher}
    if not found:
        raise OptionError(
            "; ".join(reasons)
            or f"numerics='step_cache': {type(pipe).__name__} has no denoiser that is called in a"
            f" loop ({', '.join(DENOISERS)}): leave it out"
        )
    for reason in reasons:
        log.warning("%s: without a step cache: %s", type(pipe).__name__, reason)
    return found


def _kept(
    pipe: Any,
    known: Mapping[str, nn.Module],
    options: Mapping[str, Options],
    further: Mapping[str, Mapping[str, Any]],
) -> dict[str, Dispatcher]:
    """Return what serves parts that are compiled in the way that is asked for."""
    found = {}
    for name, module in known.items():
        own = dispatcher_of(module)
        if own is None:
            continue
        wanted = further.get(name, NOTHING)
        is_alike = (own.name, own.options) == (name, options[name]) and own.is_made_by(wanted)
        holder, place = place_for(module)
        is_around = vars(holder).get(place) is own  # and nobody's wrapper is
        if is_alike and is_around and own.component is _part_of(pipe, name):
            found[name] = own
    return found


def _part_of(pipe: Any, name: str) -> nn.Module:
    """Return the component that a compiled module is a part of."""
    found: nn.Module = pipe.components[name.partition(".")[0]]
    return found


def _compile(
    module: nn.Module,
    options: Options,
    name: str,
    loop: DenoiseLoop | None,
    component: nn.Module,
    **how: Any,
) -> None:
    dispatcher = optimize_module(module, options, name=name, loop=loop, component=component, **how)
    SHARED.hold(dispatcher)


def _compile_like(pipe: Any, path: str, module: nn.Module, known: Dispatcher) -> None:
    """Compile what has been put in the place of a compiled part of a pipeline."""
    name = path.partition(".")[0]
    component = pipe.__dict__.get(name, module)
    if (record := record_of(pipe)) is not None:
        record.note({name: component}, [module])
    loop = known.loop if name in DENOISERS else None
    how = known.how
    if known.how.get("kind") is StepCacheDispatcher:
        try:
            StepCacheDispatcher.check(module, known.options)
        except OptionError as error:
            log.warning("%s has no step cache: %s", path, error)
            how = NOTHING
    elif known.how and not known.how["kind"].is_able(module):
        log.warning("%s is not split over devices: nothing says how its calls are", path)
        how = NOTHING
    _compile(module, known.options, path, loop, component, **how)


def _mark_own_bar(pipe: Any, loop: DenoiseLoop, changes: Changes) -> None:
    """Mark the loop of a pipeline of a class of its own."""
    bar = pipe.__dict__.get("progress_bar")
    if isinstance(bar, _MarkedBar) and in_force(bar):
        bar.loop = loop
    elif hasattr(pipe, "progress_bar") and not is_watched(pipe):
        changes.put([pipe], "progress_bar", _MarkedBar(pipe.progress_bar, loop, pipe))


def _listed(modules: Mapping[str, nn.Module]) -> str:
    return ", ".join(f"{name} ({type(module).__name__})" for name, module in modules.items())


def _nothing_known(pipe: Any) -> str:
    modules = modules_of(pipe)
    has = _listed(modules) or "no module at all"
    advice = f": strop.optimize(pipe.{next(iter(modules))})" if modules else ""
    return (
        f"{type(pipe).__name__} has no component that strop.optimize knows"
        f" ({', '.join(COMPONENTS)}); it has {has}. Optimise a module by itself{advice}"
    )


def restore_pipeline(pipe: Any) -> None:
    """Undo what ``optimize`` has done for a pipeline, also to what is no longer part of it.

    What another optimised pipeline shares with it stays compiled for that one, until it is restored
    as well; the components of a pipeline that was only made of another's are restored at once.
    """
    record, modules = record_of(pipe), [*compiled_modules(pipe).values()]
    if record is not None:
        record.end()
        modules += record.compiled
    if record is not None and any(map(is_claimed, modules)):
        gc.collect()  # a pipeline that nobody can reach claims nothing
    for module in modules:
        if record is None or not is_claimed(module):
            restore(module)
    undo_at(getattr(pipe, "scheduler", None), "step")  # in the midst of a loop
    if record is None:
        undo_at(pipe, "progress_bar")
        undo_at(getattr(pipe, "image_processor", None), NAME)


def _same(value: Any) -> Any:
    return value


class _MarkedBar:
    """Mark the ``progress_bar`` of a pipeline of a class of its own."""

    def __init__(self, original: Any, loop: DenoiseLoop, pipe: Any) -> None:
        self.original, self.loop, self.pipe = original, loop, pipe

    def __call__(self, iterable: Any = None, total: int | None = None, **more: Any) -> Any:
        """Draw. ``more`` are arguments that the class adds, such as Marigold's ``desc``."""
        if iterable is not None or not in_force(self):
            return self.original(iterable, total, **more)
        bar = functools.partial(self.original, total=total, **more)
        return around(self.pipe, [self.loop], bar, total)

    def __reduce__(self) -> Any:
        """Reduce a pipeline to a plain pipeline, for copies."""
        return _same, (self.original,)


def _import_diffusers() -> None:
    """Import what will be changed, since whoever changes it cannot wait for imports (``LOCK``)."""
    for where in (PLACE, HOOKS, *(w for w, _ in QUICK), *(w for w, _, _ in ROADS)):
        with suppress(ImportError, RuntimeError):
            importlib.import_module(where)
    kinds()


def _change_diffusers(changes: Changes) -> None:
    """Change what all optimised pipelines of a process share."""
    search_quickly(changes)
    draw_without_waiting(changes)
    watch_pipelines(changes, _compile_like)
    check_adapters(changes)
    offload_pinned(changes)


SHARED = SharedChanges(_change_diffusers)
