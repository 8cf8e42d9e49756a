"""Differences from eager that the documents allow, each with a name and a narrow condition.

docs/operators.md has a paragraph for each name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.operators.judge import Difference

UNINITIALISED = (
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
)


@dataclass(frozen=True)
class Where:
    """The run that a difference was found in."""

    operator: str
    dtype: str
    layout: str
    way: str
    direction: str


@dataclass(frozen=True)
class Rule:
    name: str
    allows: Callable[[Where, Difference, bool], bool]  # where; what; whether eager draws numbers


RULES = (
    Rule(
        "uninitialised",
        lambda where, d, draws: d.kind == "values" and where.operator in UNINITIALISED,
    ),
)


def rule_for(where: Where, difference: Difference, *, draws: bool) -> str:
    """The name of the rule that allows the difference, or nothing."""
    return next((rule.name for rule in RULES if rule.allows(where, difference, draws)), "")
