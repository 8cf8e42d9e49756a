"""Rows D2 to D6 of ``strop bench infer``: whole pipelines of today at tiny widths, their full sizes
without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strop.bench import accuracy, infer, infer_report
from strop.bench.family_pipelines import FAMILIES, QWEN_PROMPT, prompt_of, worded
from strop.bench.infer_contenders import Field, Plan
from strop.bench.infer_rows import FAMILY_ROWS, InferRow, chosen_rows
from strop.bench.models import made_on
from strop.bench.pipelines.parts import qwen_tokenizer
from strop.bench.pipelines.twins import nearness
from strop.debug.explain import explain
from strop.options import Options

NAMES = [row.name for row in FAMILY_ROWS]
NEAR = 100.0  # decibels: fp32 is at 130
OTHER_SIZE = {"step": (96, 64), "picture": (48, 32)}
META = torch.device("meta")
# Parameters as published, in thousand millions, to the digit that is known
PUBLISHED: dict[str, dict[str, float]] = {
    "flux-pipe": {"transformer": 11.9, "text_encoder_2": 4.76, "text_encoder": 0.123},
    "qwen-image-pipe": {"transformer": 20.4, "text_encoder": 8.29, "vae": 0.127},
    "z-image-pipe": {"transformer": 6.15, "text_encoder": 4.02, "vae": 0.0838},
    "klein-pipe": {"transformer": 3.88, "text_encoder": 4.02},
    "sd3.5-pipe": {"transformer": 2.47, "text_encoder_2": 0.695, "text_encoder_3": 4.76},
}


def field_of(row: InferRow, folder: Path) -> Field:
    options = Options(cache_dir=str(folder))
    return Field(row.case(torch.float32), torch.device("cpu"), options)


def test_rows_are_run_by_name_alone() -> None:
    assert NAMES == ["D2", "D3", "D4-z-image", "D4-klein", "D5", "D6"]
    assert [row.name for row in chosen_rows(["D4"])] == ["D4-z-image", "D4-klein"]
    assert not {row.name for row in chosen_rows([])} & set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_runs_in_eager_and_two_sizes_have_one_graph(name: str, tmp_path: Path) -> None:
    (row,) = chosen_rows([name], tiny=True)
    field = field_of(row, tmp_path)
    for size in (row.size, OTHER_SIZE[row.kind]):
        _, _, ours = field.start("strop", size, 1)
        _, _, theirs = field.start("eager", size, 1, num_calls=1)
        assert min(nearness([found], theirs) for found in ours) >= NEAR
    report = explain(field.target)
    assert not report.fallbacks
    assert {c.name for c in report.components if not c.num_calls} <= {"vae.encoder"}
    for component in report.components:
        assert component.num_eager_calls == 0
        assert component.num_recompiles == 0


def test_a_step_of_wan_is_as_accurate_as_eager(tmp_path: Path) -> None:
    (row,) = chosen_rows(["D6"], tiny=True)
    field = field_of(row, tmp_path)
    (known,) = accuracy.references(field.case, field.device)
    _, _, found = field.start("strop", row.size, row.batch)
    error = accuracy.worst(found, *known)
    assert error is not None
    assert error["is_good"]


def test_long_calls_are_made_seldom() -> None:
    (row,) = chosen_rows(["D6"], tiny=True)
    (result,) = infer.run([row], Plan("cpu", "fp32", ("eager",), samples=5), is_apart=False)
    ours, eager = (result["contenders"][name] for name in ("strop", "eager"))
    assert (ours["samples"], ours["calls"]) == (3, 1)
    assert "second_s" in ours
    assert "second_s" not in eager
    assert "references" not in result
    assert result["error"]["rms_to_eager"] < 1e-5
    assert result["public"] == "LightX2V 5.18 s, SGLang 6.13"
    assert any("to eager" in line[-1] for line in infer_report.rows_of([result]))


def test_prompts_have_the_tokens_that_rows_say() -> None:
    from diffusers import QwenImagePipeline

    pipe: Any = QwenImagePipeline(None, None, None, worded(qwen_tokenizer(1058)), None)
    template, first = pipe.prompt_template_encode, pipe.prompt_template_encode_start_idx
    before, after = (pipe.tokenizer(text).input_ids for text in template.split("{}"))
    assert len(before) == first
    ids = pipe.tokenizer(template.format(prompt_of(QWEN_PROMPT))).input_ids
    assert len(ids) == first + 128
    assert ids[-len(after) :] == after


@pytest.mark.parametrize("name", FAMILIES)
def test_full_sizes_are_those_of_the_published_models(name: str) -> None:
    with made_on(META, torch.bfloat16):
        parts = FAMILIES[name][0].parts()
    for part, published in PUBLISHED[name].items():
        held = (*parts[part].parameters(), *parts[part].buffers())
        count = sum(weight.numel() for weight in held) / 1e9
        assert float(f"{count:.3g}") == published, part
