"""Write training checkpoints: tensors as safetensors, the rest as JSON.

A checkpoint folder is written under a temporary name and renamed, so a training stopped at any
moment leaves either the old one or the new one. Nothing is pickled.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor


def save(folder: Path, groups: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
    """Replace the checkpoint at `folder`.

    Args:
        folder: The checkpoint folder.
        groups: Tensors by group ("weights", "ema", "moments", ...) and name; each group becomes
            a file, so that one can be left behind when moving a checkpoint.
        state: Anything JSON can hold.
    """
    fresh = folder.with_name(folder.name + ".new")
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for name, tensors in groups.items():
        whole = {key: tensor.detach().contiguous().cpu() for key, tensor in tensors.items()}
        save_file(whole, fresh / f"{name}.safetensors")
    (fresh / "state.json").write_text(json.dumps(state, indent=1))
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def find(folder: Path) -> Path | None:
    """Return where the newest whole checkpoint of `folder` lies, or None if there is none."""
    # A stop between the two renames of `save` leaves only the old one.
    for place in (folder, folder.with_name(folder.name + ".old")):
        if (place / "state.json").is_file():
            return place
    return None


def state(folder: Path) -> dict[str, Any]:
    """Return the JSON state of the checkpoint in `folder`."""
    content: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return content


def group(folder: Path, name: str) -> dict[str, Tensor]:
    """Return the tensors of one group on the CPU; empty if the checkpoint came without it."""
    file = folder / f"{name}.safetensors"
    return load_file(file) if file.is_file() else {}
