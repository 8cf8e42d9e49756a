"""Arguments of classes that torch's pytree knows how to take apart."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from diffusers.utils import BaseOutput
from torch import Tensor, nn

import strop


class Ragged:
    """Values, how many of them each row has, and what is no tensor."""

    def __init__(self, values: Tensor, lengths: Tensor | None, name: Any, seen: Any = None) -> None:
        self.values, self.lengths, self.name, self.seen = values, lengths, name, seen


pytree.register_pytree_node(
    Ragged,
    lambda r: ([r.values, r.lengths, r.seen], r.name),
    lambda parts, name: Ragged(parts[0], parts[1], name, parts[2]),
    serialized_type_name="tests.dispatch.test_registered_arguments.Ragged",
)


class Unknown:
    def __init__(self, values: Tensor) -> None:
        self.values = values


class Scaled(nn.Module):
    """Does one thing or another by what is no tensor, and may write to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Any, given: Any) -> Tensor:
        ragged = given["ragged"] if isinstance(given, dict) else given
        found: Tensor = self.linear(x) * ragged.values
        if ragged.name == "twice":
            found = found * 2
        if ragged.name == "seen":
            ragged.seen = found
        if isinstance(ragged.name, list):
            ragged.name.append("more")
        return found if ragged.lengths is None else found + ragged.lengths.unsqueeze(1)


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    module = Scaled().eval()
    plain = copy.deepcopy(module)
    strop.optimize(module)
    return module, plain


def ragged(rows: int, name: Any, *, has_lengths: bool = True) -> Ragged:
    torch.manual_seed(rows)
    lengths = torch.randint(0, 5, (rows,)) if has_lengths else None
    return Ragged(torch.randn(rows, 8), lengths, name)


def equal(module: nn.Module, plain: nn.Module, x: Tensor, given: Any) -> None:
    with torch.no_grad():
        torch.testing.assert_close(module(x, given), plain(x, given))


def test_one_graph_for_all_sizes() -> None:
    module, plain = pair()
    for rows in (4, 9, 3, 4):
        equal(module, plain, torch.randn(rows, 8), ragged(rows, "once"))
    report = strop.explain(module).components[0]
    assert len(report.graphs) == 1
    assert not report.fallbacks


def test_what_is_no_tensor_has_graphs_of_its_own() -> None:
    module, plain = pair()
    for name in ("once", "twice", ("twice", 1), None):
        equal(module, plain, torch.randn(4, 8), ragged(4, name))
    equal(module, plain, torch.randn(4, 8), ragged(4, "once", has_lengths=False))
    report = strop.explain(module).components[0]
    assert len(report.graphs) == 5
    assert not report.fallbacks


def test_within_other_containers() -> None:
    module, plain = pair()
    equal(module, plain, torch.randn(4, 8), {"ragged": ragged(4, "twice")})
    equal(module, plain, torch.randn(4, 8), OrderedDict(ragged=ragged(4, "twice")))
    assert not strop.explain(module).components[0].fallbacks


def test_what_a_forward_writes_is_left_to_eager() -> None:
    module, plain = pair()
    x, given, expected = torch.randn(4, 8), ragged(4, "seen"), ragged(4, "seen")
    with torch.no_grad():
        torch.testing.assert_close(module(x, given), plain(x, expected))
    torch.testing.assert_close(given.seen, expected.seen)
    (why,) = strop.explain(module).components[0].fallbacks
    assert "it changes a Ragged among its arguments" in why


def test_what_a_forward_adds_to_the_rest_is_left_to_eager() -> None:
    module, plain = pair()
    given = ragged(4, ["one"])
    equal(module, plain, torch.randn(4, 8), given)
    assert given.name == ["one", "more", "more"]
    (why,) = strop.explain(module).components[0].fallbacks
    assert "among its arguments" in why


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (Unknown(torch.ones(4, 8)), "argument of type Unknown"),
        (ragged(4, torch.ones(2)), "argument of type Ragged, whose context has tensors"),
        (ragged(4, object()), "argument of type object"),
    ],
    ids=["unknown", "tensor", "object"],
)
def test_what_is_refused(given: Any, why: str) -> None:
    class Reads(nn.Module):
        def forward(self, given: Any) -> Tensor:
            found: Tensor = given.values * 2
            return found

    module = Reads().eval()
    strop.optimize(module)
    torch.testing.assert_close(module(given), given.values * 2)
    assert list(strop.explain(module).components[0].fallbacks) == [why]


@dataclass
class Output(BaseOutput):
    """A result of diffusers, which is a dict and a dataclass, and given on to another module."""

    values: Tensor
    found: Tensor | None = None


class Fills(nn.Module):
    def forward(self, given: Output) -> Tensor:
        given.found = given.values * 2
        return given.found + 1


def test_a_result_of_diffusers_that_a_forward_fills() -> None:
    module, given, expected = Fills().eval(), Output(torch.ones(3)), Output(torch.ones(3))
    strop.optimize(module)
    with torch.no_grad():
        torch.testing.assert_close(module(given), Fills()(expected))
    assert given.found is not None
    torch.testing.assert_close(given.found, expected.found)
