"""Define the language of sprites: scenes of one or two coloured shapes, and their captions.

A `Scene` holds exactly what a caption says. What a caption leaves out (a size, a place, the
background) is free, and the drawing chooses it. `caption` and `parse` are each other's inverse
on canonical captions; `parse` also takes captions without articles.
"""

import re
from dataclasses import dataclass

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (222, 52, 62),
    "orange": (248, 140, 36),
    "yellow": (250, 212, 56),
    "green": (48, 164, 84),
    "cyan": (64, 204, 220),
    "blue": (44, 96, 224),
    "purple": (132, 68, 196),
    "pink": (248, 134, 188),
}
"""Object colours as sRGB bytes, in the order of their codes."""

BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (250, 250, 248),
    "black": (22, 22, 26),
    "gray": (138, 140, 146),
    "beige": (234, 214, 176),
    "navy": (26, 38, 88),
}
"""Background colours as sRGB bytes, in the order of their codes."""

SHAPES: tuple[str, ...] = (
    "circle",
    "square",
    "triangle",
    "star",
    "ring",
    "cross",
    "diamond",
    "heart",
)

SIZES: tuple[str, ...] = ("small", "large")

PLACES: dict[str, str] = {
    "center": "in the center",
    "left": "on the left",
    "right": "on the right",
    "top": "at the top",
    "bottom": "at the bottom",
    "top left": "at the top left",
    "top right": "at the top right",
    "bottom left": "at the bottom left",
    "bottom right": "at the bottom right",
}
"""Places of a single object and the phrase that names each."""

RELATIONS: tuple[str, ...] = ("above", "below", "to the left of", "to the right of")
"""How the first object of two lies to the second; each odd one reverses the one before it."""

BUCKETS: tuple[tuple[int, int], ...] = ((64, 64), (96, 64), (64, 96), (96, 96))
"""Picture sizes (width, height) in pixels that the model is trained on."""


@dataclass(frozen=True)
class Thing:
    """Describe one object of a scene; `size` is None where the caption does not name it."""

    colour: str
    shape: str
    size: str | None = None


@dataclass(frozen=True)
class Scene:
    """Hold what a caption says: one thing at a place, or two things in a relation."""

    things: tuple[Thing, ...]
    place: str | None = None
    relation: str | None = None
    background: str | None = None

    def __post_init__(self) -> None:
        two = len(self.things) == 2
        if len(self.things) not in (1, 2):
            raise ValueError(f"a scene has one or two things, not {len(self.things)}")
        if two != (self.relation is not None) or (two and self.place is not None):
            raise ValueError(
                "two things need a relation and no place, one thing takes no relation; got "
                f"{len(self.things)} thing(s), relation {self.relation!r}, place {self.place!r}"
            )


def caption(scene: Scene) -> str:
    """Return the canonical caption of `scene`."""
    words = [_noun_phrase(scene.things[0])]
    if scene.relation is not None:
        words += [scene.relation, _noun_phrase(scene.things[1])]
    if scene.place is not None:
        words.append(PLACES[scene.place])
    if scene.background is not None:
        words.append(f"on a {scene.background} background")
    return " ".join(words)


def _noun_phrase(thing: Thing) -> str:
    noun = " ".join(word for word in (thing.size, thing.colour, thing.shape) if word)
    return f"{article(noun)} {noun}"


def article(noun: str) -> str:
    """Return "a" or "an" as the first letter of `noun` asks."""
    return "an" if noun[0] in "aeiou" else "a"


def _pattern() -> re.Pattern[str]:
    def one(index: int) -> str:
        return (
            rf"(?:an? )?(?:(?P<size{index}>{'|'.join(SIZES)}) )?"
            rf"(?P<colour{index}>{'|'.join(COLOURS)}) (?P<shape{index}>{'|'.join(SHAPES)})"
        )

    # Longest first, so that "at the top left" is not read as "at the top" and a stray "left".
    places = "|".join(sorted(PLACES.values(), key=len, reverse=True))
    second = rf" (?P<relation>{'|'.join(RELATIONS)}) {one(2)}"
    return re.compile(
        rf"{one(1)}(?:{second}| (?P<place>{places}))?"
        rf"(?: on (?:an? )?(?P<background>{'|'.join(BACKGROUNDS)}) background)?"
    )


_CAPTION = _pattern()


def parse(prompt: str) -> Scene:
    """Read a caption back into its scene.

    Raises:
        ValueError: `prompt` is outside the grammar; the message shows two prompts that are in it.
    """
    text = " ".join(prompt.lower().replace("grey", "gray").strip(" .").split())
    found = _CAPTION.fullmatch(text)
    if found is None:
        raise ValueError(
            f"prompt {prompt!r} is outside the sprites grammar; write for example "
            "'a red circle above a blue square on a white background' or "
            f"'a small green star at the top left' with colours {', '.join(COLOURS)}, "
            f"shapes {', '.join(SHAPES)} and backgrounds {', '.join(BACKGROUNDS)}"
        )
    part = found.groupdict()
    things = [Thing(part["colour1"], part["shape1"], part["size1"])]
    if part["relation"] is not None:
        things.append(Thing(part["colour2"], part["shape2"], part["size2"]))
    names = {phrase: place for place, phrase in PLACES.items()}
    place = names[part["place"]] if part["place"] is not None else None
    return Scene(tuple(things), place, part["relation"], part["background"])


def words() -> tuple[str, ...]:
    """Return every word that a caption can hold, in a fixed order."""
    text = ["a an on background", *SIZES, *COLOURS, *SHAPES, *PLACES.values(), *RELATIONS]
    text += list(BACKGROUNDS)
    return tuple(dict.fromkeys(" ".join(text).split()))
