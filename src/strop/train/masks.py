"""Find the masks of pictures: what is white in them is trained, what is black is not."""

from __future__ import annotations

import hashlib
from pathlib import Path

from PIL import Image

from strop.errors import OptionError
from strop.train.folders import SUFFIXES, Folder, open_rgb


def masks_of(pictures: Folder, place: Path) -> tuple[Path, ...]:
    """Return the mask of each picture: the file of its name in ``place``, whatever its ending.

    Raises OptionError for pictures without one, and for masks of another size than their picture.
    """
    if not place.is_dir():
        raise OptionError(f"mask_data_dir {place} is no folder; give one with a mask for each file")
    found = {
        path.relative_to(place).with_suffix("").as_posix(): path
        for path in sorted(place.rglob("*"))
        if path.suffix.lower() in SUFFIXES
    }
    masks = []
    for picture in pictures.pictures:
        name = Path(picture.name).with_suffix("").as_posix()
        mask = found.get(name)
        if mask is None:
            raise OptionError(
                f"{place} has no mask of {picture.name}; put {name}.png there, white where the "
                "picture is to be learned"
            )
        _check(mask, (picture.width, picture.height))
        masks.append(mask)
    return tuple(masks)


def digest_of(masks: tuple[Path, ...]) -> str:
    """Hash the contents of all masks."""
    total = hashlib.sha256()
    for mask in masks:
        total.update(hashlib.sha256(mask.read_bytes()).digest())
    return total.hexdigest()


def _check(mask: Path, wanted: tuple[int, int]) -> None:
    try:
        size = open_rgb(mask).size
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise OptionError(f"the mask {mask} cannot be read: {error}; save it again") from error
    if size != wanted:
        raise OptionError(
            f"the mask {mask} has {size[0]}x{size[1]} pixels and its picture "
            f"{wanted[0]}x{wanted[1]}; give both the same size"
        )
