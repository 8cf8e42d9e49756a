"""Find and read the files with adapters that users give, before anything is done with them.

Nothing is unpickled: a pickle may run any code, and only says so when it is too late.
"""

from __future__ import annotations

import json
import os
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.errors import AdapterError
from strop.wording import counted

SAFE = ".safetensors"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_PICKLE_STARTS = (b"PK\x03\x04", *(b"\x80" + bytes([protocol]) for protocol in range(2, 6)))
_MOST_HEADER = 100_000_000  # bytes, by the format
_LISTED = 5  # names of files in a message


@dataclass(frozen=True)
class FileKind:
    """Describe a kind of file. ``usual`` are the names that diffusers looks for in a folder; if it
    ``guesses``, it takes others too. ``conversion`` turns what was in a pickle into safetensors."""

    name: str
    usual: tuple[str, ...]
    guesses: bool
    conversion: str


LORA = FileKind(
    "LoRA",
    ("pytorch_lora_weights.safetensors",),
    True,
    "save_file({k: v.contiguous() for k, v in d.items()}, new)",
)
INVERSION = FileKind(
    "textual inversion",
    ("learned_embeds.safetensors", "learned_embeds.bin"),
    False,
    "save_file({'emb_params': d['string_to_param']['*'].detach()} if 'string_to_param' in d else d,"
    " new)",
)
IP_ADAPTER = FileKind(
    "IP-Adapter",
    (),
    False,
    "save_file({f'{p}.{k}': v.contiguous() for p in d for k, v in d[p].items()}, new)",
)


@dataclass(frozen=True)
class AdapterSource:
    """Say where an adapter comes from. ``file`` is None for a dictionary of tensors and for a name
    on the hub, which diffusers resolves; ``tensors`` is None for such a name alone."""

    name: str
    file: Path | None = None
    tensors: Mapping[str, Any] | None = None


def find_source(
    given: Any, kind: FileKind, weight_name: str | None = None, subfolder: str | None = None
) -> AdapterSource:
    """Return what a user has given, read and checked. Raises AdapterError for what is no sound file
    of tensors."""
    if isinstance(given, Mapping):
        source = AdapterSource("the dictionary that was given", tensors=given)
    elif isinstance(given, Tensor):
        source = AdapterSource("the tensor that was given", tensors={"the tensor": given})
    else:
        file = find_file(os.fspath(given), kind, weight_name, subfolder)
        if file is None:
            return AdapterSource(f"{given}/{weight_name}" if weight_name else str(given))
        source = AdapterSource(str(file), file, read_tensors(file, kind))
    check_values(source)
    return source


def find_file(
    given: str, kind: FileKind, weight_name: str | None, subfolder: str | None
) -> Path | None:
    """Return the file that diffusers would read, or None for a name on the hub."""
    path = Path(given)
    if path.is_file():
        return path
    if path.is_dir():
        return _file_in(path, kind, weight_name, subfolder)
    if path.is_absolute() or given[:1] in ("", ".", "~") or given.count("/") > 1:
        raise AdapterError(f"{given}: there is no such file or folder; check the path")
    if _has_weights(path):
        raise AdapterError(f"{given}: there is no such file; check the path")
    if weight_name is not None and Path(weight_name).suffix.lower() in PICKLED:
        raise AdapterError(_pickled(Path(weight_name), kind))
    return None


def _has_weights(path: Path) -> bool:
    return path.suffix.lower() in (SAFE, *PICKLED)


def _file_in(folder: Path, kind: FileKind, weight_name: str | None, subfolder: str | None) -> Path:
    wanted = (weight_name,) if weight_name else kind.usual
    places = [folder, folder / subfolder] if subfolder else [folder]
    for path in (place / name for place in places for name in wanted):
        if path.is_file():
            return path
    there = sorted(path for path in folder.iterdir() if _has_weights(path))
    if weight_name is None and kind.guesses and there:
        return _guess(folder, there)
    has = ", ".join(path.name for path in there[:_LISTED]) or "no file with weights"
    raise AdapterError(
        f"{folder} has no {' or '.join(wanted)}; it has {has}. Give the file itself, or its"
        " name as weight_name=..."
    )


def _guess(folder: Path, there: Sequence[Path]) -> Path:
    """Return the file that diffusers would take, or a pickle, which is refused by its name."""
    from diffusers.loaders.lora_base import _best_guess_weight_name

    safe = [path for path in there if path.suffix == SAFE]
    if len(safe) < 2:
        return safe[0] if safe else there[0]
    return folder / str(_best_guess_weight_name(str(folder), file_extension=SAFE))


def read_tensors(file: Path, kind: FileKind) -> dict[str, Tensor]:
    """Return the tensors of a file by their keys. Raises AdapterError for a pickle, a file that is
    cut off, and whatever else is no safetensors."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with file.open("rb") as opened:
        head = opened.read(128)
    if file.suffix.lower() in PICKLED or head.startswith(_PICKLE_STARTS):
        raise AdapterError(_pickled(file, kind))
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except SafetensorError as error:
        raise AdapterError(f"{file} is damaged: {_damage(file, head)} ({error})") from error
    return tensors


def _pickled(file: Path, kind: FileKind) -> str:
    new = file.with_suffix(SAFE)
    if new == file:  # it only has the name of what it should be
        new = file.with_stem(f"{file.stem}_converted")
    names = f"old, new = {str(file)!r}, {str(new)!r}"
    return (
        f"{file} is a pickle, which may run any code when it is opened; Strop reads safetensors"
        f' alone. Convert it, if you trust it: python -c "import torch; from safetensors.torch'
        f" import save_file; {names}; d = torch.load(old, 'cpu', weights_only=True);"
        f' {kind.conversion}"'
    )


def _damage(file: Path, head: bytes) -> str:
    """Say what is wrong with a file that does not open, as far as its head tells."""
    size = file.stat().st_size
    if not size:
        return "it is empty; download or save it again"
    if head.startswith(b"version https://git-lfs"):
        return "it is the pointer of Git LFS, not the file itself; run: git lfs pull"
    if head.lstrip()[:1] == b"<":
        return "it is a page of the web; download the file itself"
    if head[8:9] == b"{" and size < 8 + int.from_bytes(head[:8], "little") < _MOST_HEADER:
        return "it ends within its list of keys; download or save it again"
    cut = _cut_off(file, size)
    if cut is None:
        return "it does not begin as safetensors do; download or save it again"
    key, wanted = cut
    at = f", and ends within {key}" if key else ""
    return f"it has {size:,} bytes of {wanted:,}{at}; download or save it again"


def _cut_off(file: Path, size: int) -> tuple[str, int] | None:
    """Return the first key whose values are not all there and the size that the file should have,
    or None if it does not begin with a list of keys."""
    with file.open("rb") as opened:
        first = opened.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        try:
            table: dict[str, Any] = json.loads(opened.read(min(length, size)))
            ends = {k: v["data_offsets"][1] for k, v in table.items() if k != "__metadata__"}
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            return None
    start = 8 + length
    lost = [key for key in sorted(ends, key=ends.__getitem__) if start + ends[key] > size]
    return (lost[0], start + max(ends.values())) if lost else None


@torch.no_grad()
def check_values(source: AdapterSource) -> None:
    """Raise AdapterError for a NaN or an infinite number, which would spoil every picture."""
    tensors = {
        key: tensor.float() if tensor.itemsize == 1 else tensor
        for key, tensor in _tensors_in(source.tensors or {})
        if tensor.is_floating_point() and not tensor.is_meta and tensor.numel()
    }
    if _are_finite(tensors.values()):
        return
    for key, values in tensors.items():
        if not bool((is_finite := torch.isfinite(values)).all()):
            bad, count = int((~is_finite).sum()), counted(values.numel(), "value")
            raise AdapterError(
                f"{source.name}: {key} is NaN or infinite in {bad} of {count}; the file is damaged,"
                " or its training went wrong: take another one, such as an earlier checkpoint"
            )


def _are_finite(tensors: Iterable[Tensor]) -> bool:
    """Tell whether all values are numbers. The least and the greatest value of a tensor say so, as
    NaN is both where there is one; they take a tenth of the time of asking each value, and a GPU
    answers for all tensors at once."""
    ends = defaultdict[torch.device, list[Tensor]](list)
    for tensor in tensors:
        ends[tensor.device] += [end.double() for end in tensor.aminmax()]
    return all(bool(torch.stack(found).isfinite().all()) for found in ends.values())


def _tensors_in(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Tensor]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _tensors_in(value, f"{before}{key}.")
        elif isinstance(value, Tensor):
            yield f"{before}{key}", value
