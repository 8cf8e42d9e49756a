"""The training of the autoencoder on a tiny configuration, and of the rest after it."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from strop.models import sprites
from strop.models.sprites import checkpoint, evaluate, network
from strop.models.sprites.loop import Piece
from strop.models.sprites.settings import TINY, Settings
from strop.models.sprites.train import main, picture_loss, train
from strop.train import given_settings
from tests.train import trainer

# Importing and saving through transformers and diffusers warns about their own future.
pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")
VAE = "vae/diffusion_pytorch_model.safetensors"


def _piece(out: Path, minutes: float = 5.0, resume: bool = False) -> Piece:
    return Piece(out / "vae.ckpt", minutes, resume)


def _steps(count: int) -> Settings:
    return replace(TINY, vae=replace(TINY.vae, steps=count))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sprites")
    assert main(["--out", str(out), "--settings", "tiny", "--device", "cpu"]) == 0
    return out


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained / "vae.ckpt", tmp_path / "vae.ckpt")
    return tmp_path


def test_a_stopped_training_continues_bit_for_bit(trained: Path, tmp_path: Path) -> None:
    # Up to the third step the rate is that of the longer training: it has yet to decay.
    assert train(_steps(3), tmp_path, _piece(tmp_path), CPU)
    assert checkpoint.state(tmp_path / "vae.ckpt")["step"] == 3
    assert train(TINY, tmp_path, _piece(tmp_path, resume=True), CPU)
    for name in ("ema", "weights", "moments"):
        expected = checkpoint.group(trained / "vae.ckpt", name)
        actual = checkpoint.group(tmp_path / "vae.ckpt", name)
        assert expected
        assert expected.keys() == actual.keys()
        assert all(torch.equal(expected[key], actual[key]) for key in expected), name
    for file in (trained / "weights").rglob("*.safetensors"):
        again = tmp_path / file.relative_to(trained)
        assert file.read_bytes() == again.read_bytes()


def test_the_clock_stops_a_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--out", str(tmp_path), "--settings", "tiny", "--device", "cpu", "--minutes", "0"]
    assert main(words) == 0
    assert "unfinished: run again with --resume" in capsys.readouterr().out
    assert checkpoint.find(tmp_path / "vae.ckpt") is None


def test_a_second_training_does_not_overwrite_the_first(trained: Path) -> None:
    before = (trained / "weights" / VAE).read_bytes()
    with pytest.raises(FileExistsError, match="--resume"):
        train(TINY, trained, _piece(trained), CPU)
    assert (trained / "weights" / VAE).read_bytes() == before


def test_other_settings_cannot_continue(copied: Path) -> None:
    deeper = replace(TINY, network=replace(TINY.network, vae_layers=2))
    with pytest.raises(ValueError, match="settings"):
        train(deeper, copied, _piece(copied, resume=True), CPU)


def test_a_checkpoint_without_moments_continues(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / "vae.ckpt" / "moments.safetensors").unlink()
    assert train(_steps(6), copied, _piece(copied, resume=True), CPU)
    assert "starts afresh" in capsys.readouterr().out
    assert checkpoint.state(copied / "vae.ckpt")["step"] == 6


def test_a_training_can_start_from_another_model(trained: Path, tmp_path: Path) -> None:
    assert not train(TINY, tmp_path, _piece(tmp_path, 0.0), CPU, init=trained / "weights")
    expected = load_file(trained / "weights" / VAE)
    actual = load_file(tmp_path / "weights" / VAE)
    assert expected.keys() == actual.keys()
    # Statistics are folded into the convolutions around the latents once more.
    same = [key for key in expected if "quant_conv" not in key]
    assert all(torch.equal(expected[key], actual[key]) for key in same)
    with pytest.raises(FileNotFoundError, match="--init"):
        train(TINY, tmp_path, _piece(tmp_path), CPU, init=tmp_path / "nothing")


def test_a_picture_that_lost_an_object_counts_more() -> None:
    plain = torch.full((8, 3, 8, 8), 0.01)
    assert float(picture_loss(plain, 0.5)) == pytest.approx(0.01)
    lost = plain.clone()
    lost[0] = 0.05
    # Shares of 10/3 for the lost one and 2/3 for the seven others.
    assert float(picture_loss(lost, 0.5)) == pytest.approx((0.05 * 10 / 3 + 7 * 0.01 * 2 / 3) / 8)


def test_the_folder_loads_draws_and_is_scored(trained: Path) -> None:
    report = evaluate.evaluate(trained / "weights", evaluate.Options(count=2, steps=2))
    assert report["summary"]["prompts"] == 2
    assert len(report["prompts"]) == 2
    pipe = sprites.load_from(trained / "weights")
    assert next(pipe.unet.parameters()).dtype == torch.float32
    images = evaluate.draw_prompts(pipe, ["a red ring"], 64, 96, evaluate.Options(steps=2))
    assert images.shape == (1, 3, 96, 64)


def test_the_recipe_trains_the_rest_of_the_folder(trained: Path, tmp_path: Path) -> None:
    """`strop train text-to-image --config examples/sprites.yaml --model DIR/weights`."""
    folder, output = trained / "weights", tmp_path / "out"
    recipe = given_settings.read_yaml(Path(__file__).parents[2] / "examples" / "sprites.yaml")
    small = {
        "model": folder,
        "output_dir": output,
        "train_batch_size": 2,
        "max_train_steps": 2,
        "validation_prompt": [],
        "mixed_precision": "no",
    }
    trainer.train("text-to-image", **{**recipe, **small})
    assert (output / VAE).read_bytes() == (folder / VAE).read_bytes()
    for name in ("unet/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"):
        before, after = load_file(folder / name), load_file(output / name)
        assert before.keys() == after.keys()
        changed = [key for key in before if not torch.equal(before[key], after[key])]
        assert len(changed) > len(before) / 2
    assert sprites.load_from(output).unet.config.sample_size == 24


def test_damaged_and_missing_files_are_named(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    shutil.copytree(trained / "weights", folder)
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
