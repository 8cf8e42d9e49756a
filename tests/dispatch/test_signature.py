"""Calls as skeletons, and sizes as roots."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from strop.dispatch.signature import (
    Beside,
    default_shapes,
    flatten,
    number_text,
    rebuild,
    solve_roots,
    with_floats,
    without_numbers,
)
from strop.errors import ShapeError, UnsupportedError
from strop.ir.tensor_spec import TensorSpec

X = torch.zeros(2)
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from([torch.float16, torch.int64]),
)
TENSORS = st.builds(lambda n: torch.full((n,), float(n)), st.integers(1, 5))
VALUES = st.recursive(
    st.one_of(PLAIN, TENSORS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=3),
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a is b
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return repr(a) == repr(b)


@given(VALUES)
def test_rebuild_undoes_flatten(value: Any):
    tensors: list[Tensor] = []
    skeleton = flatten(value, tensors)
    hash(skeleton)
    assert same(rebuild(skeleton, tensors), value)
    again = flatten(value, [])
    assert skeleton == again
    assert hash(skeleton) == hash(again)


@given(VALUES, VALUES)
def test_other_calls_have_other_skeletons(a: Any, b: Any):
    left: list[Tensor] = []
    right: list[Tensor] = []
    if flatten(a, left) == flatten(b, right):
        assert same(rebuild(flatten(a, []), right), b)


def test_the_order_of_a_dict_is_kept():
    """A forward may go through it."""
    one, other = flatten({"a": 1, "b": 2}, []), flatten({"b": 2, "a": 1}, [])
    assert one != other
    assert list(rebuild(other, [])) == ["b", "a"]


@pytest.mark.parametrize("value", [object(), {1, 2}, defaultdict(int, a=1), {1.5: 2}, b"x", 1j])
def test_other_types_are_refused(value: Any):
    with pytest.raises(UnsupportedError, match="argument of type"):
        flatten([value], [])


def spec(*shape: str) -> TensorSpec:
    return TensorSpec(shape, torch.float32, torch.device("cpu"))


def test_solve_roots():
    specs = [spec("b", "4", "8*h", "8*w"), spec("b", "s", "32")]
    assert solve_roots(specs, [(2, 4, 16, 24), (2, 77, 32)]) == {"b": 2, "h": 2, "w": 3, "s": 77}


@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 4, 17, 24), (2, 77, 32)],
        [(2, 5, 16, 24), (2, 77, 32)],
        [(2, 4, 16, 24), (3, 77, 32)],
        [(2, 4, 16, 24), (2, 77)],
    ],
)
def test_sizes_that_do_not_fit_are_refused(shapes: list[tuple[int, ...]]):
    with pytest.raises(ShapeError):
        solve_roots([spec("b", "4", "8*h", "8*w"), spec("b", "s", "32")], shapes)


@given(st.lists(st.lists(st.integers(1, 9), max_size=5).map(tuple), min_size=1, max_size=4))
def test_default_shapes_fit_their_own_call(shapes: list[tuple[int, ...]]):
    tensors = [torch.empty(shape) for shape in shapes]
    found = default_shapes(tensors)
    env = solve_roots(found.specs, shapes)
    assert set(env) == set(found.hints)
    for name, value in env.items():
        assert found.hints[name] >= 2
        assert found.hints[name] == max(value, 2)


def test_a_batch_of_one_beside_others() -> None:
    """Flux has a batch, and places of tokens that have none."""
    found = default_shapes([torch.zeros(1, 9, 4), torch.zeros(1), torch.zeros(9, 3)])
    assert [s.shape for s in found.specs] == [("b", "d0_1", "d0_2"), ("b",), ("b2", "d2_1")]
    assert found.hints["b"] == 2
    assert found.otherwise is not None
    assert [s.shape for s in found.otherwise.specs] == [
        ("1", "d0_1", "d0_2"),
        ("1",),
        ("b2", "d2_1"),
    ]
    found = default_shapes([torch.zeros(9, 3), torch.zeros(1, 3)])
    assert [s.shape for s in found.specs] == [("b0", "d0_1"), ("1", "d1_1")]
    assert found.otherwise is None


def test_numbers_in_calls_that_are_alike() -> None:
    one, other = (flatten((X, n, {"a": [n * 0.5, "text"]}), []) for n in (1, 2))
    assert one != other
    assert without_numbers(one) == without_numbers(other)
    assert without_numbers(flatten((True,), [])) != without_numbers(flatten((False,), []))
    beside = Beside()
    bare = flatten((X, 0.5, [1.5, True]), [], beside)
    assert beside.floats == [0.5, 1.5]
    whole = with_floats(bare, [number_text(v) for v in beside.floats])
    assert rebuild(whole, [X])[1:] == (0.5, [1.5, True])


def test_a_video_of_one_frame() -> None:
    """Beside a prompt its frames are a size; where frames come one by one, as to a decoder with or
    without its cache, one is a number, and where a trace with a symbol fails."""
    video, prompt, cache = torch.ones(2, 4, 1, 6, 8), torch.ones(2, 7, 3), torch.ones(2, 4, 2, 6, 8)
    found = default_shapes([video, prompt])
    assert found.specs[0].shape == ("b", "d0_1", "d0_2", "d0_3", "d0_4")
    assert found.hints["d0_2"] == 2
    assert found.otherwise is not None
    for shapes in (found.otherwise, default_shapes([video]), default_shapes([video, cache])):
        assert shapes.specs[0].shape == ("b", "d0_1", "1", "d0_3", "d0_4")
    assert default_shapes([cache, prompt]).otherwise is None
