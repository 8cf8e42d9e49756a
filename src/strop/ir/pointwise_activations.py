"""The activation functions of networks, and the gradients of them that AOTAutograd leaves whole."""

from __future__ import annotations

from typing import Any

import torch

from strop.ir.op import Op
from strop.ir.pointwise_row import NUMBER, has, row, triton_max, triton_min

aten = torch.ops.aten

_SIGMOID = "1.0 / (1.0 + tl.exp(-{0}))"
_RELU6 = triton_min(triton_max("{0} + 3.0", "0.0"), "6.0")

ACTIVATIONS: tuple[Op, ...] = (
    row("sigmoid", (aten.sigmoid.default,), _SIGMOID, "1 / (1 + sp::exp(-{0}))"),
    row("silu", (aten.silu.default,), "{0} / (1.0 + tl.exp(-{0}))", "{0} / (1 + sp::exp(-{0}))"),
    row(
        "gelu",
        (aten.gelu.default,),
        "0.5 * {0} * (1.0 + tl.erf({0} * 0.7071067811865476))",
        "sp::half({0}) * (1 + sp::erf({0} * 0.7071067811865476f))",
        when=has(approximate="none"),
        triton_half="half_gelu({0})",
        cpp_half="sp::half_gelu({0})",
    ),
    # 0.5 * (1 + tanh(u)) is the sigmoid of 2 * u
    row(
        "gelu_tanh",
        (aten.gelu.default,),
        "{0} / (1.0 + tl.exp(-{0} * (1.5957691216057308 + 0.07135481627260025 * {0} * {0})))",
        "{0} / (1 + sp::exp(-{0} * (1.5957691216057308f + 0.07135481627260025f * {0} * {0})))",
        reference=lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        when=has(approximate="tanh"),
        triton_half="half_gelu_tanh({0}, SM_90)",
    ),
    row("relu", (aten.relu.default,), "tl.where({0} < 0, 0, {0})", "({0} < 0 ? 0 : {0})", **NUMBER),
    row(
        "leaky_relu",
        (aten.leaky_relu.default,),
        "tl.where({0} > 0, {0}, {0} * {negative_slope})",
        "({0} > 0 ? {0} : {0} * {negative_slope})",
        attrs={"negative_slope": 0.1},
    ),
    row(
        "prelu",
        (aten._prelu_kernel.default,),
        "tl.where({0} > 0, {0}, {0} * {1})",
        "({0} > 0 ? {0} : {0} * {1})",
    ),
    row(
        "hardtanh",
        (aten.hardtanh.default,),
        triton_min(triton_max("{0}", "{min_val}"), "{max_val}"),
        "sp::limit({0}, {min_val}, {max_val})",
        attrs={"min_val": 1, "max_val": 2},
        **NUMBER,
    ),
    row(
        "hardsigmoid",
        (aten.hardsigmoid.default,),
        f"{_RELU6} / 6.0",
        "sp::limit({0} + 3, 0, 6) / 6",
    ),
    row(
        "hardswish",
        (aten.hardswish.default,),
        f"{{0}} * {_RELU6} / 6.0",
        "{0} * sp::limit({0} + 3, 0, 6) / 6",
    ),
    row(
        "elu",
        (aten.elu.default,),
        "tl.where({0} > 0, {0} * {scale},"
        " libdevice.expm1({0} * {input_scale}) * ({alpha} * {scale}))",
        "({0} > 0 ? {0} * {scale} : sp::expm1({0} * {input_scale}) * ({alpha} * {scale}))",
        attrs={"alpha": 1.5, "scale": 1.25, "input_scale": 0.75},
    ),
    row(
        "celu",
        (aten.celu.default,),
        "tl.where({0} > 0, {0}, libdevice.expm1({0} / {alpha}) * {alpha})",
        "({0} > 0 ? {0} : sp::expm1({0} / {alpha}) * {alpha})",
        attrs={"alpha": 0.75},
    ),
    row(
        "mish",
        (aten.mish.default,),
        "{0} * libdevice.tanh(libdevice.log1p(tl.exp({0})))",
        "sp::mish({0})",
    ),
    row(
        "softplus",
        (aten.softplus.default,),
        "tl.where({0} * {beta} > {threshold}, {0}, libdevice.log1p(tl.exp({0} * {beta})) / {beta})",
        "({0} * {beta} > {threshold} ? {0} : sp::log1p(sp::exp({0} * {beta})) / {beta})",
        attrs={"beta": 1, "threshold": 20},
    ),
    row(
        "logsigmoid",
        (aten.log_sigmoid.default,),
        f"{triton_min('{0}', '0.0')} - libdevice.log1p(tl.exp(-tl.abs({{0}})))",
        "sp::min({0}, {type}(0)) - sp::log1p(sp::exp(-sp::abs({0})))",
    ),
    row(
        "softshrink",
        (aten.softshrink.default,),
        "tl.where({0} > {lambd}, {0} - {lambd},"
        " tl.where({0} < -{lambd}, {0} + {lambd}, {0} * 0.0))",
        "({0} > {lambd} ? {0} - {lambd} : {0} < -{lambd} ? {0} + {lambd} : {0} * 0)",
        attrs={"lambd": 0.5},
    ),
    row(
        "hardshrink",
        (aten.hardshrink.default,),
        "tl.where(tl.abs({0}) <= {lambd}, 0.0, {0})",
        "(sp::abs({0}) <= {lambd} ? 0 : {0})",
        attrs={"lambd": 0.5},
    ),
    row(
        "threshold",
        (aten.threshold.default,),
        "tl.where({0} <= {threshold}, {value}, {0})",
        "({0} <= {threshold} ? {value} : {0})",
        attrs={"threshold": 1, "value": 7},
        **NUMBER,
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
        "when": has(is_result=is_result),
        "attrs": _ELU,
    }


# AOTAutograd leaves these whole; {0} is the gradient of the result. Where {1} is NaN and a formula
# compares it, eager's answer depends on the element's place: its vector and scalar loops differ.
GRADIENTS: tuple[Op, ...] = (
    row(
        "threshold_backward",
        (aten.threshold_backward.default,),
        "tl.where({1} <= {threshold}, 0.0, {0})",
        "({1} <= {threshold} ? 0 : {0})",
        attrs={"threshold": 0.5},
    ),
    row(
        "sigmoid_backward",
        (aten.sigmoid_backward.default,),
        "{0} * (1.0 - {1}) * {1}",
        "{0} * (1 - {1}) * {1}",
    ),
    row(
        "tanh_backward",
        (aten.tanh_backward.default,),
        "{0} * (1.0 - {1} * {1})",
        "{0} * (1 - {1} * {1})",
    ),
    row(
        "silu_backward",
        (aten.silu_backward.default,),
        f"{{0}} * {_OPEN} * (1.0 + {{1}} * (1.0 - {_OPEN}))",
        f"{{0}} * {_OPEN_CPP} * (1 + {{1}} * (1 - {_OPEN_CPP}))",
    ),
    row(
        "gelu_backward",
        (aten.gelu_backward.default,),
        "{0} * (0.5 * (1.0 + tl.erf({1} * 0.7071067811865476))"
        " + {1} * tl.exp(-0.5 * {1} * {1}) * 0.3989422804014327)",
        "{0} * (sp::half(1 + sp::erf({1} * 0.7071067811865476f))"
        " + {1} * sp::exp(-sp::half({1} * {1})) * 0.3989422804014327f)",
        when=has(approximate="none"),
        triton_half="{0} * gelu_slope({1})",
    ),
    row(
        "gelu_tanh_backward",
        (aten.gelu_backward.default,),
        f"{{0}} * {_TANH_OPEN} * (1.0 + {{1}} * (1.0 - {_TANH_OPEN}) * {_TANH_SLOPE})",
        "sp::gelu_tanh_backward({0}, {1})",
        reference=lambda g, x: aten.gelu_backward(g, x, approximate="tanh"),
        when=has(approximate="tanh"),
    ),
    row(
        "elu_backward",
        (aten.elu_backward.default,),
        "tl.where({1} > 0, {0} * {scale},"
        " {0} * ({input_scale} * {alpha} * {scale}) * tl.exp({1} * {input_scale}))",
        "({1} > 0 ? {0} * {scale}"
        " : {0} * ({input_scale} * {alpha} * {scale}) * sp::exp({1} * {input_scale}))",
        **_elu_gradient(False),
    ),
    row(
        "elu_backward_of_result",
        (aten.elu_backward.default,),
        "tl.where({1} > 0, {0} * {scale}, {0} * {input_scale} * ({1} + {alpha} * {scale}))",
        "({1} > 0 ? {0} * {scale} : {0} * {input_scale} * ({1} + {alpha} * {scale}))",
        **_elu_gradient(True),
    ),
    row(
        "leaky_relu_backward",
        (aten.leaky_relu_backward.default,),
        "tl.where({1} > 0, {0}, {0} * {negative_slope})",
        "({1} > 0 ? {0} : {0} * {negative_slope})",
        attrs={"negative_slope": 0.1},
        reference=lambda g, x, negative_slope: aten.leaky_relu_backward(
            g, x, negative_slope, False
        ),
    ),
    row(
        "hardtanh_backward",
        (aten.hardtanh_backward.default,),
        "tl.where(({1} <= {min_val}) | ({1} >= {max_val}), 0.0, {0})",
        "({1} <= {min_val} || {1} >= {max_val} ? 0 : {0})",
        attrs={"min_val": -1, "max_val": 2},
    ),
    row(
        "hardsigmoid_backward",
        (aten.hardsigmoid_backward.default,),
        "tl.where(({1} > -3) & ({1} < 3), {0} / 6.0, 0.0)",
        "({1} > -3 && {1} < 3 ? {0} / 6 : 0)",
        example=(-4, 4),
        # the overload multiplies by 1/6 in fp32, for fp64 too
        reference=lambda g, x: torch.where(x.abs() < 3, g / 6, 0),
    ),
    row(
        "hardswish_backward",
        (aten.hardswish_backward.default,),
        "tl.where({1} <= -3, 0.0, tl.where({1} < 3, {0} * ({1} / 3.0 + 0.5), {0}))",
        "({1} <= -3 ? 0 : {1} < 3 ? {0} * ({1} / 3 + 0.5f) : {0})",
        example=(-4, 4),
    ),
    row(
        "softplus_backward",
        (aten.softplus_backward.default,),
        "tl.where({1} * {beta} > {threshold}, {0}, {0} / (1.0 + tl.exp(-{1} * {beta})))",
        "({1} * {beta} > {threshold} ? {0} : {0} / (1 + sp::exp(-{1} * {beta})))",
        attrs={"beta": 2, "threshold": 3},
    ),
    row(
        "mish_backward",
        (aten.mish_backward.default,),
        f"{{0}} * ({_MISH_TANH} + {{1}} * {_OPEN} * (1.0 - {_MISH_TANH} * {_MISH_TANH}))",
        "sp::mish_backward({0}, {1})",
    ),
    row(
        "logsigmoid_backward",
        (aten.log_sigmoid_backward.default,),
        "{0} / (1.0 + tl.exp({1}))",
        "{0} / (1 + sp::exp({1}))",
        reference=lambda g, x: aten.log_sigmoid_backward(g, x, torch.exp(-x.abs())),
    ),
    row(
        "softshrink_backward",
        (aten.softshrink_backward.default,),
        "tl.where(tl.abs({1}) <= {lambd}, 0.0, {0})",
        "(sp::abs({1}) <= {lambd} ? 0 : {0})",
        attrs={"lambd": 0.5},
    ),
    row(
        "hardshrink_backward",
        (aten.hardshrink_backward.default,),
        "tl.where(tl.abs({1}) <= {lambd}, 0.0, {0})",
        "(sp::abs({1}) <= {lambd} ? 0 : {0})",
        attrs={"lambd": 0.5},
    ),
)
