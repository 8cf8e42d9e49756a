"""The moves of a random program that put elements elsewhere: views, and copies in another order."""

from __future__ import annotations

from strop.ir.dims import Expr, const
from tests.fuzz.programs import ONE
from tests.fuzz.values import Draft, Value, is_width

# other ways to see a value


def permute(d: Draft) -> None:
    x = d.pick(lambda v: v.rank > 1)
    dims = [d.dim(x), d.dim(x)]
    order = list(range(x.rank))
    order[dims[0]], order[dims[1]] = dims[1], dims[0]
    if d.chance():
        order = order[1:] + order[:1]
    d.like(
        x,
        f"{x.name}.permute({', '.join(map(str, order))})",
        shape=[x.shape[i] for i in order],
        root=x.root,
    )


def flatten(d: Draft) -> None:
    x = d.pick(lambda v: v.rank > 1)
    start = d.integer(0, x.rank - 2)
    end = d.integer(start + 1, x.rank - 1)
    joined = x.shape[start]
    for size in x.shape[start + 1 : end + 1]:
        joined = joined * size
    d.like(
        x,
        f"{x.name}.flatten({start}, {end})",
        shape=[*x.shape[:start], joined, *x.shape[end + 1 :]],
        root=x.root,
    )


def unflatten(d: Draft) -> None:
    x = d.pick(lambda v: 0 < v.rank < 5 and any(_parts(n) for n in v.shape))
    dim = d.dim(x, lambda n: bool(_parts(n)))
    part = d.one_of(_parts(x.shape[dim]))
    rest = x.shape[dim].exact_div(const(part))
    assert rest is not None
    first = d.chance()
    sizes, split = (
        (f"{part}, -1", [const(part), rest]) if first else (f"-1, {part}", [rest, const(part)])
    )
    d.like(
        x,
        f"{x.name}.unflatten({dim}, ({sizes}))",
        shape=[*x.shape[:dim], *split, *x.shape[dim + 1 :]],
        root=x.root,
    )


def _parts(size: Expr) -> list[int]:
    return [n for n in (2, 3, 4) if size.is_multiple_of(n)]


def slices(d: Draft) -> None:
    x = d.pick(lambda v: v.rank > 0 and any(n.is_const and n.value > 0 for n in v.shape))
    dim = d.dim(x, lambda n: n.is_const and n.value > 0)
    size = x.shape[dim].value
    start = d.integer(0, size - 1)
    length, stride = d.integer(1, size - start), d.one_of((1, 1, 2))
    kept = -(-length // stride)
    text = f"{x.name}[{':, ' * dim}{start}:{start + length}:{stride}]"
    d.like(x, text, shape=[*x.shape[:dim], const(kept), *x.shape[dim + 1 :]], root=x.root)


def symbolic_slice(d: Draft) -> None:
    x = d.pick(lambda v: v.rank > 0 and any(not n.is_const for n in v.shape))
    dim = d.dim(x, lambda n: not n.is_const)
    text, size = d.one_of(
        ((f"{':, ' * dim}1:", x.shape[dim] - 1), (f"{':, ' * dim}:-1", x.shape[dim] - 1))
    )
    d.like(x, f"{x.name}[{text}]", shape=[*x.shape[:dim], size, *x.shape[dim + 1 :]], root=x.root)


def select(d: Draft) -> None:
    x = d.pick(lambda v: v.rank > 0)
    dim, place = d.dim(x), d.one_of((0, -1))
    d.like(
        x,
        f"{x.name}.select({dim}, {place})",
        shape=[*x.shape[:dim], *x.shape[dim + 1 :]],
        root=x.root,
    )


def unsqueeze(d: Draft) -> None:
    x = d.pick(lambda v: v.rank < 5)
    dim, times = d.integer(0, x.rank), d.one_of((1, 1, 2, 3))
    text = f"{x.name}.unsqueeze({dim})"
    if times > 1:
        sizes = ["-1"] * dim + [str(times)] + ["-1"] * (x.rank - dim)
        text += f".expand({', '.join(sizes)})"
    d.like(x, text, shape=[*x.shape[:dim], const(times), *x.shape[dim:]], root=x.root)


def squeeze(d: Draft) -> None:
    x = d.pick(lambda v: ONE in v.shape)
    dim = d.dim(x, lambda n: n == ONE)
    d.like(x, f"{x.name}.squeeze({dim})", shape=[*x.shape[:dim], *x.shape[dim + 1 :]], root=x.root)


def diagonal(d: Draft) -> None:
    x = d.pick(lambda v: v.rank > 1 and v.shape[-1] == v.shape[-2])
    d.like(x, f"{x.name}.diagonal(0, -2, -1)", shape=x.shape[:-1], root=x.root)


# copies in another order


def turned(d: Draft) -> None:
    x = d.pick(lambda v: v.rank > 0)
    dim = d.dim(x)
    text, root = d.one_of(
        (
            ("{0}.flip({1})", None),
            ("{0}.roll(1, {1})", None),
            ("{0}.clone()", None),
            ("{0}.contiguous()", x.root),
        )
    )
    d.like(x, text.format(x.name, dim), root=root)


def repeat(d: Draft) -> None:
    x = d.pick(lambda v: v.rank > 0)
    dim, shape = d.dim(x), list(x.shape)
    shape[dim] = shape[dim] * 2
    times = ["2" if i == dim else "1" for i in range(x.rank)]
    texts = (f"{x.name}.repeat({', '.join(times)})", f"{x.name}.repeat_interleave(2, {dim})")
    d.like(x, d.one_of(texts), shape=shape)


def cat(d: Draft) -> None:
    x = d.pick(lambda v: v.rank > 0)
    dim = d.dim(x)

    def fits(y: Value) -> bool:
        rest = [n for i, n in enumerate(x.shape) if i != dim]
        same = y.rank == x.rank and [n for i, n in enumerate(y.shape) if i != dim] == rest
        return same and y.dtype == x.dtype

    parts = [x, *(d.pick(fits) for _ in range(d.integer(1, 2)))]
    shape = list(x.shape)
    shape[dim] = sum((p.shape[dim] for p in parts), start=const(0))
    text = f"torch.cat([{', '.join(p.name for p in parts)}], {dim})"
    d.like(
        x,
        text,
        shape=shape,
        bound=max(p.bound for p in parts),
        is_exact=all(p.is_exact for p in parts),
    )


def stack(d: Draft) -> None:
    x = d.pick(lambda v: v.rank < 4)
    y = d.pick(lambda v: v.shape == x.shape and v.dtype == x.dtype)
    dim = d.integer(0, x.rank)
    d.like(
        x,
        f"torch.stack([{x.name}, {y.name}], {dim})",
        bound=max(x.bound, y.bound),
        shape=[*x.shape[:dim], const(2), *x.shape[dim:]],
        is_exact=x.is_exact and y.is_exact,
    )


def pad(d: Draft) -> None:
    x = d.pick(lambda v: v.rank > 0 and v.dtype != "bool")
    left, right = (
        d.integer(-1 if x.shape[-1].is_const and x.shape[-1].value > 1 else 0, 2),
        d.integer(0, 1),
    )
    shape = [*x.shape[:-1], x.shape[-1] + left + right]
    d.like(x, f"F.pad({x.name}, ({left}, {right}), value=1)", shape=shape, bound=max(x.bound, 1))


def triangle(d: Draft) -> None:
    x = d.pick(lambda v: v.rank > 1)
    d.like(x, f"{x.name}.{d.one_of(('tril', 'triu'))}({d.integer(-1, 1)})")


def upsample(d: Draft) -> None:
    x = d.pick(lambda v: v.rank == 4 and v.is_float)
    shape = [*x.shape[:2], *(n * 2 for n in x.shape[2:])]
    d.like(x, f"F.interpolate({x.name}, scale_factor=2, mode='nearest')", shape=shape)


def pool(d: Draft) -> None:
    """Windows that reach over the edge, of sizes that torch accepts."""
    x = d.pick(lambda v: v.rank == 4 and v.is_float and all(map(is_width, v.shape[2:])))
    text = d.one_of(
        (
            "F.max_pool2d({0}, 3, 1, 1)",
            "F.avg_pool2d({0}, 3, 1, 1)",
            "F.avg_pool2d({0}, 3, 1, 1, count_include_pad=False)",
            "F.max_pool2d({0}, (1, 3), 1, (0, 1))",
        )
    )
    d.like(x, text.format(x.name), is_exact=x.is_exact and "max" in text)


def shuffle(d: Draft) -> None:
    x = d.pick(lambda v: v.rank == 4 and v.shape[1].is_multiple_of(4) and v.is_float)
    b, c, h, w = x.shape
    d.like(x, f"F.pixel_shuffle({x.name}, 2)", shape=[b, c // 4, h * 2, w * 2])
