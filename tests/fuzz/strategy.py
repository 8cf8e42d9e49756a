"""Random programs, for hypothesis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hypothesis import strategies as st

from strop.ir.dims import parse
from tests.fuzz.operators import MOVES, Move
from tests.fuzz.programs import SIZES, Argument, Program
from tests.fuzz.values import Draft, NoFit, Value

SHAPES = (
    ("b", "s", "4"),
    ("b", "4", "s", "s"),
    ("b", "s"),
    ("s", "6"),
    ("b", "1", "4"),
    ("2*s",),
    ("b", "4", "3", "2"),
    ("1", "s", "1"),
    (),
    ("4",),
    ("2", "3", "4"),
)
KINDS = ("f32", "f32", "f32", "f16", "bf16", "i64", "bool", "u8", "i8")
LAYOUTS = ("dense", "dense", "transposed", "every_second", "offset", "expanded")
OTHERS = (
    ({"b": 2, "s": 6}, {"b": 5, "s": 3}),
    ({"b": 1, "s": 6}, {"b": 5, "s": 3}),
    ({"b": 2, "s": 1}, {"b": 7, "s": 2}),
    ({"b": 0, "s": 4}, {"b": 4, "s": 4}),
    ({"b": 3, "s": 0}, {"b": 8, "s": 5}),
)


@st.composite
def programs(
    draw: Callable[[st.SearchStrategy[Any]], Any],
    most_lines: int = 12,
    kinds: tuple[str, ...] = KINDS,
    moves: Sequence[Move] = MOVES,
) -> Program:
    d = Draft(draw)
    arguments = tuple(draw(_arguments(kinds)) for _ in range(draw(st.integers(1, 3))))
    for number, a in enumerate(arguments):
        bound = {"bool": 1.0, "u8": 8.0}.get(a.dtype, 4.0)
        shape = tuple(map(parse, a.shape))
        d.values.append(Value(f"x{number}", a.dtype, shape, True, bound, -1 - number))
    for _ in range(most_lines):
        with suppress(NoFit):
            draw(st.sampled_from(moves))(d)
    names = [v.name for v in d.values]
    results = draw(st.lists(st.sampled_from(names[::-1]), min_size=0, max_size=3))
    unread = [n for i, n in enumerate(names) if not any(n in line for line in d.lines[i:])]
    every = draw(st.booleans())
    kept = tuple(dict.fromkeys([names[-1], *results, *(unread if every else ())]))
    sizes: tuple[Mapping[str, int], ...] = (SIZES, *draw(st.sampled_from(OTHERS)))
    return Program(arguments, tuple(d.weights), tuple(d.lines), kept, sizes)


@st.composite
def _arguments(draw: Callable[[st.SearchStrategy[Any]], Any], kinds: tuple[str, ...]) -> Argument:
    shape = draw(st.sampled_from(SHAPES))
    layouts = [*LAYOUTS, "channels_last"] if len(shape) == 4 else LAYOUTS
    layout = draw(st.sampled_from(layouts)) if shape else "dense"
    return Argument(shape, draw(st.sampled_from(kinds)), layout)
