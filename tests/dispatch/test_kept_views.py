"""A view that is cut anew is the view of an earlier call if it is the same part of one tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.dispatch.kept_views import KeptViews


def given(kept: KeptViews, *args: Tensor, **kwargs: Tensor) -> list[Tensor]:
    found, named = kept.of(args, kwargs)
    return [*found, *named.values()]


def test_the_same_part_of_the_same_tensor_is_the_same_view() -> None:
    kept, whole = KeptViews(), torch.arange(12.0).reshape(3, 4)
    first = given(kept, whole.chunk(2, 1)[1], prompt=whole.chunk(2, 1)[0])
    again = given(kept, whole.chunk(2, 1)[1], prompt=whole.chunk(2, 1)[0])
    assert all(one is other for one, other in zip(first, again, strict=True))
    whole[0, 3] = 7.0  # both see what is written to the whole, and count it
    assert again[0][0, 1] == 7.0
    assert again[0]._version == whole._version


def test_all_else_is_handed_on_as_it_is_given() -> None:
    kept, whole = KeptViews(), torch.arange(12.0).reshape(3, 4)
    (first,) = given(kept, whole[:, :2])
    for other in (
        whole[:, 2:],
        whole[:2, :2],
        whole.clone()[:, :2],
        whole.t()[:2].t()[:, :1],
        whole.view(torch.int32)[:, :2],
        whole,
    ):
        (found,) = given(kept, other)
        assert found is other
    (found,) = given(kept, prompt=whole[:, :2])  # of another name
    assert found is not first
    (second,) = given(kept, whole[:, :2])
    assert second is not first  # the latest view is kept, and there was another since
    kept.forget()
    assert given(kept, whole[:, :2])[0] is not second


def test_views_of_inference_mode_are_found_too() -> None:
    kept, whole = KeptViews(), torch.ones(2, 4)
    with torch.inference_mode():
        (first,) = given(kept, whole[:, :2])
        (again,) = given(kept, whole[:, :2])
    assert again is first


def test_a_tensor_that_gets_other_memory_has_other_views() -> None:
    """Its earlier views keep the memory of before."""
    kept, whole = KeptViews(), torch.zeros(2, 4)
    (first,) = given(kept, whole[:, :2])
    whole.data = torch.ones(2, 4)
    (found,) = given(kept, whole[:, :2])
    assert found is not first
    assert found.sum() == 4.0
