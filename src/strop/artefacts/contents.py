"""Say what an artefact is for: versions, targets, and the architecture of each module."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from strop.dispatch.dispatcher import Dispatcher
from strop.dispatch.stored_variants import own_source, versions
from strop.errors import CacheError
from strop.frontend.low_rank_layers import is_factor
from strop.runtime.build.processors import TARGETS, targets_below
from strop.wording import counted


@dataclass(frozen=True, slots=True)
class Architecture:
    """Describe a module without its weights' values: ``digest`` is of the names, sizes and types of
    its weights, without adapters."""

    kind: str
    num_weights: int
    dtype: str  # that most weights have
    digest: str
    options: str  # those that change what is compiled

    @staticmethod
    def of(dispatcher: Dispatcher) -> Architecture:
        """Describe the module that a dispatcher serves."""
        state = dispatcher.state
        weights = zip(state.names, state.tensors, state.shapes, strict=True)
        own = [(name, t, shape) for name, t, shape in weights if not is_factor(name)]
        lines = sorted(f"{name}:{shape}:{t.dtype}" for name, t, shape in own)
        dtypes = Counter(str(t.dtype).removeprefix("torch.") for t in state.tensors)
        return Architecture(
            type(dispatcher.module).__name__,
            len(lines),
            dtypes.most_common(1)[0][0] if dtypes else "no type",
            hashlib.sha256("\n".join(lines).encode()).hexdigest(),
            dispatcher.options.key(),
        )

    def __str__(self) -> str:
        weights = counted(self.num_weights, "weight")
        return f"{self.kind} with {weights}, {self.dtype} ({self.digest[:8]})"


@dataclass(frozen=True, slots=True)
class ArtefactContents:
    """Say for what an artefact was made. ``source`` is a digest of the compiler."""

    versions: tuple[str, ...]
    source: str
    targets: tuple[str, ...]
    parts: Mapping[str, Architecture]

    @staticmethod
    def of(parts: Mapping[str, Dispatcher]) -> ArtefactContents:
        """Describe what these dispatchers have compiled."""
        targets = {target_of(dispatcher) for dispatcher in parts.values()}
        found = {name: Architecture.of(dispatcher) for name, dispatcher in parts.items()}
        return ArtefactContents(versions(), own_source(), tuple(sorted(targets)), found)

    @staticmethod
    def joined(several: Sequence[ArtefactContents]) -> ArtefactContents:
        """Describe what several of one process are for, with the targets of all."""
        targets = {target for one in several for target in one.targets}
        parts = {name: part for one in several for name, part in one.parts.items()}
        return replace(several[0], targets=tuple(sorted(targets)), parts=parts)

    def to_json(self) -> Mapping[str, Any]:
        """Write lists and dictionaries for ``json.dumps``."""
        return asdict(self)

    @staticmethod
    def from_json(about: Mapping[str, Any], path: Path) -> ArtefactContents:
        """Read what ``to_json`` has written. Raises CacheError for anything else."""
        try:
            parts = {str(n): Architecture(**_texts(p)) for n, p in about["parts"].items()}
            listed = (tuple(map(str, about[name])) for name in ("versions", "targets"))
            found, targets = listed
            return ArtefactContents(found, str(about["source"]), targets, parts)
        except (TypeError, LookupError, AttributeError, ValueError) as error:
            raise CacheError(
                f"{path} does not say what it is for ({error}): make it again (strop.save)"
            ) from error

    def check_versions(self, path: Path) -> None:
        """Raise CacheError if another Strop, PyTorch or diffusers is installed here, for which
        plans would be others."""
        theirs, here = dict(map(_named, self.versions)), dict(map(_named, versions()))
        other = [n for n in sorted({*theirs, *here}) if theirs.get(n) != here.get(n)]
        if other:
            were = ", ".join(f"{name} {theirs.get(name, 'absent')}" for name in other)
            now = ", ".join(f"{name} {here.get(name, 'absent')}" for name in other)
            raise CacheError(
                f"{path} was made with {were}, and here is {now}: plans hold for one version of"
                " each. Make it again here (strop.save, `strop build`), or install those versions"
            )
        if self.source != own_source():
            raise CacheError(
                f"{path} was made by another state of Strop's source, of the same version: make it"
                " again here (strop.save, `strop build`)"
            )

    def check_parts(self, path: Path, given: Mapping[str, Dispatcher]) -> tuple[str, ...]:
        """Return the names of the modules that it serves. Raises CacheError for a module of another
        architecture than the one of its name, and where it serves none."""
        known = {part.digest for part in self.parts.values()}
        served = []
        for name, dispatcher in given.items():
            here, theirs = Architecture.of(dispatcher), self.parts.get(name)
            if theirs is None and here.digest not in known:
                continue
            if theirs is not None and (theirs.kind, theirs.digest) != (here.kind, here.digest):
                raise CacheError(_other(path, name, theirs, here))
            if theirs is not None and theirs.options != here.options:
                raise CacheError(
                    f"{path}: {name} was compiled with {theirs.options}, and is optimised with"
                    f" {here.options}: give strop.load the options of strop.save"
                )
            served.append(name)
        if not served:
            named = "; ".join(f"{name}: {part}" for name, part in self.parts.items())
            raise CacheError(
                f"{path} serves none of {', '.join(given)}: it is for {named or 'nothing'}"
            )
        return tuple(served)

    def check_targets(self, path: Path, served: Sequence[Dispatcher]) -> None:
        """Raise CacheError for modules on a device that it has no machine code for."""
        for dispatcher in served:
            target = target_of(dispatcher)
            if target not in self.targets:
                able = [name for name in _below(target) if name in self.targets]
                lower = f", load it with strop.Options(target={able[0]!r})" if able else ""
                raise CacheError(
                    f"{path} has machine code for {', '.join(self.targets)}, and"
                    f" {dispatcher.name} is on {target}: move it first, such as with"
                    f" pipe.to(device){lower}, or make an artefact for {target} (strop.save,"
                    " `strop build --target`)"
                )


def _below(target: str) -> tuple[str, ...]:
    """Return the targets whose machine code a processor of one could run as well."""
    return targets_below(target)[1:] if target in TARGETS else ()


def _other(path: Path, name: str, theirs: Architecture, here: Architecture) -> str:
    differs = "class" if theirs.kind != here.kind else "names, sizes or types of weights"
    return (
        f"{path} is for another model: {name} is a {theirs} there and a {here} here, of another"
        f" {differs}. An artefact serves all weights of one architecture and type"
    )


def _named(version: str) -> tuple[str, str]:
    name, _, number = version.partition(" ")
    return name, number


def _texts(part: Mapping[str, Any]) -> dict[str, Any]:
    """Check the types of what an Architecture is made of."""
    for name, value in part.items():
        if type(value) is not (int if name == "num_weights" else str):
            raise ValueError(f"{name} is {value!r}")
    return dict(part)


def target_of(dispatcher: Dispatcher) -> str:
    """Return what the device is called on which the weights of a module lie."""
    return dispatcher.variants.library(device_of_weights(dispatcher)).target_name


def device_of_weights(dispatcher: Dispatcher) -> torch.device:
    """Return where the weights of a module lie. Raises CacheError if it has none."""
    devices = dispatcher.state.devices
    if not devices:
        raise CacheError(f"{dispatcher.name} has no weights, which would say on which device it is")
    return devices[0]
