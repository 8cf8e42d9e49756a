"""Write scenes as integer tensors: drawn by the batch, split by a hash, written as token rows.

A spec is an int64 tensor [batch, 9]; its columns are the constants below. Everything here runs
on the generator's device without a host synchronisation, since training draws its captions there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from strop.models.sprites.grammar import (
    BACKGROUNDS,
    COLOURS,
    PLACES,
    RELATIONS,
    SHAPES,
    SIZES,
    Scene,
    Thing,
    caption,
)

TWO, COLOUR1, SHAPE1, SIZE1, COLOUR2, SHAPE2, SIZE2, LAYOUT, BACKGROUND = range(9)
"""Columns of a spec. SIZE, LAYOUT (one thing) and BACKGROUND count from 1; 0 leaves it out."""

HELD_OUT_IN = 16
"""One combination in this many is held out of training."""

_TWO_THINGS, _SIZED, _PLACED, _BACKED = 0.75, 0.2, 0.85, 0.9
_KINDS = len(COLOURS) * len(SHAPES)


def draw_specs(count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` specs [count, 9] from the whole grammar, held-out ones included."""
    device = generator.device

    def chance(share: float) -> Tensor:
        return torch.rand(count, device=device, generator=generator) < share

    def pick(options: int) -> Tensor:
        return torch.randint(options, (count,), device=device, generator=generator)

    two = chance(_TWO_THINGS).long()
    first = pick(_KINDS)
    # An offset of 1 to 63 keeps the two things different in colour or in shape.
    second = (first + 1 + pick(_KINDS - 1)) % _KINDS
    place = (pick(len(PLACES)) + 1) * chance(_PLACED)
    layout = torch.where(two > 0, pick(len(RELATIONS)), place)
    columns = [two, first // len(SHAPES), first % len(SHAPES), (pick(2) + 1) * chance(_SIZED)]
    columns += [two * (second // len(SHAPES)), two * (second % len(SHAPES))]
    columns += [two * (pick(2) + 1) * chance(_SIZED), layout]
    columns.append((pick(len(BACKGROUNDS)) + 1) * chance(_BACKED))
    return torch.stack(columns, dim=1)


def draw_training_specs(count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` specs [count, 9] of which none is held out."""
    # Sorting a surplus replaces rejection, whose length only the host could read.
    specs = draw_specs(count + count // 2 + 32, generator)
    order = torch.argsort(is_held_out(specs).to(torch.uint8), stable=True)
    return specs[order[:count]]


def is_held_out(specs: Tensor) -> Tensor:
    """Return bool [batch]: whether each spec's combination is held out of training.

    A combination is colours, shapes and layout. Sizes and backgrounds do not enter it, and
    "A above B" equals "B below A", so no other wording of a held-out scene is trained on.
    """
    first = specs[:, COLOUR1] * len(SHAPES) + specs[:, SHAPE1]
    second = specs[:, COLOUR2] * len(SHAPES) + specs[:, SHAPE2]
    layout, two = specs[:, LAYOUT], specs[:, TWO] > 0
    reverse = two & (layout % 2 == 1)
    upper = torch.where(reverse, second, first)
    lower = torch.where(reverse, first, second)
    pair = (layout // 2 * _KINDS + upper) * _KINDS + lower + (len(PLACES) + 1) * _KINDS
    code = torch.where(two, pair, layout * _KINDS + first)
    # Two rounds of a 32-bit integer hash whose products stay inside int64.
    for _ in range(2):
        code = ((code >> 16) ^ code) * 0x45D9F3B & 0xFFFFFFFF
    return ((code >> 16) ^ code) % HELD_OUT_IN == 0


def scenes(specs: Tensor) -> list[Scene]:
    """Return the scene of each spec."""
    return [_scene(row) for row in specs.tolist()]


def _scene(row: list[int]) -> Scene:
    colours, backgrounds, places = list(COLOURS), [None, *BACKGROUNDS], [None, *PLACES]
    sizes = [None, *SIZES]
    things = [Thing(colours[row[COLOUR1]], SHAPES[row[SHAPE1]], sizes[row[SIZE1]])]
    background = backgrounds[row[BACKGROUND]]
    if not row[TWO]:
        return Scene(tuple(things), place=places[row[LAYOUT]], background=background)
    things.append(Thing(colours[row[COLOUR2]], SHAPES[row[SHAPE2]], sizes[row[SIZE2]]))
    return Scene(tuple(things), relation=RELATIONS[row[LAYOUT]], background=background)


def specs_of(items: list[Scene]) -> Tensor:
    """Return the specs [len(items), 9] of `items`, on the CPU."""
    return torch.tensor([_row(scene) for scene in items], dtype=torch.int64)


def _row(scene: Scene) -> list[int]:
    def thing(index: int) -> list[int]:
        if index >= len(scene.things):
            return [0, 0, 0]
        item = scene.things[index]
        size = 0 if item.size is None else SIZES.index(item.size) + 1
        return [list(COLOURS).index(item.colour), SHAPES.index(item.shape), size]

    if scene.relation is not None:
        layout = RELATIONS.index(scene.relation)
    else:
        layout = 0 if scene.place is None else list(PLACES).index(scene.place) + 1
    background = 0
    if scene.background is not None:
        background = list(BACKGROUNDS).index(scene.background) + 1
    return [len(scene.things) - 1, *thing(0), *thing(1), layout, background]


def held_out_prompts(n: int = 200, seed: int = 0) -> list[str]:
    """Return `n` different captions that training never sees, the same for the same `seed`.

    They follow the mix of the training captions: about three in four have two things.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, None] = {}
    for _ in range(1000):
        specs = draw_specs(4096, generator)
        for scene in scenes(specs[is_held_out(specs)]):
            found[caption(scene)] = None
        if len(found) >= n:
            return list(found)[:n]
    raise ValueError(f"asked for {n} held-out prompts, the grammar has only about {len(found)}")


@dataclass(frozen=True)
class TokenTables:
    """Hold token ids by code, padded with -1, from which caption rows are put together on a
    device."""

    begin: int
    end: int
    length: int
    articles: Tensor
    colours: Tensor
    shapes: Tensor
    vowels: Tensor
    sizes: Tensor
    places: Tensor
    relations: Tensor
    backgrounds: Tensor


def token_tables(
    ids: dict[str, int], begin: int, end: int, length: int, device: torch.device
) -> TokenTables:
    """Build the tables from each word's token id; `length` is the tokenizer's row length."""

    def table(phrases: list[str], width: int) -> Tensor:
        rows = [[ids[word] for word in phrase.split()] for phrase in phrases]
        padded = [row + [-1] * (width - len(row)) for row in rows]
        return torch.tensor(padded, device=device)

    return TokenTables(
        begin=begin,
        end=end,
        length=length,
        articles=table(["a", "an"], 1),
        colours=table(list(COLOURS), 1),
        shapes=table(list(SHAPES), 1),
        vowels=torch.tensor([name[0] in "aeiou" for name in COLOURS], device=device),
        sizes=table(["", *SIZES], 1),
        places=table(["", *PLACES.values()], 4),
        relations=table(list(RELATIONS), 4),
        backgrounds=table(["", *(f"on a {name} background" for name in BACKGROUNDS)], 4),
    )


def token_rows(specs: Tensor, tables: TokenTables) -> Tensor:
    """Return the canonical captions' token ids, int64 [batch, length], as the tokenizer pads."""
    device, count = specs.device, len(specs)

    def thing(colour: int, shape: int, size: int) -> Tensor:
        an = (tables.vowels[specs[:, colour]] & (specs[:, size] == 0)).long()
        parts = [tables.articles[an], tables.sizes[specs[:, size]]]
        parts.append(tables.colours[specs[:, colour]])
        return torch.cat([*parts, tables.shapes[specs[:, shape]]], dim=1)

    two = specs[:, TWO, None] > 0
    # Each look-up is clamped to its own table; `where` drops the one that does not apply.
    relation = tables.relations[specs[:, LAYOUT].clamp(max=len(RELATIONS) - 1)]
    layout = torch.where(two, relation, tables.places[specs[:, LAYOUT]])
    second = torch.where(two, thing(COLOUR2, SHAPE2, SIZE2), -1)
    edge = torch.ones(count, 1, dtype=torch.int64, device=device)
    row = [edge * tables.begin, thing(COLOUR1, SHAPE1, SIZE1), layout, second]
    row += [tables.backgrounds[specs[:, BACKGROUND]], edge * tables.end]
    ids = torch.cat(row, dim=1)
    order = torch.argsort((ids < 0).to(torch.uint8), dim=1, stable=True)
    ids = torch.gather(ids, 1, order)
    ids = torch.where(ids < 0, tables.end, ids)
    short = tables.length - ids.shape[1]
    return torch.nn.functional.pad(ids, (0, short), value=tables.end)
