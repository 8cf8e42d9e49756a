"""Print the loads that add up rows: once a row of the result where they can, else by elements."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.codegen.cpp_text import scalar_type, times
from strop.ir.dims import Expr, product
from strop.ir.loops import Bag, Load

if TYPE_CHECKING:
    from strop.codegen.cpp_loops import Loops

MOST_FETCHED = 256  # elements of a row that are fetched: behind these the processor sees what comes
# Rows that are fetched before they are read: 96 of 128 bytes were best on a Zen 5, of which a Zen 4
# was as fast with 8 to 64. What is fetched has to stay in the first cache.
MOST_AHEAD, FEWEST_AHEAD, BYTES_AHEAD = 96, 12, 12288


def ahead(width: Expr, itemsize: int) -> int:
    """Return how many rows of ``width`` elements to be ahead by."""
    if not width.is_const:
        return FEWEST_AHEAD
    row_bytes = max(min(width.value, MOST_FETCHED) * itemsize, 1)
    return min(max(BYTES_AHEAD // row_bytes, FEWEST_AHEAD), MOST_AHEAD)


def print_row(loops: Loops, stmt: Load, row: str) -> None:
    """Print what fills ``row``, a row buffer with one number for each col."""
    bag, out = stmt.bag, loops.out
    assert bag is not None
    cols = loops.axis_loops(loops.kernel.cols)
    place = f"{row}[{loops.lane_at_axes()}]"
    with loops.loops(cols):
        out(f"{place} = 0;")
    out.all(_before(stmt, bag))
    with out.loop("k", f"{_first(stmt)} + {_length(stmt)}", _first(stmt)):
        out.all(_row_lines(loops, stmt, bag, is_fetched=True))
        *outer, inner = cols
        with loops.loops(outer):
            loops.simd()
            with out.loop(*inner):
                out(_step(loops, stmt, bag, place))
        out.all(_after(bag))


def print_first_fetches(loops: Loops) -> None:
    """Print what fetches the first rows of all bags, at the begin of the first task."""
    for stmt in loops.bags:
        bag = stmt.bag
        assert bag is not None
        count = f"sp::min<int64_t>({_ahead(loops, stmt)}, {loops.scalars(bag.count)})"
        with loops.out.block("if (!begin)"), loops.out.loop("k", count):
            loops.out(_fetch(loops, stmt, bag, "k"))


def element_text(loops: Loops, stmt: Load) -> str:
    """Return the text of one element, which has a loop of its own over the bag."""
    bag = stmt.bag
    assert bag is not None
    first = _first(stmt)
    lines = [
        f"{scalar_type(stmt.dtype)} total = 0;",
        *_before(stmt, bag),
        f"for (int64_t k = {first}; k < {first} + {_length(stmt)}; ++k) {{",
        *_row_lines(loops, stmt, bag, is_fetched=False),
        _step(loops, stmt, bag, "total"),
        *_after(bag),
        "}",
        "return total;",
    ]
    return f"[&] {{ {' '.join(lines)} }}()"


def _first(stmt: Load) -> str:
    return stmt.lookups[0][0]


def _length(stmt: Load) -> str:
    return stmt.lookups[1][0]


def _before(stmt: Load, bag: Bag) -> list[str]:
    return ["bool is_empty = true;"] if bag.kind == "amax" else []


def _after(bag: Bag) -> list[str]:
    return ["is_empty = false;"] if bag.kind == "amax" else []


def _row_lines(loops: Loops, stmt: Load, bag: Bag, *, is_fetched: bool) -> list[str]:
    """Return the lines that find the row of id ``k``, and go on with the next one where there is
    none."""
    stride, size, ids = loops.scalars(bag.stride), loops.scalars(bag.size), _ids(loops, bag)
    lines = []
    if is_fetched:
        far = _ahead(loops, stmt)
        lines += [
            f"if (k + {far} < {loops.scalars(bag.count)})",
            f"  {_fetch(loops, stmt, bag, f'k + {far}')}",
        ]
    lines += [
        f"const int64_t id = {ids}[k];",
        f"if (sp::is_outside(id, {size})) {{ faults |= 1; continue; }}",
    ]
    if bag.padding is not None:
        lines.append(f"if (id == {bag.padding}) continue;")
    if bag.weights is not None:
        at = f" + {loops.scalars(bag.weights_at)}" if bag.weights_at.terms else ""
        kind = scalar_type(stmt.dtype)
        lines.append(f"const {kind} factor = sp::widen(p{bag.weights}[k{at}]);")
    return [*lines, f"const auto* const found = p{stmt.param} + {times('id', stride)};"]


def _ids(loops: Loops, bag: Bag) -> str:
    return f"(p{bag.ids} + {loops.scalars(bag.at)})" if bag.at.terms else f"p{bag.ids}"


def _ahead(loops: Loops, stmt: Load) -> int:
    return ahead(_width(loops, stmt), loops.kernel.params[stmt.param].dtype.itemsize)


def _fetch(loops: Loops, stmt: Load, bag: Bag, number: str) -> str:
    """Return what fetches the row of the id of this number."""
    width = f"sp::min<int64_t>({MOST_FETCHED}, {loops.scalars(_width(loops, stmt))})"
    stride = loops.scalars(bag.stride)
    return f"sp::prefetch(p{stmt.param}, {_ids(loops, bag)}[{number}], {stride}, {width});"


def _width(loops: Loops, stmt: Load) -> Expr:
    sizes = {axis.name: axis.size for axis in loops.kernel.cols}
    return product(sizes[name] for name in stmt.index.axes if name in sizes)


def _step(loops: Loops, stmt: Load, bag: Bag, total: str) -> str:
    number = f"sp::widen(found[{loops.element(stmt.index)}])"
    number = f"factor * {number}" if bag.weights is not None else number
    if bag.kind == "sum":
        return f"{total} += {number};"
    return f"{total} = is_empty | ({number} > {total}) ? {number} : {total};"
