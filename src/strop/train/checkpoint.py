"""Write checkpoints: tensors as safetensors, the rest as JSON, and a list of sizes and hashes.

A folder ``checkpoint-N`` appears by a rename once everything in it is on the disk, so a training
killed at any moment leaves whole checkpoints only. Nothing is pickled. Ranks that have states of
their own write a file each, ``optimizer-1`` beside ``optimizer``; names of tensors are the same on
any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from strop.errors import CacheError, OptionError, TrainingError
from strop.train import files

log = logging.getLogger("strop")
_MANIFEST, _STATE = "manifest.json", "state.json"
_CHUNK = 1 << 20
FORMAT = 2  # 1 had one file of each group, whatever the number of ranks
_READ = (1, FORMAT)

Tensors = Mapping[str, Mapping[str, Tensor]]
Entries = Mapping[str, Mapping[str, Any]]
"""Size and hash of files, by name."""


def save(output: Path, step: int, tensors: Tensors, state: Mapping[str, Any]) -> Path:
    """Write ``checkpoint-<step>``: a file of each group of tensors, and the state."""
    final = output / f"checkpoint-{step}"
    with files.writing(final):
        begin(final)
        publish(final, step, state, write_tensors(final, tensors))
    return final


def begin(final: Path) -> None:
    """Make the folder in which ``final`` is written."""
    fresh = _fresh(final)
    files.discard(fresh)
    fresh.mkdir(parents=True)


def write_tensors(final: Path, tensors: Tensors, rank: int = 0) -> dict[str, dict[str, Any]]:
    """Write what a rank has, a file of each group, and return sizes and hashes of the files."""
    entries = {}
    for group, named in tensors.items():
        kept = {name: tensor.detach().contiguous().cpu() for name, tensor in named.items()}
        path = _fresh(final) / f"{group}{f'-{rank}' if rank else ''}.safetensors"
        save_file(kept, path)
        files.sync(path)
        entries[path.name] = _entry(path)
    return entries


def publish(final: Path, step: int, state: Mapping[str, Any], entries: Entries) -> None:
    """Add the state and the list of files, and rename the folder. Raises TrainingError for a file
    that another rank has written and that does not lie there."""
    fresh = _fresh(final)
    for name, entry in entries.items():
        path = fresh / name
        if not path.is_file() or path.stat().st_size != entry["size"]:
            raise TrainingError(
                f"another rank has written {path}, which rank 0 does not see: output_dir has to be "
                "one folder for all ranks"
            )
    path = fresh / _STATE
    path.write_text(json.dumps({"format": FORMAT, "step": step, **state}, indent=1) + "\n")
    manifest = dict(sorted({**entries, _STATE: _entry(path)}.items()))
    (fresh / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    files.publish(fresh, final)


def _fresh(final: Path) -> Path:
    return final.with_name(final.name + files.PART)


def prune(output: Path, keep: int | None) -> None:
    """Delete all checkpoints but the newest ``keep``."""
    if keep is not None:
        for _, folder in numbered(output)[:-keep]:
            files.discard(folder)


def numbered(output: Path) -> list[tuple[int, Path]]:
    """Return steps and folders of all checkpoints, oldest first."""
    found = []
    for folder in output.glob("checkpoint-*"):
        match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
        if match is not None and folder.is_dir():
            found.append((int(match[1]), folder))
    return sorted(found)


def find(output: Path, wanted: str) -> Path | None:
    """Find the whole checkpoint that ``--resume_from_checkpoint`` means.

    ``latest`` passes over damaged ones, with a warning, and is None where there are none at all.
    Raises OptionError for a folder that does not exist or that another program has written, and
    CacheError if the one that was named is damaged, or all are.
    """
    if wanted != "latest":
        folder = Path(wanted).expanduser()
        if not folder.is_dir() and (output / wanted).is_dir():  # diffusers takes its name, too
            folder = output / wanted
        if not folder.is_dir():
            have = ", ".join(path.name for _, path in numbered(output)) or "none"
            raise OptionError(
                f"there is no checkpoint {wanted}; {output} holds {have}; 'latest' takes the newest"
            )
        verify(folder)
        return folder
    return _latest(output)


def _latest(output: Path) -> Path | None:
    damaged = []
    for _, folder in reversed(numbered(output)):
        try:
            verify(folder)
        except CacheError as error:
            damaged.append(str(error))
        else:
            for reason in damaged:
                log.warning("%s; taking %s", reason, folder.name)
            return folder
    if damaged:  # a training that started anew would write over them
        raise CacheError(
            f"{output} holds no whole checkpoint: {'; '.join(damaged)}; put back a "
            "copy of one, or start anew in another --output_dir"
        )
    return None


def verify(folder: Path) -> None:
    """Raise CacheError unless every file has the size and the hash that were written down, and
    OptionError for a folder that is none of ours."""
    if not any((folder / name).exists() for name in (_MANIFEST, _STATE)):
        raise OptionError(
            f"{folder} is not a checkpoint of Strop: it has no {_MANIFEST}; go on "
            "with the program that wrote it, or start anew in another "
            "--output_dir"
        )
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        for name, entry in manifest.items():
            if _entry(folder / name) != entry:
                raise CacheError(f"the checkpoint {folder} is damaged: {name} has changed")
    except (OSError, ValueError, AttributeError) as error:
        raise CacheError(f"the checkpoint {folder} is damaged: {error}") from error


def state_of(folder: Path) -> dict[str, Any]:
    """Return what a checkpoint keeps beside its tensors."""
    state: dict[str, Any] = json.loads((folder / _STATE).read_text())
    return state


def load(folder: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Load the tensors by group, and the state, of a checkpoint that ``find`` has verified."""
    state = state_of(folder)
    if state["format"] not in _READ:
        raise CacheError(
            f"the checkpoint {folder} has format {state['format']}, this version of "
            f"Strop reads {' and '.join(map(str, _READ))}"
        )
    groups: dict[str, dict[str, Tensor]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        groups.setdefault(path.stem.partition("-")[0], {}).update(load_file(path))
    return groups, state


def check_same(folder: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise OptionError for settings that have changed since the checkpoint."""
    changed = [
        f"{name} was {then.get(name)!r} and is {value!r}"
        for name, value in now.items()
        if then.get(name) != value
    ]
    if changed:
        raise OptionError(
            f"{folder} belongs to a training with other settings: {'; '.join(changed)}; use the "
            "same ones, or start anew in another --output_dir"
        )


def _entry(path: Path) -> dict[str, Any]:
    total = hashlib.sha256()
    with path.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            total.update(chunk)
    return {"size": path.stat().st_size, "sha256": total.hexdigest()}
