"""Write files and folders that are there whole or not at all: written aside, synced, renamed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from strop.errors import TrainingError

PART = ".strop-part"  # ends the name of what is being written, and of nothing else


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Turn what goes wrong in writing to ``place``, a full disk above all, into a TrainingError.

    Safetensors has an error of its own for it, and Python's does not always name the file.
    """
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise TrainingError(
            f"cannot write {place}: {error}; make room, or choose another place. Checkpoints that "
            "were complete are kept"
        ) from error


def write(path: Path, fill: Callable[[Path], object]) -> None:
    """Let ``fill`` write a file under another name, then rename it to ``path``."""
    part = path.with_name(f"{path.name}.{os.getpid()}{PART}")
    with writing(path):
        try:
            fill(part)
            sync(part)
            part.replace(path)
            sync(path.parent)
        finally:
            part.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    write(path, lambda part: part.write_text(json.dumps(content, indent=1) + "\n"))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], **notes: str) -> None:
    """Write a safetensors file; the same tensors and notes give the same bytes."""
    kept = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}

    def fill(part: Path) -> None:
        save_file(kept, part, metadata=notes or None)
        if notes:
            sort_notes(part)

    write(path, fill)


def sort_notes(path: Path, **more: str) -> None:
    """Write the notes of a safetensors file anew, by name, and ``more`` of them: the library writes
    them in an order that differs from time to time. Tensors stay where they are, as their places
    count from the end of the header (https://github.com/huggingface/safetensors#format)."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    notes = header.pop("__metadata__", {}) | more
    sorted_header = {"__metadata__": dict(sorted(notes.items())), **header}
    text = json.dumps(sorted_header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # as the library aligns the tensors
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def publish(fresh: Path, final: Path) -> None:
    """Put the folder ``fresh`` in the place of ``final``."""
    for path in sorted(fresh.rglob("*")):
        sync(path)
    sync(fresh)
    discard(final)
    fresh.rename(final)
    sync(final.parent)


def discard(folder: Path) -> None:
    """Delete a folder; one that was deleted halfway has another name."""
    if folder.exists():
        dying = folder.with_name(folder.name + ".old" + PART)
        shutil.rmtree(dying, ignore_errors=True)
        folder.rename(dying)
        shutil.rmtree(dying)


def sweep(folder: Path) -> None:
    """Remove what a training that was killed left unfinished in ``folder``."""
    for path in folder.glob(f"*{PART}"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
