"""Views as affine maps, against torch's own views of real tensors."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strop.ir.affine import base_of, merge, reduced_runs, regroup, strided
from strop.ir.dims import Expr, const, product, symbol
from strop.ir.graph import Builder, Node

ENV = {"b": 2, "h": 3, "w": 5}
B, H, W = symbol("b"), symbol("h"), symbol("w")


def base(b: Builder, shape: tuple[Expr, ...], order: tuple[int, ...] | None) -> tuple[Node, Tensor]:
    """A value in some memory order, and a torch tensor that lies in memory as it does."""
    node = b.make("input", (), shape, torch.float32, order=order, index=0, state=False, merged=())
    sizes = [s.eval(ENV) for s in shape]
    values = torch.arange(math.prod(sizes), dtype=torch.float32)
    return node, values.as_strided(sizes, [s.eval(ENV) for s in node.strides])


def step(b: Builder, node: Node, tensor: Tensor, r: random.Random) -> tuple[Node, Tensor]:
    """One random view of both."""
    rank = len(node.shape)
    kind = r.choice(("permute", "slice", "merge", "split", "unsqueeze", "expand"))
    if kind == "permute":
        dims = r.sample(range(rank), rank)
        return b.permute(node, dims), tensor.permute(dims)
    if kind == "slice":
        dim = r.randrange(rank)
        size = tensor.shape[dim]
        start = r.randrange(size)
        length = r.randint(1, size - start)
        return b.slice(node, dim, start, length), tensor.narrow(dim, start, length)
    if kind == "merge" and rank > 1:
        d = r.randrange(rank - 1)
        shape = [*node.shape[:d], node.shape[d] * node.shape[d + 1], *node.shape[d + 2 :]]
        return b.reshape(node, shape), tensor.reshape([s.eval(ENV) for s in shape])
    if kind == "split":
        d = r.randrange(rank)
        inner = r.choice((const(2), const(3), H, W, B))
        outer = node.shape[d].exact_div(inner)
        if outer is not None:
            shape = [*node.shape[:d], outer, inner, *node.shape[d + 1 :]]
            return b.reshape(node, shape), tensor.reshape([s.eval(ENV) for s in shape])
    d = r.randrange(rank + 1)
    shape = [*node.shape[:d], const(1), *node.shape[d:]]
    node, tensor = b.reshape(node, shape), tensor.unsqueeze(d)
    if kind == "expand":
        shape[d] = const(4)
        return b.expand(node, shape), tensor.expand([s.eval(ENV) for s in shape])
    return node, tensor


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_random_chains_read_what_torch_reads(seed: int):
    r = random.Random(seed)
    b = Builder()
    shape = r.choice(((B, const(6), 4 * H, W), (B * H, const(12)), (const(8) * W,), (H, W, B)))
    order = tuple(r.sample(range(len(shape)), len(shape))) if r.random() < 0.5 else None
    node, tensor = base(b, shape, order)
    for _ in range(r.randint(1, 6)):
        node, tensor = step(b, node, tensor, r)
    view = strided(node)
    if view is None or view.strides is None:
        return  # a copy is made instead; that no view is refused without need is tested below
    strides = [s.eval(ENV) for s in view.strides]
    memory = torch.arange(view.base.numel.eval(ENV), dtype=torch.float32)
    read = memory.as_strided(tensor.shape, strides, view.offset.eval(ENV))
    assert torch.equal(read, tensor)


def test_a_transposed_matrix_split_into_heads_is_one_stride_a_dim():
    b = Builder()
    x, _ = base(b, (B, H * W, const(12)), None)
    heads = b.permute(b.reshape(x, (B, H * W, 3, 4)), (0, 2, 1, 3))
    view = strided(heads)
    assert view is not None
    assert view.strides == (H * W * 12, const(4), const(12), const(1))
    assert base_of(heads) is x


def test_nhwc_as_rows_is_free():
    b = Builder()
    x, _ = base(b, (B, const(8), H, W), (0, 2, 3, 1))
    rows = b.reshape(b.permute(x, (0, 2, 3, 1)), (B * H * W, 8))
    view = strided(rows)
    assert view is not None
    assert view.strides == (const(8), const(1))


def test_backwards_is_no_stride_of_torchs_but_a_size_that_subtracts_is_one():
    b = Builder()
    width = W - W // 2 - 1
    x, _ = base(b, (H, width), None)
    view = strided(x)
    assert view is not None
    assert view.strides == (width, const(1))
    back = strided(b.slice(x, 0, H - 1, H, step=-1))
    assert back is not None
    assert back.strides is None


def test_a_reshape_across_a_permute_is_no_affine_map_of_one_stride():
    b = Builder()
    x, _ = base(b, (H, W), None)
    view = strided(b.reshape(b.permute(x, (1, 0)), (H * W,)))
    assert view is None or view.strides is None


def test_regroup_splits_exactly_or_not_at_all():
    one = const(1)
    assert regroup([(H * 4, one)], (H, const(4))) == (((H, const(4)),), ((const(4), one),))
    assert regroup([(H, W), (W, one)], (H * W,)) == (((H, W), (W, one)),)
    assert regroup([(H * 3, one)], (H * 2,)) is None
    assert regroup([(H, one)], (H, const(2))) is None
    assert regroup([], (one, one)) == ((), ())


def test_merge_joins_neighbours():
    one = const(1)
    assert merge([(H, W * 4), (W, const(4)), (one, H), (const(4), one)]) == [(H * W * 4, one)]
    assert merge([(H, const(7)), (W, one)]) == [(H, const(7)), (W, one)]


@pytest.mark.parametrize(
    ("dims", "runs"),
    [
        ((3,), [False, True]),
        ((1,), [False, True, False]),
        ((0, 2), [True, False, True, False]),
        ((0, 1, 2, 3), [True]),
    ],
)
def test_reduced_runs(dims: tuple[int, ...], runs: list[bool]):
    x, _ = base(Builder(), (B, const(6), H, W), None)
    assert reduced_runs(x, dims, ENV) == runs
    assert product(x.shape).eval(ENV) == 180
