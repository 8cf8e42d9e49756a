"""Which library, or kernel of ours, attention runs by, by what was measured."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import attention_cases
from benchmarks.fitting import attn_libraries
from strop.debug.chosen import ChoiceRow
from strop.kernels import library
from strop.kernels.attention import rows
from strop.kernels.attention.cases import AttentionCase, MeasuredCase, case_of
from strop.kernels.attention.cross import CrossTile
from strop.kernels.attention.short import MaskedTile, Masking
from strop.kernels.attention.tma import TmaTile
from strop.kernels.attention.wgmma_tiles import WgmmaTile
from strop.kernels.kernel import NEVER, Problem
from strop.kernels.libraries import ATTENTION_LIBRARIES
from strop.kernels.tuned import tuned
from tests.gpus import A100, H100, H200
from tests.kernels.launching import measured

TILE = MaskedTile(64, 64, 3, 4)
T5 = AttentionCase(2, 16, 256, 256, 64, Masking.BIAS, "hq")
FLUX = AttentionCase(1, 24, 4608, 4608, 128)
CLIP = AttentionCase(2, 20, 77, 77, 64, Masking.CAUSAL)
ROWS = (
    MeasuredCase(
        T5,
        {"sdpa": 9.4, "cudnn_attention": 9.0, "efficient_attention": 9.5, "short_attention": 4.5},
        {"short_attention": TILE},
    ),
    MeasuredCase(
        FLUX,
        {"sdpa": 400.0, "cudnn_attention": 390.0, "wgmma_attention": 395.0},
        {"wgmma_attention": WgmmaTile(2, 64, 3)},
    ),
    MeasuredCase(CLIP, {"sdpa": 8.0, "flash_attention": 6.0}),
)


@pytest.fixture
def cases() -> Iterator[None]:
    with measured(*ROWS):
        yield


def problem_of(batch: int, heads: int, *sizes: int, **kinds: Any) -> Problem:
    return attn_libraries.problem_of(AttentionCase(batch, heads, *sizes, **kinds))


def chosen(problem: Problem, device: Any = H100) -> library.Choice:
    return library.select(problem.call, problem, device)


@pytest.mark.usefixtures("cases")
def test_the_fastest_of_a_case_runs() -> None:
    choice = chosen(attn_libraries.problem_of(T5))
    assert (choice.kernel, choice.cost_us) == ("short_attention", 4.5)
    assert dict(choice.beaten) == {
        "sdpa": 9.4,
        "cudnn_attention": 9.0,
        "efficient_attention": 9.5,
    }
    assert chosen(attn_libraries.problem_of(FLUX)).kernel == "cudnn_attention"
    assert chosen(attn_libraries.problem_of(CLIP)).kernel == "flash_attention"


@pytest.mark.usefixtures("cases")
def test_ours_does_not_run_where_a_library_is_faster() -> None:
    """Though a rule, of an earlier measurement, says so."""
    choice = chosen(attn_libraries.problem_of(FLUX))
    assert choice.launches is None
    assert dict(choice.beaten)["wgmma_attention"] == 395.0
    with measured():
        assert chosen(attn_libraries.problem_of(FLUX)).kernel == "wgmma_attention"


@pytest.mark.usefixtures("cases")
@pytest.mark.parametrize(
    ("problem", "kernel"),
    [
        (problem_of(4, 16, 256, 256, 64, masking=Masking.BIAS, spread="hq"), "short_attention"),
        (problem_of(2, 16, 200, 200, 64, masking=Masking.BIAS, spread="bhq"), "short_attention"),
        (
            problem_of(2, 16, 250, 250, 64, masking=Masking.BIAS, dtype=torch.float16),
            "short_attention",
        ),
        (problem_of(8, 64, 512, 512, 64, masking=Masking.BIAS, spread="hq"), "sdpa"),
        (problem_of(2, 16, 256, 256, 64, masking=Masking.BOOL, spread="hq"), "sdpa"),
        (problem_of(2, 16, 256, 256, 32, masking=Masking.BIAS, spread="hq"), "sdpa"),
        (problem_of(2, 20, 77, 77, 64, masking=Masking.CAUSAL, groups=4), "sdpa"),
        (problem_of(1, 24, 4224, 4224, 128), "cudnn_attention"),  # half a doubling
        (problem_of(2, 24, 4608, 4608, 128), "wgmma_attention"),  # a whole one: by the rules
    ],
    ids=str,
)
def test_a_case_speaks_for_what_is_near(problem: Problem, kernel: str) -> None:
    assert chosen(problem).kernel == kernel


def test_a_tile_of_one_step_does_not_run_with_more_keys() -> None:
    """Though a case with fewer keys is near."""
    tiles = {"wgmma_attention": WgmmaTile(1, 80, 1, 5), "cross_attention": CrossTile(2, 80, 2)}
    us = {"sdpa": 9.0, "wgmma_attention": 5.0, "cross_attention": 4.0}
    with measured(MeasuredCase(AttentionCase(2, 20, 1024, 77, 64), us, tiles)):
        assert chosen(problem_of(2, 20, 1024, 77, 64)).kernel == "cross_attention"
        assert chosen(problem_of(2, 20, 1024, 60, 64)).kernel == "wgmma_attention"
        for keys in (81, 90):
            problem = problem_of(2, 20, 1024, keys, 64)
            for row in (rows.WGMMA, rows.CROSS):
                assert row.launch(problem, H100) is None
                assert row.cost_us(problem, H100) == NEVER


@pytest.mark.usefixtures("cases")
def test_more_work_takes_longer() -> None:
    twice = chosen(problem_of(4, 16, 256, 256, 64, masking=Masking.BIAS, spread="hq"))
    assert twice.cost_us == 9.0
    assert dict(twice.beaten)["sdpa"] == 18.8


@pytest.mark.usefixtures("cases")
def test_an_architecture_that_was_not_measured_runs_as_before() -> None:
    problem = attn_libraries.problem_of(T5)
    assert chosen(problem, A100).kernel == "sdpa"
    assert not tuned(A100).cases
    assert chosen(problem, H200).kernel == "short_attention"  # its multiprocessors are the same


def test_nothing_measured_is_torchs_choice_and_says_so() -> None:
    with measured():
        for problem in map(attn_libraries.problem_of, (T5, CLIP)):
            assert chosen(problem).kernel == "sdpa"
            reasons = library.reasons(problem.call, H100)
            assert reasons.keys() >= {*ATTENTION_LIBRARIES, "short_attention"}
        assert "not measured for heads of 64 and masking 'causal'" in reasons["flash_attention"]


@pytest.mark.usefixtures("cases")
def test_a_mask_of_another_type_is_torchs_choice() -> None:
    given = attn_libraries.problem_of(T5)
    other = Problem(given.op, given.attrs, given.shapes, given.dtype, torch.float32)
    assert case_of(other) is None
    assert chosen(other).kernel == "sdpa"
    assert "another kind of mask" in library.reasons(other.call, H100)["short_attention"]


@pytest.mark.usefixtures("cases")
@pytest.mark.parametrize("case", [T5, FLUX, CLIP], ids=["T5", "Flux", "CLIP"])
def test_what_may_run_is_known_before(case: AttentionCase) -> None:
    problem = attn_libraries.problem_of(case)
    known = set(library.forms(problem.call, H100))
    assert set(chosen(problem).sources) <= known
    for name in ("sdpa", *ATTENTION_LIBRARIES):
        assert set(library.select(problem.call, problem, H100, (name,)).sources) <= known


@pytest.mark.usefixtures("cases")
def test_a_switch_turns_it_off() -> None:
    problem = attn_libraries.problem_of(T5)
    choice = library.select(problem.call, problem, H100, ("short_attention",))
    assert choice.kernel == "cudnn_attention"


def test_explain_shows_times_of_a_case() -> None:
    row = ChoiceRow("attention", ((2, 16, 256, 64),) * 2, 24, "short_attention", 4.5, (), ())
    assert "24x attention 2x16x256x64 . 2x16x256x64: short_attention ~4.5 us" in str(row)


# the sweep, and the table that it becomes


@pytest.mark.parametrize("shape", attn_libraries.SHAPES, ids=str)
def test_the_sweep_asks_as_the_library_does(shape: tuple[Any, ...]) -> None:
    case = attn_libraries.case(shape)
    assert case_of(attn_libraries.problem_of(case)) == case
    for name, launches in attn_libraries.ours(case, H100):
        row, *numbers = name.strip("()").split(", ", 1)
        assert attention_cases.TILES[row](*ast.literal_eval(f"({numbers[0]},)"))
        assert launches.result == (case.batch, case.heads, case.queries, case.head)


def swept() -> dict[str, Any]:
    short = "(short_attention, 64, 64, 3, 4, 1)"
    return {
        "shape": [2, 16, 256, 256, 64, "bias", "hq", 1],
        "us": {
            "sdpa": 9.4,
            "cudnn_attention": 3.0,
            "efficient_attention": 9.0,
            short: 4.5,
            "(short_attention, 128, 64, 3, 8, 1)": 4.0,
            "(tma_attention, 64, 64, 3, 4, 2, 1, False)": 1.0,
        },
        "errors": {
            "sdpa": 0.002,
            "cudnn_attention": 0.002,
            "efficient_attention": 0.002,
            short: 0.0021,
            "(short_attention, 128, 64, 3, 8, 1)": 0.1,
            "(tma_attention, 64, 64, 3, 4, 2, 1, False)": math.nan,
        },
        "dead": {"sdpa": "0.0", "cudnn_attention": "nan", short: "0.0"},
    }


def test_wrong_contenders_are_left_out() -> None:
    row = attention_cases.measured(swept())
    assert row == MeasuredCase(
        T5,
        {"sdpa": 9.4, "efficient_attention": 9.0, "short_attention": 4.5},
        {"short_attention": TILE},
    )
    alike = swept()
    alike["dead"]["sdpa"] = "nan"  # torch's own choice gives it, too
    assert attention_cases.measured(alike).us["cudnn_attention"] == 3.0


def test_a_table_is_written(tmp_path: Path) -> None:
    sweep, table = tmp_path / "sweep.json", tmp_path / "table.py"
    plain = {**swept(), "shape": [1, 24, 4608, 4608, 128, "none", "", 1]}
    plain["us"]["(tma_attention, 64, 64, 3, 4, 2, 1, False)"] = 1.0
    plain["errors"] = {**plain["errors"], "(tma_attention, 64, 64, 3, 4, 2, 1, False)": 0.002}
    report = {"kind": "attn_libraries", "rows": [swept(), plain]}
    sweep.write_text(json.dumps(report))
    assert attention_cases.main([str(sweep), "--table", str(table)]) == 0
    names: dict[str, Any] = {}
    exec(table.read_text(), names)
    first, second = names["CASES"]
    assert first == attention_cases.measured(swept())
    assert second.case == FLUX
    assert second.tiles["tma_attention"] == TmaTile(64, 64, 3, 4)


def test_the_table_has_a_default_everywhere() -> None:
    """Whatever it has: torch's own choice is timed in each case, and no case is there twice."""
    cases = tuned(H100).cases
    assert all(math.isfinite(row.us["sdpa"]) for row in cases)
    assert all(us > 0 for row in cases for us in row.us.values())
    assert len({row.case for row in cases}) == len(cases)
    for row in cases:
        assert chosen(attn_libraries.problem_of(row.case)).cost_us < NEVER
        assert row.tiles.keys() == row.us.keys() & attention_cases.TILES.keys()
