"""Check a declaration of ``strop.pattern``, so that mistakes show where they are made."""

from __future__ import annotations

import hashlib
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.errors import CaptureError, PatternError, ShapeError, UnsupportedError
from strop.frontend.stable_text import text_of
from strop.ir.dims import const
from strop.ir.graph import Graph, Node, compute_nodes
from strop.patterns import registry
from strop.patterns.match import Places, stripped
from strop.patterns.pattern import EXACT, Pattern
from strop.patterns.search import Argument, traced
from strop.wording import counted

_NUMBERS = (bool, int, float)
_count = itertools.count(1)


def pattern(
    search: Callable[..., Any],
    replace: Callable[..., Any],
    *,
    example: Sequence[Tensor],
    when: Callable[..., Any] | None = None,
    numerics: str = EXACT,
    contiguous: bool = True,
    name: str = "",
) -> Pattern:
    """Have ``replace`` compute what ``search`` computes, wherever a compiled module contains it.

    ``search``: a function of tensors in torch, traced like a module. Keyword arguments with numbers
    as defaults match any number at their place, which ``replace`` then gets. ``replace``: a
    function of the same arguments that runs your kernel and returns what ``search`` would, in
    memory of its own; it must not write into its arguments. ``example``: tensors for which the
    search runs; matches have any sizes and types. ``when``: gets a ``Value`` (shape, dtype, device,
    is_weight) for each tensor, and the keywords; it returns True, or False or a text, the reason
    why not. ``numerics``: "exact", or a name that ``Options.numerics`` must list before results
    may be worse than torch's. ``contiguous``: tensors are handed over so.

    In force until ``.remove()`` of what is returned, or the end of a ``with`` block over it. Raises
    PatternError for a declaration that can never match.
    """
    name = name or _name_of(replace)
    arguments, attributes = _parameters(name, search, example)
    _check_numerics(name, numerics)
    try:
        _signature(name, "replace", replace).bind(*arguments, **attributes)
    except TypeError as error:
        given = ", ".join([*arguments, *(f"{key}=" for key in attributes)])
        raise PatternError(
            f"pattern {name!r}: replace has to take ({given}), as search does: {error}"
        ) from error
    specs: list[Argument] = [(tuple(map(const, t.shape)), t.dtype) for t in example]
    try:
        skeleton = traced(search, specs, attributes, {}).graph
    except (CaptureError, UnsupportedError, ShapeError) as error:
        shapes = ", ".join(f"{n}{list(t.shape)}" for n, t in zip(arguments, example, strict=True))
        raise PatternError(
            f"pattern {name!r}: search cannot be traced with the example ({shapes}): {error}"
        ) from error
    _check_graph(name, skeleton, arguments)
    key = _digest(name, search, replace, when, numerics, contiguous, skeleton, attributes)
    made = Pattern(
        name,
        search,
        replace,
        when,
        numerics,
        contiguous,
        arguments,
        attributes,
        skeleton,
        _places(search, specs, attributes, skeleton),
        key,
    )
    registry.add(made)
    return made


def _name_of(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return f"pattern {next(_count)}" if name == "<lambda>" else name


def _signature(name: str, what: str, function: Any) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:  # no function; built in
        raise PatternError(
            f"pattern {name!r}: {what} is {function!r}, whose arguments cannot be"
            " told: give a Python function"
        ) from error


def _parameters(
    name: str, search: Callable[..., Any], example: Sequence[Tensor]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the names of the tensors, and the keyword arguments with their defaults. Others with a
    default, as ``inplace`` of torch's functions, keep it."""
    given = _signature(name, "search", search).parameters.values()
    places = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = {p.name: p.default for p in given if p.kind is p.KEYWORD_ONLY}
    if len(places) + len(keywords) < len(given):
        raise PatternError(f"pattern {name!r}: search takes * or ** arguments: name each tensor")
    wrong = [key for key, value in keywords.items() if type(value) not in _NUMBERS]
    if wrong:
        raise PatternError(
            f"pattern {name!r}: keyword arguments of search are numbers with a"
            f" default: {', '.join(wrong)}"
        )
    needed = [p.name for p in places if p.default is p.empty]
    are_tensors = isinstance(example, list | tuple) and all(isinstance(t, Tensor) for t in example)
    if not are_tensors or not len(needed) <= len(example) <= len(places) or not example:
        raise PatternError(
            f"pattern {name!r}: search takes {counted(len(needed), 'tensor')}"
            f" ({', '.join(needed)}): example is a tuple with a tensor for each,"
            f" not {_kinds(example)}"
        )
    return tuple(p.name for p in places[: len(example)]), keywords


def _kinds(example: Any) -> str:
    if not isinstance(example, list | tuple):
        return f"a {type(example).__name__}"
    return f"({', '.join(type(value).__name__ for value in example)})"


def _check_numerics(name: str, numerics: str) -> None:
    if not isinstance(numerics, str) or not numerics.isidentifier():
        raise PatternError(
            f"pattern {name!r}: numerics={numerics!r}: 'exact', or a name for"
            " Options(numerics=(...,))"
        )


def _check_graph(name: str, graph: Graph, arguments: Sequence[str]) -> None:
    def refuse(why: str) -> None:
        raise PatternError(f"pattern {name!r}: {why}")

    computed = list(compute_nodes(graph))
    if any(node.attrs.get("tag") for node in computed if node.op == "aten"):
        refuse("search draws random numbers, and no two draws are the same computation")
    for number, output in enumerate(graph.outputs):
        base = stripped(output)
        if base.op in ("input", "constant"):
            refuse(
                f"result {number} of search is a view or a cast of an argument or a number,"
                " which every graph is full of: it has to compute something"
            )
    behind = {node: _inputs_behind(node) for node in graph.outputs}
    unread = [
        arguments[number]
        for number, node in enumerate(graph.inputs)
        if not any(node in found for found in behind.values())
    ]
    if unread:
        refuse(f"search does not read {', '.join(unread)}")
    if not any(len(found) == len(arguments) for found in behind.values()):
        refuse("no result of search depends on all of its arguments: declare a pattern for each")


def _inputs_behind(node: Node) -> set[Node]:
    stack, seen = [node], {node}
    while stack:
        new = [i for i in stack.pop().inputs if i not in seen]
        seen.update(new)
        stack += new
    return {n for n in seen if n.op == "input"}


def _places(
    search: Callable[..., Any],
    specs: Sequence[Argument],
    attributes: Mapping[str, Any],
    skeleton: Graph,
) -> Places:
    """Return where the keywords stand in the skeleton: what changes with them. A keyword that
    changes shapes or operators stands nowhere, and keeps its default."""
    found: dict[tuple[Node, str], str] = {}
    for keyword, default in attributes.items():
        other = (not default) if isinstance(default, bool) else default * 3 + 2
        try:
            changed = traced(search, specs, {**attributes, keyword: other}, {}).graph
        except (CaptureError, UnsupportedError, ShapeError):
            continue
        if [n.op for n in changed.nodes] == [n.op for n in skeleton.nodes]:
            pairs = zip(skeleton.nodes, changed.nodes, strict=True)
            found |= {
                (left, attribute): keyword
                for left, right in pairs
                for attribute, value in left.attrs.items()
                if (repr(value), repr(right.attrs[attribute])) == (repr(default), repr(other))
            }
    return found


def _digest(
    name: str,
    search: Callable[..., Any],
    replace: Callable[..., Any],
    when: Callable[..., Any] | None,
    numerics: str,
    contiguous: bool,
    skeleton: Graph,
    attributes: Mapping[str, Any],
) -> str:
    """Hash all that decides where a pattern matches and what it is. What ``replace`` runs is no
    part of a plan: a plan that is loaded calls what this process has declared."""
    parts = [name, numerics, str(contiguous), repr(sorted(attributes.items()))]
    number = {node: position for position, node in enumerate(skeleton.nodes)}
    parts += [
        repr((n.op, [number[i] for i in n.inputs], sorted(n.attrs.items()), n.shape, n.dtype))
        for n in skeleton.nodes
    ]
    for function in (search, replace, when):
        parts += [text_of(function), _file_of(function) if function is not replace else ""]
    parts.append(torch.__version__)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _file_of(function: Callable[..., Any] | None) -> str:
    """Return the text of a function's file, in which it may call others."""
    for owner in (inspect.unwrap(function), type(function)) if function else ():
        try:
            file = inspect.getsourcefile(owner)
        except (TypeError, OSError):  # an object that is called; built in
            continue
        path = Path(file) if file else None
        return path.read_text(encoding="utf-8") if path and path.is_file() else ""
    return ""
