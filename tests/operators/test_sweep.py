"""A fixed part of the sweep, whether it can fail at all, and what its ledger says.

``python -m tests.operators.sweep`` runs all of it; docs/operators.md says what it is.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.operators import ledger, sweep
from tests.operators.checking import check
from tests.operators.judge import Run, differences, is_rounding
from tests.operators.ledger import Counts, Key, Row
from tests.operators.rules import AS_AOT_EAGER, AS_TRACED, RULES
from tests.operators.samples import Case

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of operators that torch has deprecated, and the like
]
MOST = 5  # samples of a case

# One of each kind of operator, of type, of layout and of what can become of a case.
SAMPLE = (
    ("add", "float32", "sliced"),
    ("add", "bool", "contiguous"),
    ("fft.ifft", "float32", "contiguous"),  # a conjugated view
    ("view_as_complex", "float32", "contiguous"),
    ("as_strided_scatter", "float32", "contiguous"),
    ("nn.functional.gelu", "bfloat16", "contiguous"),
    ("floor_divide", "int64", "contiguous"),
    ("bitwise_left_shift", "uint8", "contiguous"),
    ("logical_and", "bool", "sliced"),
    ("sum", "float16", "contiguous"),
    ("softmax", "float32", "sliced"),
    ("cumsum", "float64", "contiguous"),
    ("nn.functional.linear", "float32", "contiguous"),
    ("nn.functional.avg_pool2d", "float32", "channels_last"),
    ("nn.functional.layer_norm", "float32", "contiguous"),
    ("gather", "int64", "sliced"),
    ("flip", "bool", "contiguous"),
    ("cat", "float32", "contiguous"),
    ("nonzero", "float32", "contiguous"),  # sizes that values decide
    ("mul", "complex64", "contiguous"),  # no type of a kernel
    ("rand_like", "float32", "contiguous"),
    *(
        (name, "float32", "errors")
        for name in (
            "gather",
            "roll",
            "nn.functional.conv3d",
            "nn.functional.rms_norm",
            "nn.functional.max_pool1d",
        )
    ),
)
TRAINED = (
    ("nn.functional.gelu", "float32", "contiguous"),
    ("nn.functional.linear", "float32", "contiguous"),
    ("mean", "float32", "sliced"),
    ("linalg.slogdet", "float32", "sliced"),
    ("nn.functional.layer_norm", "float32", "channels_last"),
)


@pytest.mark.parametrize("way", ["optimize", "compile"])
@pytest.mark.parametrize(
    ("direction", "operator", "dtype", "layout"),
    [*(("forward", *case) for case in SAMPLE), *(("backward", *case) for case in TRAINED)],
)
def test_as_in_eager(
    way: str, direction: str, operator: str, dtype: str, layout: str, tmp_path: Path
) -> None:
    case = Case(operator, getattr(torch, dtype), layout)
    found = check(case, way, direction, str(tmp_path), MOST)
    assert not found.failures
    assert found.counts != Counts()


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("values", lambda x: x + 1e-3),
        ("dtype", lambda x: x.double()),
        ("shape", lambda x: x[:1]),
        ("strides", lambda x: x.t().contiguous().t()),
        ("requires_grad", lambda x: x.clone().requires_grad_()),
        ("structure", lambda x: [x]),
        ("type", lambda x: 1.0),
    ],
)
def test_the_judge_sees_each_kind(kind: str, change: object) -> None:
    right = torch.rand(4, 5)
    wrong = change(right.clone())  # type: ignore[operator]
    said = differences(Run(wrong, ()), Run(right, ()), Run(right.double(), ()))
    assert [d.kind for d in said] == [kind]


def test_the_judge_sees_memory() -> None:
    def run(returned: str) -> Run:
        x = torch.rand(4)
        results: dict[str, Tensor] = {"itself": x, "a view": x[:], "a copy": x.clone()}
        return Run(results[returned], (x,))

    torch.manual_seed(0)
    kinds = {
        (a, b): [
            d.kind for d in differences(run(a), run(b), None) if d.kind in ("aliasing", "identity")
        ]
        for a in ("itself", "a view", "a copy")
        for b in ("itself", "a view", "a copy")
    }
    assert kinds == {
        ("itself", "itself"): [],
        ("itself", "a view"): ["identity"],
        ("itself", "a copy"): ["aliasing", "identity"],
        ("a view", "itself"): ["identity"],
        ("a view", "a view"): [],
        ("a view", "a copy"): ["aliasing"],
        ("a copy", "itself"): ["aliasing", "identity"],
        ("a copy", "a view"): ["aliasing"],
        ("a copy", "a copy"): [],
    }


def test_the_judge_sees_writes_into_arguments() -> None:
    result = torch.zeros(2)
    said = differences(Run(result, (torch.ones(3),)), Run(result, (torch.zeros(3),)), None)
    assert [d.kind for d in said] == ["mutation"]


def test_fp64_may_move_as_far_as_eager_does() -> None:
    eager, ulp = Run([torch.ones(3).double()], ()), torch.finfo(torch.float64).eps
    near, far, moved = (Run([eager.result[0] + n * ulp], ()) for n in (200, 800, 100))
    assert differences(near, eager, None)
    assert is_rounding(near, eager, [eager, moved])
    assert not is_rounding(far, eager, [eager, moved])
    assert not is_rounding(Run([eager.result[0] * torch.nan], ()), eager, [moved])


def test_the_ledger_comes_back_as_it_was_written(tmp_path: Path) -> None:
    rows = {
        Key("add", "compile", "forward", "sliced", "int64"): Row("a" * 8, Counts(3, 0, 1, 0), "x"),
        Key("add", "compile", "forward", "sliced", "bool"): Row("a" * 8, Counts(3, 0, 1, 0), "x"),
        Key("mul", "optimize", "errors", "sliced", "bool"): Row("b" * 8, Counts(0, 0, 0, 2)),
    }
    ledger.update(rows, tmp_path / "ledger.tsv")
    assert ledger.read(tmp_path / "ledger.tsv") == rows
    ledger.update({}, tmp_path / "ledger.tsv")
    assert ledger.read(tmp_path / "ledger.tsv") == rows
    assert (
        len((tmp_path / "ledger.tsv").read_text().splitlines()) == 3
    )  # types with one outcome share a line


@pytest.mark.nightly
def test_the_ledger_is_complete_and_without_failures() -> None:
    rows = ledger.read()
    assert ledger.LEDGER.read_text().startswith(ledger.HEADER), "of another torch"
    assert not ledger.failures(rows)
    assert not set(sweep.keys()) - set(rows), "run python -m tests.operators.sweep --missing"
    assert ledger.LEDGER.stat().st_size < 1 << 20


def test_each_rule_has_its_paragraph() -> None:
    text = (ledger.ROOT / "docs" / "operators.md").read_text()
    for name in (AS_AOT_EAGER, AS_TRACED, *(rule.name for rule in RULES)):
        assert f"**{name}**" in text


def test_other_tests_may_set_flags() -> None:
    """Torch's module of samples forbids that to the process that imports it."""
    assert not torch.backends.flags_frozen()
