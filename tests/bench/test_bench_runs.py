"""Whole benchmarks on the CPU with tiny models: the code of the GPU runs, without their speed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import strop
from strop.bench import compile as compile_bench
from strop.bench import models, quality, report
from strop.bench.cases import case_named


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
    def make(dtype: torch.dtype, device: torch.device) -> Any:
        return models.make_pipeline(
            models.TINY_UNET, models.TINY_VAE, models.TINY_CLIP, device, dtype
        )

    prompts = ["a red circle", "a blue square"]
    found = quality.compare(make, prompts, ((64, 64),), torch.device("cpu"), steps=2,
                            options=options)  # fmt: skip
    assert found["num_pictures"] == 2
    assert found["is_good"], found


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
