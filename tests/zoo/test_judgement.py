"""The rule over several results: chance evens out, one bad result does not hide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.testing import assert_as_accurate_as_eager, assert_as_accurate_together

Triple = tuple[Tensor, Tensor, Tensor]


def _drawn(seed: int, own: float, eager: float, scale: float = 1.0) -> Triple:
    """Four numbers with errors of these sizes, in units of 1e-6 of them."""
    generator = torch.Generator().manual_seed(seed)
    wide = scale * torch.randn(4, generator=generator, dtype=torch.float64)
    errors = (wide * size * 1e-6 * torch.randn(4, generator=generator) for size in (own, eager))
    a, b = ((wide + error).float() for error in errors)
    return a, b, wide


def _passes_alone(triple: Triple) -> bool:
    return _passes(assert_as_accurate_as_eager, *triple)


def _passes(rule: Callable[..., None], *given: Any) -> bool:
    try:
        rule(*given)
    except AssertionError:
        return False
    return True


def test_chance_evens_out() -> None:
    triples = [_drawn(seed, 3, 3, scale=10.0 ** (seed % 5)) for seed in range(200)]
    assert sum(map(_passes_alone, triples)) < 150  # equally good, yet many a one fails
    assert_as_accurate_together(triples)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_one_bad_result_does_not_hide(scale: float) -> None:
    triples = [_drawn(seed, 3, 3) for seed in range(200)]
    a, b, wide = _drawn(0, 3, 3, scale)
    with pytest.raises(AssertionError, match="error"):
        assert_as_accurate_together([*triples, (a * 1.001, b, wide)])


def test_a_quarter_more_error_everywhere_is_seen() -> None:
    triples = [_drawn(seed, 5, 4) for seed in range(500)]
    with pytest.raises(AssertionError, match="RMS"):
        assert_as_accurate_together(triples)


def test_of_a_few_numbers_the_maximum_counts() -> None:
    """Sixteen numbers fail the rule of the RMS by chance, and seldom that of the maximum."""
    few = [[_drawn(4 * seed + n, 3, 3) for n in range(4)] for seed in range(50)]
    joined = [tuple(torch.cat(parts) for parts in zip(*each, strict=True)) for each in few]
    together = sum(_passes(assert_as_accurate_together, triples) for triples in few)
    assert sum(map(_passes_alone, joined)) < 35
    assert together > 40
    a, b, wide = few[0][0]
    with pytest.raises(AssertionError, match="maximum"):
        assert_as_accurate_together([*few[0][1:], (a + 1e-4 * wide.float(), b, wide)])
