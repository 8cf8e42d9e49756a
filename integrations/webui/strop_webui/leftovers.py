"""Empty what calls have left in the defaults of functions.

Functions of Forge's UNet take ``transformer_options={}``, and write into it. Called without
options, as by a ControlNet, they write into the default itself, which lives on. Strop compares all
that the code of a model may read, and would compile it again for each of them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

NAME = "transformer_options"


def defaults_of(model: nn.Module) -> list[dict[Any, Any]]:
    """Return the dicts that are defaults for options in the code of a model's parts."""
    kinds = {type(part) for part in model.modules()}
    tables = [vars(kind) for kind in kinds]
    tables += [vars(sys.modules[name]) for name in {kind.__module__ for kind in kinds}]
    found = [default for table in tables for default in _defaults_in(table)]
    return list({id(default): default for default in found}.values())


def _defaults_in(table: Any) -> Iterator[dict[Any, Any]]:
    for value in [*table.values()]:
        if inspect.isfunction(value) and NAME in value.__code__.co_varnames:
            parameter = inspect.signature(value).parameters.get(NAME)
            if parameter is not None and type(parameter.default) is dict:
                yield parameter.default


def empty(defaults: list[dict[Any, Any]]) -> None:
    """Make them again what their authors wrote."""
    for default in defaults:
        default.clear()
