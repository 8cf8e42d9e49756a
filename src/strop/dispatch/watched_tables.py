"""Show what is no dictionary as a table: names there stand for values, as in one."""

from __future__ import annotations

from collections.abc import Mapping
from types import CellType
from typing import Any

ABSENT = type("Absent", (), {"__repr__": lambda self: "absent"})()


class Cell:
    """Show a variable of an enclosing function as a table of one entry."""

    def __init__(self, cell: CellType) -> None:
        self.cell = cell

    def __getitem__(self, key: str) -> Any:
        return self.cell.cell_contents


class Slots:
    """Attributes that an object does not keep in a dictionary, as a table."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getitem__(self, key: str) -> Any:
        return getattr(self.value, key, ABSENT)


class Unbound:
    """Names that need not be there, of a dictionary."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.table = table

    def __getitem__(self, key: str) -> Any:
        return self.table.get(key, ABSENT)
