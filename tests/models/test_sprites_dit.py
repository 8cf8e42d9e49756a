"""sprites-dit as a diffusers folder: how it is made, loaded, drawn with and compiled."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import strop
from strop.models import sprites
from strop.models.guidance import guided
from strop.models.sprites import dit, evaluate
from strop.models.sprites.export import FILE_LIMIT, TOTAL_LIMIT
from strop.models.sprites.settings import DIT, TINY_DIT
from strop.testing import assert_as_accurate_together
from tests.e2e.tiny import DEVICES, cache_dir

# Importing and saving through transformers and diffusers warns about their own future.
pytestmark = pytest.mark.filterwarnings("ignore")

PROMPTS = ["a red circle above a blue square", "a small green star"]
TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"


def _drawn(pipe: Any, width: int, height: int) -> Tensor:
    """Three guided steps from the same noise in every type."""
    source = torch.Generator().manual_seed(width)
    noise = torch.randn(len(PROMPTS), width * height // 64, 16, generator=source)
    result = pipe(
        PROMPTS,
        width=width,
        height=height,
        num_inference_steps=3,
        latents=noise.to(pipe.device, pipe.dtype),
        output_type="pt",
        **guided(pipe, PROMPTS, 3.0),
    )
    images: Tensor = result.images
    return images


def test_the_whole_model_is_small_enough_to_ship_in_fp16() -> None:
    base = sprites.load()
    model = dit.transformer(DIT, base.vae.config.latent_channels, 128)
    sizes = [
        2 * sum(weight.numel() for weight in part.parameters())
        for part in (model, base.vae, base.text_encoder, base.text_encoder)
    ]
    assert max(sizes) <= FILE_LIMIT
    assert sum(sizes) <= TOTAL_LIMIT - 100_000  # the heads of the files


def test_an_untrained_transformer_answers_zero_and_depends_on_its_seed_alone(
    tiny_model: Path,
) -> None:
    base = sprites.load_from(tiny_model)
    torch.manual_seed(1)
    one = dit.pipeline(TINY_DIT, base).transformer
    torch.manual_seed(2)
    two = dit.pipeline(TINY_DIT, base).transformer
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    ids = torch.zeros(6, 3)
    with torch.no_grad():
        answer = one(
            hidden_states=torch.randn(2, 6, 16),
            encoder_hidden_states=torch.randn(2, 6, 32),
            pooled_projections=torch.randn(2, 32),
            timestep=torch.rand(2),
            img_ids=ids,
            txt_ids=ids,
            return_dict=False,
        )[0]
    assert answer.shape == (2, 6, 16)
    assert not answer.any()


@pytest.mark.parametrize("device", DEVICES)
def test_optimised_pictures_are_those_of_eager(
    device: str, tiny_dit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No further from fp64 than eager is. TF32 convolutions, on by default, hide what is asked
    here: they alone move these pictures by 0.002."""
    monkeypatch.setenv("STROP_CACHE_DIR", cache_dir())
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    sizes = [(64, 32), (32, 64), (48, 80)]
    pipe, exact = (
        sprites.load_from(tiny_dit, dtype, device) for dtype in (torch.float32, torch.float64)
    )
    for each in (pipe, exact):
        each.set_progress_bar_config(disable=True)
    eager = [_drawn(pipe, *size) for size in sizes]
    assert not torch.allclose(eager[0][0], eager[0][1], atol=0.05)  # the prompts differ
    strop.optimize(pipe)
    assert_as_accurate_together(
        [(_drawn(pipe, *s), e, _drawn(exact, *s)) for s, e in zip(sizes, eager, strict=True)]
    )
    report = strop.explain(pipe)
    assert report.fallbacks == {}
    assert report.num_graphs == 4  # two text encoders, the transformer and the decoder


def test_guidance_follows_the_prompt_in_a_batch_as_alone(tiny_dit: Path) -> None:
    pipe = sprites.load_from(tiny_dit)
    pipe.set_progress_bar_config(disable=True)
    options = evaluate.Options(steps=2, guidance=3.0)
    both = evaluate.draw_prompts(pipe, PROMPTS, 32, 32, options)
    alone = evaluate.draw_prompts(pipe, PROMPTS[:1], 32, 32, options)
    torch.testing.assert_close(both[:1], alone, atol=1e-4, rtol=0)
    plain = evaluate.draw_prompts(pipe, PROMPTS[:1], 32, 32, evaluate.Options(2, 2, 1.0))
    assert not torch.allclose(plain, alone, atol=1e-3)


def test_guidance_has_each_pipelines_own_name(tiny_dit: Path, tiny_model: Path) -> None:
    diffusion, flow = sprites.load_from(tiny_model), sprites.load_from(tiny_dit)
    assert guided(diffusion, "a", 4.0) == {"guidance_scale": 4.0, "negative_prompt": None}
    assert guided(diffusion, ["a", "b"], 4.0, "c")["negative_prompt"] == ["c", "c"]
    assert guided(flow, "a", 4.0) == {
        "true_cfg_scale": 4.0,
        "negative_prompt": "",
        "max_sequence_length": 24,
    }
    assert guided(flow, ["a", "b"], 4.0)["negative_prompt"] == ["", ""]


def test_the_folder_is_scored(tiny_dit: Path) -> None:
    report = evaluate.evaluate(tiny_dit, evaluate.Options(count=4, steps=1))
    assert report["summary"]["prompts"] == 4
    assert 0 <= report["summary"]["all_right"] <= 1


def test_lost_weights_are_an_error_that_says_how_to_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sprites, "DIT_WEIGHTS", tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"lacks .*dit --out.*sprites-dit\.yaml"):
        sprites.load_dit()


def test_the_parts_that_do_not_ship_twice_are_those_of_sprites(
    shipped_dit: Path, tiny_dit: Path
) -> None:
    assert not (shipped_dit / "vae").exists()
    whole, ours = sprites.load_from(tiny_dit), sprites.load_dit()
    for part in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        wanted, found = (getattr(pipe, part) for pipe in (whole, ours))
        assert not found.training
        pairs = zip(wanted.state_dict().items(), found.state_dict().items(), strict=True)
        assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs), part
    assert torch.equal(_drawn(ours, 32, 32), _drawn(whole, 32, 32))
    half = sprites.load_dit(torch.bfloat16)
    assert type(half).__name__ == "FluxPipeline"
    assert half.transformer.dtype == half.text_encoder_2.dtype == torch.bfloat16


@pytest.mark.usefixtures("shipped_dit")
def test_a_damaged_part_of_sprites_is_named() -> None:
    lost = sprites.WEIGHTS / "vae" / "diffusion_pytorch_model.safetensors"
    lost.write_bytes(lost.read_bytes()[:1000])
    with pytest.raises(ValueError, match=rf"{lost} is no readable safetensors"):
        sprites.load_dit()
    lost.unlink()
    with pytest.raises(FileNotFoundError, match=rf"lacks {lost}"):
        sprites.load_dit()


def test_damaged_and_missing_files_are_named(tiny_dit: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dit"
    shutil.copytree(tiny_dit, folder)
    damaged = folder / TRANSFORMER
    damaged.write_bytes(damaged.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"transformer.* is no readable safetensors"):
        sprites.load_from(folder)
    damaged.unlink()
    (folder / "tokenizer_2" / "merges.txt").unlink()
    with pytest.raises(FileNotFoundError, match=rf"{TRANSFORMER}.*, tokenizer_2/merges\.txt"):
        sprites.load_from(folder)


def test_an_untrained_model_is_not_written_over_another(tiny_model: Path, tmp_path: Path) -> None:
    dit.write(TINY_DIT, tiny_model, tmp_path / "new")
    index = json.loads((tmp_path / "new" / "model_index.json").read_text())
    assert index["_class_name"] == "FluxPipeline"
    with pytest.raises(FileExistsError, match="--out"):
        dit.write(TINY_DIT, tiny_model, tmp_path / "new")
