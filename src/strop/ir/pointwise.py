"""List the pointwise rows of the operator table: the numeric ones by family, and all of them
together.

Adding a pointwise operator means adding a row to a family, and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch

from strop.ir.op import Op, Operands, Types
from strop.ir.pointwise_activations import ACTIVATIONS, GRADIENTS
from strop.ir.pointwise_logic import BITWISE, CONDITIONS
from strop.ir.pointwise_row import (
    ALPHA,
    FRACTION,
    INTEGER,
    NUMBER,
    POSITIVE,
    UNIT,
    has,
    row,
    triton_max,
    triton_min,
)

aten = torch.ops.aten


def _mode(mode: str) -> dict[str, Any]:
    return {
        "reference": lambda x, y: torch.div(x, y, rounding_mode=mode),
        "when": has(rounding_mode=mode),
    }


ARITHMETIC: tuple[Op, ...] = (
    row("add", (aten.add.Tensor, aten.add.Scalar), "{0} + {alpha} * {1}", commutes=True, **ALPHA),
    row("sub", (aten.sub.Tensor, aten.sub.Scalar), "{0} - {alpha} * {1}", **ALPHA),
    row("rsub", (aten.rsub.Tensor, aten.rsub.Scalar), "{1} - {alpha} * {0}", **ALPHA),
    row("mul", (aten.mul.Tensor, aten.mul.Scalar), "{0} * {1}", commutes=True, **NUMBER),
    row("div", (aten.div.Tensor, aten.div.Scalar), "{0} / {1}", **POSITIVE),
    row("neg", (aten.neg.default,), "-{0}", **NUMBER),
    row("abs", (aten.abs.default,), "tl.abs({0})", "sp::abs({0})", **NUMBER),
    row("reciprocal", (aten.reciprocal.default,), "1.0 / {0}", "1 / {0}", **POSITIVE),
    row("square", (aten.square.default,), "{0} * {0}", **NUMBER),
    row("addcmul", (aten.addcmul.default,), "{0} + {value} * {1} * {2}", attrs={"value": 0.75}),
    row(
        "addcmul_int",
        (aten.addcmul.default,),
        "{0} + {value} * {1} * {2}",
        attrs={"value": 3},
        **INTEGER,
    ),
    row(
        "addcdiv",
        (aten.addcdiv.default,),
        "{0} + {value} * ({1} / {2})",
        attrs={"value": 0.75},
        **POSITIVE,
    ),
    row(
        "lerp",
        (aten.lerp.Tensor, aten.lerp.Scalar),
        "tl.where(tl.abs({2}) < 0.5, {0} + {2} * ({1} - {0}), {1} - ({1} - {0}) * (1.0 - {2}))",
        "(sp::abs({2}) < 0.5f ? {0} + {2} * ({1} - {0}) : {1} - ({1} - {0}) * (1 - {2}))",
    ),
    row(
        "hypot",
        (aten.hypot.default,),
        "libdevice.hypot({0}, {1})",
        "sp::hypot({0}, {1})",
        commutes=True,
    ),
    row(
        "copysign",
        (aten.copysign.Tensor, aten.copysign.Scalar),
        "libdevice.copysign({0}, {1})",
        "sp::copysign({0}, {1})",
    ),
    row("rad2deg", (aten.rad2deg.default,), "{0} * 57.29577951308232", "{0} * 57.29577951308232f"),
    row(
        "deg2rad",
        (aten.deg2rad.default,),
        "{0} * 0.017453292519943295",
        "{0} * 0.017453292519943295f",
    ),
)

_FMOD = "libdevice.fmod({0}, {1})"
_WRAPS = f"(({_FMOD} != 0) & (({_FMOD} < 0) != ({{1}} < 0)))"  # of another sign than the divisor
_WRAPS_INT = "(({0} % {1} != 0) & (({0} % {1} < 0) != ({1} < 0)))"

# Integers divide as in C in both languages, and as in Python in torch. A C++ program would die
# of a division by zero: ``sp::quotient`` gives 0.
DIVISION: tuple[Op, ...] = (
    row("fmod", (aten.fmod.Tensor, aten.fmod.Scalar), _FMOD, "sp::fmod({0}, {1})"),
    row(
        "fmod_int",
        (aten.fmod.Tensor, aten.fmod.Scalar),
        "{0} % {1}",
        "sp::fmod({0}, {1})",
        **INTEGER,
    ),
    row(
        "remainder",
        (aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor),
        f"tl.where({_WRAPS}, {_FMOD} + {{1}}, {_FMOD})",
        "sp::remainder({0}, {1})",
    ),
    row(
        "remainder_int",
        (aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor),
        f"tl.where({_WRAPS_INT}, {{0}} % {{1}} + {{1}}, {{0}} % {{1}})",
        "sp::remainder({0}, {1})",
        **INTEGER,
    ),
    # not floor(x / y): the quotient may round up to a whole number that is too large by one
    row(
        "div_floor",
        (aten.div.Tensor_mode, aten.div.Scalar_mode),
        f"tl.where({{1}} == 0, {{0}} / {{1}}, libdevice.copysign(tl.abs(libdevice.rint("
        f"({{0}} - {_FMOD}) / {{1}} - {_WRAPS}.to({{type}}))), {{0}} / {{1}}))",
        "sp::floor_divide({0}, {1})",
        **_mode("floor"),
    ),
    row(
        "div_floor_int",
        (aten.div.Tensor_mode, aten.div.Scalar_mode),
        f"{{0}} // {{1}} - {_WRAPS_INT}.to({{type}})",
        "sp::floor_divide({0}, {1})",
        **_mode("floor"),
        **INTEGER,
    ),
    row(
        "div_trunc",
        (aten.div.Tensor_mode, aten.div.Scalar_mode),
        "libdevice.trunc({0} / {1})",
        "sp::trunc({0} / {1})",
        **_mode("trunc"),
        rounds=True,
    ),
    row(
        "div_trunc_int",
        (aten.div.Tensor_mode, aten.div.Scalar_mode),
        "{0} // {1}",
        "sp::quotient({0}, {1})",
        **_mode("trunc"),
        **INTEGER,
    ),
)

ROUNDING: tuple[Op, ...] = (
    row("floor", (aten.floor.default,), "tl.floor({0})", "sp::floor({0})", rounds=True),
    row("ceil", (aten.ceil.default,), "tl.ceil({0})", "sp::ceil({0})", rounds=True),
    row("trunc", (aten.trunc.default,), "libdevice.trunc({0})", "sp::trunc({0})", rounds=True),
    row("round", (aten.round.default,), "libdevice.rint({0})", "sp::round({0})", rounds=True),
    row(
        "frac",
        (aten.frac.default,),
        "{0} - libdevice.trunc({0})",
        "{0} - sp::trunc({0})",
        rounds=True,
    ),
    row(
        "sign",
        (aten.sign.default, aten.sgn.default),
        "({0} > 0).to({type}) - ({0} < 0).to({type})",
        "sp::sign({0})",
        **NUMBER,
    ),
    row(
        "heaviside",
        (aten.heaviside.default,),
        "tl.where({0} == 0, {1}, ({0} > 0).to({type}))",
        "({0} == 0 ? {1} : {0} > 0)",
        **NUMBER,
    ),
)

EXPONENTIAL: tuple[Op, ...] = (
    row("sqrt", (aten.sqrt.default,), "tl.sqrt_rn({0})", "sp::sqrt({0})", **POSITIVE),
    row("rsqrt", (aten.rsqrt.default,), "tl.rsqrt({0})", "1 / sp::sqrt({0})", **POSITIVE),
    row("exp", (aten.exp.default,), "tl.exp({0})", "sp::exp({0})"),
    row("exp2", (aten.exp2.default,), "tl.exp2({0})", "sp::exp2({0})"),
    row("expm1", (aten.expm1.default,), "libdevice.expm1({0})", "sp::expm1({0})"),
    row("log", (aten.log.default,), "tl.log({0})", "sp::log({0})", **POSITIVE),
    row("log2", (aten.log2.default,), "tl.log2({0})", "sp::log2({0})", **POSITIVE),
    row("log10", (aten.log10.default,), "libdevice.log10({0})", "sp::log10({0})", **POSITIVE),
    row(
        "log1p",
        (aten.log1p.default,),
        "libdevice.log1p({0})",
        "sp::log1p({0})",
        example=(-0.9, 3.0),
    ),
    row(
        "pow",
        (aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar, aten.pow.Scalar),
        "libdevice.pow({0}, {1})",
        "sp::pow({0}, {1})",
        **POSITIVE,
    ),
    row(
        "logit",
        (aten.logit.default,),
        "tl.log({0} / (1.0 - {0}))",
        "sp::log({0} / (1 - {0}))",
        when=has(eps=None),
        **FRACTION,
    ),
    row(
        "logaddexp",
        (aten.logaddexp.default,),
        f"tl.where({{0}} == {{1}}, {{0}} + 0.6931471805599453, {triton_max('{0}', '{1}')}"
        " + libdevice.log1p(tl.exp(-tl.abs({0} - {1}))))",
        "({0} == {1} ? {0} + 0.6931471805599453f"
        " : sp::max({0}, {1}) + sp::log1p(sp::exp(-sp::abs({0} - {1}))))",
        commutes=True,
    ),
    row(
        "logaddexp2",
        (aten.logaddexp2.default,),
        f"tl.where({{0}} == {{1}}, {{0}} + 1.0, {triton_max('{0}', '{1}')}"
        " + 1.4426950408889634 * libdevice.log1p(tl.exp2(-tl.abs({0} - {1}))))",
        "({0} == {1} ? {0} + 1 : sp::max({0}, {1})"
        " + 1.4426950408889634f * sp::log1p(sp::exp2(-sp::abs({0} - {1}))))",
        commutes=True,
    ),
    row(
        "xlogy",
        (aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other),
        "tl.where(({0} == 0) & ({1} == {1}), 0.0, {0} * tl.log({1}))",
        "({0} == 0 && {1} == {1} ? 0 : {0} * sp::log({1}))",
        **POSITIVE,
    ),
    row(
        "xlog1py",
        (aten.special_xlog1py.default,),
        "tl.where(({0} == 0) & ({1} == {1}), 0.0, {0} * libdevice.log1p({1}))",
        "({0} == 0 && {1} == {1} ? 0 : {0} * sp::log1p({1}))",
        **POSITIVE,
    ),
    row(
        "entr",
        (aten.special_entr.default,),
        'tl.where({0} < 0, -float("inf"), tl.where({0} == 0, 0.0, -{0} * tl.log({0})))',
        "({0} < 0 ? sp::lowest<{type}>() : {0} == 0 ? 0 : -{0} * sp::log({0}))",
        **POSITIVE,
    ),
    row("erf", (aten.erf.default,), "tl.erf({0})", "sp::erf({0})"),
    row("erfc", (aten.erfc.default,), "libdevice.erfc({0})", "sp::erfc({0})"),
    row("erfinv", (aten.erfinv.default,), "libdevice.erfinv({0})", "sp::erfinv({0})", **UNIT),
    row("lgamma", (aten.lgamma.default,), "libdevice.lgamma({0})", "sp::lgamma({0})", **POSITIVE),
)

TRIGONOMETRIC: tuple[Op, ...] = (
    row("sin", (aten.sin.default,), "tl.sin({0})", "sp::sin({0})"),
    row("cos", (aten.cos.default,), "tl.cos({0})", "sp::cos({0})"),
    row("tan", (aten.tan.default,), "libdevice.tan({0})", "sp::tan({0})", example=(-1.5, 1.5)),
    row("asin", (aten.asin.default,), "libdevice.asin({0})", "sp::asin({0})", **UNIT),
    row("acos", (aten.acos.default,), "libdevice.acos({0})", "sp::acos({0})", **UNIT),
    row("atan", (aten.atan.default,), "libdevice.atan({0})", "sp::atan({0})"),
    row("atan2", (aten.atan2.default,), "libdevice.atan2({0}, {1})", "sp::atan2({0}, {1})"),
    row("sinh", (aten.sinh.default,), "libdevice.sinh({0})", "sp::sinh({0})"),
    row("cosh", (aten.cosh.default,), "libdevice.cosh({0})", "sp::cosh({0})"),
    row("tanh", (aten.tanh.default,), "libdevice.tanh({0})", "sp::tanh({0})"),
    row("asinh", (aten.asinh.default,), "libdevice.asinh({0})", "sp::asinh({0})"),
    row(
        "acosh", (aten.acosh.default,), "libdevice.acosh({0})", "sp::acosh({0})", example=(1.0, 9.0)
    ),
    row("atanh", (aten.atanh.default,), "libdevice.atanh({0})", "sp::atanh({0})", **UNIT),
    row(
        "sinc",
        (aten.sinc.default,),
        "tl.where({0} == 0, 1.0, tl.sin({0} * 3.141592653589793) / ({0} * 3.141592653589793))",
        "({0} == 0 ? 1 : sp::sin({0} * 3.141592653589793f) / ({0} * 3.141592653589793f))",
    ),
)

EXTREMES: tuple[Op, ...] = (
    row(
        "maximum",
        (aten.maximum.default, aten.clamp_min.default, aten.clamp_min.Tensor),
        triton_max("{0}", "{1}"),
        "sp::max({0}, {1})",
        commutes=True,
        **NUMBER,
    ),
    row(
        "minimum",
        (aten.minimum.default, aten.clamp_max.default, aten.clamp_max.Tensor),
        triton_min("{0}", "{1}"),
        "sp::min({0}, {1})",
        commutes=True,
        **NUMBER,
    ),
    row(
        "fmax",
        (aten.fmax.default,),
        "tl.maximum({0}, {1})",
        "sp::fmax({0}, {1})",
        commutes=True,
        **NUMBER,
    ),
    row(
        "fmin",
        (aten.fmin.default,),
        "tl.minimum({0}, {1})",
        "sp::fmin({0}, {1})",
        commutes=True,
        **NUMBER,
    ),
    row(
        "clamp_min",
        (aten.clamp.Tensor, aten.clamp.default),
        triton_max("{0}", "{1}"),
        "sp::max({0}, {1})",
        when=has(max=None),
        **NUMBER,
    ),
    row(
        "clamp_max",
        (aten.clamp.Tensor, aten.clamp.default),
        triton_min("{0}", "{1}"),
        "sp::min({0}, {1})",
        reference=aten.clamp_max.Tensor,
        when=has(min=None),
        **NUMBER,
    ),
    row(
        "clamp",
        (aten.clamp.Tensor, aten.clamp.default),
        triton_min(triton_max("{0}", "{1}"), "{2}"),
        "sp::min(sp::max({0}, {1}), {2})",
        **NUMBER,
    ),
)

# The one row that rounds: the user asked for it. Code generators print it by result type.
CAST = row(
    "cast",
    (aten._to_copy.default,),
    "{0}",
    operands=Operands.OWN,
    types=Types.ANY,
    reference=lambda x: x,
    only_moves=True,
)

POINTWISE: tuple[Op, ...] = (
    *ARITHMETIC,
    *DIVISION,
    *ROUNDING,
    *EXPONENTIAL,
    *TRIGONOMETRIC,
    *ACTIVATIONS,
    *EXTREMES,
    *CONDITIONS,
    *BITWISE,
    *GRADIENTS,
    CAST,
)
