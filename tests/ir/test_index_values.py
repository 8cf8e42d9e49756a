"""What is known of numbers that are made of indices alone is what running them gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from strop.debug.reference import evaluate, input_values
from strop.ir.index_values import Affine, IndexValues, Known, NotAbove
from strop.options import Options
from strop.passes.canonicalize import canonicalize
from tests.frontend.tracing import trace

SIZES = {"b": 2, "s": 5}
Made = Callable[[Tensor], Tensor]


def positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device)


def documents(x: Tensor) -> Tensor:
    """As transformers tells packed texts apart: a new one begins where positions do not go on."""
    where = positions(x)[None]
    steps = torch.diff(where, prepend=where[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)


KNOWN: dict[str, Made] = {
    "positions": positions,
    "a sum": lambda x: positions(x)[:, None] * 1 + 3 - positions(x)[None] + 2,
    "causal": lambda x: positions(x)[None] <= positions(x)[:, None],
    "causal, turned": lambda x: positions(x)[:, None] >= positions(x)[None],
    "below the diagonal": lambda x: positions(x)[None] < positions(x)[:, None],
    "from the diagonal on": lambda x: positions(x)[None] > positions(x)[:, None] - 1,
    "one document": documents,
    "the same document": lambda x: documents(x)[:, :, None] == documents(x)[:, None],
    "all of these": lambda x: (
        (documents(x)[:, :, None] == documents(x)[:, None])
        & (positions(x)[None, None] <= positions(x)[None, :, None])
    ),
    "up to the last": lambda x: positions(x)[None] <= positions(x)[-1:, None],
    "behind the last": lambda x: positions(x)[None] > positions(x)[-1:, None],
    "before the first": lambda x: positions(x)[None] < positions(x)[:1, None],
    "never": lambda x: (positions(x) != positions(x)) & (positions(x) > 1),
    "every second": lambda x: torch.arange(0, 2 * x.shape[1], 2)[1:],
    "looked up": lambda x: positions(x)[None][torch.arange(1)[:, None], positions(x)[None]],
    "pieces that go on": lambda x: torch.cat([positions(x), positions(x) + x.shape[1]]),
    "numbers of another type": lambda x: positions(x).int()[None] - 1,
    "permuted": lambda x: (
        (positions(x)[None] <= positions(x)[:, None]).int().t() * 1
        if False
        else (positions(x)[:, None] - 3 * 1).t()
    ),
}


def many_sums(x: Tensor) -> Tensor:
    found = positions(x)
    for _ in range(600):  # one inside the other: more than Python calls functions
        found = found + 1
    return found


KNOWN["many sums"] = many_sums
UNKNOWN: dict[str, Made] = {
    "of values": lambda x: positions(x) <= x[0],
    "pieces that do not go on": lambda x: torch.cat([positions(x), positions(x)]),
    "two conditions": lambda x: (positions(x) > 1) & (positions(x) < 4),
    "a sum of conditions": lambda x: (positions(x) > 1) + (positions(x) < 4),
    "fractions": lambda x: positions(x).float() + 1,
    "small types": lambda x: positions(x).to(torch.int8) + 100,
    "an index that may be outside": lambda x: positions(x)[positions(x) - 1],
}


def known_of(make: Made) -> tuple[Known, Tensor]:
    """Return what is known of a result, and the result at SIZES."""
    graph = canonicalize(trace(make, "b s", **SIZES).graph, Options())
    given = input_values(graph, {0: torch.randn(2, 5)})
    (value,) = evaluate(graph.outputs, given, SIZES, exact=False).values()
    return IndexValues(graph.nodes).of(graph.outputs[0]), value


def numbers(found: Affine, shape: tuple[int, ...]) -> Tensor:
    value = torch.tensor(found.start.eval(SIZES))
    for dim, step in enumerate(found.steps):
        along = torch.arange(shape[dim]) * step.eval(SIZES)
        value = value + along.view(-1, *(1,) * (len(shape) - dim - 1))
    return value.expand(shape)


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_is_so(name: str) -> None:
    found, value = known_of(KNOWN[name])
    assert found is not None
    shape = tuple(value.shape)
    if isinstance(found, NotAbove):
        assert torch.equal(numbers(found.number, shape) <= 0, value)
    else:
        assert torch.equal(numbers(found, shape), value.long())


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_left_alone(name: str) -> None:
    assert known_of(UNKNOWN[name])[0] is None
