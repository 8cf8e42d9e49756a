"""Define one layer of a recurrent network over all steps, in one direction.

The products of the layer's inputs are computed for all steps at once, before it; a step adds the
product of the last hidden state to them. ``torch.nn.LSTM``, ``GRU`` and ``RNN`` give the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}  # of a cell, by torch's name for it


def has_cell(kind: str) -> bool:
    """Tell whether a cell keeps another state beside the hidden one."""
    return kind == "lstm"


def recurrence(
    kind: str,
    gates: Tensor,
    weight: Tensor,
    hidden: Tensor,
    cell: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    is_reversed: bool = False,
) -> Tensor:
    """Return the hidden states (T, B, H) of all steps; behind them that of an LSTM's cell at the
    end: (T + 1, B, H).

    ``gates`` (T, B, G * H) has what inputs add to each gate, with their bias; ``weight`` (G * H, H)
    and ``bias`` (G * H,) are those of hidden states; ``hidden`` and ``cell`` (B, H) are the states
    at the beginning, which is the last step where it is reversed. All have one type.
    """
    steps: list[Tensor] = []
    for each in gates.flip(0) if is_reversed else gates:
        hidden, cell = _step(kind, each, F.linear(hidden, weight, bias), hidden, cell)
        steps.append(hidden)
    if is_reversed:
        steps.reverse()
    return torch.stack([*steps, *([] if cell is None else [cell])])


def recurrence_of(inputs: Sequence[Tensor], attrs: Mapping[str, Any]) -> Tensor:
    """Return the same of the operands of a node, which has what may be missing behind the rest."""
    gates, weight, hidden, *more = inputs
    cell = more.pop(0) if has_cell(attrs["kind"]) else None
    bias = more.pop() if attrs["has_bias"] else None
    is_reversed = attrs["reversed"]
    return recurrence(attrs["kind"], gates, weight, hidden, cell, bias, is_reversed=is_reversed)


def _step(
    kind: str, gates: Tensor, added: Tensor, hidden: Tensor, cell: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    if kind == "gru":
        reset, update, new = gates.chunk(3, -1)
        by_reset, by_update, by_new = added.chunk(3, -1)
        fresh = (new + (reset + by_reset).sigmoid() * by_new).tanh()
        return fresh + (update + by_update).sigmoid() * (hidden - fresh), None
    if cell is None:
        total = gates + added
        return (total.tanh() if kind == "rnn_tanh" else total.relu()), None
    let_in, forget, candidate, let_out = (gates + added).chunk(4, -1)
    cell = forget.sigmoid() * cell + let_in.sigmoid() * candidate.tanh()
    return let_out.sigmoid() * cell.tanh(), cell
