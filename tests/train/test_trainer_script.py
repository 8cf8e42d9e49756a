"""The first step beside that of diffusers' scripts, as it stands in them, from the same draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from strop.train.data import Batch
from strop.train.draws import generator
from strop.train.objective import Objective
from strop.train.session import Session
from tests.e2e.tiny import DEVICES
from tests.train import trainer

diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # of diffusers

NUMBER = (
    3  # of the batch; none of its timesteps is without any signal, where the scripts divide 0/0
)
SCALE = 1024.0  # of the loss: fp16 has few numbers below 6e-5
LEAST = {"no": 1e-6, "bf16": 1e-5, "fp16": 1e-4}  # share of all gradients; smaller ones are noise
SUBJECT: dict[str, Any] = {
    "instance_prompt": "a sks ring",
    "with_prior_preservation": True,
    "class_prompt": "a ring",
    "num_class_images": 3,
    "prior_loss_weight": 0.5,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "epsilon": ("text-to-image", {"prediction_type": "epsilon"}),
    "v": ("text-to-image", {"prediction_type": "v_prediction"}),
    "snr of epsilon": ("text-to-image", {"prediction_type": "epsilon", "snr_gamma": 5.0}),
    "snr of v": ("text-to-image", {"prediction_type": "v_prediction", "snr_gamma": 5.0}),
    "noise offset": ("text-to-image", {"noise_offset": 0.1}),
    "input perturbation": ("text-to-image", {"input_perturbation": 0.1, "noise_offset": 0.1}),
    "dreambooth": ("dreambooth", {**SUBJECT, "train_text_encoder": True}),
    "lora": ("lora", {"train_text_encoder": True}),
}
PRECISIONS = [
    ("cpu", "no"),
    ("cpu", "bf16"),
    *(pytest.param("cuda", half, marks=DEVICES[1].marks) for half in ("no", "bf16", "fp16")),
]


def script_loss(made: Session, batch: Batch) -> Tensor:
    """From pixels and ids to the loss: ``train_text_to_image.py``, and where there are class
    pictures ``train_dreambooth.py``. Latents and noise are fp32, as they are in the scripts without
    mixed precision; with it these also round the noise schedule to the half type."""
    args, model = made.settings, made.model
    encoder = model.modules["text_encoder"]
    device, source = model.device, generator(made.settings.seed, "noise", NUMBER, model.device)
    scheduler = diffusers.DDPMScheduler.from_config(model.pipeline.scheduler.config)
    scheduler.register_to_config(prediction_type=model.process.prediction)
    with torch.no_grad():
        encoded = model.vae.encode(batch.pictures.to(device, model.vae.dtype)).latent_dist
        encoded = type(encoded)(encoded.parameters.float())
    latents = encoded.sample(source) * model.vae.config.scaling_factor
    noise = torch.randn(latents.shape, device=device, generator=source)
    if args.noise_offset:
        shape = (latents.shape[0], latents.shape[1], 1, 1)
        noise += args.noise_offset * torch.randn(shape, device=device, generator=source)
    new_noise = noise
    if args.input_perturbation:
        more = torch.randn(noise.shape, device=device, generator=source)
        new_noise = noise + args.input_perturbation * more
    count = scheduler.config.num_train_timesteps
    times = torch.randint(0, count, (len(latents),), device=device, generator=source).long()
    assert int(times.max()) < count - 1
    noisy = scheduler.add_noise(latents, new_noise, times)
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(args.mixed_precision)
    kind = half or torch.bfloat16  # accelerate casts in what it has prepared: what is trained
    with torch.autocast(device.type, kind, enabled=half is not None and args.train_text_encoder):
        states = encoder(batch.text.tensors["text_encoder"].to(device), return_dict=False)[0]
    with torch.autocast(device.type, kind, enabled=half is not None):
        guess = model.unet(noisy, times, states, return_dict=False)[0]
    is_noise = model.process.prediction == "epsilon"
    target = noise if is_noise else scheduler.get_velocity(latents, noise, times)
    return compared(args, scheduler, guess, target, times)


def compared(args: Any, scheduler: Any, guess: Tensor, target: Tensor, times: Tensor) -> Tensor:
    if args.with_prior_preservation:
        guess, guess_prior = torch.chunk(guess, 2, dim=0)
        target, target_prior = torch.chunk(target, 2, dim=0)
        prior = functional.mse_loss(guess_prior.float(), target_prior.float(), reduction="mean")
        loss = functional.mse_loss(guess.float(), target.float(), reduction="mean")
        return loss + args.prior_loss_weight * prior
    if args.snr_gamma is None:
        return functional.mse_loss(guess.float(), target.float(), reduction="mean")
    snr = diffusers.training_utils.compute_snr(scheduler, times)
    both = torch.stack([snr, args.snr_gamma * torch.ones_like(times)], dim=1)
    weights = both.min(dim=1)[0]
    weights = weights / (snr if scheduler.config.prediction_type == "epsilon" else snr + 1)
    loss = functional.mse_loss(guess.float(), target.float(), reduction="none")
    loss = loss.mean(dim=list(range(1, len(loss.shape)))) * weights
    return loss.mean()


def gradients(made: Session, loss: Tensor) -> dict[str, Tensor]:
    made.learner.forget_gradients()
    (loss * SCALE).backward()
    found = made.learner.named.items()
    return {name: p.grad.detach().double().flatten() for name, p in found if p.grad is not None}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("device", "precision"), PRECISIONS)
def test_first_step(
    device: str, precision: str, name: str, tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    task, given = CASES[name]
    place = "instance_data_dir" if "instance_prompt" in given else "train_data_dir"
    folders = {place: pictures, "output_dir": tmp_path / "out"}
    if "class_prompt" in given:
        folders["class_data_dir"] = tmp_path / "class"
    made = trainer.session(
        task, model=tiny_model, device=device, mixed_precision=precision, **given, **folders
    )
    made.learner.train()
    batch = made.source.batch(NUMBER)
    loss = Objective(made.settings, made.model, made.unet)(batch, NUMBER)
    ours = gradients(made, loss)
    expected = script_loss(made, batch)
    theirs = gradients(made, expected)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5 if precision == "no" else 1e-3)
    assert ours.keys() == theirs.keys()
    whole = torch.stack([g.norm() for g in theirs.values()]).norm()
    judged = {
        n: torch.cosine_similarity(ours[n], g, dim=0).item()
        for n, g in theirs.items()
        if g.norm() > LEAST[precision] * whole
    }
    assert len(judged) >= 0.5 * len(theirs), "of LoRA one half starts without a gradient"
    assert min(judged.values()) >= 0.9999, min(judged, key=lambda n: judged[n])
    if precision == "no":
        apart = torch.stack([(ours[n] - g).norm() for n, g in theirs.items()]).norm()
        assert apart < 1e-3 * whole
