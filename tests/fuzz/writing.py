"""The moves of a random program that write into parts of a tensor, or turn pairs of numbers."""

from __future__ import annotations

from tests.fuzz.values import Draft


def strided_write(d: Draft) -> None:
    """Write each so many-th element of a dim, over those of a tensor or into an empty one."""
    x = d.pick(lambda v: v.rank > 0 and v.is_float and any(n.least for n in v.shape))
    dim, step = d.dim(x, lambda n: bool(n.least)), d.one_of((1, 2, 2, 3))
    is_all = d.chance()
    base = f"torch.empty_like({x.name})" if is_all else f"{x.name} * 0.5"
    starts = range(step) if is_all else [d.integer(0, 2)]
    new = d.like(x, base, bound=x.bound + 1, is_exact=False)
    for start in starts:
        where = f"[{':, ' * dim}{start}::{step}]"
        d.lines.append(f"{new.name}{where} = torch.sin({x.name} + {start}){where}")


ROTATIONS = (
    "z * torch.polar(torch.ones_like(a), a)",
    "z * torch.complex(torch.cos(a), torch.sin(a)).conj()",
    "torch.polar(torch.ones_like(a), a) * z.conj() + z",
    "z / torch.complex(torch.cos(a), torch.sin(a))",
    "torch.cat([z, z * 1j], -1)[..., : z.shape[-1]] * 2",
)


def complex_rotation(d: Draft) -> None:
    """Turn pairs of neighbours as complex numbers."""
    x = d.pick(lambda v: v.rank > 0 and v.is_float and v.shape[-1].is_multiple_of(2))
    pairs = f"{x.name}.to(f32).clone(memory_format=torch.contiguous_format).unflatten(-1, (-1, 2))"
    text = d.one_of(ROTATIONS)
    d.lines.append(f"a = {x.name}.to(f32)[..., 1::2]")
    d.lines.append(f"z = torch.view_as_complex({pairs})")
    made = f"torch.view_as_real({text}).flatten(-2).to({x.dtype})"
    d.like(x, made, bound=3 * x.bound + 1, is_exact=False)
