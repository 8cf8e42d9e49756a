"""Rules that choose between kernels of ours and a library's, judged by sweeps of an H100."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from strop.bench import select
from strop.cli import app
from strop.errors import StropError
from strop.kernels.gemm.tile import GemmTile
from strop.kernels.tuned import h100

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
SWEEPS = [
    RESULTS / f"{name}.json"
    for name in (
        "conv_wgmma_h100_2026-11-24",
        "linear_wgmma_h100_2026-11-24",
        "attn_wgmma_h100_2026-11-24",
    )
]
HELD_OUT = [
    RESULTS / f"{name}.json"
    for name in ("conv_wgmma-held-out_h100_2026-11-25", "linear_wgmma-held-out_h100_2026-11-24")
]


MORE = [
    RESULTS / f"{name}.json"
    for name in (
        "conv_wgmma-strided_h100_2026-11-23",
        "conv_wgmma-others_h100_2026-11-24",
        "linear_wgmma-sums_h100_2026-11-24",
    )
]
# Widths and heads that no UNet of Stable Diffusion has: a single shape may miss more.
WIDER = [
    RESULTS / f"{name}_h100_2026-11-26.json" for name in ("attn_wgmma-heads", "linear_wgmma-widths")
]
PAIRED = RESULTS / "linear_paired_h100_2026-11-27.json"
NORMED = RESULTS / "linear_normed_h200_2026-11-29.json"


@pytest.mark.parametrize("sweep", [*SWEEPS, *MORE], ids=lambda sweep: sweep.stem)
def test_each_sweep(sweep: Path) -> None:
    found = list(select.choices(sweep))
    assert len(found) >= 9
    assert len({choice.chosen for choice in found}) >= 3
    assert any(choice.chosen not in select.LIBRARIES for choice in found)
    assert select.judged(found, held_out=False).holds


@pytest.mark.parametrize("sweep", WIDER, ids=lambda sweep: sweep.stem)
def test_wider_sweeps(sweep: Path) -> None:
    verdict = select.judged(list(select.choices(sweep)), held_out=False)
    assert verdict.count >= 17
    assert verdict.mean >= select.MUST_MEAN
    assert verdict.worst.share > 0.8


def test_products_with_factors_of_adapters() -> None:
    """Each level of SD1.5's and SDXL's UNets has the fastest tile, and none the library: products
    that go on over factors, and those with A, which have few columns."""
    found = list(select.choices(PAIRED))
    assert len(found) == len(json.loads(PAIRED.read_text())["rows"]) == 48
    assert len({choice.chosen for choice in found}) >= 12
    assert not any(choice.chosen in select.LIBRARIES for choice in found)
    verdict = select.judged(found, held_out=False)
    assert verdict.mean >= 0.995
    assert verdict.worst.share >= 0.98, verdict


def test_products_that_normalise_their_columns() -> None:
    """Nearly each layer of ResNet-50 has the fastest tile, and every tile of the table is chosen
    for one. "cublas" there has torch's norm behind it."""
    found = list(select.choices(NORMED))
    assert len(found) == len(json.loads(NORMED.read_text())["rows"]) == 36
    chosen = {choice.chosen for choice in found}
    few_columns = astuple(GemmTile(1, 32, 8))  # for products with fewer than all other tiles have
    assert chosen | {few_columns} == set(map(astuple, h100.NORMED_TILES))
    verdict = select.judged(found, held_out=False)
    assert verdict.mean >= 0.995
    assert verdict.worst.share >= 0.95, verdict


def test_held_out() -> None:
    verdict = select.judged(list(select.choices(SWEEPS[2])), held_out=True)
    assert verdict.count >= 9
    assert verdict.holds, verdict


@pytest.mark.parametrize("sweep", HELD_OUT, ids=lambda sweep: sweep.stem)
def test_products_held_out(sweep: Path) -> None:
    verdict = select.judged(list(select.choices(sweep)), held_out=True)
    assert verdict.count >= 18
    assert verdict.holds, verdict


def test_a_bad_choice_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(select.RULES, "conv_wgmma", lambda shape: select.LIBRARY)  # type: ignore[arg-type]
    assert not select.judged(list(select.choices(SWEEPS[0])), held_out=False).holds
    empty = tmp_path / "empty.json"
    empty.write_text(json.dumps({"kind": "conv_wgmma", "rows": []}))
    with pytest.raises(StropError, match="no shape"):
        select.judged(list(select.choices(empty)), held_out=True)


def test_the_sweep_that_products_are_fitted_to() -> None:
    result = CliRunner().invoke(app, ["bench", "select", str(SWEEPS[0])])
    assert result.exit_code == 0, result.output
    assert result.output.count("is reached") == 1
    assert "held out" not in result.output


@pytest.mark.parametrize(
    ("kind", "shape", "us", "chosen"),
    [
        (
            "conv_wgmma",
            (2, 64, 320, 320, 3, 1),
            {"cudnn": 31.0, "(2, 160, 5, 1, True)": 22.5},
            (2, 160, 5, 1, True, False),
        ),
        (
            "linear_wgmma",
            (2048, 1280, 1280, ""),
            {"cublas": 12.2, "(2, 160, 5, 1, True)": 11.6},
            (2, 160, 5, 1, True, False),
        ),
        (
            "linear_wgmma",
            (64, 10240, 1280, "gated"),
            {"cublas": 9.0, "(2, 160, 5, 1, True)": 12.0},
            "cublas",
        ),
    ],
)
def test_sweeps_of_products(
    kind: str, shape: tuple[Any, ...], us: dict[str, float], chosen: select.Name, tmp_path: Path
) -> None:
    """Whose rule has its numbers from all shapes of a sweep."""
    sweep = tmp_path / "sweep.json"
    sweep.write_text(json.dumps({"kind": kind, "rows": [{"shape": shape, "us": us}]}))
    (found,) = select.choices(sweep)
    assert (found.chosen, found.fastest, found.was_fitted) == (chosen, chosen, True)


@pytest.mark.parametrize(
    ("text", "match"),
    [("{", "is no sweep"), ("[]", "is no sweep"), ('{"kind": "gemm", "rows": []}', "no rule")],
)
def test_files_that_are_no_sweeps(text: str, match: str, tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    file.write_text(text)
    with pytest.raises(StropError, match=match):
        list(select.choices(file))
    with pytest.raises(StropError, match="is no sweep"):
        list(select.choices(tmp_path / "none.json"))


def test_the_command() -> None:
    result = CliRunner().invoke(app, ["bench", "select", *map(str, SWEEPS)])
    assert result.exit_code == 0, result.output
    assert "held out: " in result.output
    assert result.output.count("is reached") == 2
    assert "2x32x320x640x3x1" in result.output
    failed = CliRunner().invoke(app, ["bench", "select", "nowhere.json"])
    assert failed.exit_code != 0
    assert "nowhere.json is no sweep of kernels" in failed.output + str(failed.stderr)


def test_a_decision_is_quick() -> None:
    first, again = select.decision_us((2, side, 320, 640, 3, 1) for side in range(8, 136))
    assert again < 20  # 2 on a core that does nothing else
    assert first < 5000  # the kernel's text is printed too
