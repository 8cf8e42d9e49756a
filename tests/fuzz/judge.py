"""Whether strop computes what a program says: values, what shares memory, what was written to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from hypothesis.errors import UnsatisfiedAssumption
from torch import Tensor

from strop.api import optimize_module
from strop.dispatch.adapter import Adapter
from strop.dispatch.dispatcher import Dispatcher
from strop.dispatch.signature import Shapes
from strop.ir.tensor_spec import TensorSpec
from strop.options import Options
from strop.testing import assert_as_accurate_as_eager
from tests.fuzz.programs import SIZES, Program

# What torch says to a program that is no program: a max of nothing, a view that is none.
NO_PROGRAM = (RuntimeError, IndexError, NotImplementedError, ValueError)
COARSEST = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-4, torch.float64: 1e-10}


class Named(Adapter):
    """The sizes of a program's arguments."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def shapes(self, tensors: Sequence[Tensor], skeleton: Any = ()) -> Shapes:
        specs = tuple(
            TensorSpec(a.shape, t.dtype, t.device)
            for a, t in zip(self.program.arguments, tensors, strict=True)
        )
        used = {root for spec in specs for size in spec.sizes for root in size.roots}
        return Shapes(specs, {name: SIZES[name] for name in used})


def optimized(program: Program, folder: str, **options: Any) -> Dispatcher:
    module = program.module()
    return optimize_module(module, Options(cache_dir=folder, **options), adapter=Named(program))


def judge(program: Program, dispatcher: Dispatcher, slack: float = 1.0) -> None:
    """Raises AssertionError where results are not those of eager, at any of the sizes.

    ``slack``: how many times the error of eager is right, too. Machine code has roundings of its
    own, and a norm of a row of two nearly equal numbers makes much of either.
    """
    with torch.no_grad():
        for sizes in program.sizes:
            _judge_at(program, dispatcher, sizes, slack)
    if all(size > 1 for sizes in program.sizes for size in sizes.values()):
        captures = dispatcher.variants.num_captures
        assert captures <= 1, f"{captures} graphs for {[dict(s) for s in program.sizes]}"


def _judge_at(
    program: Program, dispatcher: Dispatcher, sizes: Mapping[str, int], slack: float
) -> None:
    mine, theirs = program.inputs(sizes), program.inputs(sizes)
    exact = program.inputs(sizes, exact=True)
    try:
        expected = program.module()(*theirs)
        with _double_by_default():
            right = program.module(exact=True)(*exact)
    except NO_PROGRAM as error:
        if sizes == SIZES:
            raise UnsatisfiedAssumption from error
        return
    if not all(_is_meaningful(e, r) for e, r in zip(expected, right, strict=True)):
        raise UnsatisfiedAssumption
    found = dispatcher.module(*mine)
    for number, (f, e, r) in enumerate(zip(found, expected, right, strict=True)):
        note = f"result {number} ({program.results[number]}) at {dict(sizes)}: "
        try:
            if e.dtype is torch.float64:  # as wide as the judge: eager is what it is compared with
                torch.testing.assert_close(f, e, rtol=1e-12, atol=1e-12)
            else:
                _assert_accurate(f, e, r.double(), slack)
        except AssertionError as error:
            raise AssertionError(note + str(error)) from None
    for number, (f, e) in enumerate(zip(mine, theirs, strict=True)):
        assert torch.equal(f, e), f"argument {number} after the call at {dict(sizes)}"
    _judge_memory(program, [*mine, *found], [*theirs, *expected])


def _assert_accurate(found: Tensor, eager: Tensor, exact: Tensor, slack: float) -> None:
    """The project's rule, where results have elements enough for it: of a few, either side is
    lucky at times. A root of a mean square over n values is known to a factor of 1 + 1/sqrt(n)."""
    try:
        assert_as_accurate_as_eager(found, eager, exact)
    except AssertionError:
        if not found.is_floating_point() or not torch.isfinite(found).all():
            raise
        own, base, scale = (
            float(x.square().mean().sqrt()) for x in (found - exact, eager - exact, exact)
        )
        luck = slack * (1 + 4 / found.numel() ** 0.5)
        if own > luck * (1.1 * base + 0.5 * torch.finfo(found.dtype).eps * scale):
            raise


# Views in the graph: their results, and views of those, are copies of their own.
COPIED = (
    ".flip(",
    ".roll(",
    ".repeat",
    ".clone(",
    ".contiguous(",
    ".tril(",
    ".triu(",
    ".expand(",
    "F.interpolate(",
)


def _judge_memory(program: Program, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Results share memory with arguments and each other where eager's do. An argument that is not
    dense is traced as if it were: views of it may be copies, and the other way round."""
    ours, theirs = sharing(found), sharing(wanted)
    arguments = wanted[: len(program.arguments)]
    if not all(x.is_contiguous() for x in arguments):
        return
    is_copied = any(word in program.source for word in COPIED)
    for i, row in enumerate(ours):
        for j, shared in enumerate(row):
            same = shared == theirs[i][j] or (is_copied and not shared)
            assert same, f"{i} and {j} of arguments and results: sharing memory is {shared}"


def _is_meaningful(eager: Tensor, exact: Tensor) -> bool:
    """Whether rounding leaves something to judge: no integer hangs on it, no norm of a constant
    row blows it up."""
    if not eager.is_floating_point():
        return torch.equal(eager, exact)
    wide = eager.double()
    if not torch.isfinite(wide).all() or not torch.isfinite(exact).all():
        return False
    scale = float(exact.double().abs().max()) if exact.numel() else 0.0
    return not exact.numel() or float((wide - exact).abs().max()) <= COARSEST[eager.dtype] * scale


def sharing(tensors: Sequence[Tensor]) -> list[list[bool]]:
    """Who lies in whose memory; empty tensors lie nowhere."""
    places = [
        t.untyped_storage().data_ptr() if t.numel() else -1 - i for i, t in enumerate(tensors)
    ]
    return [[a == b for b in places] for a in places]


class _double_by_default:
    """What torch makes of integers is as wide as all floats are."""

    def __enter__(self) -> None:
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *exception: object) -> None:
        torch.set_default_dtype(torch.float32)
