"""Whether results are those of eager: structure, types, sizes, strides, memory and values.

Values are judged by fp64, as ``strop.testing`` says. Samples are small: of a few numbers chance
decides who is nearer to the truth, so that the root of a mean square over n of them is taken to be
known to a factor of 1 + 4/sqrt(n), as in tests/fuzz. Where fp64 says nothing (results in fp64,
another count of results, NaN in other places), a few units of the last place of eager are right,
and what eager itself moves by when its arguments move by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from strop.testing import MAX_FACTOR, MAX_ULPS, RMS_FACTOR, RMS_ULPS
from tests.operators.samples import is_plain

NEAR_ULPS, NEAR_ULPS_OF_LARGEST = 16, 8
NUDGED_FACTOR = 4
TINY = 1e-300
UNDERFLOW = 16 * torch.finfo(torch.float32).tiny  # where CPUs may take numbers for zero


@dataclass(frozen=True)
class Difference:
    """``kind``: one of structure, type, dtype, shape, strides, values, gradient, mutation,
    overflow, requires_grad, aliasing, identity, exception, crash. ``ulps``: how far a number is
    from eager's at most, in units of the last place of the largest one."""

    kind: str
    text: str
    ulps: float = math.inf

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"

    def of(self, kind: str, where: str) -> Difference:
        """The same, said of a part; an overflow is one wherever it is."""
        kind = self.kind if self.kind == "overflow" else kind
        return replace(self, kind=kind, text=where + self.text)


@dataclass(frozen=True)
class Run:
    """What came of a call: its result, and its arguments afterwards. ``gradients``: see running."""

    result: Any
    arguments: Sequence[Tensor]
    gradients: Sequence[Tensor | None] = ()


def differences(ours: Run, eager: Run, exact: Run | None) -> list[Difference]:
    """What differs. ``exact``: the same in fp64, if that could be had."""
    found, our_spec = pytree.tree_flatten(ours.result)
    wanted, spec = pytree.tree_flatten(eager.result)
    if our_spec != spec:
        return [Difference("structure", f"{our_spec} for {spec}")]
    right = _aligned(pytree.tree_leaves(exact.result) if exact else [], len(wanted))
    said = list(_compared("", found, wanted, right))
    for number, (a, b) in enumerate(zip(ours.arguments, eager.arguments, strict=True)):
        if found_one := values_differ(a, b, None):
            said.append(found_one.of("mutation", f"argument {number}: "))
    said += _memory(list(ours.arguments), found, list(eager.arguments), wanted)
    said += _gradients_differ(ours, eager, exact)
    return said


def _gradients_differ(ours: Run, eager: Run, exact: Run | None) -> Iterator[Difference]:
    if len(ours.gradients) != len(eager.gradients):
        yield Difference("gradient", f"{len(ours.gradients)} for {len(eager.gradients)}")
        return
    right = _aligned(exact.gradients if exact else [], len(eager.gradients))
    for number, (a, b, c) in enumerate(zip(ours.gradients, eager.gradients, right, strict=True)):
        if (a is None) != (b is None):
            yield Difference("gradient", f"of argument {number}: {_named(a)} for {_named(b)}")
        elif a is not None and b is not None:
            if (a.dtype, a.shape) != (b.dtype, b.shape):
                yield Difference("gradient", f"of argument {number}: {_named(a)} for {_named(b)}")
            elif said := values_differ(a, b, c):
                yield said.of("gradient", f"of argument {number}: ")


def _aligned(values: Sequence[Any], count: int) -> Sequence[Any]:
    return values if len(values) == count else [None] * count


def _compared(
    where: str, found: Sequence[Any], wanted: Sequence[Any], right: Sequence[Any]
) -> Iterator[Difference]:
    for number, (a, b, c) in enumerate(zip(found, wanted, right, strict=True)):
        where = f"result {number}: " if len(wanted) > 1 else ""
        for said in _differ(a, b, c):
            yield said.of(said.kind, where)


def _differ(a: Any, b: Any, exact: Any) -> Iterator[Difference]:
    if not isinstance(b, Tensor) or type(a) is not type(b):
        if not (type(a) is type(b) and (a == b or (a != a and b != b))):
            kind = "type" if type(a) is not type(b) else "values"
            yield Difference(kind, f"{_named(a)} for {_named(b)}")
        return
    for kind in ("dtype", "layout", "shape", "requires_grad"):
        if getattr(a, kind) != getattr(b, kind):
            yield Difference(kind, f"{getattr(a, kind)} for {getattr(b, kind)}")
            if kind != "requires_grad":
                return
    if is_plain(b) and b.numel() and _strides(a) != _strides(b):
        yield Difference("strides", f"{a.stride()} for {b.stride()} of {tuple(b.shape)}")
    if said := values_differ(a, b, exact):
        yield said


def _named(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)[:60]


def looks(result: Any) -> list[Any]:
    """Types, sizes and strides."""
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    return [
        (leaf.dtype, list(map(int, leaf.shape)), list(map(int, _strides(leaf)))) for leaf in leaves
    ]


def _strides(t: Tensor) -> list[int]:
    """Of dims that have more than one element: those of others say nothing."""
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size != 1]


def values_differ(found: Tensor, eager: Tensor, exact: Any) -> Difference | None:
    """The difference in values or, where eager alone is not finite, in what overflows."""
    a, b = (_numbers(x) for x in (found, eager))
    if not b.dtype.is_floating_point:
        return None if torch.equal(a, b) else Difference("values", _shown(a, b, a != b))
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return None
    right = _numbers(exact) if isinstance(exact, Tensor) else None
    if right is not None and right.shape != b.shape:
        right = None
    other = ~same & ~(a.isfinite() & b.isfinite())
    if bool(other.any()):
        is_ours_right = right is not None and _is_rounded(a[other], right[other])
        kind = "overflow" if is_ours_right else "values"
        return Difference(kind, f"NaN or inf elsewhere: {_shown(a, b, other)}")
    finite = b.isfinite()
    if right is None or not _can_judge(right, b, finite):
        text = _far(a[finite], b[finite])
    else:
        text = _inaccurate(a[finite], b[finite], right[finite].double())
    return Difference("values", text, _ulps(a[finite], b[finite])) if text else None


def is_rounding(ours: Run, eager: Run, nudged: Sequence[Run]) -> bool:
    """Whether ours is no further from eager than eager's from other arguments are: ``nudged`` are
    those that differ from the given ones in the last place."""
    found, wanted = _floats(ours), _floats(eager)
    moved = [_floats(run) for run in nudged]
    if any(len(others) != len(wanted) for others in (found, *moved)):
        return False
    return all(
        _distance(a, b) <= NUDGED_FACTOR * max(_distance(run[number], b) for run in moved)
        for number, (a, b) in enumerate(zip(found, wanted, strict=True))
        if not torch.equal(a, b)
    )


def _floats(run: Run) -> list[Tensor]:
    leaves = [t for t in (*pytree.tree_leaves(run.result), *run.gradients) if isinstance(t, Tensor)]
    return [t for t in map(_numbers, leaves) if t.dtype.is_floating_point]


def _distance(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
        return math.inf
    apart = (a.double() - b.double())[b.isfinite()].abs()
    return float(apart.max()) if apart.numel() else 0.0


def _ulps(a: Tensor, b: Tensor) -> float:
    x, y = a.double(), b.double()
    return float((x - y).abs().max() / (torch.finfo(b.dtype).eps * y.abs().max() + TINY))


def _can_judge(right: Tensor, eager: Tensor, finite: Tensor) -> bool:
    if not right.dtype.is_floating_point or right.dtype.itemsize <= eager.dtype.itemsize:
        return False
    return bool(right[finite].isfinite().all())


def _is_rounded(a: Tensor, exact: Tensor) -> bool:
    """Whether a is what fp64 says, rounded to its type, in which large numbers are infinite."""
    right = exact.to(a.dtype)
    same, finite = (a == right) | (a.isnan() & right.isnan()), a.isfinite() & right.isfinite()
    return bool((same | finite).all()) and not (finite.any() and _far(a[finite], right[finite]))


def _far(a: Tensor, b: Tensor) -> str:
    eps, x, y = torch.finfo(a.dtype).eps, a.double(), b.double()
    near = (x - y).abs() <= eps * (NEAR_ULPS * y.abs() + NEAR_ULPS_OF_LARGEST * y.abs().max())
    return "" if bool(near.all()) else f"not near eager: {_shown(a, b, ~near)}"


def _inaccurate(found: Tensor, eager: Tensor, exact: Tensor) -> str:
    luck = 1 + 4 / found.numel() ** 0.5
    own, base = found.double() - exact, eager.double() - exact
    ulp = torch.finfo(found.dtype).eps * _rms(exact) + UNDERFLOW
    if _rms(own) > luck * (RMS_FACTOR * _rms(base) + RMS_ULPS * ulp):
        return f"RMS error {_rms(own):.2e}, eager's {_rms(base):.2e}, ulp {ulp:.2e}"
    largest = own.abs().max(), base.abs().max()
    if largest[0] > luck * (MAX_FACTOR * largest[1] + MAX_ULPS * ulp):
        return f"largest error {largest[0]:.2e}, eager's {largest[1]:.2e}, ulp {ulp:.2e}"
    return ""


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _numbers(t: Tensor) -> Tensor:
    """As a dense array of real numbers of a type that torch computes with."""
    t = t.detach()
    if t.is_nested:
        t = t.to_padded_tensor(0.0)
    if t.layout is not torch.strided:
        t = t.to_dense()
    if t.is_quantized:
        t = t.dequantize()
    t = t.resolve_conj().resolve_neg()
    if t.is_complex():
        t = torch.view_as_real(t)
    return t.float() if t.dtype.is_floating_point and t.dtype.itemsize == 1 else t


def _shown(a: Tensor, b: Tensor, wrong: Tensor) -> str:
    pairs = zip(a[wrong][:3].tolist(), b[wrong][:3].tolist(), strict=True)
    return ", ".join(f"{_short(x)} for {_short(y)}" for x, y in pairs)


def _short(x: Any) -> str:
    return f"{x:.8g}" if isinstance(x, float) else str(x)


def _memory(
    mine: list[Any], found: list[Any], theirs: list[Any], wanted: list[Any]
) -> Iterator[Difference]:
    """Who lies in whose memory, and which result is which argument itself."""
    ours, eagers, first = [*mine, *found], [*theirs, *wanted], len(mine)
    numbers = [i for i, t in enumerate(eagers) if isinstance(t, Tensor)]
    places = {i: (_place(ours[i], i), _place(eagers[i], i)) for i in numbers}

    def name(i: int) -> str:
        return f"argument {i}" if i < first else f"result {i - first}"

    for j in (n for n in numbers if n >= first):
        for i in (n for n in numbers if n < j):
            ours_shared, shared = (places[i][k] == places[j][k] for k in (0, 1))
            if ours_shared != shared:
                how = "shares" if ours_shared else "does not share"
                yield Difference("aliasing", f"{name(j)} {how} the memory of {name(i)}")
            if (ours[i] is ours[j]) != (eagers[i] is eagers[j]):
                how = "is" if ours[i] is ours[j] else "is not"
                yield Difference("identity", f"{name(j)} {how} {name(i)}")


def _place(value: Any, number: int) -> int:
    """Where a tensor's memory begins. Empty ones, and those that are no arrays, lie nowhere."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or not value.numel():
        return -1 - number
    return value.untyped_storage().data_ptr()
