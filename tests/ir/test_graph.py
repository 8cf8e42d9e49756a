"""The graph builder: equal nodes once, views folded, only live nodes kept."""

from __future__ import annotations

import pytest
import torch

from strop.errors import ShapeError
from strop.ir.dims import const, symbol
from strop.ir.graph import Builder, Node, broadcast, dense_strides, finish, rewrite

F32 = torch.float32
B, H = symbol("b"), symbol("h")


def given(b: Builder, *shape: object, index: int = 0) -> Node:
    return b.make("input", (), shape, F32, index=index, state=False, merged=())  # type: ignore[arg-type]


def test_equal_nodes_are_one():
    b = Builder()
    x, y = given(b, B, H), given(b, B, H, index=1)
    assert b.pointwise("mul", x, y, dtype=F32) is b.pointwise("mul", x, y, dtype=F32)
    assert b.pointwise("mul", y, x, dtype=F32) is not b.pointwise("mul", x, y, dtype=F32)
    assert b.pointwise("add", x, y, dtype=F32, alpha=1) is not b.pointwise(
        "add", x, y, dtype=F32, alpha=2
    )


def test_constants_of_other_types_are_other_nodes():
    b = Builder()
    assert b.constant(1.0, F32) is b.constant(1.0, F32)
    assert b.constant(1, torch.int64) is not b.constant(1, torch.int32)
    assert type(b.constant(1, F32).attrs["value"]) is int
    assert type(b.constant(1.0, F32).attrs["value"]) is float
    assert b.constant(True, F32).attrs["value"] is True


def test_minus_zero_is_another_constant():
    b = Builder()
    signs = {str(b.constant(v, F32).attrs["value"]) for v in (0.0, -0.0)}
    assert signs == {"0.0", "-0.0"}


def test_random_calls_and_writes_are_never_one():
    b = Builder()
    x, y = given(b, B), given(b, B, index=1)
    writes = [b.make("write", (x, y), (B,), F32) for _ in range(2)]
    assert writes[0] is not writes[1]
    calls = [b.make("aten", (x,), (B,), F32, target="t", tag=tag) for tag in ("rand", "rand_1")]
    assert calls[0] is not calls[1]


def test_views_fold():
    b = Builder()
    x = given(b, B, 4, H)
    assert b.reshape(b.reshape(x, (B * 4, H)), x.shape) is x
    assert b.permute(b.permute(x, (2, 0, 1)), (1, 2, 0)) is x
    assert b.permute(x, (0, -2, -1)) is x
    assert b.slice(x, 1, 0, 4) is x
    assert b.expand(x, x.shape) is x
    twice = b.permute(b.permute(x, (2, 0, 1)), (2, 0, 1))
    assert twice.inputs == (x,)
    assert b.reshape(b.reshape(x, (B, 2, 2, H)), (B * 2, 2, H)).inputs == (x,)


def test_reshape_keeps_the_number_of_elements():
    b = Builder()
    with pytest.raises(ShapeError, match="reshape"):
        b.reshape(given(b, B, H), (B, H + 1))


def test_broadcast():
    assert broadcast("x", (B, const(1)), (const(4),)) == (B, const(4))
    assert broadcast("x", (), (B,)) == (B,)
    with pytest.raises(ShapeError, match="broadcast"):
        broadcast("x", (B,), (H,))


def test_dense_strides():
    shape = (B, const(3), H)
    assert dense_strides(shape) == (H * 3, H, const(1))
    assert dense_strides(shape, (0, 2, 1)) == (H * 3, const(1), const(3))


def test_dead_nodes_go_and_inputs_stay():
    b = Builder()
    x, unused = given(b, B), given(b, B, index=1)
    b.pointwise("exp", x, dtype=F32)
    kept = b.pointwise("neg", x, dtype=F32)
    graph = finish(b, (x, unused), (kept,), {"b": 2})
    assert graph.nodes == (x, unused, kept)
    assert graph.users()[x] == [kept]


def test_rewrite_replaces_and_merges():
    b = Builder()
    x = given(b, B)
    total = b.pointwise(
        "add",
        b.pointwise("neg", x, dtype=F32),
        b.pointwise("exp", x, dtype=F32),
        dtype=F32,
        alpha=1,
    )
    graph = finish(b, (x,), (total,), {"b": 2})
    new = rewrite(
        graph, lambda b, n, i: b.pointwise("neg", *i, dtype=F32) if n.op == "exp" else None
    )
    assert [n.op for n in new.nodes] == ["input", "neg", "add"]
    assert new.outputs[0].inputs[0] is new.outputs[0].inputs[1]
