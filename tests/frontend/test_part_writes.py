"""What becomes of writes into parts of a tensor: pieces side by side, and nothing read for
nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.frontend.tracing import trace


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.unflatten(-1, (-1, 2)).unbind(-1)
    out = torch.empty_like(x)
    out[..., 0::2] = one * cos - other * sin
    out[..., 1::2] = one * sin + other * cos
    return out


def test_an_interleaved_write_is_a_stack() -> None:
    for width in ("12", "2*w"):
        half = "6" if width == "12" else "w"
        traced = trace(_rotated, f"b n {width}", f"n {half}", f"n {half}", b=2, n=5, w=3)
        (cat,) = [node for node in traced.graph.nodes if node.op == "cat"]
        assert [node.op for node in cat.inputs] == ["reshape", "reshape"]
        assert not any(node.op in ("aten", "constant") for node in traced.graph.nodes)


def test_what_is_written_in_parts_is_a_cat_of_them() -> None:
    def written(x: Tensor, y: Tensor) -> Tensor:
        out = x.clone()
        out[:, 2:4] = y
        out[:, :2] = y + 1
        out[:, 4:] = x[:, 4:] * 2
        return out

    traced = trace(written, "b 6 h", "b 2 h", b=2, h=3)
    (cat,) = [node for node in traced.graph.nodes if node.op == "cat"]
    assert [node.op for node in cat.inputs] == ["add", "input", "mul"]


def test_what_was_written_before_is_kept_where_nothing_is_written_over_it() -> None:
    def written(x: Tensor, y: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[:, 1:4] = y
        out[:, 2:5] = y * 2
        return out

    traced = trace(written, "b 6 h", "b 3 h", b=2, h=3)
    (cat,) = [node for node in traced.graph.nodes if node.op == "cat"]
    sizes = [str(node.shape[1]) for node in cat.inputs]
    assert sizes == ["1", "1", "3", "1"]
