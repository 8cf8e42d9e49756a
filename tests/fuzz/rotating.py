"""The moves of a random program that vision and video transformers are made of: rotations, rolls,
windows, and rows of another length."""

from __future__ import annotations

from strop.ir.dims import Expr, const
from tests.fuzz.values import Draft


def rotation(d: Draft) -> None:
    """By halves or by neighbours, as rotary embeddings turn queries and keys."""
    x = d.pick(lambda v: v.rank > 0 and v.is_float and v.shape[-1].is_multiple_of(2))
    half = f"{x.name}.shape[-1] // 2"
    pairs = f"{x.name}.unflatten(-1, (-1, 2))"
    text = d.one_of(
        (
            f"torch.cat([-{x.name}[..., {half}:], {x.name}[..., :{half}]], -1)",
            f"torch.stack([-{x.name}[..., 1::2], {x.name}[..., 0::2]], -1).flatten(-2)",
            f"torch.stack([-{pairs}.select(-1, 1), {pairs}.select(-1, 0)], -1).flatten(-2)",
            f"torch.cat([-{pairs}.unbind(-1)[1], {pairs}.unbind(-1)[0]], -1)",
        )
    )
    d.like(x, text)


def windows(d: Draft) -> None:
    """Rolled, cut in windows of 2, which become rows."""
    x = d.pick(lambda v: v.rank > 1 and any(n.is_multiple_of(2) for n in v.shape[:-1]))
    dim = d.one_of([i for i, n in enumerate(x.shape[:-1]) if n.is_multiple_of(2)])
    text, shape = x.name, list(x.shape)
    if d.chance():
        text += f".roll({d.one_of((-1, 1))}, {dim})"
    if d.chance() and x.rank > 2 and dim > 0:
        text += f".unflatten({dim}, (-1, 2)).transpose({dim - 1}, {dim}).flatten(0, {dim})"
        joined = const(1)
        for size in x.shape[: dim + 1]:
            joined = joined * size
        half = joined.exact_div(const(2))
        assert half is not None
        shape = [half, const(2), *x.shape[dim + 1 :]]
    else:
        text += f".unflatten({dim}, (-1, 2)).transpose({dim}, {dim + 1}).flatten({dim}, {dim + 1})"
    d.like(x, text, shape=shape)


def regrouped(d: Draft) -> None:
    """Rows of another length, whose ends do not meet."""
    x = d.pick(lambda v: v.rank > 1 and all(_is_long(n) for n in v.shape[-2:]))
    outer, inner = x.shape[-2:]
    text = f"{x.name}.reshape(*{x.name}.shape[:-2], {inner.value}, {outer.value})"
    d.like(x, text, shape=[*x.shape[:-2], inner, outer], root=x.root)


def _is_long(size: Expr) -> bool:
    return size.is_const and size.value > 1
