"""Say which families of models are trained, and tell them apart by the index of a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.errors import UnsupportedError
from strop.train.families.family import Family
from strop.train.families.flux import Flux, FluxOfClips
from strop.train.families.sd3 import StableDiffusion3
from strop.train.families.stable import StableDiffusion, StableDiffusionXL

FAMILIES: tuple[Family, ...] = (
    StableDiffusion(),
    StableDiffusionXL(),
    StableDiffusion3(),
    Flux(),
    FluxOfClips(),
)


def family_of(folder: Path, index: Mapping[str, Any]) -> Family:
    """Return the family whose parts are those of ``model_index.json``.

    Raises UnsupportedError that names the part by which the nearest family differs.
    """
    kinds = {name: _class_of(part) for name, part in index.items()}
    apart = {family: _differences(family, kinds) for family in FAMILIES}
    family = min(FAMILIES, key=lambda one: len(apart[one]))
    if not apart[family]:
        return family
    name = apart[family][0]
    wanted = family.kinds.get(name, "no such part")
    names = ", ".join(dict.fromkeys(one.name for one in FAMILIES))
    raise UnsupportedError(
        f"{folder}: its {name} is {kinds.get(name)}, and {family.name}, the nearest family, has "
        f"{wanted}; training is built for {names}"
    )


def _differences(family: Family, kinds: Mapping[str, str | None]) -> list[str]:
    """Return the parts that are not the family's; networks and tokenizers that are too many."""
    wrong = [
        name
        for name, kind in family.kinds.items()
        if kinds.get(name) != kind and not (kinds.get(name) is None and name in family.may_lack)
    ]
    more = [
        name
        for name, kind in kinds.items()
        if kind is not None
        and name not in family.kinds
        and (name.startswith(("text_encoder", "tokenizer")) or name in ("unet", "transformer"))
    ]
    return wrong + more


def _class_of(part: object) -> str | None:
    found = part[1] if isinstance(part, list) and len(part) == 2 else None
    return None if found is None else str(found).removesuffix("Fast")
