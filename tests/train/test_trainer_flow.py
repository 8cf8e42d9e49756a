"""Training of Flux by flow matching: the loss, a whole training, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import strop
from strop.errors import OptionError, StropError, UnsupportedError
from strop.models import sprites
from strop.models.sprites import dit, evaluate
from strop.models.sprites.settings import TINY_DIT
from strop.train import given_settings
from strop.train.draws import generator
from strop.train.families import tokens
from strop.train.flow import Timesteps
from strop.train.learner import Learner
from strop.train.levels import Draws
from strop.train.objective import Objective
from strop.train.session import Session
from strop.train.share import BatchShare
from tests.e2e.tiny import cache_dir
from tests.train import trainer

diffusers = pytest.importorskip("diffusers")
# Importing and saving through transformers and diffusers warns about their own future.
pytestmark = pytest.mark.filterwarnings("ignore")

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
NUMBER = 1  # of a batch whose pictures are wider than high


class Recorded(nn.Module):
    """Answers with one tensor, and keeps the arguments it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.answer: Tensor | None = None
        self.seen: dict[str, Any] = {}

    def forward(self, *, return_dict: bool, **inputs: Any) -> tuple[Tensor]:
        assert return_dict is False
        self.seen = inputs
        hidden: Tensor = inputs["hidden_states"]
        return (torch.zeros_like(hidden) if self.answer is None else self.answer,)


def _session(folder: Path, out: Path, watch: trainer.Watch | None = None, **given: Any) -> Session:
    common = {"model": folder, "dataset_name": "sprites", "output_dir": out, "max_train_steps": 3}
    return trainer.session("text-to-image", watch, **{**common, **given})


def _train(folder: Path, out: Path, watch: trainer.Watch | None = None, **given: Any) -> None:
    common = {"model": folder, "dataset_name": "sprites", "output_dir": out}
    trainer.train("text-to-image", watch, **{**common, **given})


def test_the_network_sees_and_predicts_what_flow_matching_says(
    tiny_dit: Path, tmp_path: Path
) -> None:
    made = _session(tiny_dit, tmp_path / "out", train_batch_size=3)
    network = Recorded()
    objective = Objective(made.settings, made.model, network)
    batch = made.source.batch(NUMBER)
    loss = objective(batch, NUMBER)

    source = generator(made.settings.seed, "noise", NUMBER)
    latents = objective._latents(batch, Draws(source, batch.share))
    noise = torch.randn(latents.shape, generator=source)
    ids = batch.text.tensors["text_encoder"]
    pack, height, width = tokens.tokens_of, *latents.shape[2:]
    seen, pipe = network.seen, made.model.pipeline
    share = seen["timestep"][:, None, None, None]
    assert 0 < float(share.min()) < float(share.max()) < 1
    torch.testing.assert_close(seen["hidden_states"], pack((1 - share) * latents + share * noise))
    torch.testing.assert_close(loss, (noise - latents).square().mean())
    network.answer = pack(noise - latents)
    assert objective(batch, NUMBER).item() < 1e-12

    # Places and texts are those that the pipeline gives the transformer when it draws.
    _, places = pipe.prepare_latents(
        3, 4, height * pipe.vae_scale_factor, width * pipe.vae_scale_factor, torch.float32, "cpu",
        generator(0, "any", 0),
    )  # fmt: skip
    assert torch.equal(seen["img_ids"], places)
    texts = pipe.tokenizer.batch_decode(ids, skip_special_tokens=True)
    states, pooled, text_places = pipe.encode_prompt(texts, max_sequence_length=24)
    torch.testing.assert_close(seen["encoder_hidden_states"], states)
    torch.testing.assert_close(seen["pooled_projections"], pooled)
    assert torch.equal(seen["txt_ids"], text_places)


def test_the_scheduler_follows_the_velocity_to_the_picture(tiny_dit: Path) -> None:
    scheduler = sprites.load_from(tiny_dit).scheduler
    clean, noise = torch.randn(2, 1, 24, 16, generator=torch.Generator().manual_seed(0))
    scheduler.set_timesteps(7)
    state = noise
    for moment in scheduler.timesteps:
        state = scheduler.step(noise - clean, moment, state).prev_sample
    torch.testing.assert_close(state, clean, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("scheme", "deviation"), [("none", 0.2887), ("logit_normal", 0.2083)])
def test_timesteps_are_drawn_as_the_scheme_says(scheme: str, deviation: float) -> None:
    share = BatchShare.of(100_000)
    drawn = Timesteps(scheme).draw(Draws(torch.Generator().manual_seed(0), share))
    assert float(drawn.mean()) == pytest.approx(0.5, abs=0.005)
    assert float(drawn.std()) == pytest.approx(deviation, abs=0.003)


@pytest.mark.slow
def test_the_loss_falls(tmp_path: Path) -> None:
    """With the autoencoder that ships: a random one's latents are noise, which nothing predicts."""
    dit.write(TINY_DIT, sprites.WEIGHTS, tmp_path / "start")
    given = {"train_batch_size": 4, "max_train_steps": 30, "learning_rate": 1e-2}
    _train(tmp_path / "start", tmp_path / "out", **given, lr_warmup_steps=0)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "out" / "metrics.jsonl").open()]
    assert len(losses) == 30
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])


@pytest.mark.slow
def test_a_compiled_transformer_learns_what_a_plain_one_does(
    tiny_dit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STROP_CACHE_DIR", cache_dir())
    found = []
    for compiled in (False, True):
        out = tmp_path / str(compiled)
        made = _session(tiny_dit, out, train_batch_size=3, compile_unet=compiled)
        made.learner.train()
        loss = Objective(made.settings, made.model, made.unet)(made.source.batch(NUMBER), NUMBER)
        loss.backward()
        found.append({name: weight.grad for name, weight in made.learner.named.items()})
    assert not strop.explain(made.unet).fallbacks
    assert made.unet.forward.counters.calls == 1  # type: ignore[attr-defined]
    for name, plain in found[0].items():
        close = {"atol": 1e-5 * float(plain.abs().max()) + 1e-9, "rtol": 1e-4}
        torch.testing.assert_close(
            found[1][name], plain, **close, msg=lambda m, n=name: f"{n}: {m}"
        )


class Gradients(TorchDispatchMode):
    """Notes whether what attention's backward is given lies dense."""

    def __init__(self) -> None:
        super().__init__()
        self.are_dense: set[bool] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in str(func) and "backward" in str(func):
            # (B, H, S, D) in the memory order (B, S, H, D)
            self.are_dense.add(args[0].transpose(1, 2).is_contiguous())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_of_attention_lie_in_two_ways_unless_it_is_compiled(
    compiled: bool, tiny_dit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch has one plan of cuDNN for both, so eager must do without cuDNN."""
    monkeypatch.setenv("STROP_CACHE_DIR", cache_dir())
    made = _session(tiny_dit, tmp_path / "out", train_batch_size=3, compile_unet=compiled)
    made.learner.train()
    objective = Objective(made.settings, made.model, made.unet)
    objective(made.source.batch(NUMBER), NUMBER).backward()  # compiles
    with Gradients() as seen:
        objective(made.source.batch(NUMBER), NUMBER).backward()
    assert seen.are_dense == ({True} if compiled else {True, False})


def test_torch_does_without_cudnn_in_attention_unless_it_is_compiled(
    tiny_dit: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, backward = [], Learner.backward

    def watched(learner: Learner, loss: Tensor) -> None:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        backward(learner, loss)

    monkeypatch.setattr(Learner, "backward", watched)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    for name, folder in {"flux": tiny_dit, "diffusion": tiny_model}.items():
        _train(folder, tmp_path / name, max_train_steps=1)
    assert seen == [False, True]
    assert torch.backends.cuda.cudnn_sdp_enabled()
    model = _session(tiny_dit, tmp_path / "compiled").model
    with model.attention(is_compiled=True):
        assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_gradients_on_a_gpu_are_right_without_compiling(tiny_dit: Path, tmp_path: Path) -> None:
    """In bf16, for which torch would take cuDNN's attention; the judge is fp32."""
    watch, found = trainer.Watch(), []
    for precision in ("no", "bf16"):
        given = {"device": "cuda", "train_batch_size": 64, "mixed_precision": precision}
        made = _session(tiny_dit, tmp_path / precision, watch, **given)
        made.learner.train()
        with made.model.attention(is_compiled=False):
            batch = made.source.batch(NUMBER)
            Objective(made.settings, made.model, made.unet)(batch, NUMBER).backward()
        found.append({name: weight.grad for name, weight in made.learner.named.items()})
    assert sum("without cuDNN" in text for text in watch.warnings) == 1
    exact, ours = found
    for name in (name for name in exact if "attn.to_" in name and "weight" in name):
        error = (ours[name] - exact[name]).norm() / exact[name].norm()
        assert error < 0.1, (name, error)


def test_what_is_saved_is_the_trained_model(tiny_dit: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    _train(tiny_dit, out, max_train_steps=2, lr_warmup_steps=0, save_precision="fp16")
    before, after = load_file(tiny_dit / WEIGHTS), load_file(out / WEIGHTS)
    assert before.keys() == after.keys()
    assert {tensor.dtype for tensor in after.values()} == {torch.float16}
    assert sum(not torch.equal(before[k].half(), after[k]) for k in before) > len(before) / 2
    for part in ("vae/diffusion_pytorch_model", "text_encoder/model", "text_encoder_2/model"):
        kept, now = (load_file(place / f"{part}.safetensors") for place in (tiny_dit, out))
        assert all(torch.equal(kept[key].half(), now[key]) for key in kept), part
    drawn = evaluate.draw_prompts(
        sprites.load_from(out), ["a red ring"], 64, 32, evaluate.Options(steps=2)
    )
    assert drawn.shape == (1, 3, 32, 64)
    assert bool(drawn.isfinite().all())


def test_a_resumed_training_has_the_bits_of_one_that_never_stopped(
    tiny_dit: Path, tmp_path: Path
) -> None:
    given = {"use_ema": True, "checkpointing_steps": 2, "threads": 1}
    _train(tiny_dit, tmp_path / "whole", max_train_steps=4, **given)
    _train(tiny_dit, tmp_path / "cut", max_train_steps=2, **given)
    _train(tiny_dit, tmp_path / "cut", max_train_steps=4, resume_from_checkpoint="latest", **given)
    last = "checkpoint-4"
    expected, actual = (trainer.checkpoint_sums(tmp_path / n / last) for n in ("whole", "cut"))
    assert expected
    assert expected == actual
    assert (tmp_path / "whole" / WEIGHTS).read_bytes() == (tmp_path / "cut" / WEIGHTS).read_bytes()


def test_validation_pictures_follow_the_prompt(tiny_dit: Path, tmp_path: Path) -> None:
    given = {"validation_prompt": ["a red circle", "a star"], "num_validation_images": 2}
    given |= {"validation_inference_steps": 1, "validation_guidance_scale": 3.0}
    _train(tiny_dit, tmp_path / "out", max_train_steps=1, **given)
    assert (tmp_path / "out" / "validation" / "step-000001.png").is_file()


def test_the_recipe_trains_a_model(tiny_dit: Path, tmp_path: Path) -> None:
    """`strop train text-to-image --config examples/sprites-dit.yaml`, in small."""
    file = Path(__file__).parents[2] / "examples" / "sprites-dit.yaml"
    recipe = given_settings.read_yaml(file)
    small = {"train_batch_size": 2, "max_train_steps": 2, "validation_prompt": []}
    small |= {"model": tiny_dit, "output_dir": tmp_path / "out", "mixed_precision": "bf16"}
    assert recipe["compile_unet"]
    small["compile_unet"] = False  # a test above compiles one
    trainer.train("text-to-image", **{**recipe, **small})
    assert load_file(tmp_path / "out" / WEIGHTS)
    assert given_settings.make("text-to-image", recipe).draws_sprites


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"snr_gamma": 5.0}, "snr_gamma is not for flow matching"),
        ({"prediction_type": "epsilon"}, "prediction_type is not for flow matching"),
        ({"mode_scale": 1.0}, "mode_scale changes nothing without --weighting_scheme mode"),
        ({"max_sequence_length": 7}, "max_sequence_length is for models with a T5"),
    ],
)
def test_what_it_has_nothing_for_is_refused(
    given: dict[str, Any], message: str, tiny_dit: Path, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=message):
        _session(tiny_dit, tmp_path / "out", **given)


def test_other_transformers_are_refused(tiny_dit: Path, tmp_path: Path) -> None:
    folder = tmp_path / "t5"
    shutil.copytree(tiny_dit, folder)
    index = json.loads((folder / "model_index.json").read_text())
    index["text_encoder_2"] = ["transformers", "T5EncoderModel"]
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(
        UnsupportedError, match=r"tokenizer_2 is CLIPTokenizer, and Flux.1, the nearest"
    ):
        _session(folder, tmp_path / "out")


def test_a_weighting_scheme_is_for_flow_matching(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="weighting_scheme is not for DDPM"):
        _session(tiny_model, tmp_path / "out", weighting_scheme="none")
    with pytest.raises(OptionError, match="weighting_scheme is 'even': choose none, logit_normal"):
        _session(tiny_model, tmp_path / "out", weighting_scheme="even")


def test_lost_weights_say_how_to_train_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sprites, "DIT_WEIGHTS", tmp_path / "nothing")
    with pytest.raises(StropError, match=r"lacks model_index\.json.*sprites-dit\.yaml"):
        trainer.session("text-to-image", model="sprites-dit", output_dir=tmp_path / "out")


@pytest.mark.usefixtures("shipped_dit")
def test_a_training_of_the_one_that_ships_gives_a_whole_folder(
    tiny_dit: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    trainer.train("text-to-image", model="sprites-dit", output_dir=out, max_train_steps=1)
    for part in ("vae/diffusion_pytorch_model", "text_encoder/model", "text_encoder_2/model"):
        before, after = (load_file(place / f"{part}.safetensors") for place in (tiny_dit, out))
        assert all(torch.equal(before[key], after[key]) for key in before), part
    for name in ("tokenizer", "tokenizer_2"):
        assert (out / name / "vocab.json").read_bytes() == (
            tiny_dit / name / "vocab.json"
        ).read_bytes()
    assert sprites.load_from(out).vae.config.shift_factor == 0.0


def test_latents_are_shifted_as_the_autoencoder_says(tiny_dit: Path, tmp_path: Path) -> None:
    """Flux's own autoencoder has a mean that is taken off before latents are scaled."""
    made = _session(tiny_dit, tmp_path / "out", train_batch_size=3)
    batch, found = made.source.batch(NUMBER), []
    for shift, scale in ((0.0, 1.0), (None, 1.0), (0.25, 0.5)):
        made.model.vae.register_to_config(shift_factor=shift, scaling_factor=scale)
        objective = Objective(made.settings, made.model, Recorded())
        draws = Draws(generator(0, "noise", NUMBER), batch.share)
        found.append(objective._latents(batch, draws))
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[2], (found[0] - 0.25) * 0.5)
