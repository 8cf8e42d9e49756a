"""The training chain on a tiny configuration."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from strop.models import sprites
from strop.models.sprites import checkpoint, evaluate, network
from strop.models.sprites.export import export
from strop.models.sprites.loop import Piece
from strop.models.sprites.settings import TINY
from strop.models.sprites.train_diffusion import train_diffusion
from strop.models.sprites.train_vae import picture_loss, train_vae

# Importing and saving through transformers and diffusers warns about their own future.
pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")


def _piece(folder: Path, steps: int, resume: bool = False) -> Piece:
    return Piece(folder, minutes=5.0, plan_minutes=None, steps=steps, resume=resume)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sprites")
    assert train_vae(TINY, out, _piece(out / "vae.ckpt", 5), CPU)
    assert train_diffusion(TINY, out, _piece(out / "diffusion.ckpt", 8), CPU, compiled=False)
    return out


def test_a_stopped_training_continues_bit_for_bit(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "vae", tmp_path / "vae")
    folder = tmp_path / "diffusion.ckpt"
    # The rate depends on the planned total, so the first piece is cut by hand after 3 of 8 steps.
    assert train_diffusion(TINY, tmp_path, _piece(folder, 3), CPU, compiled=False)
    state = checkpoint.state(folder)
    groups = {name: checkpoint.group(folder, name) for name in ("weights", "ema", "moments")}
    checkpoint.save(folder, groups, {**state, "total": 8})
    assert train_diffusion(TINY, tmp_path, _piece(folder, 8, resume=True), CPU, compiled=False)
    whole = trained / "diffusion.ckpt"
    assert checkpoint.state(folder)["images"] == checkpoint.state(whole)["images"]
    for name in ("ema", "weights", "moments"):
        expected = checkpoint.group(whole, name)
        actual = checkpoint.group(folder, name)
        assert expected.keys() == actual.keys()
        assert all(torch.equal(expected[key], actual[key]) for key in expected), name


def test_a_second_training_does_not_overwrite_the_first(trained: Path) -> None:
    with pytest.raises(FileExistsError, match="--resume"):
        train_diffusion(TINY, trained, _piece(trained / "diffusion.ckpt", 9), CPU, compiled=False)


def test_other_settings_cannot_continue(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "vae.ckpt", tmp_path / "vae.ckpt")
    wider = replace(TINY, network=replace(TINY.network, vae_layers=2))
    with pytest.raises(ValueError, match="settings"):
        train_vae(wider, tmp_path, _piece(tmp_path / "vae.ckpt", 9, resume=True), CPU)


def test_a_checkpoint_without_moments_continues(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "vae.ckpt", tmp_path / "vae.ckpt")
    for file in (tmp_path / "vae.ckpt").glob("moments-*"):
        file.unlink()
    state = checkpoint.state(tmp_path / "vae.ckpt")
    (tmp_path / "vae.ckpt" / "state.json").write_text(json.dumps({**state, "total": 6}))
    assert train_vae(TINY, tmp_path, _piece(tmp_path / "vae.ckpt", 6, resume=True), CPU)


def test_a_training_can_start_from_an_exported_model(trained: Path, tmp_path: Path) -> None:
    folder = export(TINY, trained)
    built = network.parts(TINY, seed=5)
    network.start_from(built, folder)
    pipe = sprites.load_from(folder)
    for mine, theirs in ((built.unet, pipe.unet), (built.text, pipe.text_encoder)):
        expected = theirs.state_dict()
        assert all(torch.equal(value, expected[key]) for key, value in mine.state_dict().items())
    assert train_vae(TINY, tmp_path, _piece(tmp_path / "vae.ckpt", 1), CPU, init=folder)
    with pytest.raises(FileNotFoundError, match="--init"):
        network.start_from(built, tmp_path)


def test_a_picture_that_lost_an_object_counts_more() -> None:
    plain = torch.full((8, 3, 8, 8), 0.01)
    assert float(picture_loss(plain, 0.5)) == pytest.approx(0.01)
    lost = plain.clone()
    lost[0] = 0.05
    # Shares of 10/3 for the lost one and 2/3 for the seven others.
    assert float(picture_loss(lost, 0.5)) == pytest.approx((0.05 * 10 / 3 + 7 * 0.01 * 2 / 3) / 8)


def test_diffusion_without_autoencoder_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="'vae' verb"):
        train_diffusion(TINY, tmp_path, _piece(tmp_path / "d", 1), CPU, compiled=False)


def test_the_export_loads_draws_and_is_scored(trained: Path) -> None:
    folder = export(TINY, trained)
    report = evaluate.evaluate(folder, evaluate.Options(count=2, steps=2))
    assert report["summary"]["prompts"] == 2
    assert len(report["prompts"]) == 2
    pipe = sprites.load_from(folder)
    assert next(pipe.unet.parameters()).dtype == torch.float32
    images = evaluate.draw_prompts(pipe, ["a red ring"], 64, 96, evaluate.Options(steps=2))
    assert images.shape == (1, 3, 96, 64)


def test_damaged_and_missing_files_are_named(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    shutil.copytree(export(TINY, trained), folder)
    damaged = folder / "unet" / "diffusion_pytorch_model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    with pytest.raises(ValueError, match="no readable safetensors"):
        sprites.load_from(folder)
    damaged.unlink()
    with pytest.raises(FileNotFoundError, match="unet/diffusion_pytorch_model"):
        sprites.load_from(folder)


def test_a_save_cut_between_its_renames_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    checkpoint.save(folder, {"weights": {"a": torch.ones(3)}}, {"step": 1})
    folder.rename(tmp_path / "c.old")
    found = checkpoint.find(folder)
    assert found == tmp_path / "c.old"
    assert torch.equal(checkpoint.group(found, "weights")["a"], torch.ones(3))


def test_folding_statistics_keeps_the_pictures() -> None:
    model = network.parts(TINY).vae.eval()
    pictures = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        before = model.encode(pictures).latent_dist
        plain = model.decode(before.mean).sample
        flat = before.mean.transpose(0, 1).flatten(1)
        network.fold_statistics(model, flat.mean(1), flat.std(1))
        after = model.encode(pictures).latent_dist
        folded = model.decode(after.mean).sample
    flat = after.mean.transpose(0, 1).flatten(1)
    torch.testing.assert_close(flat.mean(1), torch.zeros(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(flat.std(1), torch.ones(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(folded, plain, atol=1e-4, rtol=1e-4)


def test_the_scheduler_inverts_the_training_noise() -> None:
    # A perfect v-prediction must lead the shipped scheduler to the clean latents.
    noise = network.scheduler(TINY.noise)
    signal = noise.alphas_cumprod.clone()
    source = torch.Generator().manual_seed(0)
    clean, state = torch.randn(2, 1, 4, 8, 8, generator=source)
    noise.set_timesteps(20)
    for moment in noise.timesteps:
        keep = signal[moment]
        guess = (keep.sqrt() * state - clean) / (1 - keep).sqrt()
        state = noise.step(guess, moment, state).prev_sample
    torch.testing.assert_close(state, clean, atol=1e-4, rtol=0)
