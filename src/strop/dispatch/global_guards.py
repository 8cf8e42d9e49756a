"""Watch what the code of a module reads besides arguments and weights: settings, names, class
attributes, closures, functions in force, and objects that are no modules, such as attention
processors. A trace keeps their values, so another value is another graph.

``reach`` says what that is. Numbers, texts and containers of them count by value, functions of the
user's by their code, the rest by identity; functions of libraries by identity in this process, and
by their code on disk.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import is_
from types import FunctionType, MappingProxyType
from typing import Any

import numpy as np
from torch import nn

from strop.dispatch.asked_values import Answers
from strop.dispatch.code_walk import (
    LIBRARIES,
    Binding,
    CodeWalk,
    Content,
    Originals,
    is_fixed,
)
from strop.dispatch.identities import CONSTANTS, addresses, identities, is_equal
from strop.dispatch.native_look import Watched
from strop.dispatch.watched_tables import ABSENT, Cell, Unbound
from strop.frontend.stable_text import WHENCE, is_plain, text_of, text_of_config
from strop.frontend.tables import COUNTS

__all__ = ["LIBRARIES", "GlobalGuards", "GuardChange", "is_private"]
_BY_TEXT = (*CONSTANTS, FunctionType, type(len), type)


class GuardChange:
    """Something that differs from what it was. ``undo`` puts that back. ``is_own``: it is in the
    user's code, and not in a library's."""

    def __init__(
        self, label: str, before: Any, now: Any, undo: Callable[[], None], *, is_own: bool = True
    ) -> None:
        self.label, self.before, self.now, self.undo = label, before, now, undo
        self.is_own = is_own


class GlobalGuards:
    """Hold what one module reads, as it was when last looked at."""

    def __init__(
        self, parts: Iterable[tuple[str, nn.Module]], ignored: frozenset[str] = frozenset()
    ) -> None:
        """``parts`` with their paths are the modules that run, the outermost first."""
        reach = CodeWalk(parts)
        self.consulted, self.own_names = reach.consulted, reach.own_names
        self.asks_same = reach.asks_same
        self.drawn_from = [*reach.drawn_from.values()]
        self.unread = frozenset() if reach.asks_any else COUNTS - reach.read_names
        self._memos = [(memo, memo.cache_info().currsize) for memo in reach.memos.values()]
        self._places = [
            p for p in reach.places.values() if p.label not in ignored and p.key not in self.unread
        ]
        self._contents = [
            c for c in reach.contents.values() if not is_fixed(c.value) and c.label not in ignored
        ]
        self._owners = list(reach.owners.values())
        self._owned = [held for _, _, held in self._owners]
        self._objects = [*reach.modules, *(owner for _, owner, _ in self._owners)]
        self._note()

    def _note(self) -> None:
        self._names = identities([(place.table, place.key) for place in self._places])
        self._items = [_items(content.value) for content in self._contents]
        values = [content.value for content in self._contents]
        self._others = [n for n, v in enumerate(values) if not isinstance(v, list | tuple | dict)]
        self._listed = [value for value in values if isinstance(value, list | tuple | dict)]
        self._lengths = [*map(len, self._listed)]
        listed = [*chain.from_iterable(map(_parts, self._listed))]
        self._num_listed, self._listed_at = len(listed), addresses(listed, len(listed))
        self._attributes = [dict(held) for held in self._owned]
        self._num_owned = sum(map(len, self._owned))
        self._kinds = list(map(type, self._objects))
        self._kind_addresses = addresses(self._kinds, len(self._kinds))

    def again(self) -> GlobalGuards:
        """Return what watches the same places, from their values of now."""
        found = copy.copy(self)
        found._note()
        return found

    def have_changed(self) -> bool:
        try:
            same = self._names.hold() or self._are_equal()
        except (KeyError, ValueError):  # deleted; a cell without a value
            return True
        return (
            not same
            or sum(map(len, self._owned)) != self._num_owned
            or addresses(map(type, self._objects), len(self._kinds)) != self._kind_addresses
            or not self._hold_items()
        )

    @property
    def watched(self) -> Watched:
        """Return what ``have_changed`` compares."""
        return Watched(
            [*self._names.places],
            self._owned,
            self._num_owned,
            [*zip(self._objects, self._kinds, strict=True)],
            [(c.value, known) for c, known in zip(self._contents, self._items, strict=True)],
        )

    def hold(self, contents: Iterable[tuple[Any, Any]]) -> bool:
        """Tell whether containers hold these items."""
        return all(_holds(value, known) for value, known in contents)

    def _hold_items(self) -> bool:
        """Tell whether containers hold what they did: first all lists and the like at once, by
        identity, in half of the time that each takes by itself."""
        if [*map(len, self._listed)] == self._lengths:
            now = chain.from_iterable(map(_parts, self._listed))
            if addresses(now, self._num_listed) == self._listed_at:
                contents, items = self._contents, self._items
                return all(_has(contents[n], items[n]) for n in self._others)
        return all(map(_has, self._contents, self._items))

    def _are_equal(self) -> bool:
        """Bound anew to equal numbers and texts, which are taken over."""
        if not all(map(is_equal, self._names.now(), self._names.values)):
            return False
        self._names = self._names.again()
        return True

    # what a trace has done

    def changes(self) -> list[GuardChange]:
        return [*self._new_values(), *self._new_items(), *self._new_attributes()]

    def forget_memos(self) -> None:
        """Empty the memories of functions that have kept results of a trace."""
        for memo, size in self._memos:
            if memo.cache_info().currsize != size:
                memo.cache_clear()

    def _new_values(self) -> Iterator[GuardChange]:
        for place, value in zip(self._places, self._names.values, strict=True):
            now = _value_at(place)
            if not is_equal(now, value):
                undo = _binding(place, value)
                yield GuardChange(place.label, value, now, undo, is_own=place.is_own)

    def _new_items(self) -> Iterator[GuardChange]:
        for content, known in zip(self._contents, self._items, strict=True):
            if not _has(content, known):
                yield GuardChange(
                    content.label, known, _items(content.value), _filling(content, known)
                )

    def _new_attributes(self) -> Iterator[GuardChange]:
        known = {(id(place.table), place.key) for place in self._places}
        for (label, owner, held), before in zip(self._owners, self._attributes, strict=True):
            for key in held.keys() - before.keys():
                if (id(held), key) not in known and not isinstance(held, MappingProxyType):
                    yield GuardChange(
                        f"{label}.{key}", ABSENT, held[key], _removal(owner, held, key)
                    )

    # parts of keys

    @property
    def text(self) -> list[str]:
        """A line for each name that the user's code reads, and for the numbers and texts of
        frameworks, the same in every process. Settings of modules have their own place."""
        return sorted({*self._lines(True)})

    @property
    def code(self) -> str:
        """A digest of what is read of libraries, functions by their code: the same in every
        process where nobody has put others in their places."""
        return hashlib.sha256("\n".join(sorted({*self._lines(False)})).encode()).hexdigest()

    def _lines(self, is_own: bool) -> Iterator[str]:
        for place, value in zip(self._places, self._names.values, strict=True):
            is_asked = place.is_own is is_own and not place.is_setting and value is not ABSENT
            is_asked &= is_own or place.key not in WHENCE
            if is_asked and (is_own or isinstance(value, _BY_TEXT)):
                yield f"{place.label}={text_of(value)}"
        for content in self._contents:
            if content.is_own and is_own:
                yield f"{content.label}={text_of(content.value)}"

    @property
    def containers(self) -> list[str]:
        """A line for each list and the like of a framework's that holds numbers and texts alone:
        peft makes a new list of active adapters with each weight that it sets."""
        places = zip(self._places, self._names.values, strict=True)
        return sorted(f"{p.label}={_text_of_container(v)}" for p, v in places if _is_by_text(p, v))

    @property
    def objects(self) -> list[Any]:
        """Values of which the text does not tell everything: compared by identity."""
        places = zip(self._places, self._names.values, strict=True)
        held = [
            type(v) if _is_bare_processor(p, v) else v
            for p, v in places
            if not _is_by_text(p, v)
            and not (p.is_setting and _is_text(v))  # which has a place of its own
            and (not p.is_own or not (_is_told(v) or p.is_setting))
        ]
        for known in self._items:
            if isinstance(known, list):
                held += [item for item in known if not _is_told(item)]
        return held


def is_private(label: str) -> bool:
    """Tell whether a name is a cache by custom."""
    return label.rpartition(".")[2].startswith("_")


def _is_by_text(place: Binding, value: Any) -> bool:
    is_container = isinstance(value, list | tuple | dict | set | frozenset)
    return not place.is_own and not place.is_setting and is_container and is_plain(value)


def _is_text(value: Any) -> bool:
    """Tell whether a setting is numbers and texts alone."""
    if isinstance(value, dict):
        return all(map(_is_text, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_text, value))
    return isinstance(value, CONSTANTS)


def _is_bare_processor(place: Binding, value: Any) -> bool:
    """Tell whether it is an attention processor that holds nothing: one is as good as another.
    diffusers makes new ones where an IP-Adapter goes."""
    if place.key != "processor" or isinstance(value, nn.Module):
        return False
    return type(value).__module__.startswith("diffusers.") and not getattr(value, "__dict__", True)


def _text_of_container(value: Any) -> str:
    is_config = isinstance(value, dict) and is_fixed(value)
    return text_of_config(value) if is_config else text_of(value)


def _is_told(value: Any) -> bool:
    return isinstance(value, _BY_TEXT) or is_plain(value)


def _items(value: Any) -> Any:
    """Return, to compare with later, what it holds, by identity, or the bytes of an array."""
    return value.copy() if isinstance(value, np.ndarray) else list(_parts(value))


def _parts(value: Any) -> Iterable[Any]:
    return chain(value, value.values()) if isinstance(value, dict) else value


def _has(content: Content, known: Any) -> bool:
    return _holds(content.value, known)


def _holds(value: Any, known: Any) -> bool:
    """Tell whether a container holds these items."""
    if isinstance(value, np.ndarray):
        is_like = value.shape == known.shape and value.dtype == known.dtype
        return bool(is_like and value.tobytes() == known.tobytes())
    if isinstance(value, set):
        return len(value) == len(known) and value.issuperset(known)
    if len(value) * (2 if isinstance(value, dict) else 1) != len(known):
        return False
    return all(map(is_, _parts(value), known)) or all(map(is_equal, _parts(value), known))


def _value_at(place: Binding) -> Any:
    try:
        return place.table[place.key]
    except (KeyError, ValueError):
        return ABSENT


def _binding(place: Binding, value: Any) -> Callable[[], None]:
    def undo() -> None:
        table, key = place.table, place.key
        if isinstance(table, Cell):
            table.cell.cell_contents = value
            return
        if isinstance(table, Answers):  # what was traced has set it as in eager
            return
        held = table.table if isinstance(table, Unbound | Originals) else table
        if not isinstance(held, dict):  # a class, or slots
            setattr(place.owner, key, value) if value is not ABSENT else delattr(place.owner, key)
        elif value is ABSENT:
            held.pop(key, None)
        else:
            held[key] = value

    return undo


def _removal(owner: Any, held: Any, key: str) -> Callable[[], None]:
    return lambda: held.pop(key, None)


def _filling(content: Content, known: Any) -> Callable[[], None]:
    def undo() -> None:
        value = content.value
        if isinstance(value, np.ndarray):
            value[...] = known
            return
        value.clear()
        if isinstance(value, dict):
            half = len(known) // 2
            value.update(zip(known[:half], known[half:], strict=True))
        elif isinstance(value, set):
            value.update(known)
        else:
            value.extend(known)

    return undo
