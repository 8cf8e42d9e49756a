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
