"""Differences from eager that the documents allow, each with a name and a narrow condition.

docs/operators.md has a paragraph for each name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.operators.judge import Difference

UNINITIALISED = (
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
)

DROPOUT = (
    "nn.functional.alpha_dropout",
    "nn.functional.dropout",
    "nn.functional.dropout2d",
    "nn.functional.dropout3d",
    "nn.functional.feature_alpha_dropout.with_train",
    "nn.functional.feature_alpha_dropout.without_train",
    "nn.functional.multi_head_attention_forward",
    "nn.functional.scaled_dot_product_attention",
)
# they draw numbers from a seed of their own
SEEDED = ("pca_lowrank", "svd_lowrank")
NUMBERS = ("values", "gradient")
REFUSES_LAYOUT = ("is_contiguous", "must be contiguous", "stride 1", "not compatible", "stride(")
VIDEOS = ("nn.functional.conv3d", "nn.functional.conv_transpose3d")
KEEP_GAPS = ("select_scatter", "slice_scatter", "diagonal_scatter", "as_strided_scatter")
SOLVERS = (
    "linalg.",
    "svd",
    "pca_lowrank",
    "cholesky",
    "lu",
    "geqrf",
    "ormqr",
    "triangular_solve",
    "pinverse",
    "qr",
    "logdet",
    "matrix_exp",
)
SOLVER_ULPS = 512
ATTENTION_ULPS = 4
SIXTHS_ULPS = 2**28  # a number of 24 bits as one of 53


@dataclass(frozen=True)
class Where:
    """The run that a difference was found in."""

    operator: str
    dtype: str
    layout: str
    way: str
    direction: str


@dataclass(frozen=True)
class Rule:
    name: str
    allows: Callable[[Where, Difference, bool], bool]  # where; what; whether eager draws numbers


RULES = (
    Rule(
        "uninitialised",
        lambda where, d, draws: d.kind in ("values", "strides") and where.operator in UNINITIALISED,
    ),
    Rule(
        "dropout",
        lambda where, d, draws: draws and d.kind in NUMBERS and where.operator in DROPOUT,
    ),
    Rule(
        "layouts that eager refuses",
        lambda where, d, draws: (
            d.kind == "exception"
            and where.layout != "contiguous"
            and d.text.startswith(("none for RuntimeError", "none for ValueError"))
            and any(word in d.text for word in REFUSES_LAYOUT)
        ),
    ),
    Rule(
        "gaps",
        lambda where, d, draws: (
            d.kind == "strides" and where.layout == "sliced" and where.operator in KEEP_GAPS
        ),
    ),
    Rule(
        "videos",
        lambda where, d, draws: (
            d.kind == "strides" and where.operator in VIDEOS and where.layout != "contiguous"
        ),
    ),
    Rule(
        "unsafe views",
        lambda where, d, draws: (
            d.kind in ("strides", "aliasing") and where.operator in ("unsafe_split", "unsafe_chunk")
        ),
    ),
    Rule(
        "cancellation",
        lambda where, d, draws: (
            d.kind == "gradient" and where.operator == "nn.functional.normalize"
        ),
    ),
    Rule(
        "attention",
        lambda where, d, draws: (
            d.kind in NUMBERS
            and where.operator == "nn.functional.scaled_dot_product_attention"
            and where.dtype in ("bfloat16", "float16")
            and where.layout == "sliced"
            and d.ulps <= ATTENTION_ULPS
        ),
    ),
    Rule(
        "sixths",
        lambda where, d, draws: (
            d.kind == "gradient"
            and where.operator == "nn.functional.hardsigmoid"
            and where.dtype == "float64"
            and d.ulps <= SIXTHS_ULPS
        ),
    ),
    Rule("overflow", lambda where, d, draws: d.kind == "overflow"),
    Rule(
        "solvers",
        lambda where, d, draws: (
            d.kind in NUMBERS and where.operator.startswith(SOLVERS) and d.ulps <= SOLVER_ULPS
        ),
    ),
    Rule(
        "exceptions of Dynamo",
        lambda where, d, draws: (
            d.kind == "exception"
            and where.way == "compile"
            and d.text.startswith("TorchRuntimeError for ")
        ),
    ),
)

AS_TRACED = (
    "torch's shape rules"  # for which ``checking`` runs the sample on tensors without numbers
)
AS_AOT_EAGER = "torch.compile itself"  # for which ``checking`` runs torch.compile without Strop


def rule_for(where: Where, difference: Difference, *, draws: bool) -> str:
    """The name of the rule that allows the difference, or nothing."""
    return next((rule.name for rule in RULES if rule.allows(where, difference, draws)), "")
