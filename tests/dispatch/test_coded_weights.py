"""What is compared of weights that codes were made of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strop.dispatch.coded_weights import edges
from strop.runtime.derived.known_values import KnownValues


def _rows(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape).to(dtype)


def _channels_last(weight: Tensor) -> Tensor:
    return weight.contiguous(memory_format=torch.channels_last)


WHOLE = {
    "fp16": _rows(6, 32),
    "fp32": _rows(6, 10, dtype=torch.float32),
    "rows of a larger one": _rows(9, 32)[2:8],
    "convolution": _channels_last(_rows(6, 8, 3, 3)),
}
OTHERS = {
    "uneven": _rows(6, 30),
    "columns of a larger one": _rows(6, 64)[:, 4:36],
    "at any address": _rows(200)[2:194].view(6, 32),
    "a convolution's as torch makes it": _rows(6, 8, 3, 3),
}


@pytest.mark.parametrize("weight", [*WHOLE.values(), *OTHERS.values()], ids=[*WHOLE, *OTHERS])
def test_the_first_row_and_the_first_numbers_of_each_row_are_compared(weight: Tensor) -> None:
    """In each place of a window; what lies inside is not, which docs/eight-bit.md says."""
    given = weight.clone(memory_format=torch.preserve_format)
    weight = weight.copy_(given)
    count = 8 // weight.itemsize
    places = [(0, weight.shape[1] - 1), *((row, n) for row in (1, 5) for n in (0, count - 1))]
    window = [(0, 0), (2, 1)] if weight.dim() == 4 else [()]
    for place in (place + at for place in places for at in window):
        known = KnownValues(edges(weight))
        assert not known.differs()
        weight.data[place] += 1
        assert known.differs(), place
        weight.copy_(given)
        assert not known.differs()
        weight.data[place] = -weight.data[place]
        assert known.differs(), place
        weight.copy_(given)
    known = KnownValues(edges(weight))
    weight.data[3, count] += 1
    assert not known.differs()
    weight.copy_(given)


@pytest.mark.parametrize("weight", WHOLE.values(), ids=WHOLE)
def test_whole_words_are_gathered_at_once(weight: Tensor) -> None:
    found = edges(weight)
    assert {edge.dtype for edge in found} == {torch.int64}
    assert found[0].numel() * 8 == weight[0].numel() * weight.itemsize
    assert found[1].numel() == weight.numel() // weight.shape[1]
    assert all(
        edge.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr() for edge in found
    )


@pytest.mark.parametrize("weight", OTHERS.values(), ids=OTHERS)
def test_other_weights_are_gathered_number_by_number(weight: Tensor) -> None:
    assert {edge.dtype for edge in edges(weight)} == {weight.dtype}
