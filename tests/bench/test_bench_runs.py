"""Whole benchmarks on the CPU with tiny models: the code of the GPU runs, without their speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import strop
from strop.bench import accuracy, eight_bit, models, quality, report
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


def test_pictures_in_8_bits_are_judged_by_prompts_and_by_exact_ones() -> None:
    red, size = torch.zeros(3, 64, 64), 24
    red[0, 20 : 20 + size, 20 : 20 + size] = 1.0
    other, noise = red.clone(), torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0))
    other[:, 40:, 40:] = 0.9
    found = eight_bit.judged(["a red square"] * 2, [red, red], [red, other])
    assert found["num_prompts"] == 2
    assert found["psnr_worst_db"] < 20 < found["psnr_median_db"]
    assert eight_bit.structural_similarity(red, red) == pytest.approx(1.0)
    similar = [eight_bit.structural_similarity(red, red * (1 - s) + s * noise) for s in (0.1, 0.5)]
    assert 1 > similar[0] > similar[1] > 0
    assert found["is_good"] is (found["right"] >= found["right_exact"] - eight_bit.MOST_LOST)


@pytest.mark.parametrize("lost", [0.0, 0.2])
def test_pictures_that_8_bits_spoil_are_an_error(
    lost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def run(numerics: str, *args: Any, **how: Any) -> dict[str, Any]:
        given.update(how, numerics=numerics)
        judged = {"num_prompts": 5, "right_exact": 1.0, "right": 1.0 - lost, "judged_alike": 1.0}
        judged |= {"psnr_median_db": 50.0, "psnr_worst_db": 40.0, "ssim_median": 0.99}
        judged |= {"layers": {"a.b": 0.02, "a.c": 0.03}, "refused": {"a.d": 0.3}}
        models = {"sprites": judged | {"is_good": not lost}}
        return {"numerics": numerics, "models": models, "is_good": not lost}

    monkeypatch.setattr(eight_bit, "run", run)
    words = ["bench", "pictures", "--device", "cpu", "--numerics", "int8", "--budget", "0.2"]
    result = CliRunner().invoke(app, words)
    assert (given["numerics"], given["budget"], given["num_prompts"]) == ("int8", 0.2, 200)
    assert (result.exit_code == 0) is not lost
    assert ("BROKEN" in result.output) is bool(lost)
    assert result.output.index("a.c") < result.output.index("a.b") < result.output.index("a.d")
    assert "30.00%, above the budget: exact" in result.output


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_sprites_in_8_bits_are_as_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE_DIR", str(tmp_path))
    result = eight_bit.run("int8", None, "cpu", num_prompts=8, budget=0.01)
    assert result["is_good"], result["models"]
    for found in result["models"].values():
        assert found["psnr_median_db"] > 40
        assert found["ssim_median"] > 0.99
        assert found["refused"]
        assert all(error > 0.01 for error in found["refused"].values())
        assert len(found["layers"]) > 20
        assert all(error <= 0.01 for error in found["layers"].values())
        assert not any("time" in path or "norm" in path for path in found["layers"])
