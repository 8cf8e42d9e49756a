"""Whole benchmarks on the CPU with tiny models: the code of the GPU runs, without their speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import strop
from strop.bench import accuracy, models, numerics, quality, report
from strop.bench import compile as compile_bench
from strop.bench.cases import case_named
from strop.bench.infer_variants import variants
from strop.cli import app
from strop.debug.explain import explain


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> strop.Options:
    return strop.Options(cache_dir=str(tmp_path_factory.mktemp("cache")))


@pytest.mark.slow
def test_compile_cold_and_cached() -> None:
    result = compile_bench.run(case_named("tiny-unet"), None, "cpu", limit_s=300)
    cold, cached = result["cold"], result["cached"]
    assert "failed" not in cold, cold
    assert cold["counts"]["num_captures"] == 1
    assert cached["counts"]["num_captures"] == 0
    assert cached["counts"]["num_launches"] == cold["counts"]["num_launches"]
    assert cold["stages_s"]["capture"] > 0
    assert set(cached["stages_s"]) == {"kernels"}  # loaded; nothing was traced or planned
    assert cached["first_s"] < cold["first_s"]
    assert result["cache_bytes"] > 0
    assert len(report.compile_rows_of(result)) == 3


@pytest.mark.slow
def test_quality(options: strop.Options) -> None:
    prompts = ["a red circle", "a blue square"]
    found = quality.compare(
        tiny_pipe, prompts, ((64, 64),), torch.device("cpu"), steps=2, options=options
    )
    assert found["num_pictures"] == 2
    assert found["is_good"], found


def tiny_pipe(dtype: torch.dtype, device: torch.device) -> Any:
    return models.make_pipeline(models.TINY_UNET, models.TINY_VAE, models.TINY_CLIP, device, dtype)


@pytest.mark.slow
def test_each_switch_draws_the_same(
    options: strop.Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All on first, of whose program the switches are."""
    said, found_for = list[str](), list[tuple[int, str]]()

    def two(given: strop.Options, target: Any, kind: str) -> dict[str, strop.Options]:
        found_for.append((len(explain(target).graphs), kind))
        every = variants(given, target, kind)
        return {name: every[name] for name in ("no dot_merge", "all off")}

    monkeypatch.setattr(quality, "variants", two)
    result = quality.compare(
        tiny_pipe,
        ["a red circle"],
        ((64, 64),),
        torch.device("cpu"),
        steps=2,
        options=options,
        ablate=True,
        step=said.append,
    )
    found = result["switches"]
    assert list(found) == said == ["all on", "no dot_merge", "all off"]
    assert found_for == [(3, "picture")]
    assert all(judged["is_good"] and not judged["fallbacks"] for judged in found.values())
    assert [row[0] for row in quality.rows_of(result)[1:]] == ["default", *found]


@pytest.mark.parametrize("is_good", [True, False])
def test_a_broken_switch_is_an_error(is_good: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    good = {"psnr_median_db": 70.0, "psnr_worst_db": 65.0, "is_good": True}
    found = good | {"switches": {"no early_launch": good | {"is_good": is_good}}}
    monkeypatch.setattr(quality, "run", lambda *args, **kwargs: found)
    result = CliRunner().invoke(app, ["bench", "pictures", "--device", "cpu", "--ablate"])
    assert ("BROKEN" in result.output) is not is_good
    assert (result.exit_code == 0) is is_good


def test_worst_of_results() -> None:
    """The one that breaks the rule; of pictures, with nothing more exact, the one furthest off."""
    torch.manual_seed(0)
    exact = torch.randn(64, dtype=torch.float64)
    near, far = (exact + size * torch.randn(64) for size in (1e-4, 1e-1))
    found = accuracy.worst([near.half(), far.half()], near.half(), exact)
    assert found is not None
    assert not found["is_good"]
    assert found["rms"] > 0.05
    pictures = accuracy.worst([near, far], exact, None)
    assert pictures is not None
    assert pictures["psnr_to_eager_db"] < 25
    assert accuracy.worst([near], None, None) is None


def test_control_judges_half_precision() -> None:
    torch.manual_seed(0)
    exact = [torch.rand(3, 8, 8) for _ in range(4)]
    noise = [0.01 * torch.randn(3, 8, 8) for _ in range(4)]
    eager = [e + n for e, n in zip(exact, noise, strict=True)]
    same = [e - n for e, n in zip(exact, noise, strict=True)]
    worse = [*same[:3], exact[3] - 3 * noise[3]]
    assert quality._against_control(same, eager, exact)["is_good"]
    found = quality._against_control(worse, eager, exact)
    assert not found["is_good"]
    assert found["worst_difference_db"] == pytest.approx(-9.54, abs=0.01)


@pytest.mark.parametrize("is_good", [True, False])
def test_pictures_that_numerics_spoil_are_an_error(
    is_good: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    row = {"model": "sprites", "numerics": "int8", "num_cached": 0, "num_full": 0}
    row |= {"num_right": 5, "distance_median": 0.01, "distance_worst": 0.2, "psnr_median_db": 50.0}
    row |= {"seconds_a_picture": 0.5, "speed": 1.5, "is_good": is_good}
    row |= {"layers": {"a.b": 0.02, "a.c": 0.03}, "refused": {"a.d": 0.3}}

    def run(names: list[str], *args: Any, **how: Any) -> tuple[dict[str, Any], list[Any]]:
        given.update(how, names=names)
        return {"num_prompts": 5, "rows": [row], "is_good": is_good}, []

    monkeypatch.setattr(numerics, "run", run)
    words = ["bench", "pictures", "--device", "cpu", "--numerics", "int8", "--budget", "0.2"]
    result = CliRunner().invoke(app, words)
    assert (given["names"], given["budget"], given["num_prompts"]) == (["int8"], 0.2, 200)
    assert (result.exit_code == 0) is is_good
    assert ("BROKEN" in result.output) is not is_good
    assert result.output.index("a.c") < result.output.index("a.b") < result.output.index("a.d")
    assert "30.00%, above the budget: exact" in result.output


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_sprites_in_8_bits_are_as_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE_DIR", str(tmp_path))
    result, _ = numerics.run(["int8"], num_prompts=8, budget=0.01)
    assert result["is_good"], result["rows"]
    rows = [row for row in result["rows"] if row["numerics"] == "int8"]
    assert [row["model"] for row in rows] == ["sprites", "sprites-dit"]
    for row in rows:
        assert row["psnr_median_db"] > 40
        assert 0 < row["distance_median"] < 0.01
        assert row["refused"]
        assert all(error > 0.01 for error in row["refused"].values())
        assert len(row["layers"]) > 20
        assert all(error <= 0.01 for error in row["layers"].values())
        assert not any("time" in path or "norm" in path for path in row["layers"])
    header, *_ = numerics.layer_rows(result)
    assert len(numerics.layer_rows(result)) == 1 + sum(
        len(row["layers"]) + len(row["refused"]) for row in rows
    )
    assert header[-1] == "error"
