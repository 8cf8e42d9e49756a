"""Save what is compiled of a module or pipeline as an artefact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from strop.artefacts.contents import ArtefactContents, device_of_weights
from strop.artefacts.signing import SecretKey, check_can_sign, read_secret_key, sign_artefact
from strop.dispatch import stored_variants
from strop.dispatch.dispatcher import Dispatcher
from strop.dispatch.variants import Variant
from strop.errors import OptionError
from strop.runtime.build.artefact import StoredEntry, write_artefact
from strop.runtime.run import choices
from strop.wording import counted


@dataclass(frozen=True, slots=True)
class SavedArtefact:
    """Say what was saved. ``strop.load(..., trust=artefact.fingerprint)`` accepts no other file.
    ``left_out`` says which modules are not in it, and why; ``signature`` is a file beside it."""

    path: Path
    fingerprint: str
    num_bytes: int
    num_plans: int
    num_kernels: int
    targets: tuple[str, ...]
    left_out: tuple[str, ...]
    signature: Path | None = None

    def __str__(self) -> str:
        plans, kernels = counted(self.num_plans, "plan"), counted(self.num_kernels, "kernel")
        lines = [
            f"{self.path}: {plans}, {kernels} for {', '.join(self.targets)},"
            f" {self.num_bytes / 1e6:.1f} MB, {self.fingerprint}",
            *([f"signed: {self.signature}"] if self.signature else []),
            *(f"left out: {reason}" for reason in self.left_out),
        ]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Gathered:
    """Hold what is compiled of some modules on one device."""

    contents: ArtefactContents
    entries: tuple[StoredEntry, ...]
    left_out: tuple[str, ...]


def save_artefact(
    dispatchers: Mapping[str, Dispatcher], path: Path, key: SecretKey | None = None
) -> SavedArtefact:
    """Write all graphs that these have compiled so far, with all kernels for all sizes, and sign
    the file if there is a key.

    Raises OptionError where none has run, CacheError where the file cannot be written.
    """
    return write_gathered([gather(dispatchers)], path, key)


def signing_key(path: str | PathLike[str] | None) -> SecretKey | None:
    """Read the key of a file, if there is one. Raises OptionError for what is no key, and where
    nothing can be signed."""
    if path is None:
        return None
    check_can_sign()
    return read_secret_key(Path(path))


def gather(dispatchers: Mapping[str, Dispatcher]) -> Gathered:
    """Return all that these have compiled. Raises OptionError where that is nothing."""
    parts = {name: part for name, part in dispatchers.items() if _kept(part)}
    left_out = [f"{n} ({why})" for n, part in dispatchers.items() if (why := _left_out(part))]
    if not parts:
        raise OptionError(
            f"strop.save has nothing to save: {'; '.join(left_out) or 'nothing is optimised'}. Call"
            " the model first, or strop.warmup(pipe, sizes=...)"
        )
    entries = list[StoredEntry]()
    for name, part in parts.items():
        found, num_missing = _entries(part)
        entries += found
        if num_missing:
            left_out.append(f"{name} ({counted(num_missing, 'kernel')} that cannot be compiled)")
    return Gathered(ArtefactContents.of(parts), tuple(entries), tuple(left_out))


def write_gathered(
    gathered: Sequence[Gathered], path: Path, key: SecretKey | None = None
) -> SavedArtefact:
    """Write one file for the devices of all of these, which are of the same modules, and sign it if
    there is a key. Raises CacheError where it cannot be written."""
    contents = ArtefactContents.joined([one.contents for one in gathered])
    found = {(e.kind, e.key): e for one in gathered for e in one.entries}
    counts = Counter(kind for kind, _ in found)
    fingerprint = write_artefact(path, contents.to_json(), found.values())
    return SavedArtefact(
        path,
        f"sha256:{fingerprint}",
        path.stat().st_size,
        counts["plan"],
        counts["cpp"] + counts["cubin"],
        contents.targets,
        tuple(dict.fromkeys(reason for one in gathered for reason in one.left_out)),
        None if key is None else sign_artefact(path, fingerprint, key),
    )


def _kept(dispatcher: Dispatcher) -> list[Variant]:
    return [variant for variant in dispatcher.variants.all if variant.stored_keys]


def _left_out(dispatcher: Dispatcher) -> str:
    """Say what of a module is not saved, or nothing."""
    num_all, num_kept = len(dispatcher.variants.all), len(_kept(dispatcher))
    if not num_all:
        return "it has not run"
    if num_kept < num_all:
        return f"{counted(num_all - num_kept, 'graph')} that no disk cache can keep"
    return ""


def _entries(dispatcher: Dispatcher) -> tuple[list[StoredEntry], int]:
    """Return plans, and the kernels of each for all sizes; and how many of these there are not."""
    dispatcher.variants.wait()
    library = dispatcher.variants.library(device_of_weights(dispatcher))
    found, num_missing = list[StoredEntry](), 0
    for variant in _kept(dispatcher):
        found += stored_variants.stored(variant.stored_keys, dispatcher.options)
        sources = choices.sources_elsewhere(variant.program, (), library.device)
        code = list(library.machine_code(sources))
        num_missing += len(sources) - sum(entry.kind in ("cpp", "cubin") for entry in code)
        found += code
    return found, num_missing
