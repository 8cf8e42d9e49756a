"""A user calls these on a module or a diffusers pipeline: optimize, explain, save, load ..."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from strop.dispatch.dispatcher import Dispatcher
from strop.dispatch.features import place_for
from strop.dispatch.known_dispatchers import dispatcher_of
from strop.dispatch.units import units_of
from strop.errors import OptionError
from strop.options import OPTION_NAMES, Options, check_names
from strop.patterns.declare import pattern

if TYPE_CHECKING:
    from os import PathLike

    from strop.artefacts.saving import SavedArtefact
    from strop.debug.report import Report

__all__ = [
    "changing",
    "dispatchers_of",
    "explain",
    "load",
    "lora_rows",
    "optimize",
    "optimize_module",
    "pattern",
    "restore",
    "save",
    "warmup",
]
T = TypeVar("T")


def optimize(
    obj: T,
    *,
    train: bool = False,
    options: Options | None = None,
    parallel: str | None = None,
    devices: Sequence[str | torch.device] | None = None,
    **unknown: Any,
) -> T:
    """Compile a module, or the components of a diffusers pipeline, in place, and return ``obj``.

    Nothing is compiled yet: the first call of each module does that, once for every size. Class
    identity, ``config``, Parameters, ``state_dict`` keys and hooks stay as they are. ``restore``
    undoes it. Components of a pipeline that are compiled with the same options already, for it or
    for another that shares them, stay as they are. Where ``train`` is True, calls of a module with
    gradients are compiled too, forward and backward. A ``DistributedDataParallel`` stands for the
    module in it, here and for the other functions. Of a module that ``fully_shard`` (FSDP2) has
    sharded, each unit without further units is compiled by itself, and the rest runs in eager.

    ``parallel="cfg"`` runs the two halves of each call of a pipeline's denoisers, those of
    classifier-free guidance, on two GPUs, ``"batch"`` cuts the rows of a call evenly for all GPUs,
    or for ``devices``, the first of which is where the model lies. The others hold copies of the
    denoisers, which are kept equal to them. A row's values are those of the same model at the batch
    of its piece. ``"context"`` divides the tokens of a call among the processes of a group.

    Raises OptionError for anything that is neither a module nor a pipeline, for other keywords, for
    devices that are not there, and for tokens that cannot be divided.
    """
    options = _checked_options(options, unknown)
    if not isinstance(train, bool):
        raise OptionError(f"strop.optimize got train={train!r}; it takes True or False")
    how = _parallel_how(parallel, devices, options, train=train)
    _check_step_cache(obj, options, parallel, train=train)
    _check_budget(options, train=train)
    if isinstance(obj, torch.jit.ScriptModule):
        raise OptionError(
            f"strop.optimize got a {type(obj).__name__}, which has no Python forward to trace; give"
            " it the module that was scripted or traced"
        )
    if isinstance(obj, nn.Module):
        units = units_of(without_ddp(obj)) if train else {}
        if units:
            _optimize_units(units, options)
        else:
            optimize_module(obj, options, train=train, **how)
    elif train:
        raise OptionError(
            f"strop.optimize(train=True) got a {type(obj).__name__}; it takes the torch.nn.Module"
            " that is trained, such as pipe.unet"
        )
    elif _is_pipeline(obj):
        from strop.diffusion.pipeline import optimize_pipeline

        optimize_pipeline(obj, options, how)
    else:
        raise OptionError(
            f"strop.optimize got a {type(obj).__name__}; it takes a torch.nn.Module or a diffusers"
            " pipeline. For a plain function use torch.compile(fn, backend='strop')."
        )
    return obj


def _checked_options(options: Options | None, unknown: dict[str, Any]) -> Options:
    if unknown:
        check_names(unknown, OPTION_NAMES, "option")
        text = ", ".join(f"{name}={value!r}" for name, value in unknown.items())
        raise OptionError(f"strop.optimize takes options as options=strop.Options({text})")
    if options is not None and not isinstance(options, Options):
        raise OptionError(
            f"options is a {type(options).__name__}; strop.optimize takes strop.Options(...)"
        )
    return options or Options.from_environment()


def _parallel_how(
    parallel: str | None,
    devices: Sequence[str | torch.device] | None,
    options: Options,
    *,
    train: bool,
) -> dict[str, Any]:
    """Return what ``optimize_module`` is to make of a module whose calls are split; nothing where
    none is. Raises OptionError for what cannot be together with that."""
    if parallel is None:
        if devices is not None:
            raise OptionError("devices is for parallel='cfg' and 'batch': give one of them too")
        return {}
    if train:
        raise OptionError(
            f"train=True and parallel={parallel!r}: several GPUs train by 'strop train"
            " --num_processes', or by DistributedDataParallel"
        )
    if options.weights_budget_bytes:
        raise OptionError(
            f"weights_budget_bytes and parallel={parallel!r}: a copy needs all weights on its GPU"
        )
    from strop.dispatch.parallel.context import ContextDispatcher
    from strop.dispatch.parallel.served import ParallelDispatcher
    from strop.dispatch.parallel.settings import CONTEXT

    kind = ContextDispatcher if parallel == CONTEXT else ParallelDispatcher
    return {"kind": kind, "wanted": (parallel, devices)}


def _check_step_cache(obj: Any, options: Options, parallel: str | None, *, train: bool) -> None:
    """Raise OptionError for what cannot be together with a step cache, if there is one."""
    reason = ""
    if isinstance(obj, nn.Module):
        reason = "is for the denoise loop of a pipeline, and a module by itself has none"
    if parallel is not None:
        reason = f"and parallel={parallel!r} cannot be together yet"
    if train:
        reason = "and train=True cannot be together: it reuses results of earlier calls"
    if options.step_cache and reason:
        raise OptionError(f"numerics='step_cache' {reason}: leave it out")


def _check_budget(options: Options, *, train: bool) -> None:
    """Raise OptionError for what cannot be together with a budget for weights, if there is one."""
    reason = ""
    if train:
        reason = "train=True needs all weights on the GPU, where they are updated"
    if options.lora == "merged":
        reason = "lora='merged' needs a second copy of the weights there; lora='auto' does not"
    if options.check:
        reason = "check=True reads weights that are no longer there when a step is judged"
    if options.weights_budget_bytes and reason:
        raise OptionError(
            f"weights_budget_bytes={options.weights_budget_bytes} limits the GPU memory of weights,"
            f" and {reason}: leave one of the two out"
        )


def optimize_module(
    module: nn.Module, options: Options, *, train: bool = False, **how: Any
) -> Dispatcher:
    """Put a dispatcher in front of ``module.forward``."""
    module = without_ddp(module)
    restore(module)
    kind: Callable[..., Dispatcher] = how.pop("kind", Dispatcher)
    if "adapter" not in how:
        from strop.diffusion.components import adapter_for

        how["adapter"] = adapter_for(module)
    if train:  # Dynamo takes its time to import
        from strop.dispatch.training import TrainingDispatcher as kind
    dispatcher = kind(module, options, **how)
    holder, name = place_for(module)
    setattr(holder, name, dispatcher)
    return dispatcher


def _optimize_units(units: Mapping[str, nn.Module], options: Options) -> None:
    """Compile the units of a module that is sharded. Those that are alike share their graphs."""
    steps: dict[type, Any] = {}
    for path, unit in units.items():
        dispatcher: Any = optimize_module(unit, options, train=True, name=path)
        dispatcher.steps.share(steps.setdefault(type(unit), dispatcher.steps))


def without_ddp(module: nn.Module) -> nn.Module:
    """Return what a ``DistributedDataParallel`` trains, or the module itself. What is around that
    has hooks and averages gradients, and stays as it is."""
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module


def _is_pipeline(obj: Any) -> bool:
    return isinstance(getattr(obj, "components", None), Mapping)


def restore(obj: T) -> T:
    """Undo ``optimize``: every attribute that it has set is the very object that was there before.
    Parameters keep their values and strides (merged ones share a storage).

    Functions of diffusers are its own again when no optimised pipeline is left. What others have
    set in the same place since stays. A component that another optimised pipeline has as well stays
    compiled until that one is restored. Restoring again does nothing.

    Raises OptionError for anything that is neither a module nor a pipeline.
    """
    if isinstance(obj, nn.Module):
        for dispatcher in dispatchers_of(obj).values():
            dispatcher.leave()
    elif _is_pipeline(obj):
        from strop.diffusion.pipeline import restore_pipeline

        restore_pipeline(obj)
    else:
        raise OptionError(
            f"strop.restore got a {type(obj).__name__}; it takes the module or pipeline that"
            " strop.optimize was given"
        )
    return obj


def lora_rows(
    obj: Any, names: Sequence[str | None], scales: Sequence[float] | None = None
) -> AbstractContextManager[None]:
    """Give each picture of a batch an adapter of its own, or none, while the body runs.

    ``names[i]`` is the adapter of picture i, or None; ``scales[i]`` multiplies the scale that the
    adapter has. Calls with several times as many rows, as under classifier-free guidance, take the
    names again and again. Other names and scales compile nothing. Which adapters are active does
    not matter meanwhile; layers are served unmerged.

    Raises OptionError for a name that no optimised module knows, ShapeError for a call with other
    rows, and UnsupportedError for adapters that are no plain LoRA, and wherever a call would run in
    eager, which would not know of it.
    """
    from strop.dispatch.adapter_rows import row_adapters, rows_taken

    return rows_taken(dispatchers_of(obj), row_adapters(names, scales))


def changing(obj: Any) -> AbstractContextManager[None]:
    """Change an optimised module or pipeline in the body, as a whole, while other threads call it.

    A call of another thread gives what the model gave before the body or what it gives after it,
    never a mixture: it waits for the end of the body, which begins when calls under way are done.
    Without this a call may see some of the layers that ``set_adapters`` goes through changed and
    others not, as in eager. Calls that run in eager wait for nobody.
    """
    from strop.dispatch.changing import held

    return held(with_cached_parts(dispatchers_of(obj)).values())


def explain(obj: Any, *args: Any, **kwargs: Any) -> Report:
    """Report what has run in an optimised module or pipeline, which is called first if there are
    arguments. Anything else is compiled, called with them, and restored.

    The Report prints as text, has a ``.html`` page and a ``.to_dict()``. Raises OptionError if
    there is nothing to run and nothing ran.
    """
    from strop.debug.explain import explain as build_report

    return build_report(obj, *args, **kwargs)


def save(
    obj: Any, path: str | PathLike[str], *, sign: str | PathLike[str] | None = None
) -> SavedArtefact:
    """Save all graphs that an optimised module or pipeline has compiled so far, with all kernels
    for all sizes, as one file: an artefact. It holds no weights, and serves all that have the same
    names, sizes and types, with any LoRA. ``sign`` is the file of a secret key of minisign's; the
    signature is written beside the artefact.

    Returns what was saved, with the file's fingerprint. Raises OptionError where nothing has been
    compiled yet or nothing can be signed, and CacheError where the file cannot be written.
    """
    from strop.artefacts.saving import save_artefact, signing_key

    return save_artefact(_served(obj, "strop.save"), Path(path), signing_key(sign))


def load(
    obj: T,
    path: str | PathLike[str],
    *,
    trust: bool | str | PathLike[str] = False,
    options: Options | None = None,
) -> T:
    """Read from an artefact what a module or pipeline would compile, and return ``obj``, which is
    optimised if it was not. What the artefact lacks is compiled as ever.

    Machine code is a program: give ``trust=True`` for a file of somebody whom you trust, its
    fingerprint, as ``save`` returns it, or the file of the public key of who signed it. A file in
    your own cache folder needs none of them.

    Raises CacheError for a file that is damaged, not trusted, of another version, or made for
    another model, device or options, and OptionError for a ``trust`` that is none of these; ``obj``
    is then not optimised if it was not.
    """
    from strop.artefacts.contents import ArtefactContents
    from strop.artefacts.loading import open_artefact
    from strop.runtime.build.artefact import LOADED

    before = _served(obj, "strop.load")
    known = [dispatcher.options for dispatcher in before.values()] or [Options.from_environment()]
    artefact = open_artefact(Path(path), trust, options or known[0])
    try:
        contents = ArtefactContents.from_json(artefact.about, artefact.path)
        contents.check_versions(artefact.path)
        if options is not None or not before:
            optimize(obj, options=options)
        try:
            given = dispatchers_of(obj)
            served = contents.check_parts(artefact.path, given)
            contents.check_targets(artefact.path, [given[name] for name in served])
        except BaseException:
            if not before:
                restore(obj)
            raise
    except BaseException:
        artefact.close()
        raise
    LOADED.use(artefact)
    for name in served:
        given[name].variants.artefact = str(artefact.path)
    return obj


def warmup(pipe: T, *, sizes: Sequence[tuple[int, int]], **given: Any) -> T:
    """Compile all that pictures of these sizes, (height, width), need, and the kernels for other
    sizes, and return ``pipe``. It draws each of them in two steps.

    ``given`` are arguments of the pipeline's own call, such as ``image`` or another
    ``num_inference_steps``. Raises OptionError for what is no optimised pipeline.
    """
    from strop.artefacts.warm_up import check_sizes, warm_up_pipeline

    found = dispatchers_of(pipe) if _is_pipeline(pipe) else {}
    if not found:
        raise OptionError(
            f"strop.warmup got a {type(pipe).__name__}; it takes a pipeline that strop.optimize has"
            " seen. A module by itself is ready after one call of yours"
        )
    warm_up_pipeline(pipe, list(found.values()), check_sizes(sizes), given)
    return pipe


def _served(obj: Any, call: str) -> dict[str, Dispatcher]:
    """Return the dispatchers of what ``call`` was given. Raises OptionError for anything that is
    neither a module nor a pipeline."""
    if not isinstance(obj, nn.Module) and not _is_pipeline(obj):
        raise OptionError(
            f"{call} got a {type(obj).__name__}; it takes a torch.nn.Module or a diffusers pipeline"
        )
    return dispatchers_of(obj)


def dispatchers_of(obj: Any) -> dict[str, Dispatcher]:
    """Return the dispatchers of an optimised module or pipeline, by component name."""
    if isinstance(obj, nn.Module):
        inner = without_ddp(obj)
        found = {path: dispatcher_of(unit) for path, unit in units_of(inner).items() if path}
        found[type(inner).__name__] = dispatcher_of(inner)
    else:
        from strop.diffusion.parts import compiled_modules

        found = {name: dispatcher_of(module) for name, module in compiled_modules(obj).items()}
    return {name: d for name, d in found.items() if d is not None}


def with_cached_parts(dispatchers: Mapping[str, Dispatcher]) -> dict[str, Dispatcher]:
    """Return dispatchers, and those of parts inside of the hooks of caches, by their paths."""
    found = dict(dispatchers)
    for name, dispatcher in dispatchers.items():
        found |= {f"{name}.{path}": part for path, part in dispatcher.cached.serving.items()}
    return found


def with_twins(dispatchers: Mapping[str, Dispatcher]) -> dict[str, Dispatcher]:
    """Return dispatchers, and those of copies on other devices. Nobody but their own dispatcher may
    take a copy's lock: it calls copies while it has its own."""
    found = dict(dispatchers)
    for name, dispatcher in dispatchers.items():
        found |= {f"{name}, {place}": twin for place, twin in dispatcher.served_twins.items()}
    return found
