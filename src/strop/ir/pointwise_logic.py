"""The pointwise rows that compare, choose, and work on bits."""

from __future__ import annotations

import torch

from strop.ir.op import Op, Operands, Types
from strop.ir.pointwise_row import BITS, BOOL, COMPARES, INTEGER, TESTS, TRUTH, row

aten = torch.ops.aten

CONDITIONS: tuple[Op, ...] = (
    row(
        "where",
        (aten.where.self,),
        "tl.where({0}, {1}, {2})",
        "({0} ? {1} : {2})",
        operands=Operands.SELECT,
        types=Types.ANY,
        only_moves=True,
    ),
    row("lt", (aten.lt.Tensor, aten.lt.Scalar), "{0} < {1}", **COMPARES),
    row("le", (aten.le.Tensor, aten.le.Scalar), "{0} <= {1}", **COMPARES),
    row("gt", (aten.gt.Tensor, aten.gt.Scalar), "{0} > {1}", **COMPARES),
    row("ge", (aten.ge.Tensor, aten.ge.Scalar), "{0} >= {1}", **COMPARES),
    row("eq", (aten.eq.Tensor, aten.eq.Scalar), "{0} == {1}", commutes=True, **COMPARES),
    row("ne", (aten.ne.Tensor, aten.ne.Scalar), "{0} != {1}", commutes=True, **COMPARES),
    row("isnan", (aten.isnan.default,), "{0} != {0}", **COMPARES),
    row(
        "isinf",
        (aten.isinf.default,),
        'tl.abs({0}) == float("inf")',
        "sp::abs({0}) == sp::highest<float>()",
        **TESTS,
    ),
    row(
        "isposinf",
        (aten.isposinf.default,),
        '{0} == float("inf")',
        "{0} == sp::highest<float>()",
        **TESTS,
    ),
    row(
        "isneginf",
        (aten.isneginf.default,),
        '{0} == -float("inf")',
        "{0} == sp::lowest<float>()",
        **TESTS,
    ),
    row(
        "signbit",
        (aten.signbit.default,),
        "libdevice.signbit({0}) != 0",
        "sp::signbit({0})",
        **TESTS,
    ),
    row("signbit_int", (aten.signbit.default,), "{0} < 0", operands=Operands.PROMOTED, **INTEGER),
    row("logical_and", (aten.logical_and.default,), "{0} & {1}", commutes=True, **TRUTH),
    row("logical_or", (aten.logical_or.default,), "{0} | {1}", commutes=True, **TRUTH),
    row("logical_xor", (aten.logical_xor.default,), "{0} ^ {1}", commutes=True, **TRUTH),
    row("logical_not", (aten.logical_not.default,), "{0} == 0", "!{0}", **TRUTH),
)

BITWISE: tuple[Op, ...] = (
    row(
        "bitwise_and",
        (aten.bitwise_and.Tensor, aten.bitwise_and.Scalar, aten.bitwise_and.Scalar_Tensor),
        "{0} & {1}",
        commutes=True,
        **BITS,
    ),
    row(
        "bitwise_or",
        (aten.bitwise_or.Tensor, aten.bitwise_or.Scalar, aten.bitwise_or.Scalar_Tensor),
        "{0} | {1}",
        commutes=True,
        **BITS,
    ),
    row(
        "bitwise_xor",
        (aten.bitwise_xor.Tensor, aten.bitwise_xor.Scalar, aten.bitwise_xor.Scalar_Tensor),
        "{0} ^ {1}",
        commutes=True,
        **BITS,
    ),
    row("bitwise_not", (aten.bitwise_not.default,), "~{0}", **INTEGER),
    row("not", (aten.bitwise_not.default,), "{0} == 0", "!{0}", **BOOL),
    row(
        "or",
        (aten.add.Tensor, aten.add.Scalar, aten.maximum.default, aten.fmax.default),
        "{0} | {1}",
        when=lambda bound: bool(bound.get("alpha", 1)),
        commutes=True,
        **BOOL,
    ),
    row(
        "and",
        (aten.mul.Tensor, aten.mul.Scalar, aten.minimum.default, aten.fmin.default),
        "{0} & {1}",
        commutes=True,
        **BOOL,
    ),
    # a shift by the width or more, or by a negative count, leaves nothing but the sign
    row(
        "shift_left",
        (
            aten.bitwise_left_shift.Tensor,
            aten.bitwise_left_shift.Tensor_Scalar,
            aten.bitwise_left_shift.Scalar_Tensor,
            aten.__lshift__.Tensor,
            aten.__lshift__.Scalar,
        ),
        "tl.where(({1} < 0) | ({1} >= {bits}), 0, {0} << {1})",
        "sp::shift_left({0}, {1})",
        **INTEGER,
    ),
    row(
        "shift_right",
        (
            aten.bitwise_right_shift.Tensor,
            aten.bitwise_right_shift.Tensor_Scalar,
            aten.bitwise_right_shift.Scalar_Tensor,
            aten.__rshift__.Tensor,
            aten.__rshift__.Scalar,
        ),
        "tl.where(({1} < 0) | ({1} >= {bits}), tl.where({0} < 0, -1, 0).to({type}), {0} >> {1})",
        "sp::shift_right({0}, {1})",
        **INTEGER,
    ),
)
