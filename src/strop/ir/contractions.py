"""Holds the rows of the operator table that libraries and hand-written kernels compute."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strop.ir.dims import Expr
from strop.ir.op import Anchor, Kind, Op, Shapes

NHWC = (0, 2, 3, 1)
STEPS_BY_ROWS = (0, 2, 1, 3)  # the states of a step lie together
BSHD = (0, 2, 1, 3)  # (B, H, S, D) values laid out as (B, S, H, D)
CUDA = frozenset({"cuda"})
ANYWHERE = frozenset({"cpu", "cuda"})


def _linear_flops(shapes: Shapes, attrs: Mapping[str, Any]) -> int:
    return 2 * math.prod(shapes[0]) * shapes[1][0]


def _mixed_flops(shapes: Shapes, attrs: Mapping[str, Any]) -> int:
    """Count the two numbers that each sum of codes is multiplied with: values decide what else."""
    return 2 * math.prod(shapes[0])


def _paired_flops(shapes: Shapes, attrs: Mapping[str, Any]) -> int:
    return _linear_flops(shapes[:2], attrs) + _linear_flops(shapes[2:4], attrs)


def _matmul_flops(shapes: Shapes, attrs: Mapping[str, Any]) -> int:
    return 2 * math.prod(shapes[0]) * shapes[1][-1]


def _conv_flops(shapes: Shapes, attrs: Mapping[str, Any]) -> int:
    (batch, _, *image), (out, _, *window) = shapes[0], shapes[1]
    sides: list[int] = [
        (side + 2 * pad - dilation * (size - 1) - 1) // stride + 1
        for side, size, pad, stride, dilation in zip(
            image, window, attrs["padding"], attrs["stride"], attrs["dilation"], strict=True
        )
    ]
    return 2 * batch * out * math.prod(sides) * math.prod(shapes[1][1:])


def _scan_flops(shapes: Shapes, attrs: Mapping[str, Any]) -> int:
    return 2 * math.prod(shapes[0])


def _recurrence_flops(shapes: Shapes, attrs: Mapping[str, Any]) -> int:
    return 2 * math.prod(shapes[0]) * shapes[1][1]


def _upsampled_conv_flops(shapes: Shapes, attrs: Mapping[str, Any]) -> int:
    """Count each of four windows at each pixel of the operand."""
    return 2 * math.prod(shapes[1]) * math.prod(shapes[0]) // shapes[0][1]


def _attention_flops(shapes: Shapes, attrs: Mapping[str, Any]) -> int:
    (b, h, s, d), keys, values = shapes[0], shapes[1][2], shapes[2][3]
    return 2 * b * h * s * keys * (d + values)


# A linear whose sum goes on over a second pair of operands: low (..., R) and up (N, R), as of an
# adapter's factors. Both pairs come before all else that it reads.
PAIRED: Mapping[str, str] = {
    "linear": "paired_linear",
    "geglu": "paired_geglu",
    "linear_add": "paired_linear_add",
}
# How many operands are multiplied with each other: values and weights in turn.
FACTORS: Mapping[str, int] = dict.fromkeys(PAIRED, 2) | dict.fromkeys(PAIRED.values(), 4)
LINEARS = ("linear", PAIRED["linear"])  # the plain form of both

# The attribute of a call whose result is some columns of a wider value, with gaps between rows.
AMONG_COLUMNS = "among_columns"

GELU, GELU_TANH, SILU = GATE_OPS = ("gelu", "gelu_tanh", "silu")  # operators that gates go through


@dataclass(frozen=True, slots=True)
class Gate:
    """Say what becomes of the gates of a ``geglu``, and which half of the columns they are."""

    activation: str = GELU
    is_first: bool = False

    @staticmethod
    def of(attrs: Mapping[str, Any]) -> Gate:
        return Gate(attrs.get("activation", GELU), attrs.get("gates_first", False))

    @property
    def attrs(self) -> dict[str, Any]:
        """Return the attributes of such an operator: those of GEGLU are left out."""
        more: dict[str, Any] = {"gates_first": True} if self.is_first else {}
        return more if self.activation == GELU else more | {"activation": self.activation}


def alike(op: str, linear: str) -> str:
    """Return the form of ``op`` that has as many pairs of operands as ``linear``, which is one of
    LINEARS."""
    return op if linear == LINEARS[0] else PAIRED[op]


# Rows and depth, which is a multiple of the third number, up to which one kernel multiplies as fast
# as weights come, and ends a linear by its bias and GELU (``kernels.gemm.skinny``).
FEW_ROWS, FEW_ROWS_DEPTH, FEW_ROWS_UNIT = 4, 4096, 64


def has_few_rows(rows: int, depth: Expr) -> bool:
    """Tell whether a linear of so many rows and such a depth has that kernel."""
    is_deep = depth.is_const and depth.value % FEW_ROWS_UNIT == 0
    return 0 < rows <= FEW_ROWS and is_deep and 0 < depth.value <= FEW_ROWS_DEPTH


RELU = "relu"
NORMED = ("normed_linear", "normed_linear_add")  # the second adds a value before the activation
NUM_OF_NORM = 4  # operands that stand behind all else: mean, variance, factor, shift
NORM_ACTIVATIONS = ("", RELU, SILU)  # none among them


@dataclass(frozen=True, slots=True)
class ColumnNorm:
    """Say how a linear ends whose columns are normalised by statistics that are known: what is
    added to the variance, which of NORM_ACTIVATIONS follows, and whether a value is added before
    that."""

    eps: float = 0.0
    activation: str = ""
    adds: bool = False

    @staticmethod
    def of(op: str, attrs: Mapping[str, Any]) -> ColumnNorm:
        return ColumnNorm(attrs["eps"], attrs["activation"], op == NORMED[1])


CONTRACTIONS: tuple[Op, ...] = (
    # x (..., K), weight (N, K)[, bias (N,)] -> (..., N)
    Op(
        "linear",
        Kind.CONTRACTION,
        rows_kept=lambda attrs, rank: True,
        anchor=Anchor(
            "GEMM",
            ANYWHERE,
            rows=2,
            takes_gaps=True,
            is_movable=True,
            warm_up=1,
            flops=_linear_flops,
        ),
    ),
    # x (..., K), weight (W, K) -> (..., N): the first N ``columns`` of a linear, where N < W
    Op(
        "trimmed_linear",
        Kind.CONTRACTION,
        rows_kept=lambda attrs, rank: True,
        anchor=Anchor("GEMM", ANYWHERE, rows=2, warm_up=1, flops=_linear_flops),
    ),
    # x (..., K), weight (N, K), addend (..., N) -> (..., N), rounded once
    Op(
        "linear_add",
        Kind.CONTRACTION,
        anchor=Anchor("GEMM", ANYWHERE, rows=3, warm_up=1, flops=_linear_flops),
    ),
    # x (..., K), weight (2 N, K)[, bias (2 N,)] -> (..., N): a * gelu(b) of a linear's halves a, b,
    # or another of GATE_OPS, or gelu(a) * b
    Op(
        "geglu",
        Kind.CONTRACTION,
        anchor=Anchor("GEMM", CUDA, rows=2, warm_up=1, flops=_linear_flops),
    ),
    # x (..., K), weight (N, K), bias (N,) -> (..., N): GELU's tanh form of a linear, rounded once;
    # maybe AMONG_COLUMNS
    Op(
        "linear_gelu",
        Kind.CONTRACTION,
        anchor=Anchor("GEMM", CUDA, rows=2, takes_gaps=True, warm_up=1, flops=_linear_flops),
    ),
    # x (..., K), weight (N, K), mean, variance, factor, shift (N,) -> (..., N): a linear whose
    # columns are (sum - mean) / sqrt(variance + ``eps``) * factor + shift, and the ``activation``
    # of that, one of NORM_ACTIVATIONS, rounded once
    Op(
        NORMED[0],
        Kind.CONTRACTION,
        rows_kept=lambda attrs, rank: True,
        anchor=Anchor("GEMM", CUDA, rows=2, is_movable=True, warm_up=1, flops=_linear_flops),
    ),
    # x, weight, addend (..., N), mean, variance, factor, shift -> (..., N): the same, and the
    # addend is added before the activation
    Op(
        NORMED[1],
        Kind.CONTRACTION,
        rows_kept=lambda attrs, rank: True,
        anchor=Anchor("GEMM", CUDA, rows=3, is_movable=True, warm_up=1, flops=_linear_flops),
    ),
    # x (..., K), weight (N, K), low (..., R), up (N, R)[, bias (N,)] -> (..., N), rounded once
    Op(
        "paired_linear",
        Kind.CONTRACTION,
        rows_kept=lambda attrs, rank: True,
        anchor=Anchor(
            "GEMM",
            ANYWHERE,
            rows=4,
            takes_gaps=True,
            is_movable=True,
            warm_up=1,
            flops=_paired_flops,
        ),
    ),
    # x, weight, low, up, addend (..., N)[, bias] -> (..., N)
    Op(
        "paired_linear_add",
        Kind.CONTRACTION,
        anchor=Anchor("GEMM", ANYWHERE, rows=5, warm_up=1, flops=_paired_flops),
    ),
    # x, weight (2 N, K), low, up (2 N, R)[, bias (2 N,)] -> (..., N)
    Op(
        "paired_geglu",
        Kind.CONTRACTION,
        anchor=Anchor("GEMM", CUDA, rows=4, warm_up=1, flops=_paired_flops),
    ),
    # sums (M, N) of codes, most (M, 1), x (M, K), columns (K,), codes (N, K), scales (N,)
    # [, bias (N,)] -> (M, N): ``ir.mixed_product``
    Op(
        "mixed_product",
        Kind.CONTRACTION,
        anchor=Anchor("GEMM", ANYWHERE, flops=_mixed_flops),
    ),
    # codes (M, K), codes of a weight (N, K), both int8[, its zero points (N,), int64] -> sums
    # (M, N) of (code - ``zero``, 0 without it) times (code - its zero point), int32
    Op(
        "code_sums",
        Kind.CONTRACTION,
        anchor=Anchor("GEMM", ANYWHERE, flops=_linear_flops),
    ),
    # codes (M, K), codes of a weight (N, K), both e4m3 or bytes that stand for it, their scales
    # (M, 1) and (1, N), or one number each[, bias (N,)] -> (M, N); maybe with short sums, is_fast
    Op(
        "scaled_product",
        Kind.CONTRACTION,
        anchor=Anchor("GEMM", ANYWHERE, flops=_linear_flops),
    ),
    # the operands of such a product with a weight of 2 N rows, scales by row and by column[, a bias
    # (2 N,)] -> (M, N): a * gelu(b) of its halves a, b, as of a geglu, rounded once
    Op(
        "scaled_geglu",
        Kind.CONTRACTION,
        anchor=Anchor("GEMM", CUDA, flops=_linear_flops),
    ),
    # a (..., M, K), b (..., K, N) -> (..., M, N)
    Op(
        "matmul",
        Kind.CONTRACTION,
        anchor=Anchor("GEMM", ANYWHERE, warm_up=1, flops=_matmul_flops),
    ),
    # x (N, C, H, W), weight (O, C/groups, KH, KW)[, bias]
    Op(
        "conv2d",
        Kind.CONTRACTION,
        anchor=Anchor(
            "convolution",
            CUDA,
            pictures=1,
            order=NHWC,
            weight=1,
            is_movable=True,
            warm_up=2,
            flops=_conv_flops,
        ),
    ),
    # codes (N, C, H, W), codes of a weight (O, C, KH, KW), both int8[, its zero points (O,), int64]
    # -> sums of (code - ``zero``) times (code - its zero point), int32
    Op(
        "code_conv2d",
        Kind.CONTRACTION,
        anchor=Anchor(
            "convolution", ANYWHERE, pictures=1, order=NHWC, is_movable=True, flops=_conv_flops
        ),
    ),
    # e4m3 codes (N, C, H, W), or bytes that stand for them, codes of a weight (O, C, KH, KW), their
    # scales (N, 1, H, W) and (O,) in fp32 -> (N, O, HO, WO)
    Op(
        "scaled_conv2d",
        Kind.CONTRACTION,
        anchor=Anchor(
            "convolution", ANYWHERE, pictures=1, order=NHWC, is_movable=True, flops=_conv_flops
        ),
    ),
    # weight (O, C, 3, 3) -> (4 O, C, 2, 2), by ``passes.upsampled_conv``
    Op("folded_taps", Kind.CONTRACTION, anchor=Anchor(planned=CUDA, order=NHWC, weight=0)),
    # x (N, C, H, W), such taps -> (N, O, 2 H, 2 W)
    Op(
        "upsampled_conv2d",
        Kind.CONTRACTION,
        anchor=Anchor("convolution", CUDA, pictures=1, order=NHWC, flops=_upsampled_conv_flops),
    ),
    # q, k, v (B, H, S, D)[, mask] -> (B, H, S, D)
    Op(
        "attention",
        Kind.CONTRACTION,
        anchor=Anchor(
            "attention",
            order=BSHD,
            takes_gaps=True,
            has_dense_ends=True,
            warm_up=3,
            flops=_attention_flops,
        ),
    ),
    # a, b (batch, rows, steps, inner) -> all states: h[t] = a[t] * h[t - 1] + b[t]
    # (``ir.linear_scan``). Whatever reads the states of a step, as Mamba's products do, finds them
    # side by side.
    Op(
        "linear_scan",
        Kind.CONTRACTION,
        rows_kept=lambda attrs, rank: True,
        anchor=Anchor("scan", ANYWHERE, order=STEPS_BY_ROWS, is_movable=True, flops=_scan_flops),
    ),
    # gates (T, B, G * H), weight (G * H, H), hidden state (B, H)[, cell (B, H)][, bias (G * H,)] ->
    # (T, B, H), or (T + 1, B, H) with an LSTM's cell at the end (``ir.recurrence``)
    Op(
        "recurrence",
        Kind.CONTRACTION,
        anchor=Anchor("recurrence", ANYWHERE, is_movable=True, flops=_recurrence_flops),
    ),
    # x (n,)[, an earlier exchange, which is not read] -> (n,) or (n * size,): what the processes of
    # a group send each other (``ir.exchange``), in the order of their numbers
    Op("exchange", Kind.CONTRACTION, anchor=Anchor("exchange between processes")),
)
