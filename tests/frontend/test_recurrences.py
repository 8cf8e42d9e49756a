"""LSTM, GRU and RNN layers on a CPU, taken apart into products and one walk a direction."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.frontend import recurrences

LAYERS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *args, **kw: nn.RNN(*args, nonlinearity="relu", **kw),
}
SHAPES = [(3, 4), (1, 1), (5, 2), (2, 7)]


def flat(found: Any) -> list[Tensor]:
    y, states = found
    return [y, *(states if isinstance(states, tuple) else [states])]


def states_of(layer: nn.RNNBase, batch: int) -> Any:
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    hidden = torch.randn(count, batch, layer.hidden_size)
    return (hidden, torch.randn_like(hidden)) if isinstance(layer, nn.LSTM) else hidden


def walks(module: nn.Module) -> tuple[int, int]:
    """Return how many walks of ours a call has, and how many calls of torch's own layers."""
    found = re.findall(r"(\d+) (recurrence|aten)\b", str(strop.explain(module)))
    return tuple(
        sum(int(n) for n, name in found if name == kind) for kind in ("recurrence", "aten")
    )


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("both", [False, True], ids=["one way", "both ways"])
def test_layers(kind: str, bias: bool, both: bool) -> None:
    for depth, first in itertools.product((1, 2), (False, True)):
        torch.manual_seed(0)
        layer = LAYERS[kind](6, 9, depth, bias=bias, batch_first=first, bidirectional=both).eval()
        ours = strop.optimize(copy.deepcopy(layer))
        for shape in SHAPES:
            x = torch.randn(*shape, 6)
            given = states_of(layer, shape[0] if first else shape[1])
            for states in ((), (given,)):
                with torch.no_grad():
                    torch.testing.assert_close(flat(ours(x, *states)), flat(layer(x, *states)))
        graphs = 2  # with states and without
        assert walks(ours) == (graphs * depth * (2 if both else 1), 0)
        assert ours.forward.counters.eager_calls == 0


def test_states_of_one_call_are_those_of_the_next() -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(4, 5, batch_first=True).eval()
    ours = strop.optimize(copy.deepcopy(layer))
    x = torch.randn(2, 12, 4)
    with torch.no_grad():
        whole, _ = layer(x)
        states: Any = None
        for part in x.split((1, 4, 3, 4), 1):
            y, states = ours(part, states)
            torch.testing.assert_close(y, whole[:, : y.shape[1]])
            whole = whole[:, y.shape[1] :]


def test_weights_are_never_stale() -> None:
    layer = nn.GRU(4, 5).eval()
    ours = strop.optimize(copy.deepcopy(layer))
    x = torch.randn(3, 2, 4)
    for _ in range(3):
        with torch.no_grad():
            for mine, other in zip(ours.parameters(), layer.parameters(), strict=True):
                other.copy_(torch.randn_like(other))
                mine.copy_(other)
            torch.testing.assert_close(flat(ours(x)), flat(layer(x)))


def test_samples_without_a_batch_and_under_vmap() -> None:
    layer = nn.LSTM(4, 5).eval()
    ours, x = strop.optimize(copy.deepcopy(layer)), torch.randn(6, 4)
    with torch.no_grad():
        torch.testing.assert_close(flat(ours(x)), flat(layer(x)))


LEFT = {
    "wide": (lambda: nn.LSTM(4, recurrences.MOST_UNITS["lstm"] + 1), torch.float32),
    "fp64": (lambda: nn.GRU(4, 5).double(), torch.float64),
    "projections": (lambda: nn.LSTM(4, 6, proj_size=3), torch.float32),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", LEFT)
def test_torchs_own_operator_is_left(name: str) -> None:
    made, dtype = LEFT[name]
    layer = made().eval()
    ours, x = strop.optimize(copy.deepcopy(layer)), torch.randn(3, 2, 4, dtype=dtype)
    with torch.no_grad():
        torch.testing.assert_close(flat(ours(x)), flat(layer(x)))
    assert walks(ours) == (0, 1)


@pytest.mark.parametrize("kind", LAYERS)
def test_packed_sequences_are_not_taken_for_padded_ones(kind: str) -> None:
    """They run in eager, as their values say how long each is."""
    layer = LAYERS[kind](4, 5).eval()
    ours, x = strop.optimize(copy.deepcopy(layer)), torch.randn(4, 3, 4)
    packed = nn.utils.rnn.pack_padded_sequence(x, [4, 3, 1])
    with torch.no_grad():
        torch.testing.assert_close(ours(packed)[0].data, layer(packed)[0].data)
    assert "Expected a value of type" not in str(strop.explain(ours))
    assert ours.forward.counters.eager_calls == 1


def test_dropout_between_layers_is_drawn_by_torch() -> None:
    layer = nn.GRU(4, 5, 2, dropout=0.5).train()
    ours, x = strop.optimize(copy.deepcopy(layer)), torch.randn(3, 2, 4)
    with torch.no_grad():
        torch.manual_seed(7)
        wanted = flat(layer(x))
        torch.manual_seed(7)
        torch.testing.assert_close(flat(ours(x)), wanted)


def test_gradients_are_torchs() -> None:
    layer = nn.LSTM(4, 5).train()
    ours = strop.optimize(copy.deepcopy(layer), train=True)
    x = torch.randn(3, 2, 4)
    for module in (layer, ours):
        module(x)[0].square().sum().backward()
    for mine, other in zip(ours.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_an_empty_batch_and_no_steps() -> None:
    layer = nn.LSTM(4, 5).eval()
    ours = strop.optimize(copy.deepcopy(layer))
    with torch.no_grad():
        ours(torch.randn(3, 2, 4))
        for module in (layer, ours):
            assert [tuple(t.shape) for t in flat(module(torch.randn(3, 0, 4)))] == [
                (3, 0, 5),
                (1, 0, 5),
                (1, 0, 5),
            ]
            with pytest.raises(RuntimeError, match="larger than 0"):
                module(torch.randn(0, 2, 4))


def test_torch_compile() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.GRU(4, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x)[0])

    tagger = Tagger().eval()
    fast = torch.compile(copy.deepcopy(tagger), backend="strop")
    with torch.no_grad():
        for shape in SHAPES:
            x = torch.randn(*shape, 4)
            torch.testing.assert_close(fast(x), tagger(x))
