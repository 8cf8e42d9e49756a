"""Describe one declared pattern, the handle that ``strop.pattern`` returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strop.errors import CaptureError, ShapeError, StropError, UnsupportedError
from strop.ir.graph import Graph
from strop.patterns import registry
from strop.patterns.match import Places
from strop.patterns.search import Argument, Searched, traced

EXACT = "exact"


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """Hold a rule from a subgraph to a call. It is in force until ``remove``; as a context manager,
    until the block ends. ``skeleton`` is the search at the sizes of the example."""

    name: str
    search: Callable[..., Any]
    replace: Callable[..., Any]
    when: Callable[..., Any] | None
    numerics: str
    contiguous: bool
    arguments: tuple[str, ...]
    attributes: Mapping[str, Any]  # keyword arguments of the search, with their defaults
    skeleton: Graph
    places: Places  # where the skeleton has the keywords
    key: str
    _graphs: dict[Any, Searched | StropError] = field(default_factory=dict, repr=False)

    def remove(self) -> None:
        """End the pattern; modules compile anew without it at their next call."""
        registry.remove(self)

    def __enter__(self) -> Pattern:
        registry.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def at(
        self, arguments: Sequence[Argument], attributes: Mapping[str, Any], hints: Mapping[str, int]
    ) -> Searched:
        """Return the graph of the search for these arguments; raises StropError if it has none."""
        key = (tuple(arguments), repr(sorted(attributes.items())))
        if key not in self._graphs:
            try:
                self._graphs[key] = traced(self.search, arguments, attributes, hints)
            except (CaptureError, UnsupportedError, ShapeError) as error:
                self._graphs[key] = error
        found = self._graphs[key]
        if isinstance(found, StropError):
            raise found
        return found

    def allowed(self, names: Sequence[str]) -> bool:
        """Tell whether these opt-ins (``Options.numerics``) let it change results."""
        return self.numerics == EXACT or self.numerics in names
