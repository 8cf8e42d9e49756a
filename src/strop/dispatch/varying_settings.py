"""Floats among a module's settings that a user turns: the scale of an IP-Adapter, of a LoRA.

The first values that are seen are constants of a graph. A setting whose floats are others at a
later look is *turned*: its floats join those of the call's arguments as inputs (``turned``), and no
longer belong to what the module is. Settings that have always been equal are one input. Scales
that are known to be turned (``scales.py``) are inputs from the beginning, each for itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from strop.dispatch.scales import as_floats, as_traced, is_scale
from strop.dispatch.signature import (
    Beside,
    NumberRef,
    Skeleton,
    count_numbers,
    flatten,
    with_floats,
)
from strop.errors import UnsupportedError
from strop.frontend.adapted_layers import is_left_over
from strop.frontend.module_parts import own_attributes
from strop.frontend.stable_text import is_plain

Name = tuple[str, str]  # the path of a part, and its attribute
_CONTAINERS = (list, tuple, dict)


class TurnedSettings:
    """Finds the turned settings of one module. ``names``: which ones these are."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.names: frozenset[Name] = frozenset()
        self._seen: dict[Name, tuple[Skeleton, list[float]]] = {}
        self._places: list[tuple[Mapping[str, Any], str, Skeleton]] = []
        self._scales: list[bool] = []  # which of them are scales
        self._groups: list[int] = []  # of all their floats: equal ones have always been equal
        self._latest: tuple[list[float], Skeleton, list[float]] = ([], (), [])
        # what the latest call has read, as text, behind how many floats, and its skeleton: calls
        # are many, changes few
        self._read: tuple[str, int, Skeleton] | None = None

    def scan(self, parts: Iterable[tuple[str, nn.Module]]) -> None:
        """Look at the settings of these parts of the module, with their paths, anew."""
        by_path = dict(parts)
        seen = dict(_settings_with_floats(by_path))
        alike = {n for n in seen.keys() & self._seen.keys() if seen[n][0] == self._seen[n][0]}
        turned = {n for n in alike if seen[n][1] != self._seen[n][1]}
        scales = {(path, name) for path, name in seen if is_scale(by_path[path], name)}
        self.names = frozenset(turned | scales | (self.names & alike))
        self._seen = seen
        before = [form for _, _, form in self._places]
        self._places = [
            (vars(by_path[path]), name, seen[path, name][0]) for path, name in sorted(self.names)
        ]
        self._read = None
        self._scales = [place in scales for place in sorted(self.names)]
        if before != [form for _, _, form in self._places]:
            self._groups, self._latest = [], ([], (), [])

    def form_of(self, path: str, name: str) -> Skeleton:
        """Return what a turned setting looks like besides its floats; None for any other
        setting."""
        return self._seen[path, name][0] if (path, name) in self.names else None

    @property
    def labels(self) -> frozenset[str]:
        """Return the labels as ``global_guards`` names them."""
        root = type(self.module).__qualname__
        return frozenset(f"{path or root}.{name}" for path, name in self.names)

    @property
    def values(self) -> tuple[float, ...] | None:
        """Return all floats of turned settings as they are now, or None where a setting has another
        form than at the last scan."""
        now = self._values()
        return None if now is None else tuple(now)

    @property
    def text(self) -> str:
        """Return all turned settings as they are now."""
        return repr([table.get(name) for table, name, _ in self._places])

    def read(self, beside: Beside) -> Skeleton | None:
        """The settings as one more part of a call's skeleton, whose floats go ``beside``, those
        of a group once; None where one has another form than at the last scan."""
        text, start = self.text, len(beside.floats)
        if self._read is None or self._read[:2] != (text, start):
            now = self._values()
            if now is None:
                return None
            if now != self._latest[0] or not self._latest[1]:
                self._latest = now, *self._shared(now)
            refs = [NumberRef(start + ref) for ref in range(len(self._latest[2]))]
            self._read = text, start, with_floats(self._latest[1], refs)
        beside.floats += self._latest[2]
        beside.num_settings = len(self._latest[2])
        return self._read[2]

    def _values(self) -> list[float] | None:
        """Return all floats as they are now, or None where a setting has another form."""
        now: list[float] = []
        for (table, name, form), is_known in zip(self._places, self._scales, strict=True):
            value = table.get(name)
            found = _formed(as_floats(value) if is_known else value)
            if found is None or found[0] != form:
                return None
            now += found[1]
        return now

    def _shared(self, now: Sequence[float]) -> tuple[Skeleton, list[float]]:
        values = {value.hex(): value for value in now}  # -0.0 is not 0.0
        groups = self._groups or self._first_groups()
        keys = [(group, value.hex()) for group, value in zip(groups, now, strict=True)]
        places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        self._groups = [places[key] for key in keys]
        refs, parts = iter(map(NumberRef, self._groups)), []
        for _, _, form in self._places:
            parts.append(with_floats(form, [next(refs) for _ in range(count_numbers(form))]))
        return ("tuple", *parts), [values[text] for _, text in places]

    def _first_groups(self) -> list[int]:
        """Return a group for each float: each scale is one of its own, all else is together."""
        found = list[int]()
        for (_, _, form), is_known in zip(self._places, self._scales, strict=True):
            for _ in range(count_numbers(form)):
                found.append(len(found) + 1 if is_known else 0)
        return found

    @contextmanager
    def put(self, clone: nn.Module, values: Sequence[Any]) -> Iterator[None]:
        """Meanwhile a copy of the module has these values of the turned settings."""
        parts = dict(clone.named_modules())
        places = [(parts[path], name) for path, name in sorted(self.names)]
        before = [vars(part)[name] for part, name in places]

        def write(given: Iterable[Any]) -> None:
            for (part, name), value in zip(places, given, strict=True):
                part.__dict__[name] = value

        write(as_traced(*place, value) for place, value in zip(places, values, strict=True))
        try:
            yield
        finally:
            write(before)


def _settings_with_floats(
    parts: Mapping[str, nn.Module],
) -> Iterator[tuple[Name, tuple[Skeleton, list[float]]]]:
    for path, part in parts.items():
        for name, value in own_attributes(part):
            if name.startswith("_") or is_left_over(part, name):
                continue
            if is_scale(part, name):
                value = as_floats(value)
            if type(value) in _CONTAINERS or type(value) is float:
                formed = _formed(value)
                if formed is not None and formed[1]:
                    yield (path, name), formed


def _formed(value: Any) -> tuple[Skeleton, list[float]] | None:
    """Split a plain value into what is left without its floats, and these."""
    if type(value) is float:
        return NumberRef(0), [value]
    if type(value) not in _CONTAINERS or not is_plain(value):
        return None
    beside = Beside()
    try:
        return flatten(value, [], beside), beside.floats
    except UnsupportedError:  # it holds more than numbers and texts
        return None
