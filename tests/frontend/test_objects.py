"""Results that are dataclasses, and those that no program can hold."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.errors import StropError
from strop.options import Options


@dataclass
class Found:
    boxes: Tensor
    count: int
    rest: Any = None

    @property
    def total(self) -> Tensor:
        return self.boxes.sum() + self.count


@dataclass(frozen=True, slots=True)
class Frozen:
    value: Tensor
    name: str = field(init=False, default="frozen")


class Colour(enum.Enum):
    RED = 1


class Words(str):
    pass


class Pairs(dict[str, Tensor]):
    pass


class Gives(nn.Module):
    def __init__(self, result: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.result = nn.Linear(4, 4), result

    def forward(self, x: Tensor) -> Any:
        return self.result(self.linear(x))


def optimized(result: Callable[[Tensor], Any], folder: Path, **options: Any) -> Any:
    torch.manual_seed(0)
    module = Gives(result).eval().requires_grad_(False)
    return strop.optimize(module, options=Options(cache_dir=str(folder), **options))


def nested(x: Tensor) -> dict[str, Any]:
    return {"found": [Found(x, 3, Found(x[0], x.shape[0]))], "frozen": Frozen(x * 2)}


@pytest.mark.parametrize("num_captures", [1, 0], ids=["compiled", "from disk"])
def test_dataclasses_come_back_as_such(
    tmp_path_factory: pytest.TempPathFactory, num_captures: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "dataclasses"
    module = optimized(nested, folder, strict=True)
    for rows in (2, 3, 2):
        x = torch.randn(rows, 4)
        actual, expected = module(x), module.forward.eager(x)
        (found,), (like,) = actual["found"], expected["found"]
        assert type(found) is Found
        torch.testing.assert_close(found.total, like.total)
        torch.testing.assert_close(found.rest.boxes, like.rest.boxes)
        assert (found.count, found.rest.count) == (3, rows)
        assert type(actual["frozen"]) is Frozen
        assert actual["frozen"].name == "frozen"
        torch.testing.assert_close(actual["frozen"].value, expected["frozen"].value)
    assert module.forward.variants.num_captures == num_captures


def test_a_dataclass_without_a_name_is_compiled_in_each_process(tmp_path: Path) -> None:
    @dataclass
    class Local:
        value: Tensor

    for _ in range(2):
        module = optimized(Local, tmp_path, strict=True)
        assert type(module(torch.randn(2, 4))) is Local
        assert module.forward.variants.num_captures == 1


RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "Colour": lambda x: (x, Colour.RED),
    "Words": lambda x: (x, Words("a")),
    "Pairs": lambda x: Pairs(x=x),
    "set": lambda x: (x, {1, 2}),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_what_no_program_can_hold_is_eagers(kind: str, tmp_path: Path) -> None:
    module, x = optimized(RESULTS[kind], tmp_path), torch.randn(3, 4)
    for _ in range(2):
        assert repr(module(x)) == repr(module.forward.eager(x))
    assert module.forward.counters.fallbacks == {
        f"it returns a {kind}, which no program can hold": 2
    }
    with pytest.raises(StropError, match=kind):
        optimized(RESULTS[kind], tmp_path, strict=True)(x)


class Takes(nn.Module):
    """Changes lists and dicts that it is given, in its own way."""

    def __init__(self, act: Callable[..., Tensor]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor, given: Any, *more: Any) -> Tensor:
        return self.act(x, given, *more)


def pops(x: Tensor, given: list[Tensor]) -> Tensor:
    while given:
        x = x * 2 + given.pop(0)
    return x


def pops_one(x: Tensor, given: list[Tensor]) -> Tensor:
    return x + given.pop()


def turns(x: Tensor, given: list[Tensor]) -> Tensor:
    given.reverse()
    return x + given[0]


def pops_a_key(x: Tensor, given: dict[str, Tensor]) -> Tensor:
    return x + given.pop("b")


def pops_inside(x: Tensor, given: dict[str, list[Tensor]]) -> Tensor:
    return x + given["last"].pop() + given["first"].pop(0)


def renames(x: Tensor, given: dict[str, Tensor]) -> Tensor:
    given["z"] = given.pop("b")
    return x + given["z"]


def keeps_frames(x: Tensor, given: dict[str, list[Any]]) -> Tensor:
    """As the VAEs of video models do: frames, and the place that is next."""
    place = given["place"][0]
    old = given["frames"][place]
    given["frames"][place] = x[-2:] * 1
    given["place"][0] += 1
    given["place"][0] %= 2
    return x if old is None else torch.cat([old, x])


def moves(x: Tensor, given: dict[str, list[Any]]) -> Tensor:
    given["last"][0] = given["first"].pop()
    return x + given["last"][0]


def goes_through(x: Tensor, given: dict[str, Tensor]) -> Tensor:
    return torch.cat([x, *given.values()])


A, B, C = (torch.full((3,), float(n)) for n in (1, 2, 3))
TAKEN: dict[Callable[..., Tensor], tuple[Callable[[], Any], int]] = {
    pops: (lambda: [A, B, C], 0),
    pops_one: (lambda: [A, B, C], 0),
    turns: (lambda: [A, B, C], 0),
    pops_a_key: (lambda: {"b": A, "a": B}, 0),
    pops_inside: (lambda: {"last": [A, B], "first": [C, B]}, 0),
    renames: (lambda: {"b": A, "a": B}, 0),
    keeps_frames: (lambda: {"place": [0], "frames": [None, A]}, 0),
    moves: (lambda: {"last": [A], "first": [C, B]}, 0),
    goes_through: (lambda: {"b": A, "a": B}, 0),
}


@pytest.mark.parametrize("act", TAKEN, ids=lambda act: act.__name__)
def test_what_a_forward_takes_out_of_its_arguments(
    act: Callable[..., Tensor], tmp_path: Path
) -> None:
    make, num_eager = TAKEN[act]
    for _ in range(2):  # the second time from disk
        module = strop.optimize(Takes(act).eval(), options=Options(cache_dir=str(tmp_path)))
        for _ in range(2):
            given, wanted = make(), make()
            with torch.no_grad():
                torch.testing.assert_close(module(A, given), act(A, wanted), rtol=0, atol=0)
            assert repr(given) == repr(wanted)
        assert module.forward.counters.eager_calls == num_eager


def test_frames_that_are_kept_from_call_to_call(tmp_path: Path) -> None:
    module = strop.optimize(Takes(keeps_frames).eval(), options=Options(cache_dir=str(tmp_path)))
    kept: list[dict[str, Any]] = [{"place": [0], "frames": [None, None]} for _ in range(2)]
    with torch.no_grad():
        for n in range(6):
            x = torch.arange(3.0) + n
            torch.testing.assert_close(module(x, kept[0]), keeps_frames(x, kept[1]))
            torch.testing.assert_close(kept[0], kept[1])
    assert module.forward.counters.eager_calls == 0
    assert len(module.forward.variants.all) == 4  # the first round, and both places in later ones


def test_one_list_given_twice_is_left_to_eager(tmp_path: Path) -> None:
    def both(x: Tensor, one: list[Tensor], other: list[Tensor]) -> Tensor:
        return x + one.pop() * 2 + other.pop()

    module = strop.optimize(Takes(both).eval(), options=Options(cache_dir=str(tmp_path)))
    for given in ([A, B], [A, B]):
        with torch.no_grad():
            torch.testing.assert_close(module(C, given, given), C + B * 2 + A, rtol=0, atol=0)
        assert given == []
    apart = [A, B], [A, C]
    with torch.no_grad():
        torch.testing.assert_close(module(C, *apart), C + B * 2 + C, rtol=0, atol=0)
    assert module.forward.counters.eager_calls == 2
    ((reason, _),) = module.forward.counters.fallbacks.items()
    assert "given to it twice" in reason
