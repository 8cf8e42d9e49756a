"""The number of rows of an embedding is data: one graph for all of them, which checks indices
against the rows that are there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import strop
from strop.bench.pipelines import twins
from strop.bench.pipelines.all import PIPELINES
from tests.e2e import tiny

ROWS, WIDTH = 10, 8
OTHERS = (14, 4, 400)


def drawn(rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.manual_seed(rows))


class Words(nn.Module):
    """Tokens with their places, as text encoders begin."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(ROWS, WIDTH), nn.Embedding(6, WIDTH)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.last(F.silu(self.tokens(ids) + self.places(places)))


class Tied(Words):
    """A language model, which gives scores by its own embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, ROWS, bias=False)
        self.last.weight = self.tokens.weight


class TiedInCode(Words):
    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(F.silu(self.tokens(ids)), self.tokens.weight)


class Asking(Words):
    """Code that reads how many rows there are."""

    def forward(self, ids: Tensor) -> Tensor:
        last = ids.clamp(max=self.tokens.num_embeddings - 1)
        if self.tokens.weight.shape[0] > 12:
            last = last - 1
        return self.last(self.tokens(last.clamp(min=0))) * self.tokens.weight.shape[0]


class Named(Words):
    """Code that asks for an attribute by a name that it has made."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * getattr(self.tokens, "num_" + "embeddings")


class Padded(Words):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(ROWS, WIDTH, padding_idx=3)


def new_parameter(module: Words, rows: int) -> None:
    weight = nn.Parameter(drawn(rows).to(module.tokens.weight.device), requires_grad=False)
    if module.last.weight is module.tokens.weight:
        module.last.weight, module.last.out_features = weight, rows
    module.tokens.weight, module.tokens.num_embeddings = weight, rows


def new_data(module: Words, rows: int) -> None:
    module.tokens.weight.data = drawn(rows).to(module.tokens.weight.device)
    module.tokens.num_embeddings = rows


def new_layer(module: Words, rows: int) -> None:
    other = nn.Embedding(rows, WIDTH, module.tokens.padding_idx, _weight=drawn(rows))
    module.tokens = other.to(module.places.weight.device)


def made(kind: type[Words], device: str = "cpu") -> Words:
    torch.manual_seed(0)
    return kind().eval().requires_grad_(False).to(device)


def pair(kind: type[Words], folder: Path, device: str = "cpu", **more: Any) -> tuple[Any, Any]:
    options = tiny.options(cache_dir=str(folder), **more)
    return made(kind, device), strop.optimize(made(kind, device), options=options)


def assert_as_eager(eager: Words, fast: Any, rows: int) -> None:
    ids = torch.tensor([[0, rows - 1, 1], [rows // 2, 2, 3]], device=eager.places.weight.device)
    with torch.no_grad():
        torch.testing.assert_close(fast(ids), eager(ids), rtol=1e-5, atol=1e-5)


def assert_out_of_range(fast: Any, index: int) -> None:
    with torch.no_grad(), pytest.raises(IndexError):
        fast(torch.tensor([[0, index, 1]]))


@pytest.mark.parametrize("device", tiny.DEVICES)
@pytest.mark.parametrize("kind", [Words, Padded])
@pytest.mark.parametrize("change", [new_parameter, new_data, new_layer])
def test_one_graph_for_any_number_of_rows(
    change: Callable[[Any, int], None], kind: type[Words], device: str, tmp_path: Path
) -> None:
    eager, fast = pair(kind, tmp_path, device, strict=True)
    for rows in (ROWS, *OTHERS):
        if rows != fast.tokens.weight.shape[0]:
            change(eager, rows)
            change(fast, rows)
        for _ in range(3):  # the third may be a replay
            assert_as_eager(eager, fast, rows)
        if device == "cpu":  # a GPU says so in the next call
            assert_out_of_range(fast, rows)
            assert_out_of_range(eager, rows)
            assert_out_of_range(fast, -1)
    assert fast.forward.variants.num_captures == 1
    assert not fast.forward.variants.all[0].fixed


def test_fewer_rows_of_the_same_memory(tmp_path: Path) -> None:
    eager, fast = pair(Words, tmp_path, strict=True)
    for _ in range(3):
        assert_as_eager(eager, fast, ROWS)
    for module in (eager, fast):
        module.tokens.weight.data = module.tokens.weight.data[: ROWS - 2]
    assert_as_eager(eager, fast, ROWS - 2)
    assert_out_of_range(fast, ROWS - 1)


@pytest.mark.parametrize("kind", [Tied, TiedInCode, Asking, Named])
def test_what_else_depends_on_the_rows_is_right(kind: type[Words], tmp_path: Path) -> None:
    """Then there is a graph for each number of rows, to which going back is free."""
    eager, fast = pair(kind, tmp_path)
    for rows in (ROWS, *OTHERS, 14, 400):
        for module in (eager, fast):
            new_parameter(module, rows)
        for _ in range(2):
            assert_as_eager(eager, fast, rows)
    assert fast.forward.variants.num_captures <= 4
    assert fast.forward.counters.eager_calls == 0


def test_a_tied_table_is_stored_for_each_number_of_rows(tmp_path: Path) -> None:
    for captures in (2, 0):
        eager, fast = pair(TiedInCode, tmp_path)
        for rows in (ROWS, 14):
            for module in (eager, fast):
                new_parameter(module, rows)
            assert_as_eager(eager, fast, rows)
        assert fast.forward.variants.num_captures == captures


def test_a_stored_graph_serves_any_number_of_rows(tmp_path: Path) -> None:
    for captures, rows in ((1, ROWS), (0, 14), (0, 4)):
        eager, fast = pair(Words, tmp_path, strict=True)
        for module in (eager, fast):
            new_parameter(module, rows)
        assert_as_eager(eager, fast, rows)
        assert_out_of_range(fast, rows)
        assert fast.forward.variants.num_captures == captures


def test_training_sees_other_rows(tmp_path: Path) -> None:
    eager = made(Words)
    fast: Any = made(Words)
    strop.optimize(fast, train=True, options=tiny.options(cache_dir=str(tmp_path)))
    for rows in (ROWS, 14, 4):
        ids = torch.tensor([[0, rows - 1, 1]])
        gradients = []
        for module in (eager, fast):
            new_parameter(module, rows)
            module.tokens.weight.requires_grad_(True)
            module(ids).square().sum().backward()
            gradients.append(module.tokens.weight.grad)
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)


def _learned(pipe: Any, count: int, seed: int) -> Tensor:
    width = pipe.text_encoder.get_input_embeddings().weight.shape[1]
    found = torch.randn(count, width, generator=torch.manual_seed(seed))
    return found if count > 1 else found[0]


@pytest.mark.filterwarnings("ignore")
def test_textual_inversions_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one token and of several, more of them, one or all taken out, and in again."""
    monkeypatch.setenv("CI", "true")  # code of transformers asks for it
    case = {case.name: case for case in PIPELINES}["sd15"]
    eager, fast = case.made(), case.made()
    encoder = strop.optimize(fast, options=tiny.options(strict=True)).text_encoder.forward
    before = []
    for step, prompt in enumerate(
        ("a cat", "a <cat>", "a <cat> <cow>", "a <cat> and a cow", "a <cat>", "a cat", "a <cat>")
    ):
        for pipe in (eager, fast):
            if step in (1, 6):
                pipe.load_textual_inversion({"<cat>": _learned(pipe, 1, 5)}, token="<cat>")
            if step == 2:
                pipe.load_textual_inversion({"<cow>": _learned(pipe, 3, 7)}, token="<cow>")
            if step == 4:
                pipe.unload_textual_inversion(["<cow>", "<cow>_1", "<cow>_2"])
            if step == 5:
                pipe.unload_textual_inversion()
        found, wanted = (twins.drawn(case, pipe, prompt=prompt)[0] for pipe in (fast, eager))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        before.append(fast.text_encoder.get_input_embeddings().weight.shape[0])
    assert len(set(before)) == 3
    assert len(encoder.variants.all) == 1
