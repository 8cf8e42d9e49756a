"""The loss against closed forms, and against diffusers' own schedulers and scripts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.errors import OptionError, TrainingError
from strop.train import compiled, given_settings, training_settings
from strop.train.data import Batch
from strop.train.ddpm import snr_weights, target_of
from strop.train.draws import generator
from strop.train.loop import TrainingLoop
from strop.train.objective import Objective, joined
from strop.train.schedules import learning_rate
from tests.e2e.tiny import DEVICES, cache_dir
from tests.train import trainer

diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # of diffusers


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("STROP_CACHE_DIR", cache_dir())
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("gamma", [0.0, 1.0, 5.0])
def test_min_snr_weighs_the_loss_of_the_picture(prediction: str, gamma: float) -> None:
    """Whatever is predicted, the weighted loss is min(SNR, gamma) times that of the picture."""
    signal = torch.tensor([0.999, 0.9, 0.5, 0.1, 0.004], dtype=torch.float64)
    keep, lose = signal.sqrt()[:, None], (1 - signal).sqrt()[:, None]
    picture, noise, error = torch.randn(3, 5, 7, dtype=torch.float64, generator=_source()).unbind()
    noisy = keep * picture + lose * noise
    guessed = picture + error
    implied_noise = (noisy - keep * guessed) / lose
    target = target_of(prediction, picture, noise, keep, lose)
    guess = target_of(prediction, guessed, implied_noise, keep, lose)
    rows = (guess - target).square().mean(1) * snr_weights(signal, gamma, prediction)
    snr = signal / (1 - signal)
    expected = torch.minimum(snr, torch.tensor(gamma)) * error.square().mean(1)
    torch.testing.assert_close(rows, expected, rtol=1e-9, atol=1e-12)


def test_min_snr_without_any_signal() -> None:
    """At zero terminal SNR: the limit 1 for the noise, 0 for v, whose target is the picture."""
    nothing = torch.zeros(1)
    assert snr_weights(nothing, 5.0, "epsilon").item() == 1.0
    assert snr_weights(nothing, 5.0, "v_prediction").item() == 0.0


def test_prior_preservation_counts_both_means() -> None:
    rows = torch.tensor([1.0, 3.0, 10.0, 30.0])
    assert joined(rows, 2, 0.5).item() == 2.0 + 0.5 * 20.0
    assert joined(rows, 4, 0.5).item() == 11.0


def _source() -> torch.Generator:
    return torch.Generator().manual_seed(0)


class Recorder(nn.Module):
    """Remembers what the UNet is asked, and answers zeros."""

    def forward(
        self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, return_dict: bool
    ) -> Any:
        self.noisy, self.times, self.text = sample, timestep, encoder_hidden_states
        return (torch.zeros_like(sample),)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_noise_and_target_are_those_of_diffusers(
    prediction: str, tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    made = trainer.session(
        "text-to-image",
        model=tiny_model,
        train_data_dir=pictures,
        output_dir=tmp_path,
        prediction_type=prediction,
    )
    model, recorder = made.model, Recorder()
    batch = made.source.batch(5)
    loss = Objective(made.settings, model, recorder)(batch, 5)
    source = generator(0, "noise", 5)
    with torch.no_grad():
        encoded = model.vae.encode(batch.pictures).latent_dist
        drawn = torch.randn(encoded.mean.shape, generator=source)
        latents = (encoded.mean + encoded.std * drawn) * model.vae.config.scaling_factor
        noise = torch.randn(latents.shape, generator=source)
        times = torch.randint(1000, (len(latents),), generator=source)
        noises = diffusers.DDPMScheduler.from_config(model.pipeline.scheduler.config)
        text = model.modules["text_encoder"](batch.text.tensors["text_encoder"])[0]
    wanted = noise if prediction == "epsilon" else noises.get_velocity(latents, noise, times)
    torch.testing.assert_close(recorder.noisy, noises.add_noise(latents, noise, times))
    assert torch.equal(recorder.times, times)
    assert torch.equal(recorder.text, text)
    torch.testing.assert_close(loss, wanted.square().mean())


@pytest.mark.parametrize("device", DEVICES)
def test_a_training_without_strop_gives_the_same_weights(
    device: str, tiny_model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop of diffusers' script with torch's AdamW, clip and EMAModel, from the same draws."""
    from diffusers.training_utils import EMAModel

    # TF32 would make 1e-4 of a rounding in the last bit.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    values: dict[str, Any] = {
        "model": tiny_model,
        "train_data_dir": pictures,
        "use_ema": True,
        "gradient_accumulation_steps": 2,
        "max_train_steps": 4,
        "lr_scheduler": "cosine",
        "lr_warmup_steps": 2,
        "device": device,
        "deterministic": True,
    }
    trainer.train("text-to-image", **values, output_dir=tmp_path / "ours")
    made = trainer.session("text-to-image", **values, output_dir=tmp_path / "theirs")
    unet = made.model.unet.train()
    objective = Objective(made.settings, made.model, unet)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    rates = diffusers.optimization.get_scheduler(
        "cosine", optimizer, num_warmup_steps=2, num_training_steps=4
    )
    average = EMAModel(unet.parameters(), decay=0.9999)
    for step in range(4):
        for part in range(2):
            number = step * 2 + part
            (objective(made.source.batch(number), number) / 2).backward()
        nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        average.step(unet.parameters())
    average.copy_to(unet.parameters())
    ours = trainer.weights(tmp_path / "ours")
    for name, tensor in unet.state_dict().items():
        torch.testing.assert_close(ours[name], tensor.cpu(), rtol=1e-4, atol=NEAR[device])


NEAR = {"cpu": 1e-6, "cuda": 1e-5}  # a step moves a weight by 1e-3
# Device, precision, whether it is compiled.
LEARNS = [
    ("cpu", "no", False),
    *(
        pytest.param("cuda", *more, marks=DEVICES[1].marks)
        for more in (("no", False), ("bf16", False), ("fp16", False), ("bf16", True))
    ),
]


@pytest.mark.parametrize(("device", "precision", "compiled_unet"), LEARNS)
def test_it_learns(
    device: str,
    precision: str,
    compiled_unet: bool,
    tiny_model: Path,
    pictures: Path,
    tmp_path: Path,
) -> None:
    """From random weights; judged on noise that was not trained on."""
    made = trainer.session(
        "text-to-image",
        model=tiny_model,
        train_data_dir=pictures,
        from_scratch=True,
        train_text_encoder=True,
        output_dir=tmp_path,
        max_train_steps=40,
        train_batch_size=5,
        center_crop=True,
        cache_latents=True,
        learning_rate=1e-2,
        device=device,
        mixed_precision=precision,
        compile_unet=compiled_unet,
    )
    objective = Objective(made.settings, made.model, made.unet)

    def loss() -> float:
        found = [objective(made.source.batch(n), n).detach() for n in range(1000, 1008)]
        return torch.stack(found).mean().item()

    before = loss()
    TrainingLoop(made, trainer.Watch()).run()
    assert loss() < 0.93 * before


@pytest.mark.parametrize("name", training_settings.SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 3])
def test_rates_are_those_of_diffusers(name: str, warmup: int) -> None:
    made = given_settings.make(
        "text-to-image",
        {
            "model": "sprites",
            "lr_scheduler": name,
            "lr_warmup_steps": warmup,
            "lr_num_cycles": 2,
            "lr_power": 1.5,
            "learning_rate": 1e-3,
            "max_train_steps": 12,
        },
    )
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
    theirs = diffusers.optimization.get_scheduler(
        name, optimizer, num_warmup_steps=warmup, num_training_steps=12, num_cycles=2, power=1.5
    )
    for step in range(14):
        rate = learning_rate(made, step, 12)
        assert math.isclose(rate, theirs.get_last_lr()[0], rel_tol=1e-9, abs_tol=1e-18), step
        optimizer.step()
        theirs.step()


def test_scaled_rate() -> None:
    made = given_settings.make(
        "dreambooth",
        {
            "model": "sprites",
            "instance_data_dir": "d",
            "instance_prompt": "x",
            "scale_lr": True,
            "gradient_accumulation_steps": 3,
            "train_batch_size": 2,
        },
    )
    assert made.rate == pytest.approx(6 * 5e-6)


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        ("cpu", "no"),
        *(pytest.param("cuda", kind, marks=DEVICES[1].marks) for kind in ("no", "fp16")),
    ],
)
def test_a_loss_that_is_not_finite_ends_the_training(
    device: str, precision: str, tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    """Also where a scaler leaves out steps: it would leave out all of them."""
    made = trainer.session(
        "text-to-image",
        model=tiny_model,
        train_data_dir=pictures,
        output_dir=tmp_path,
        max_train_steps=6,
        checkpointing_steps=2,
        device=device,
        mixed_precision=precision,
    )
    loop = TrainingLoop(made, trainer.Watch())
    honest = loop.runs.micro_batch

    def poisoned(batch: Batch, number: int, rate: float | None) -> Tensor:
        factor = math.nan if number == 3 else 1.0
        return honest(replace(batch, pictures=batch.pictures * factor), number, rate)

    loop.runs.micro_batch = poisoned  # type: ignore[method-assign]
    advice = r"Start anew in another --output_dir with a lower --learning_rate"
    with pytest.raises(TrainingError, match=rf"loss of step 4 is nan; checkpoint-2 .*{advice}"):
        loop.run()
    check_what_is_kept(tmp_path)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_that_are_not_finite_end_the_training(
    device: str, tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    """Of a finite loss: the clip would spread them over all weights."""
    made = trainer.session(
        "text-to-image",
        model=tiny_model,
        train_data_dir=pictures,
        output_dir=tmp_path,
        max_train_steps=6,
        checkpointing_steps=2,
        checkpoints_total_limit=1,
        device=device,
    )
    loop = TrainingLoop(made, trainer.Watch())
    honest, weight = loop.runs.micro_batch, loop.learner.parameters[0]
    factor = torch.ones((), device=device)  # a CUDA graph reads it in every replay
    weight.register_hook(lambda gradient: gradient * factor)

    def poisoned(batch: Batch, number: int, rate: float | None) -> Tensor:
        factor.fill_(math.inf if number == 3 else 1.0)
        return honest(batch, number, rate)

    loop.runs.micro_batch = poisoned  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match=r"norm of the gradients of step 4 is (inf|nan);"):
        loop.run()
    check_what_is_kept(tmp_path)


def check_what_is_kept(tmp_path: Path) -> None:
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert not (tmp_path / "model_index.json").exists()


def test_sprites_generator_needs_a_number_of_steps(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no epochs: give --max_train_steps"):
        trainer.session(
            "text-to-image", model=tiny_model, dataset_name="sprites", output_dir=tmp_path
        )


def of_one(network: nn.Module) -> Any:
    return SimpleNamespace(denoisers=[network], unet=network)


def test_a_compiled_unet_is_trained_in_place() -> None:
    """Its gradients are judged in test_compiled_models.py."""
    unet = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 4, 3, padding=1))
    prepared = compiled.prepare(of_one(unet.train()), True)
    assert prepared is unet
    prepared(torch.randn(2, 4, 8, 8)).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in unet.parameters())
    report = strop.explain(unet)
    assert {graph.role for graph in report.graphs} == {"forward", "backward"}
    assert not report.fallbacks
    plain = nn.Linear(2, 2)
    assert compiled.prepare(of_one(plain), False) is plain
    assert "forward" not in vars(plain)
