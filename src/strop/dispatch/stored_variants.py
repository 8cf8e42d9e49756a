"""Variants are kept on disk: a hit runs neither the tracer nor a compiler.

The key is everything that shapes the graph: the module's structure, configuration and source files,
argument layout and symbolic sizes, options, and the versions of everything involved. The entry is
JSON; loading it evaluates nothing.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import nn

import strop
from strop.dispatch.code_walk import FRAMEWORKS
from strop.dispatch.module_state import ModuleState, layout_of
from strop.dispatch.signature import Shapes, Skeleton
from strop.errors import CacheError
from strop.frontend.module_parts import graph_text
from strop.frontend.stable_text import WHENCE, qualified, text_as_lists, text_of, text_of_config
from strop.ir.program import NumberGuard
from strop.ir.serialize import from_json, to_json
from strop.ir.tensor_spec import TensorSpec
from strop.options import Options
from strop.patterns import registry
from strop.runtime.build.artefact import LOADED, StoredEntry
from strop.runtime.build.cache import DiskCache

if TYPE_CHECKING:
    from strop.dispatch.variants import Variant

log = logging.getLogger("strop")
_FORMAT = 7
# What a trace runs the code of. Triton is not among them, as it only compiles kernels.
_LIBRARIES = ("diffusers", "transformers", "peft")
# By package: whose classes of modules and weights are traced where a model has them.
_OF_WEIGHTS = {
    "torchao": "torchao",
    "bitsandbytes": "bitsandbytes",
    "optimum": "optimum-quanto",
    "gguf": "gguf",
}


def key_of(
    module: nn.Module, state: ModuleState, skeleton: Skeleton, shapes: Shapes, options: Options
) -> str:
    """Return a digest of all that the graph depends on, weights excepted."""
    parts: list[str] = [
        f"format {_FORMAT}",
        *versions(),
        own_source(),
        options.key(),
        *registry.keys(),
    ]
    sources, tables = set(), {name.rpartition(".")[0] for name in state.tables}
    for path, part in state.parts:
        processor = part.__dict__.get("processor")
        settings = _settings(state, path, part)
        shown = "" if path in tables else part.extra_repr()  # which has their rows
        parts.append(f"{path}:{qualified(type(part))}:{shown}:{settings}")
        parts += [f"{qualified(type(processor))}", graph_text(part)]
        sources |= {_source_digest(type(part)), _source_digest(type(processor))}
    sources |= set(map(_source_digest, state.composed_kinds))
    parts += sorted(sources)
    parts.append(_config(module, state))
    parts += [*state.global_guards.text, *state.global_guards.containers, state.global_guards.code]
    parts += [
        f"{n}:{shape}:{layout_of(t, device)}:{t.dtype}:{device.type}"
        for n, t, shape, device in zip(
            state.names, state.tensors, state.shapes, state.devices, strict=True
        )
    ]
    parts += map(repr, (*state.make_ups, *state.casts.items(), *state.computed.items()))
    parts += map(repr, (*state.shards.items(), *state.exchanges_with))
    parts += map(_version, _libraries_of_weights(state))
    parts += [
        repr(state.adapters),
        repr(sorted(state.tied)),
        repr(skeleton),
        repr((_of_any(shapes.specs), shapes.hints if shapes.is_exact else ())),
        str(torch.get_default_dtype()),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _of_any(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return specs without the number of a device: a plan is for each device of a kind."""
    return on_device(specs, lambda device: torch.device(device.type))


def on_device(
    specs: Sequence[TensorSpec], place: Callable[[torch.device], torch.device]
) -> tuple[TensorSpec, ...]:
    return tuple(replace(spec, device=place(spec.device)) for spec in specs)


def _config(module: nn.Module, state: ModuleState) -> str:
    """Write out the configuration, but for numbers of rows that no code reads."""
    config = getattr(module, "config", None)
    if isinstance(config, Mapping):
        text = text_of_config(config, _writer(_package(module)))
    else:
        text = repr(config)
    lines, unread = text.split("\n"), tuple(state.global_guards.unread)
    return "\n".join(line for line in lines if not line.strip(' "').startswith(unread))


def _settings(state: ModuleState, path: str, part: nn.Module) -> str:
    """Write out plain attributes: flags such as ``upcast_attention`` decide what a forward does."""
    package = _package(part)
    unread, write = WHENCE if package in FRAMEWORKS else frozenset(), _writer(package)
    settings = state.settings(path, part).items()
    return repr(sorted((k, write(v)) for k, v in settings if k not in unread))


def _package(part: nn.Module) -> str:
    return type(part).__module__.partition(".")[0]


def _writer(package: str) -> Callable[[Any], str]:
    return text_as_lists if package == "diffusers" else text_of


@lru_cache(maxsize=1)
def versions() -> tuple[str, ...]:
    """Return the versions of all that decides about a graph. Which devices a torch was built for is
    no part of it."""
    own = [f"strop {strop.__version__}", f"torch {torch.__version__.partition('+')[0]}"]
    return (*own, *map(_version, _LIBRARIES))


def _libraries_of_weights(state: ModuleState) -> list[str]:
    kinds = {*(type(part) for _, part in state.parts), *state.composed_kinds}
    packages = {kind.__module__.partition(".")[0] for kind in kinds}
    if any(".quantizers.gguf" in kind.__module__ for kind in kinds):
        packages.add("gguf")
    return [library for package, library in _OF_WEIGHTS.items() if package in packages]


@lru_cache
def _version(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{name} absent"


@lru_cache(maxsize=1)
def own_source() -> str:
    """Return a digest of the compiler itself, so that a change to it never meets an old plan."""
    digest = hashlib.sha256()
    root = Path(strop.__file__).parent
    for name in ("backend.py", "dispatch/step_cache/structures.py"):  # this says what is traced
        digest.update((root / name).read_bytes())
    for folder in (
        "frontend",
        "ir",
        "passes",
        "patterns",
        "fusion",
        "lowering",
        "codegen",
        "kernels",
        "stages",
    ):
        for file in sorted((root / folder).rglob("*.[ph]*")):
            if file.suffix in (".py", ".h"):
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _source_digest(kind: type) -> str:
    """Return a digest of the file that defines a class: a changed forward is another graph. A class
    without a file is told by the code of its own methods."""
    try:
        file = inspect.getsourcefile(kind)
    except (TypeError, OSError):  # built in, or typed at a prompt
        file = None
    if file:
        return _file_digest(file)
    own = [f"{k}:{text_of(v)}" for k, v in vars(kind).items() if hasattr(v, "__code__")]
    return "\n".join([qualified(kind), *own])


@lru_cache(maxsize=4096)
def _file_digest(file: str) -> str:
    path = Path(file)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else file


# torch.device raises RuntimeError, torch's own names AttributeError
_DAMAGE = (CacheError, ValueError, LookupError, TypeError, AttributeError, RuntimeError)


def find(
    key: str, numbers: Sequence[float], state: ModuleState, options: Options
) -> tuple[tuple[str, ...], Variant | None]:
    """Return the keys that lead to the variant for these numbers and tables, and the stored
    variant, or None. The last key is that under which it is, or is to be saved: a variant that is
    not for them leads to another key."""
    keys: list[str] = []
    while True:
        keys.append(key)
        variant = load(key, options)
        if variant is None or (variant.is_for(numbers) and variant.suits(state)):
            return tuple(keys), variant
        rows = [spec.shape for spec in variant.rows]
        key = hashlib.sha256(f"{key}{variant.number_guards}{rows}".encode()).hexdigest()


def load(key: str, options: Options) -> Variant | None:
    """Return the stored variant, or None. A damaged entry is dropped with one log line."""
    for place in (LOADED, DiskCache(options.cache_path)):
        data = place.read("plan", key)
        variant = None if data is None else _decoded(data)
        if variant is not None:
            return variant
    return None


def stored(keys: Sequence[str], options: Options) -> Iterator[StoredEntry]:
    """Yield plans as they are kept. Raises CacheError where one is gone."""
    cache = DiskCache(options.cache_path)
    for key in keys:
        data = cache.read("plan", key) or LOADED.read("plan", key)
        if data is None:
            raise CacheError(
                f"{options.cache_path} no longer holds plan/{key}, which this process runs:"
                " somebody has emptied the cache since. Do the same in a new process"
            )
        yield StoredEntry("plan", key, data)


def _decoded(data: bytes) -> Variant | None:
    from strop.dispatch.variants import Variant
    from strop.frontend.capture import Same

    try:
        entry = json.loads(data)
        program = from_json(entry["program"])
        out_spec = pytree.treespec_loads(entry["out_spec"])
        specs, rows = _specs_from(entry["specs"]), _specs_from(entry["rows"])
        names, is_ragged = tuple(entry["state_names"]), bool(entry["is_ragged"])
        fixed, reads = (tuple(map(str, entry[name])) for name in ("fixed", "layout_reads"))
        guards = tuple(
            NumberGuard(int(number), str(relation), float(value))
            for number, relation, value in entry["number_guards"]
        )
        same = tuple(
            Same(int(place), str(kind), int(number)) for place, kind, number in entry["same"]
        )
    except _DAMAGE as error:
        log.warning("a stored plan was dropped: %s", error)
        return None
    return Variant(
        program,
        specs,
        out_spec,
        names,
        is_ragged,
        from_disk=True,
        fixed=fixed,
        layout_reads=reads,
        number_guards=guards,
        same=same,
        rows=rows,
    )


def _specs_from(entries: Any) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            tuple(shape),
            getattr(torch, dtype),
            torch.device(device),
            None if order is None else tuple(order),
        )
        for shape, dtype, device, order in entries
    )


def _entries_of(specs: Sequence[TensorSpec]) -> list[Any]:
    return [(s.shape, str(s.dtype).removeprefix("torch."), str(s.device), s.order) for s in specs]


def save(key: str, variant: Variant, options: Options) -> bool:
    """Keep a variant, and say whether that was possible. One whose result type cannot be written
    down is compiled in each process."""
    try:
        out_spec = pytree.treespec_dumps(variant.out_spec)
    except NotImplementedError as error:
        log.warning("this plan is not kept on disk: %s", error)
        return False
    entry: dict[str, Any] = {
        "arch": options.arch,  # that of the option, for who reads the file: the key has it too
        "program": to_json(variant.program),
        "out_spec": out_spec,
        "specs": _entries_of(variant.specs),
        "rows": _entries_of(variant.rows),
        "state_names": variant.state_names,
        "is_ragged": variant.is_ragged,
        "fixed": variant.fixed,
        "layout_reads": variant.layout_reads,
        "number_guards": [(g.number, g.relation, g.value) for g in variant.number_guards],
        "same": [(s.place, s.kind, s.number) for s in variant.same],
    }
    DiskCache(options.cache_path).write("plan", key, json.dumps(entry).encode())
    return True
