"""Take LSTM, GRU and RNN layers on a CPU apart: a product for all steps, and a walk over them.

torch's own operator makes some eight calls for each step, layer and direction. Here a layer is a
linear over all of its inputs at once, and one operator (``ir.recurrence``) that a kernel walks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.frontend.differentiated import define, is_differentiated, is_transformed
from strop.ir.graph import Node
from strop.ir.recurrence import has_cell, recurrence

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

# Of a layer: torch calls oneDNN for an LSTM, and products of wide ones are as fast by libraries.
# One and two threads with AVX2 (docs/log/cpu.md).
MOST_UNITS = {"lstm": 128, "gru": 256, "rnn_tanh": 256, "rnn_relu": 256}
_library = torch.library.Library("strop", "FRAGMENT")
_library.define(
    "recurrence(str kind, Tensor gates, Tensor weight, Tensor hidden, Tensor? cell, Tensor? bias, "
    "bool is_reversed) -> Tensor"
)


def _walked(
    kind: str,
    gates: Tensor,
    weight: Tensor,
    hidden: Tensor,
    cell: Tensor | None,
    bias: Tensor | None,
    is_reversed: bool,
) -> Tensor:
    return recurrence(kind, gates, weight, hidden, cell, bias, is_reversed=is_reversed)


def _shape(kind: str, gates: Tensor, weight: Tensor, hidden: Tensor, *rest: Any) -> Tensor:
    steps, batch, _ = gates.shape
    return gates.new_empty((steps + has_cell(kind), batch, hidden.shape[-1]))


define(_library, "recurrence", _walked, _shape)
RECURRENCE = torch.ops.strop.recurrence.default


def layers(
    kind: str,
    x: Tensor,
    states: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...] | None:
    """Return what ``torch.lstm`` and its like do, whose arguments these are, with the states in one
    list; None where torch's own operator is to do it: on a GPU, in other types than fp32, inside a
    gradient, with dropout between layers, with projections, and in wide layers."""
    ways, each = (2 if bidirectional else 1), (4 if has_biases else 2)
    is_whole = len(params) == num_layers * ways * each
    if not is_whole or (train and dropout) or not _is_for_us((x, *states, *params)):
        return None
    units = params[1].shape[-1]  # of the weight, which has known sizes where states have not
    if not isinstance(units, int) or units > MOST_UNITS[kind]:
        return None
    torch._check(x.shape[1 if batch_first else 0] > 0)
    value, is_first = x, batch_first
    ends: list[list[Tensor]] = [[] for _ in states]
    for layer in range(num_layers):
        found: list[Tensor] = []
        for way in range(ways):
            number = layer * ways + way
            weights = list(params[each * number : each * (number + 1)])
            initial = [state.select(0, number) for state in states]
            walked = _layer(kind, value, weights, initial, way == 1, is_first)
            found.append(walked[0])
            for end, state in zip(ends, walked[1:], strict=True):
                end.append(state)
        value, is_first = (torch.cat(found, -1) if bidirectional else found[0]), False
    return value.transpose(0, 1) if batch_first else value, *map(torch.stack, ends)


def _layer(
    kind: str,
    x: Tensor,
    weights: Sequence[Tensor],
    states: Sequence[Tensor],
    is_reversed: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Return the hidden states (T, B, H) of a layer in one direction, and its states at the end."""
    of_input, of_hidden, *biases = weights
    gates = F.linear(x, of_input, *biases[:1])
    gates = gates.transpose(0, 1) if batch_first else gates
    cell = states[1] if has_cell(kind) else None
    bias = biases[1] if biases else None
    found = RECURRENCE(kind, gates, of_hidden, states[0], cell, bias, is_reversed)
    steps = gates.shape[0]
    hidden = found.narrow(0, 0, steps)
    last = found.narrow(0, 0 if is_reversed else steps - 1, 1).squeeze(0)
    ends = (last, found.narrow(0, steps, 1).squeeze(0)) if has_cell(kind) else (last,)
    return hidden, *ends


def _is_for_us(operands: Sequence[Tensor]) -> bool:
    if any(x.dtype is not torch.float32 or x.device.type != "cpu" for x in operands):
        return False
    if torch.is_autocast_enabled("cpu") or is_differentiated(operands) or is_transformed():
        return False
    return operands[0].dim() == operands[1].dim() == 3


def _imported(
    im: Importer,
    fx: Any,
    kind: str,
    gates: Any,
    weight: Any,
    hidden: Any,
    cell: Any,
    bias: Any,
    is_reversed: bool,
) -> Node:
    given = (gates, weight, hidden, *(x for x in (cell, bias) if x is not None))
    nodes = [im.node(each) for each in given]
    steps, batch, _ = nodes[0].shape
    shape = (steps + int(has_cell(kind)), batch, nodes[2].shape[-1])
    dtype = fx.meta["val"].dtype
    return im.builder.make(
        "recurrence",
        nodes,
        shape,
        dtype,
        kind=kind,
        has_bias=bias is not None,
        reversed=is_reversed,
    )


RECURRENCES: dict[Any, Callable[..., Any]] = {RECURRENCE: _imported}
