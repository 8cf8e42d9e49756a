"""Arguments whose sizes an operator compares: one graph for all sizes, eager's error for others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import strop
from strop.errors import ShapeError, UnsupportedError
from strop.frontend.decompositions import DECOMPOSITIONS
from strop.options import Options
from tests.views.running import Function, assert_equal


def framed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(x.shape[0], x.shape[1] + 2, x.shape[2])
    out[:, 1:-1] = x
    out[:, 0] = 1.0
    out[:, -1] = y
    return out


Shapes = tuple[tuple[int, ...], ...]
# a function, shapes that one graph serves, and shapes that eager refuses
TIED: dict[str, tuple[Callable[..., Any], tuple[Shapes, ...], Shapes]] = {
    "rms_norm": (
        lambda x, w: F.rms_norm(x, (8,), w),
        (((3, 8), (8,)), ((5, 8), (8,))),
        ((3, 8), (7,)),
    ),
    "rms_norm_of_rows": (
        lambda x, w: F.rms_norm(x, (x.shape[-1],), w),
        (((2, 3, 8), (8,)), ((5, 2, 6), (6,))),
        ((2, 3, 8), (7,)),
    ),
    "rms_norm_of_planes": (
        lambda x, w: F.rms_norm(x, x.shape[1:], w),
        (((2, 3, 8), (3, 8)), ((5, 2, 6), (2, 6))),
        ((2, 3, 8), (8,)),
    ),
    "group_norm": (lambda x: F.group_norm(x, 2), (((2, 8, 4),), ((3, 6, 5),)), ((2, 7, 4),)),
    "group_norm_weighted": (
        lambda x, w, b: F.group_norm(x, 2, w, b),
        (((2, 8, 4), (8,), (8,)), ((3, 6, 5), (6,), (6,))),
        ((2, 8, 4), (8,), (6,)),
    ),
    "group_norm_shifted": (
        lambda x, b: F.group_norm(x, 2, None, b),
        (((2, 8, 4), (8,)), ((3, 6, 5), (6,))),
        ((2, 8, 4), (6,)),
    ),
    "slice_scatter": (
        lambda x, y: torch.slice_scatter(x, y, 1, 1, 3) + 1,
        (((2, 4, 3), (2, 2, 3)), ((3, 5, 4), (3, 2, 4))),
        ((2, 4, 3), (2, 2, 1)),
    ),
    "slice_scatter_from": (
        lambda x, y: torch.slice_scatter(x, y, 1, 1) + 1,
        (((2, 4, 3), (2, 3, 3)), ((3, 5, 4), (3, 4, 4))),
        ((2, 4, 3), (2, 2, 3)),
    ),
    "select_scatter": (
        lambda x, y: torch.select_scatter(x, y, 1, -1) + 1,
        (((2, 4, 3), (2, 3)), ((3, 5, 4), (3, 4))),
        ((2, 4, 3), (2, 1)),
    ),
    "framed": (
        framed,
        (((2, 3, 4), (2, 4)), ((3, 5, 2), (3, 2)), ((2, 1, 1), (2, 1))),
        ((2, 3, 4), (2, 3)),
    ),
    "patches": (
        lambda x: (
            x.reshape(x.shape[0], x.shape[1], x.shape[2] // 2, 2, x.shape[3] // 2, 2)
            .permute(0, 2, 4, 1, 3, 5)
            .flatten(3)
            .flatten(1, 2)
            * 2
        ),
        (((2, 3, 4, 6),), ((3, 3, 8, 4),), ((1, 3, 6, 6),)),
        ((2, 3, 5, 6),),
    ),
    "pixel_unshuffle": (
        lambda x: F.pixel_unshuffle(x, 2) + 1,
        (((2, 3, 4, 6),), ((3, 3, 8, 4),)),
        ((2, 3, 5, 6),),
    ),
}


def some(shapes: Shapes) -> list[torch.Tensor]:
    return [torch.randn(shape) for shape in shapes]


@pytest.mark.parametrize("name", TIED)
def test_tied_sizes(name: str, tmp_path: Any) -> None:
    function, good, bad = TIED[name]
    module = Function(function).eval()
    dispatcher = strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    for shapes in good:
        given = some(shapes)
        assert_equal(dispatcher(*given), function(*given))
    assert module.forward.variants.num_captures == 1
    assert not [step for v in module.forward.variants.all for step in v.program.call_steps]
    given = some(bad)
    with pytest.raises(RuntimeError) as wanted:
        function(*given)
    with pytest.raises(RuntimeError) as found:
        dispatcher(*given)
    assert str(found.value) == str(wanted.value)


def test_what_a_rule_has_met_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Not that there is no rule."""

    def refuse(*_: Any) -> None:
        raise ShapeError("a size that is no size")

    monkeypatch.setitem(DECOMPOSITIONS, torch.ops.strop.rms_norm.default, refuse)
    module = Function(lambda x: F.rms_norm(x, (8,)) + 1).eval()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    with pytest.raises(UnsupportedError, match="cannot be a kernel here: a size that is no size"):
        module(torch.randn(2, 8))


def rotated(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """As Wan turns queries and keys by their places. ``x``: (batch, channels, tokens, heads)."""
    x = x.permute(0, 2, 3, 1)
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    out = torch.empty_like(x)
    out[..., 0::2] = even * angle.cos() - odd * angle.sin()
    out[..., 1::2] = even * angle.sin() + odd * angle.cos()
    return out


def test_a_batch_of_one_is_no_other_graph_for_what_is_written_in_steps(tmp_path: Any) -> None:
    module = Function(rotated).eval()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    for batch, tokens, heads in ((2, 3, 4), (1, 5, 2), (3, 2, 1)):
        given = some(((batch, 8, tokens, heads), (tokens, 1, 4)))
        assert_equal(module(*given), rotated(*given))
    assert module.forward.variants.num_captures == 1


def test_what_has_an_element_at_several_places_is_not_written_to(tmp_path: Any) -> None:
    module = Function(lambda x: torch.zeros(1, x.shape[1]).expand(x.shape).copy_(x) + 1).eval()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
    with pytest.raises(RuntimeError, match="single memory location"):
        module(torch.randn(3, 4))
