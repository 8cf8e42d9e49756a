"""Print the parts of a kernel that was cut (``pieces``) as functions, of which equal ones are one.

The pieces of a cat are often alike: 64 lookups in 64 tables. g++ would otherwise compile each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from strop.codegen import nest
from strop.codegen.cpp_loops import Loops
from strop.codegen.cpp_text import TYPES
from strop.ir.dims import Expr
from strop.ir.loops import (
    Apply,
    Bag,
    CheckIndex,
    Index,
    Literal,
    Load,
    LoopKernel,
    Param,
    Position,
    Stmt,
    Store,
    args_of,
    outs_of,
)

Moved = tuple[int, Expr]  # a param of the whole kernel, from an element on


@dataclass(slots=True)
class PartPrinter:
    """Print one part after the other into ``whole``, which gets a call of each."""

    whole: Loops
    print_all: Callable[[Loops], None]
    functions: dict[tuple[str, ...], str] = field(default_factory=dict)

    def add(self, part: LoopKernel) -> None:
        """Print a call, and the function that it calls unless there is one already."""
        whole = self.whole
        kernel, pointers = _renumbered(part)
        own = Loops(kernel, is_part=True)
        own.out.depth = 2
        self.print_all(own)
        whole.scratch = whole.scratch or own.scratch
        lines = (_header(kernel, own), *own.out.lines)
        name = self.functions.get(lines)
        if name is None:
            name = self.functions[lines] = f"part{len(self.functions)}"
            whole.out(f"const auto {name} = {lines[0]}")
            whole.out.lines.extend(lines[1:])
            whole.out("};")
        given = [self._pointer(*pointer) for pointer in pointers]
        if own.scratch:
            given.append(f"p{len(whole.kernel.params)}")
        given += [whole.scalars(size) for size in own.scalars.names]
        whole.out(f"{name}({', '.join(given)});")

    def _pointer(self, number: int, offset: Expr) -> str:
        return f"p{number}" if offset == nest.ZERO else f"p{number} + {self.whole.scalars(offset)}"


def _header(kernel: LoopKernel, own: Loops) -> str:
    """Return the beginning of a function. It stays one: inlined, each call would be compiled."""
    params = [f"{_type(param)}* const p{n}" for n, param in enumerate(kernel.params)]
    if own.scratch:
        params.append(f"{TYPES[own.scratch[0].dtype]}* const p{len(kernel.params)}")
    params += [f"const int64_t {name}" for name in own.scalars.names.values()]
    return f"[]({', '.join(params)}) __attribute__((noinline)) {{"


def _type(param: Param) -> str:
    return f"{'' if param.is_output else 'const '}{TYPES[param.dtype]}"


def _renumbered(kernel: LoopKernel) -> tuple[LoopKernel, list[Moved]]:
    """Return a kernel whose params and values are counted as they come, and which begins at the
    first element of each param; and what its params are."""
    pointers, names = dict[Moved, int](), dict[str, str]()
    body = tuple(_with_numbers(stmt, pointers, names) for stmt in _ordered(kernel.body))
    params = tuple(kernel.params[number] for number, _ in pointers)
    return replace(kernel, params=params, body=body), list(pointers)


def _ordered(body: Sequence[Stmt]) -> list[Stmt]:
    """Return each statement behind what it needs, as late as can be: pieces that share a number
    have it in their text where others have theirs."""
    makers = {out: stmt for stmt in body for out in outs_of(stmt)}
    found = dict[Stmt, None]()
    for store in body:
        stack: list[Stmt] = [store] if isinstance(store, Store) else []
        while stack:
            needs = [makers[arg] for arg in args_of(stack[-1]) if makers[arg] not in found]
            if needs:
                stack += reversed(needs)
            else:
                found[stack.pop()] = None
    return list(found)


def _with_numbers(stmt: Stmt, pointers: dict[Moved, int], names: dict[str, str]) -> Stmt:
    for out in outs_of(stmt):
        names[out] = f"v{len(names)}"
    if isinstance(stmt, Store):
        param, index = _at_start(stmt, pointers)
        return Store(param, index, names[stmt.value])
    assert len(outs_of(stmt)) == 1, "a part of a cut kernel reduces nothing"
    out = names[outs_of(stmt)[0]]
    if isinstance(stmt, Load):
        param, index = _at_start(stmt, pointers)
        lookups = tuple((names[name], stride) for name, stride in stmt.lookups)
        guard = stmt.guard and names[stmt.guard]
        stmt = replace(stmt, bag=_with_own_params(stmt.bag, pointers))
        return replace(stmt, out=out, param=param, index=index, guard=guard, lookups=lookups)
    if isinstance(stmt, CheckIndex):
        guard = stmt.guard and names[stmt.guard]
        return replace(stmt, out=out, value=names[stmt.value], guard=guard)
    if isinstance(stmt, Apply):
        return replace(stmt, out=out, args=tuple(names[arg] for arg in stmt.args))
    assert isinstance(stmt, Literal | Position), "C++ has no pairs"
    return replace(stmt, out=out)


def _with_own_params(bag: Bag | None, pointers: dict[Moved, int]) -> Bag | None:
    """Count the params of a bag as they come, each from its first element on."""
    if bag is None:
        return None
    ids = pointers.setdefault((bag.ids, bag.at), len(pointers))
    weights = None
    if bag.weights is not None:
        weights = pointers.setdefault((bag.weights, bag.weights_at), len(pointers))
    return replace(bag, ids=ids, at=nest.ZERO, weights=weights, weights_at=nest.ZERO)


def _at_start(stmt: Load | Store, pointers: dict[Moved, int]) -> tuple[int, Index]:
    key = stmt.param, stmt.index.offset
    return pointers.setdefault(key, len(pointers)), replace(stmt.index, offset=nest.ZERO)
