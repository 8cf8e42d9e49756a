"""Hold the pointwise rows of the operator table, by family.

A row holds the ATen overloads it stands for, one scalar expression for each code generator, and
the function that is its reference (the first overload, where it takes operands and attributes as
they are). ``{0}``, ``{1}`` are the operands, ``{name}`` an attribute under the name that the ATen
schema gives it, ``{type}`` and ``{bits}`` the compute type and its width. Operands arrive in the
row's compute type (fp32 for half types, see ``compute_dtype``) and nothing rounds before a store.
Adding an operator means adding a row here and nothing else.

Where eager raises or is undefined (an integer divided by zero), kernels give some number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from strop.ir.op import Kind, Op, Operands, Types

aten = torch.ops.aten


def _row(name: str, overloads: tuple[Any, ...], triton: str, cpp: str = "", **more: Any) -> Op:
    more.setdefault("reference", overloads[0])
    more.setdefault("types", Types.FLOAT)
    return Op(name, Kind.POINTWISE, overloads, triton, cpp or triton, **more)


def _is(**wanted: Any) -> Callable[[Mapping[str, Any]], bool]:
    return lambda attrs: all(attrs.get(name) == value for name, value in wanted.items())


def _max(x: str, y: str) -> str:
    return f"tl.maximum({x}, {y}, propagate_nan=tl.PropagateNan.ALL)"


def _min(x: str, y: str) -> str:
    return f"tl.minimum({x}, {y}, propagate_nan=tl.PropagateNan.ALL)"


def _mode(mode: str) -> dict[str, Any]:
    return {
        "reference": lambda x, y: torch.div(x, y, rounding_mode=mode),
        "when": _is(rounding_mode=mode),
    }


_NUMBER: dict[str, Any] = {"types": Types.NUMBER}
_INTEGER: dict[str, Any] = {"types": Types.INTEGER}
_BOOL: dict[str, Any] = {"types": Types.BOOL}
_BITS: dict[str, Any] = {"types": Types.BITS}
_COMPARES: dict[str, Any] = {"operands": Operands.PROMOTED, "types": Types.ANY}
_TESTS: dict[str, Any] = {"operands": Operands.PROMOTED}
_TRUTH: dict[str, Any] = {"operands": Operands.TRUTH, "types": Types.ANY}
_ALPHA: dict[str, Any] = {"attrs": {"alpha": 1}, "types": Types.NUMBER}
_POSITIVE: dict[str, Any] = {"example": (0.1, 3.0)}
_UNIT: dict[str, Any] = {"example": (-0.95, 0.95)}
_FRACTION: dict[str, Any] = {"example": (0.05, 0.95)}

ARITHMETIC: tuple[Op, ...] = (
    _row("add", (aten.add.Tensor, aten.add.Scalar), "{0} + {alpha} * {1}", **_ALPHA),
    _row("sub", (aten.sub.Tensor, aten.sub.Scalar), "{0} - {alpha} * {1}", **_ALPHA),
    _row("rsub", (aten.rsub.Tensor, aten.rsub.Scalar), "{1} - {alpha} * {0}", **_ALPHA),
    _row("mul", (aten.mul.Tensor, aten.mul.Scalar), "{0} * {1}", **_NUMBER),
    _row("div", (aten.div.Tensor, aten.div.Scalar), "{0} / {1}", **_POSITIVE),
    _row("neg", (aten.neg.default,), "-{0}", **_NUMBER),
    _row("abs", (aten.abs.default,), "tl.abs({0})", "sp::abs({0})", **_NUMBER),
    _row("reciprocal", (aten.reciprocal.default,), "1.0 / {0}", "1 / {0}", **_POSITIVE),
    _row("square", (aten.square.default,), "{0} * {0}", **_NUMBER),
    _row("addcmul", (aten.addcmul.default,), "{0} + {value} * {1} * {2}", attrs={"value": 0.75}),
    _row(
        "addcmul_int",
        (aten.addcmul.default,),
        "{0} + {value} * {1} * {2}",
        attrs={"value": 3},
        **_INTEGER,
    ),
    _row(
        "addcdiv",
        (aten.addcdiv.default,),
        "{0} + {value} * ({1} / {2})",
        attrs={"value": 0.75},
        **_POSITIVE,
    ),
    _row(
        "lerp",
        (aten.lerp.Tensor, aten.lerp.Scalar),
        "tl.where(tl.abs({2}) < 0.5, {0} + {2} * ({1} - {0}), {1} - ({1} - {0}) * (1.0 - {2}))",
        "(sp::abs({2}) < 0.5f ? {0} + {2} * ({1} - {0}) : {1} - ({1} - {0}) * (1 - {2}))",
    ),
    _row("hypot", (aten.hypot.default,), "libdevice.hypot({0}, {1})", "sp::hypot({0}, {1})"),
    _row(
        "copysign",
        (aten.copysign.Tensor, aten.copysign.Scalar),
        "libdevice.copysign({0}, {1})",
        "sp::copysign({0}, {1})",
    ),
    _row("rad2deg", (aten.rad2deg.default,), "{0} * 57.29577951308232", "{0} * 57.29577951308232f"),
    _row(
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
    _row("fmod", (aten.fmod.Tensor, aten.fmod.Scalar), _FMOD, "sp::fmod({0}, {1})"),
    _row(
        "fmod_int",
        (aten.fmod.Tensor, aten.fmod.Scalar),
        "{0} % {1}",
        "sp::fmod({0}, {1})",
        **_INTEGER,
    ),
    _row(
        "remainder",
        (aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor),
        f"tl.where({_WRAPS}, {_FMOD} + {{1}}, {_FMOD})",
        "sp::remainder({0}, {1})",
    ),
    _row(
        "remainder_int",
        (aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor),
        f"tl.where({_WRAPS_INT}, {{0}} % {{1}} + {{1}}, {{0}} % {{1}})",
        "sp::remainder({0}, {1})",
        **_INTEGER,
    ),
    # not floor(x / y): the quotient may round up to a whole number that is too large by one
    _row(
        "div_floor",
        (aten.div.Tensor_mode, aten.div.Scalar_mode),
        f"tl.where({{1}} == 0, {{0}} / {{1}}, libdevice.copysign(tl.abs(libdevice.rint("
        f"({{0}} - {_FMOD}) / {{1}} - {_WRAPS}.to({{type}}))), {{0}} / {{1}}))",
        "sp::floor_divide({0}, {1})",
        **_mode("floor"),
    ),
    _row(
        "div_floor_int",
        (aten.div.Tensor_mode, aten.div.Scalar_mode),
        f"{{0}} // {{1}} - {_WRAPS_INT}.to({{type}})",
        "sp::floor_divide({0}, {1})",
        **_mode("floor"),
        **_INTEGER,
    ),
    _row(
        "div_trunc",
        (aten.div.Tensor_mode, aten.div.Scalar_mode),
        "libdevice.trunc({0} / {1})",
        "sp::trunc({0} / {1})",
        **_mode("trunc"),
    ),
    _row(
        "div_trunc_int",
        (aten.div.Tensor_mode, aten.div.Scalar_mode),
        "{0} // {1}",
        "sp::quotient({0}, {1})",
        **_mode("trunc"),
        **_INTEGER,
    ),
)

ROUNDING: tuple[Op, ...] = (
    _row("floor", (aten.floor.default,), "tl.floor({0})", "sp::floor({0})"),
    _row("ceil", (aten.ceil.default,), "tl.ceil({0})", "sp::ceil({0})"),
    _row("trunc", (aten.trunc.default,), "libdevice.trunc({0})", "sp::trunc({0})"),
    _row("round", (aten.round.default,), "libdevice.rint({0})", "sp::round({0})"),
    _row("frac", (aten.frac.default,), "{0} - libdevice.trunc({0})", "{0} - sp::trunc({0})"),
    _row(
        "sign",
        (aten.sign.default, aten.sgn.default),
        "({0} > 0).to({type}) - ({0} < 0).to({type})",
        "sp::sign({0})",
        **_NUMBER,
    ),
    _row(
        "heaviside",
        (aten.heaviside.default,),
        "tl.where({0} == 0, {1}, ({0} > 0).to({type}))",
        "({0} == 0 ? {1} : {0} > 0)",
        **_NUMBER,
    ),
)

EXPONENTIAL: tuple[Op, ...] = (
    _row("sqrt", (aten.sqrt.default,), "tl.sqrt_rn({0})", "sp::sqrt({0})", **_POSITIVE),
    _row("rsqrt", (aten.rsqrt.default,), "tl.rsqrt({0})", "1 / sp::sqrt({0})", **_POSITIVE),
    _row("exp", (aten.exp.default,), "tl.exp({0})", "sp::exp({0})"),
    _row("exp2", (aten.exp2.default,), "tl.exp2({0})", "sp::exp2({0})"),
    _row("expm1", (aten.expm1.default,), "libdevice.expm1({0})", "sp::expm1({0})"),
    _row("log", (aten.log.default,), "tl.log({0})", "sp::log({0})", **_POSITIVE),
    _row("log2", (aten.log2.default,), "tl.log2({0})", "sp::log2({0})", **_POSITIVE),
    _row("log10", (aten.log10.default,), "libdevice.log10({0})", "sp::log10({0})", **_POSITIVE),
    _row(
        "log1p",
        (aten.log1p.default,),
        "libdevice.log1p({0})",
        "sp::log1p({0})",
        example=(-0.9, 3.0),
    ),
    _row(
        "pow",
        (aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar, aten.pow.Scalar),
        "libdevice.pow({0}, {1})",
        "sp::pow({0}, {1})",
        **_POSITIVE,
    ),
    _row(
        "logit",
        (aten.logit.default,),
        "tl.log({0} / (1.0 - {0}))",
        "sp::log({0} / (1 - {0}))",
        when=_is(eps=None),
        **_FRACTION,
    ),
    _row(
        "logaddexp",
        (aten.logaddexp.default,),
        f"tl.where({{0}} == {{1}}, {{0}} + 0.6931471805599453, {_max('{0}', '{1}')}"
        " + libdevice.log1p(tl.exp(-tl.abs({0} - {1}))))",
        "({0} == {1} ? {0} + 0.6931471805599453f"
        " : sp::max({0}, {1}) + sp::log1p(sp::exp(-sp::abs({0} - {1}))))",
    ),
    _row(
        "logaddexp2",
        (aten.logaddexp2.default,),
        f"tl.where({{0}} == {{1}}, {{0}} + 1.0, {_max('{0}', '{1}')}"
        " + 1.4426950408889634 * libdevice.log1p(tl.exp2(-tl.abs({0} - {1}))))",
        "({0} == {1} ? {0} + 1 : sp::max({0}, {1})"
        " + 1.4426950408889634f * sp::log1p(sp::exp2(-sp::abs({0} - {1}))))",
    ),
    _row(
        "xlogy",
        (aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other),
        "tl.where(({0} == 0) & ({1} == {1}), 0.0, {0} * tl.log({1}))",
        "({0} == 0 && {1} == {1} ? 0 : {0} * sp::log({1}))",
        **_POSITIVE,
    ),
    _row(
        "xlog1py",
        (aten.special_xlog1py.default,),
        "tl.where(({0} == 0) & ({1} == {1}), 0.0, {0} * libdevice.log1p({1}))",
        "({0} == 0 && {1} == {1} ? 0 : {0} * sp::log1p({1}))",
        **_POSITIVE,
    ),
    _row(
        "entr",
        (aten.special_entr.default,),
        'tl.where({0} < 0, -float("inf"), tl.where({0} == 0, 0.0, -{0} * tl.log({0})))',
        "({0} < 0 ? sp::lowest<{type}>() : {0} == 0 ? 0 : -{0} * sp::log({0}))",
        **_POSITIVE,
    ),
    _row("erf", (aten.erf.default,), "tl.erf({0})", "sp::erf({0})"),
    _row("erfc", (aten.erfc.default,), "libdevice.erfc({0})", "sp::erfc({0})"),
    _row("erfinv", (aten.erfinv.default,), "libdevice.erfinv({0})", "sp::erfinv({0})", **_UNIT),
    _row("lgamma", (aten.lgamma.default,), "libdevice.lgamma({0})", "sp::lgamma({0})", **_POSITIVE),
)

TRIGONOMETRIC: tuple[Op, ...] = (
    _row("sin", (aten.sin.default,), "tl.sin({0})", "sp::sin({0})"),
    _row("cos", (aten.cos.default,), "tl.cos({0})", "sp::cos({0})"),
    _row("tan", (aten.tan.default,), "libdevice.tan({0})", "sp::tan({0})", example=(-1.5, 1.5)),
    _row("asin", (aten.asin.default,), "libdevice.asin({0})", "sp::asin({0})", **_UNIT),
    _row("acos", (aten.acos.default,), "libdevice.acos({0})", "sp::acos({0})", **_UNIT),
    _row("atan", (aten.atan.default,), "libdevice.atan({0})", "sp::atan({0})"),
    _row("atan2", (aten.atan2.default,), "libdevice.atan2({0}, {1})", "sp::atan2({0}, {1})"),
    _row("sinh", (aten.sinh.default,), "libdevice.sinh({0})", "sp::sinh({0})"),
    _row("cosh", (aten.cosh.default,), "libdevice.cosh({0})", "sp::cosh({0})"),
    _row("tanh", (aten.tanh.default,), "libdevice.tanh({0})", "sp::tanh({0})"),
    _row("asinh", (aten.asinh.default,), "libdevice.asinh({0})", "sp::asinh({0})"),
    _row(
        "acosh", (aten.acosh.default,), "libdevice.acosh({0})", "sp::acosh({0})", example=(1.0, 9.0)
    ),
    _row("atanh", (aten.atanh.default,), "libdevice.atanh({0})", "sp::atanh({0})", **_UNIT),
    _row(
        "sinc",
        (aten.sinc.default,),
        "tl.where({0} == 0, 1.0, tl.sin({0} * 3.141592653589793) / ({0} * 3.141592653589793))",
        "({0} == 0 ? 1 : sp::sin({0} * 3.141592653589793f) / ({0} * 3.141592653589793f))",
    ),
)

_SIGMOID = "1.0 / (1.0 + tl.exp(-{0}))"
_RELU6 = _min(_max("{0} + 3.0", "0.0"), "6.0")

ACTIVATIONS: tuple[Op, ...] = (
    _row("sigmoid", (aten.sigmoid.default,), _SIGMOID, "1 / (1 + sp::exp(-{0}))"),
    _row("silu", (aten.silu.default,), "{0} / (1.0 + tl.exp(-{0}))", "{0} / (1 + sp::exp(-{0}))"),
    _row(
        "gelu",
        (aten.gelu.default,),
        "0.5 * {0} * (1.0 + tl.erf({0} * 0.7071067811865476))",
        "sp::half({0}) * (1 + sp::erf({0} * 0.7071067811865476f))",
        when=_is(approximate="none"),
        triton_half="half_gelu({0})",
    ),
    # 0.5 * (1 + tanh(u)) is the sigmoid of 2 * u
    _row(
        "gelu_tanh",
        (aten.gelu.default,),
        "{0} / (1.0 + tl.exp(-{0} * (1.5957691216057308 + 0.07135481627260025 * {0} * {0})))",
        "{0} / (1 + sp::exp(-{0} * (1.5957691216057308f + 0.07135481627260025f * {0} * {0})))",
        reference=lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        when=_is(approximate="tanh"),
    ),
    _row(
        "relu", (aten.relu.default,), "tl.where({0} < 0, 0, {0})", "({0} < 0 ? 0 : {0})", **_NUMBER
    ),
    _row(
        "leaky_relu",
        (aten.leaky_relu.default,),
        "tl.where({0} > 0, {0}, {0} * {negative_slope})",
        "({0} > 0 ? {0} : {0} * {negative_slope})",
        attrs={"negative_slope": 0.1},
    ),
    _row(
        "prelu",
        (aten._prelu_kernel.default,),
        "tl.where({0} > 0, {0}, {0} * {1})",
        "({0} > 0 ? {0} : {0} * {1})",
    ),
    _row(
        "hardtanh",
        (aten.hardtanh.default,),
        _min(_max("{0}", "{min_val}"), "{max_val}"),
        "sp::limit({0}, {min_val}, {max_val})",
        attrs={"min_val": 1, "max_val": 2},
        **_NUMBER,
    ),
    _row(
        "hardsigmoid",
        (aten.hardsigmoid.default,),
        f"{_RELU6} / 6.0",
        "sp::limit({0} + 3, 0, 6) / 6",
    ),
    _row(
        "hardswish",
        (aten.hardswish.default,),
        f"{{0}} * {_RELU6} / 6.0",
        "{0} * sp::limit({0} + 3, 0, 6) / 6",
    ),
    _row(
        "elu",
        (aten.elu.default,),
        "tl.where({0} > 0, {0} * {scale},"
        " libdevice.expm1({0} * {input_scale}) * ({alpha} * {scale}))",
        "({0} > 0 ? {0} * {scale} : sp::expm1({0} * {input_scale}) * ({alpha} * {scale}))",
        attrs={"alpha": 1.5, "scale": 1.25, "input_scale": 0.75},
    ),
    _row(
        "celu",
        (aten.celu.default,),
        "tl.where({0} > 0, {0}, libdevice.expm1({0} / {alpha}) * {alpha})",
        "({0} > 0 ? {0} : sp::expm1({0} / {alpha}) * {alpha})",
        attrs={"alpha": 0.75},
    ),
    _row(
        "mish",
        (aten.mish.default,),
        "{0} * libdevice.tanh(libdevice.log1p(tl.exp({0})))",
        "sp::mish({0})",
    ),
    _row(
        "softplus",
        (aten.softplus.default,),
        "tl.where({0} * {beta} > {threshold}, {0}, libdevice.log1p(tl.exp({0} * {beta})) / {beta})",
        "({0} * {beta} > {threshold} ? {0} : sp::log1p(sp::exp({0} * {beta})) / {beta})",
        attrs={"beta": 1, "threshold": 20},
    ),
    _row(
        "logsigmoid",
        (aten.log_sigmoid.default,),
        f"{_min('{0}', '0.0')} - libdevice.log1p(tl.exp(-tl.abs({{0}})))",
        "sp::min({0}, {type}(0)) - sp::log1p(sp::exp(-sp::abs({0})))",
    ),
    _row(
        "softshrink",
        (aten.softshrink.default,),
        "tl.where({0} > {lambd}, {0} - {lambd},"
        " tl.where({0} < -{lambd}, {0} + {lambd}, {0} * 0.0))",
        "({0} > {lambd} ? {0} - {lambd} : {0} < -{lambd} ? {0} + {lambd} : {0} * 0)",
        attrs={"lambd": 0.5},
    ),
    _row(
        "hardshrink",
        (aten.hardshrink.default,),
        "tl.where(tl.abs({0}) <= {lambd}, 0.0, {0})",
        "(sp::abs({0}) <= {lambd} ? 0 : {0})",
        attrs={"lambd": 0.5},
    ),
    _row(
        "threshold",
        (aten.threshold.default,),
        "tl.where({0} <= {threshold}, {value}, {0})",
        "({0} <= {threshold} ? {value} : {0})",
        attrs={"threshold": 1, "value": 7},
        **_NUMBER,
    ),
)

EXTREMES: tuple[Op, ...] = (
    _row(
        "maximum",
        (aten.maximum.default, aten.clamp_min.default, aten.clamp_min.Tensor),
        _max("{0}", "{1}"),
        "sp::max({0}, {1})",
        **_NUMBER,
    ),
    _row(
        "minimum",
        (aten.minimum.default, aten.clamp_max.default, aten.clamp_max.Tensor),
        _min("{0}", "{1}"),
        "sp::min({0}, {1})",
        **_NUMBER,
    ),
    _row("fmax", (aten.fmax.default,), "tl.maximum({0}, {1})", "sp::fmax({0}, {1})", **_NUMBER),
    _row("fmin", (aten.fmin.default,), "tl.minimum({0}, {1})", "sp::fmin({0}, {1})", **_NUMBER),
    _row(
        "clamp_min",
        (aten.clamp.Tensor, aten.clamp.default),
        _max("{0}", "{1}"),
        "sp::max({0}, {1})",
        when=_is(max=None),
        **_NUMBER,
    ),
    _row(
        "clamp_max",
        (aten.clamp.Tensor, aten.clamp.default),
        _min("{0}", "{1}"),
        "sp::min({0}, {1})",
        reference=aten.clamp_max.Tensor,
        when=_is(min=None),
        **_NUMBER,
    ),
    _row(
        "clamp",
        (aten.clamp.Tensor, aten.clamp.default),
        _min(_max("{0}", "{1}"), "{2}"),
        "sp::min(sp::max({0}, {1}), {2})",
        **_NUMBER,
    ),
)

CONDITIONS: tuple[Op, ...] = (
    _row(
        "where",
        (aten.where.self,),
        "tl.where({0}, {1}, {2})",
        "({0} ? {1} : {2})",
        operands=Operands.SELECT,
        types=Types.ANY,
    ),
    _row("lt", (aten.lt.Tensor, aten.lt.Scalar), "{0} < {1}", **_COMPARES),
    _row("le", (aten.le.Tensor, aten.le.Scalar), "{0} <= {1}", **_COMPARES),
    _row("gt", (aten.gt.Tensor, aten.gt.Scalar), "{0} > {1}", **_COMPARES),
    _row("ge", (aten.ge.Tensor, aten.ge.Scalar), "{0} >= {1}", **_COMPARES),
    _row("eq", (aten.eq.Tensor, aten.eq.Scalar), "{0} == {1}", **_COMPARES),
    _row("ne", (aten.ne.Tensor, aten.ne.Scalar), "{0} != {1}", **_COMPARES),
    _row("isnan", (aten.isnan.default,), "{0} != {0}", **_COMPARES),
    _row(
        "isinf",
        (aten.isinf.default,),
        'tl.abs({0}) == float("inf")',
        "sp::abs({0}) == sp::highest<float>()",
        **_TESTS,
    ),
    _row(
        "isposinf",
        (aten.isposinf.default,),
        '{0} == float("inf")',
        "{0} == sp::highest<float>()",
        **_TESTS,
    ),
    _row(
        "isneginf",
        (aten.isneginf.default,),
        '{0} == -float("inf")',
        "{0} == sp::lowest<float>()",
        **_TESTS,
    ),
    _row(
        "signbit",
        (aten.signbit.default,),
        "libdevice.signbit({0}) != 0",
        "sp::signbit({0})",
        **_TESTS,
    ),
    _row("signbit_int", (aten.signbit.default,), "{0} < 0", operands=Operands.PROMOTED, **_INTEGER),
    _row("logical_and", (aten.logical_and.default,), "{0} & {1}", **_TRUTH),
    _row("logical_or", (aten.logical_or.default,), "{0} | {1}", **_TRUTH),
    _row("logical_xor", (aten.logical_xor.default,), "{0} ^ {1}", **_TRUTH),
    _row("logical_not", (aten.logical_not.default,), "{0} == 0", "!{0}", **_TRUTH),
)

BITWISE: tuple[Op, ...] = (
    _row(
        "bitwise_and",
        (aten.bitwise_and.Tensor, aten.bitwise_and.Scalar, aten.bitwise_and.Scalar_Tensor),
        "{0} & {1}",
        **_BITS,
    ),
    _row(
        "bitwise_or",
        (aten.bitwise_or.Tensor, aten.bitwise_or.Scalar, aten.bitwise_or.Scalar_Tensor),
        "{0} | {1}",
        **_BITS,
    ),
    _row(
        "bitwise_xor",
        (aten.bitwise_xor.Tensor, aten.bitwise_xor.Scalar, aten.bitwise_xor.Scalar_Tensor),
        "{0} ^ {1}",
        **_BITS,
    ),
    _row("bitwise_not", (aten.bitwise_not.default,), "~{0}", **_INTEGER),
    _row("not", (aten.bitwise_not.default,), "{0} == 0", "!{0}", **_BOOL),
    _row(
        "or",
        (aten.add.Tensor, aten.add.Scalar, aten.maximum.default, aten.fmax.default),
        "{0} | {1}",
        when=lambda bound: bool(bound.get("alpha", 1)),
        **_BOOL,
    ),
    _row(
        "and",
        (aten.mul.Tensor, aten.mul.Scalar, aten.minimum.default, aten.fmin.default),
        "{0} & {1}",
        **_BOOL,
    ),
    # a shift by the width or more, or by a negative count, leaves nothing but the sign
    _row(
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
        **_INTEGER,
    ),
    _row(
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
        **_INTEGER,
    ),
)

_OPEN = "(1.0 / (1.0 + tl.exp(-{1})))"
_OPEN_CPP = "(1 / (1 + sp::exp(-{1})))"
_TANH_ARG = "{1} * (1.5957691216057308 + 0.07135481627260025 * {1} * {1})"
_TANH_SLOPE = "(1.5957691216057308 + 0.21406444881780075 * {1} * {1})"
_TANH_OPEN = f"(1.0 / (1.0 + tl.exp(-{_TANH_ARG})))"
_MISH_TANH = "libdevice.tanh(libdevice.log1p(tl.exp({1})))"
_ELU: dict[str, Any] = {"alpha": 1.5, "scale": 1.25, "input_scale": 0.75}


def _elu_gradient(is_result: bool) -> dict[str, Any]:
    return {
        "reference": lambda g, x, alpha, scale, input_scale: aten.elu_backward(
            g, alpha, scale, input_scale, is_result, x
        ),
        "when": _is(is_result=is_result),
        "attrs": _ELU,
    }


# What AOTAutograd leaves whole: {0} is the gradient of the result. Where {1} is NaN and a formula
# compares it, eager's answer depends on the element's place: its vector and scalar loops differ.
GRADIENTS: tuple[Op, ...] = (
    _row(
        "threshold_backward",
        (aten.threshold_backward.default,),
        "tl.where({1} <= {threshold}, 0.0, {0})",
        "({1} <= {threshold} ? 0 : {0})",
        attrs={"threshold": 0.5},
    ),
    _row(
        "sigmoid_backward",
        (aten.sigmoid_backward.default,),
        "{0} * (1.0 - {1}) * {1}",
        "{0} * (1 - {1}) * {1}",
    ),
    _row(
        "tanh_backward",
        (aten.tanh_backward.default,),
        "{0} * (1.0 - {1} * {1})",
        "{0} * (1 - {1} * {1})",
    ),
    _row(
        "silu_backward",
        (aten.silu_backward.default,),
        f"{{0}} * {_OPEN} * (1.0 + {{1}} * (1.0 - {_OPEN}))",
        f"{{0}} * {_OPEN_CPP} * (1 + {{1}} * (1 - {_OPEN_CPP}))",
    ),
    _row(
        "gelu_backward",
        (aten.gelu_backward.default,),
        "{0} * (0.5 * (1.0 + tl.erf({1} * 0.7071067811865476))"
        " + {1} * tl.exp(-0.5 * {1} * {1}) * 0.3989422804014327)",
        "{0} * (sp::half(1 + sp::erf({1} * 0.7071067811865476f))"
        " + {1} * sp::exp(-sp::half({1} * {1})) * 0.3989422804014327f)",
        when=_is(approximate="none"),
        triton_half="{0} * gelu_slope({1})",
    ),
    _row(
        "gelu_tanh_backward",
        (aten.gelu_backward.default,),
        f"{{0}} * {_TANH_OPEN} * (1.0 + {{1}} * (1.0 - {_TANH_OPEN}) * {_TANH_SLOPE})",
        "sp::gelu_tanh_backward({0}, {1})",
        reference=lambda g, x: aten.gelu_backward(g, x, approximate="tanh"),
        when=_is(approximate="tanh"),
    ),
    _row(
        "elu_backward",
        (aten.elu_backward.default,),
        "tl.where({1} > 0, {0} * {scale},"
        " {0} * ({input_scale} * {alpha} * {scale}) * tl.exp({1} * {input_scale}))",
        "({1} > 0 ? {0} * {scale}"
        " : {0} * ({input_scale} * {alpha} * {scale}) * sp::exp({1} * {input_scale}))",
        **_elu_gradient(False),
    ),
    _row(
        "elu_backward_of_result",
        (aten.elu_backward.default,),
        "tl.where({1} > 0, {0} * {scale}, {0} * {input_scale} * ({1} + {alpha} * {scale}))",
        "({1} > 0 ? {0} * {scale} : {0} * {input_scale} * ({1} + {alpha} * {scale}))",
        **_elu_gradient(True),
    ),
    _row(
        "leaky_relu_backward",
        (aten.leaky_relu_backward.default,),
        "tl.where({1} > 0, {0}, {0} * {negative_slope})",
        "({1} > 0 ? {0} : {0} * {negative_slope})",
        attrs={"negative_slope": 0.1},
        reference=lambda g, x, negative_slope: aten.leaky_relu_backward(
            g, x, negative_slope, False
        ),
    ),
    _row(
        "hardtanh_backward",
        (aten.hardtanh_backward.default,),
        "tl.where(({1} <= {min_val}) | ({1} >= {max_val}), 0.0, {0})",
        "({1} <= {min_val} || {1} >= {max_val} ? 0 : {0})",
        attrs={"min_val": -1, "max_val": 2},
    ),
    _row(
        "hardsigmoid_backward",
        (aten.hardsigmoid_backward.default,),
        "tl.where(({1} > -3) & ({1} < 3), {0} / 6.0, 0.0)",
        "({1} > -3 && {1} < 3 ? {0} / 6 : 0)",
        example=(-4, 4),
        # the overload multiplies by 1/6 in fp32, for fp64 too
        reference=lambda g, x: torch.where(x.abs() < 3, g / 6, 0),
    ),
    _row(
        "hardswish_backward",
        (aten.hardswish_backward.default,),
        "tl.where({1} <= -3, 0.0, tl.where({1} < 3, {0} * ({1} / 3.0 + 0.5), {0}))",
        "({1} <= -3 ? 0 : {1} < 3 ? {0} * ({1} / 3 + 0.5f) : {0})",
        example=(-4, 4),
    ),
    _row(
        "softplus_backward",
        (aten.softplus_backward.default,),
        "tl.where({1} * {beta} > {threshold}, {0}, {0} / (1.0 + tl.exp(-{1} * {beta})))",
        "({1} * {beta} > {threshold} ? {0} : {0} / (1 + sp::exp(-{1} * {beta})))",
        attrs={"beta": 2, "threshold": 3},
    ),
    _row(
        "mish_backward",
        (aten.mish_backward.default,),
        f"{{0}} * ({_MISH_TANH} + {{1}} * {_OPEN} * (1.0 - {_MISH_TANH} * {_MISH_TANH}))",
        "sp::mish_backward({0}, {1})",
    ),
    _row(
        "logsigmoid_backward",
        (aten.log_sigmoid_backward.default,),
        "{0} / (1.0 + tl.exp({1}))",
        "{0} / (1 + sp::exp({1}))",
        reference=lambda g, x: aten.log_sigmoid_backward(g, x, torch.exp(-x.abs())),
    ),
    _row(
        "softshrink_backward",
        (aten.softshrink_backward.default,),
        "tl.where(tl.abs({1}) <= {lambd}, 0.0, {0})",
        "(sp::abs({1}) <= {lambd} ? 0 : {0})",
        attrs={"lambd": 0.5},
    ),
    _row(
        "hardshrink_backward",
        (aten.hardshrink_backward.default,),
        "tl.where(tl.abs({1}) <= {lambd}, 0.0, {0})",
        "(sp::abs({1}) <= {lambd} ? 0 : {0})",
        attrs={"lambd": 0.5},
    ),
)

# The one row that rounds: the user asked for it. Code generators print it by result type.
CAST = _row(
    "cast",
    (aten._to_copy.default,),
    "{0}",
    operands=Operands.OWN,
    types=Types.ANY,
    reference=lambda x: x,
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
