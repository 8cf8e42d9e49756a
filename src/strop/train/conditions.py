"""Find the conditioning pictures of a ControlNet's training: edges, depths, poses, one for each
picture."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from strop.errors import OptionError
from strop.train.crops import Placement
from strop.train.folders import (
    METADATA,
    SUFFIXES,
    Folder,
    files_in,
    open_rgb,
    read_captioned,
    rows_of,
)
from strop.train.ranks import ALONE, Ranks
from strop.train.settings import Settings

_READERS = 8
_IMAGE_FOLDER = "_file_name"  # ends columns of files in metadata for Hugging Face's datasets


def read_controlled(
    settings: Settings,
    on_progress: Callable[[int, int], None] = lambda n, of: None,
    ranks: Ranks = ALONE,
) -> Folder:
    """Read pictures with captions and conditioning pictures. Each rank decodes its share.

    Raises OptionError for what is missing, a conditioning picture that cannot be read, and one of
    other proportions than its picture.
    """
    folder = Path(settings.train_data_dir).expanduser()
    place = Path(settings.conditioning_data_dir).expanduser()
    named: dict[Path, Path] = {}
    if settings.conditioning_data_dir:
        if folder.resolve().is_relative_to(place.resolve()):
            raise OptionError(
                f"conditioning_data_dir {place} has train_data_dir {folder} in it; give "
                "conditioning pictures a folder of their own"
            )
        others = {path.resolve() for path in files_in(place)}
    else:
        named = named_in_metadata(folder, settings.conditioning_image_column)
        others = {*named.values()}
    found = read_captioned(
        folder, settings.caption_column, settings.max_train_samples, on_progress, ranks, others
    )
    return _with_conditions(found, named or named_alike(found, place), ranks)


def named_in_metadata(folder: Path, column: str) -> dict[Path, Path]:
    """Return the conditioning picture of each picture that a metadata file names, as real paths.

    Raises OptionError for a row that names none, or one that lies outside of ``folder``.
    """
    found = {}
    for source in (path for path in files_in(folder) if path.name in METADATA):
        for number, row in rows_of(source):
            where = f"{source}, line {number}"
            key = column if column in row else f"{column}{_IMAGE_FOLDER}"
            name = row.get(key)
            if not isinstance(name, str) or not name:
                raise OptionError(
                    f"{where}: no file under {column!r}, only {', '.join(map(str, row))}; "
                    "--conditioning_image_column names the conditioning pictures, or give their "
                    "folder as --conditioning_data_dir"
                )
            path = (source.parent / name).resolve()
            if not path.is_relative_to(folder.resolve()):
                raise OptionError(f"{where}: {path} is outside {folder}")
            found[(source.parent / str(row.get("file_name"))).resolve()] = path
    if not found:
        raise OptionError(
            f"{folder} has no metadata.jsonl that names conditioning pictures: write one with "
            f'lines {{"file_name": ..., "text": ..., "{column}": ...}}, or give their folder as '
            "--conditioning_data_dir"
        )
    return found


def named_alike(pictures: Folder, place: Path) -> dict[Path, Path]:
    """Return the file in ``place`` that has the name of each picture, whatever its ending."""
    there = {
        path.relative_to(place).with_suffix("").as_posix(): path
        for path in files_in(place)
        if path.suffix.lower() in SUFFIXES
    }
    found = {}
    for picture in pictures.pictures:
        path = there.get(Path(picture.name).with_suffix("").as_posix())
        if path is None:
            raise OptionError(
                f"{place} has no conditioning picture of {picture.name}; put "
                f"{Path(picture.name).with_suffix('.png')} there, or leave the picture out"
            )
        found[picture.path.resolve()] = path.resolve()
    return found


def _with_conditions(pictures: Folder, found: Mapping[Path, Path], ranks: Ranks) -> Folder:
    """Decode the conditioning picture of each picture once."""

    def look(number: int) -> str:
        picture = pictures.pictures[number]
        _check(paths[number], (picture.width, picture.height))
        return hashlib.sha256(paths[number].read_bytes()).hexdigest()

    def inspect(numbers: Sequence[int]) -> list[str]:
        with ThreadPoolExecutor(_READERS) as pool:
            return [*pool.map(look, numbers)]

    paths = tuple(found[picture.path.resolve()] for picture in pictures.pictures)
    hashes = ranks.dealt(range(len(paths)), inspect)
    digest = hashlib.sha256("".join(hashes).encode()).hexdigest()
    return replace(pictures, conditions=paths, digest_of_conditions=digest)


def _check(path: Path, wanted: tuple[int, int]) -> None:
    try:
        size = open_rgb(path).size
    except OptionError as error:
        raise OptionError(f"the conditioning picture {path} {error}") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise OptionError(
            f"the conditioning picture {path} cannot be read: {error}; save it again"
        ) from error
    # Half a pixel of rounding in each side of a picture that was scaled.
    if abs(size[0] * wanted[1] - size[1] * wanted[0]) > max(wanted):
        raise OptionError(
            f"the conditioning picture {path} has {size[0]}x{size[1]} pixels and its picture "
            f"{wanted[0]}x{wanted[1]}: give both the same proportions, so that they lie above each "
            "other"
        )


def condition_of(path: Path, placement: Placement, resample: str) -> Tensor:
    """Return what is seen of a conditioning picture where its own is cut like this,
    [3, height, width] from 0 to 1, as ControlNets of diffusers take it."""
    rows = placement.cut(open_rgb(path), resample)
    return rows.permute(2, 0, 1).to(torch.float32) / 255.0
