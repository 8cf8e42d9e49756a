"""Load adapters into optimised pipelines whole or not at all.

diffusers loads a file part by part, and finds what is wrong with it when some parts are loaded. Its
own methods do the work here, too; before each part is loaded its tensors are compared with the
model, and whatever goes wrong, the pipeline is put back as it was.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from strop.diffusion import adapter_fit
from strop.diffusion.adapter_files import (
    INVERSION,
    IP_ADAPTER,
    LORA,
    AdapterSource,
    FileKind,
    find_source,
)
from strop.diffusion.changes import Changes, in_force, mend
from strop.diffusion.optimised import is_optimised
from strop.diffusion.parts import compiled_modules
from strop.diffusion.snapshots import components_of, unchanged_on_error
from strop.dispatch.changing import held
from strop.dispatch.gc_pause import collection_paused
from strop.dispatch.known_dispatchers import dispatcher_of
from strop.errors import AdapterError
from strop.wording import counted

Given = dict[str, Any]
Own = Callable[..., Any]


def load_lora(pipe: Any, own: Own, given: Given) -> Any:
    """Load a LoRA by diffusers' method ``own``, whose arguments are ``given``."""
    source = _source(given, LORA)
    if source.file is not None:  # what diffusers would look for is found
        given |= {_first(given): str(source.file)}
        given.pop("weight_name", None)
        given.pop("subfolder", None)
    swapped = given.get("adapter_name") if given.get("hotswap") else None
    before = _adapters(pipe)
    loading = LoraLoading(source)
    with _put_back(pipe, [source], swapped):
        with _watched_parts(pipe, loading):
            result = own(pipe, **given)
        if not loading.parts and _adapters(pipe) == before:
            raise AdapterError(_nothing_loaded(pipe, source))
        return result


def load_inversion(pipe: Any, own: Own, given: Given) -> Any:
    """Load textual inversions."""
    names = given[_first(given)]
    encoder = given.get("text_encoder") or getattr(pipe, "text_encoder", None)
    sources = [
        _source(given | {_first(given): name}, INVERSION)
        for name in (names if isinstance(names, list) else [names])
    ]
    for source in sources if encoder is not None else ():
        if misfit := adapter_fit.prompt_misfit(encoder, source.tensors or {}):
            raise AdapterError(f"{source.name}: {misfit}")
    if any(source.tensors is None for source in sources):
        given.setdefault("use_safetensors", True)
    with _put_back(pipe, sources):
        return own(pipe, **given)


def load_ip_adapter(pipe: Any, own: Own, given: Given) -> Any:
    """Load one or several IP-Adapters."""
    rows = [_listed(given, name) for name in (_first(given), "weight_name", "subfolder")]
    count = max(map(len, rows))
    filled = [row * count if len(row) == 1 else row for row in rows]
    sources = [find_source(p, IP_ADAPTER, name, f) for p, name, f in zip(*filled, strict=False)]
    unet = getattr(pipe, "unet", None)
    for source in sources if unet is not None else ():
        state = _parts_of_ip_adapter(source.tensors)
        misfit = None if state is None else adapter_fit.ip_adapter_misfit(unet, state)
        if misfit is not None:
            raise AdapterError(f"{source.name}: {misfit}")
    with _put_back(pipe, sources):
        return own(pipe, **given)


def _listed(given: Given, name: str) -> list[Any]:
    value = given.get(name)
    return value if isinstance(value, list) else [value]


def _parts_of_ip_adapter(tensors: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the weights as diffusers holds them: those of a file have their part in their keys."""
    if tensors is None or any(isinstance(value, Mapping) for value in tensors.values()):
        return tensors
    return {
        part: {k.removeprefix(f"{part}."): v for k, v in tensors.items() if k.startswith(part)}
        for part in ("image_proj", "ip_adapter")
    }


def _first(given: Given) -> str:
    """Return the name of the argument that says what to load; it differs between methods."""
    return next(iter(given))


def _source(given: Given, kind: FileKind) -> AdapterSource:
    name, folder = given.get("weight_name"), given.get("subfolder")
    source = find_source(given[_first(given)], kind, name, folder)
    if source.tensors is None and not given.setdefault("use_safetensors", True):
        raise AdapterError(
            f"{source.name}: use_safetensors=False asks for a pickle, which may run any code when"
            " it is opened; Strop reads safetensors alone"
        )
    return source


@contextmanager
def _put_back(
    pipe: Any, sources: Sequence[AdapterSource], swapped: str | None = None
) -> Iterator[None]:
    """Put the pipeline back as it was if loading fails, and say in the error which file it was."""
    try:
        with unchanged_on_error(pipe, swapped):
            yield
    except Exception as error:
        if not isinstance(error, AdapterError):
            names = ", ".join(source.name for source in sources)
            error.add_note(f"It was {names}. The pipeline is as it was before.")
        raise


# LoRA: the parts


@dataclass
class LoraLoading:
    """Hold a LoRA that is being loaded, and the parts of the pipeline that have taken theirs."""

    source: AdapterSource
    parts: list[str] = field(default_factory=list)

    def into_model(self, name: str, part: Any, own: Own, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``load_lora_adapter`` of a model of diffusers."""
        given = _arguments(own, args, kwargs)
        state, prefix = given[_first(given)], given.get("prefix", "transformer")
        if isinstance(state, Mapping):
            self._check(name, part, _own_keys(state, prefix), given, prefix)
        return own(**given)

    def into_encoder(self, name: str, part: Any, own: Own, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``load_adapter`` of a text encoder of transformers."""
        given = _arguments(own, args, kwargs)
        state = given.get("adapter_state_dict")
        if isinstance(state, Mapping):
            self._check(name, part, state, given, name)
        return own(**given)

    def _check(
        self, name: str, part: Any, state: Mapping[str, Any], given: Given, prefix: str | None
    ) -> None:
        if not state:
            return  # diffusers warns of it
        adapter = given.get("adapter_name")
        if adapter in getattr(part, "peft_config", {}) and not given.get("hotswap"):
            raise AdapterError(
                f"{self.source.name}: the {name} has an adapter {adapter!r} already; choose another"
                f" adapter_name, replace that one with hotswap=True, or delete it with"
                f" pipe.delete_adapters({adapter!r})"
            )
        if misfit := adapter_fit.lora_misfit(part, state, name):
            origin = self._origin(state, misfit.key, prefix)
            raise AdapterError(f"{self.source.name}: {name}.{misfit}{origin}")
        self.parts.append(name)

    def _origin(self, state: Mapping[str, Any], key: str, prefix: str | None) -> str:
        """Say what a key is called in the file, if diffusers has given it another name."""
        value, held = state.get(key), self.source.tensors or {}
        if value is None or f"{prefix}.{key}" in held or key in held:
            return ""
        same = [k for k, v in held.items() if v.shape == value.shape and torch.equal(v, value)]
        return f" (the file calls it {same[0]})" if len(same) == 1 else ""


def _own_keys(state: Mapping[str, Any], prefix: str | None) -> Mapping[str, Any]:
    """Return what of a file is one model's, with the keys that peft has."""
    from diffusers.utils import convert_unet_state_dict_to_peft

    start = "" if prefix is None else f"{prefix}."
    own = {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}
    is_peft = not own or "lora_A" in next(iter(own)) or any(".lokr_" in key for key in own)
    if is_peft or "lora_controlnet" in own:
        return own
    converted: Mapping[str, Any] = convert_unet_state_dict_to_peft(own)
    return converted


_STAND_INS = (
    ("load_lora_adapter", LoraLoading.into_model),
    ("load_adapter", LoraLoading.into_encoder),
)


@contextmanager
def _watched_parts(pipe: Any, loading: LoraLoading) -> Iterator[None]:
    """Have every model of a pipeline look at what it is to load. The methods stand in their objects
    for the time being."""
    with ExitStack() as ends:
        for name, part in components_of(pipe).items():
            for method, stand_in in _STAND_INS:
                own = getattr(part, method, None)
                if own is not None and method not in vars(part):
                    vars(part)[method] = functools.partial(stand_in, loading, name, part, own)
                    ends.callback(vars(part).pop, method, None)
        yield


def _adapters(pipe: Any) -> dict[str, tuple[str, ...]]:
    """Return the names of the adapters of each part."""
    parts = components_of(pipe).items()
    found = {name: tuple(getattr(part, "peft_config", None) or ()) for name, part in parts}
    norms = {n: ("norms",) for n, part in parts if vars(part).get("_transformer_norm_layers")}
    return found | {f"{name} norms": value for name, value in norms.items()}


def _nothing_loaded(pipe: Any, source: AdapterSource) -> str:
    keys = list(source.tensors or ())
    begin = ", ".join(dict.fromkeys(key.partition(".")[0] for key in keys[:200]))
    parts = ", ".join(getattr(pipe, "_lora_loadable_modules", components_of(pipe)))
    return (
        f"{source.name}: nothing of it is for this pipeline ({type(pipe).__name__}), which takes"
        f" LoRA into its {parts}; its {counted(len(keys), 'key')} begin with"
        f" {begin or 'nothing'}. It was made for another model"
    )


def _arguments(own: Own, args: tuple[Any, ...], kwargs: Given) -> Given:
    """Return the arguments of a call by their names. Raises TypeError as the call would."""
    bound = inspect.signature(own).bind(*args, **kwargs)
    found = dict(bound.arguments)
    for name, parameter in inspect.signature(own).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            found |= found.pop(name, {})
    return found


# the methods of diffusers

Load = Callable[[Any, Own, Given], Any]
ROADS: tuple[tuple[str, str, Load], ...] = (
    ("diffusers.loaders.lora_pipeline", "load_lora_weights", load_lora),
    ("diffusers.loaders.textual_inversion", "load_textual_inversion", load_inversion),
    ("diffusers.loaders.ip_adapter", "load_ip_adapter", load_ip_adapter),
)


def load_checked(pipe: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a pipeline that loads files, by its name, with all checks, whether the
    pipeline is optimised or not."""
    (load,) = (load for _, method, load in ROADS if method == name)
    return _loaded(load, pipe, getattr(type(pipe), name), args, kwargs)


@collection_paused()  # what is loaded lives on, and compiled models leave a lot to walk over
def _loaded(load: Load, pipe: Any, own: Own, args: tuple[Any, ...], kwargs: Given) -> Any:
    given = _arguments(functools.partial(own, pipe), args, kwargs)
    served = map(dispatcher_of, compiled_modules(pipe).values())
    with held(d for d in served if d is not None):  # other threads see all of it or nothing
        return load(pipe, own, given)


def check_adapters(changes: Changes) -> None:
    """Have optimised pipelines look at files before they load them."""
    for where, name, load in ROADS:
        for kind in _classes(where, name):
            mend(kind, name)
            own = vars(kind)[name]
            changes.put([kind], name, functools.wraps(own)(_checking(load, own)))


def _classes(where: str, name: str) -> list[type]:
    """Return the classes of a module of diffusers that have such a method of their own."""
    try:
        module = importlib.import_module(where)
    except (ImportError, RuntimeError):  # diffusers is not there, or another edition
        return []
    found = [v for v in vars(module).values() if inspect.isclass(v) and v.__module__ == where]
    return [kind for kind in found if name in vars(kind)]


def _checking(load: Load, own: Own) -> Own:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (in_force(method) and is_optimised(self)):
            return own(self, *args, **kwargs)
        return _loaded(load, self, own, args, kwargs)

    return method
