"""Mixed precision: what is kept in the half type, what is fp32; and no step waits for a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import strop
from strop.train import drawing, lora
from strop.train.data import Reader
from strop.train.loop import TrainingLoop
from strop.train.metrics import Journal
from strop.train.objective import Objective
from strop.train.ranks import ALONE
from strop.train.session import Session
from tests.e2e.tiny import DEVICES, cache_dir
from tests.train import trainer
from tests.train.judge import no_waiting

diffusers = pytest.importorskip("diffusers")
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation"),  # of diffusers
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`"),
]
GPU = DEVICES[1].marks
HALVES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MIXED = [("cpu", "bf16"), *(pytest.param("cuda", kind, marks=GPU) for kind in ("bf16", "fp16"))]
PRECISIONS = [("cpu", "no"), pytest.param("cuda", "no", marks=GPU), *MIXED]
# Task -> its settings, and parts whose own weights are trained.
TASKS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "unet": ("text-to-image", {}, {"unet"}),
    "both": ("text-to-image", {"train_text_encoder": True}, {"unet", "text_encoder"}),
    "adapters": ("lora", {"train_text_encoder": True}, set()),
}


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("STROP_CACHE_DIR", cache_dir())
    products = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(products)
    torch.use_deterministic_algorithms(False)


def session(task: str, model: Path, pictures: Path, output: Path, **more: Any) -> Session:
    values = {"train_data_dir": pictures, "max_train_steps": 3, **more}
    return trainer.session(task, model=model, output_dir=output, **values)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize(("device", "precision"), PRECISIONS)
def test_what_is_not_trained_is_half(
    device: str, precision: str, name: str, tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    task, given, trained = TASKS[name]
    made = session(
        task, tiny_model, pictures, tmp_path, device=device, mixed_precision=precision, **given
    )
    learns = set(map(id, made.learner.parameters))
    for part, module in made.model.modules.items():
        for weight in module.parameters():
            is_ours = id(weight) in learns
            assert weight.dtype == (torch.float32 if is_ours else HALVES[precision])
            assert is_ours == weight.requires_grad
        assert all(id(p) in learns for p in module.parameters()) == (part in trained)
    batch = made.source.batch(0)
    assert (
        batch.pictures.device.type == next(iter(batch.text.tensors.values())).device.type == "cpu"
    )
    loss = Objective(made.settings, made.model, made.unet)(batch, 0)
    assert loss.dtype == torch.float32
    loss.backward()
    assert all(
        p.grad is not None and p.grad.dtype == torch.float32 for p in made.learner.parameters
    )


@pytest.mark.parametrize(("device", "precision"), MIXED)
def test_a_saved_model_has_the_untrained_parts_as_they_were(
    device: str, precision: str, tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    """Their rounded copies are for training; pictures are drawn with the parts together."""
    trainer.train(
        "text-to-image",
        model=tiny_model,
        train_data_dir=pictures,
        max_train_steps=2,
        output_dir=tmp_path,
        device=device,
        mixed_precision=precision,
        validation_prompt="a ring",
        num_validation_images=2,
        validation_inference_steps=2,
        validation_steps=1,
    )
    names = {"vae": "diffusion_pytorch_model", "text_encoder": "model"}
    for part, file in names.items():
        ours, theirs = (load_file(f / part / f"{file}.safetensors") for f in (tmp_path, tiny_model))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert len(list((tmp_path / "validation").iterdir())) == 3
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path)
    assert trainer.picture(pipe).isfinite().all()


@pytest.mark.parametrize(("device", "precision"), MIXED)
def test_a_compiled_unet_draws_without_it(
    device: str, precision: str, tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    """Under autocast; its compiled passes are there again for the next step."""
    style, pages = drawing.Style(trainer.SIDE, 4.0, 2), []
    for is_compiled in (False, True):
        made = session(
            "text-to-image",
            tiny_model,
            pictures,
            tmp_path,
            device=device,
            mixed_precision=precision,
            compile_unet=is_compiled,
            validation_prompt="a ring",
            deterministic=True,
        )
        made.learner.train(False)
        pages += drawing.validate(made.settings, made.model, style, ALONE)[0]
        assert ("forward" in vars(made.unet)) == is_compiled
    assert strop.explain(made.unet).num_graphs == 0
    half = len(pages) // 2
    assert [p.tobytes() for p in pages[:half]] == [p.tobytes() for p in pages[half:]]


@pytest.mark.parametrize(("device", "precision"), MIXED)
def test_adapters_of_mixed_precision(
    device: str, precision: str, tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    """The files hold what was trained, in fp32, and fit the model as it was."""
    made = session(
        "lora",
        tiny_model,
        pictures,
        tmp_path,
        device=device,
        rank=3,
        mixed_precision=precision,
        train_text_encoder=True,
    )
    TrainingLoop(made, trainer.Watch()).run()
    stored = load_file(tmp_path / lora.DIFFUSERS_NAME)
    live = {name.replace(".default.", "."): p for name, p in made.learner.named.items()}
    assert len(stored) == len(live)
    wanted = sorted(p.norm().item() for p in live.values())
    assert sorted(t.norm().item() for t in stored.values()) == pytest.approx(wanted, rel=1e-6)
    assert all(t.dtype == torch.float32 for t in stored.values())
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(tiny_model)
    before = trainer.picture(pipe)
    pipe.load_lora_weights(tmp_path, weight_name=lora.KOHYA_NAME)
    assert not torch.equal(trainer.picture(pipe), before)


@pytest.mark.parametrize(("device", "precision"), PRECISIONS)
def test_caches_are_of_one_precision(
    device: str, precision: str, tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    """A file of another one is another file, and holds what a training without caches computes."""
    common = {"device": device, "center_crop": True, "random_flip": True}
    cached = {"cache_latents": True, "pre_compute_text_embeddings": True}
    losses = []
    for extra, kind in (({}, precision), (cached, "no"), (cached, precision)):
        made = session(
            "text-to-image", tiny_model, pictures, tmp_path, mixed_precision=kind, **common, **extra
        )
        objective = Objective(made.settings, made.model, made.unet)
        losses.append([objective(made.source.batch(n), n).item() for n in range(4)])
    assert losses[2] == pytest.approx(losses[0], rel=1e-5 if precision == "no" else 1e-3)
    files = list((tmp_path / "cache").iterdir())
    assert len(files) == (2 if precision == "no" else 4)
    batch = made.source.batch(0)
    assert (batch.pictures.dtype, batch.text.tensors["states"].dtype) == (
        torch.float32,
        HALVES[precision],
    )


# Settings of trainings on a GPU -> how near the losses of four steps are to those of plain fp32.
# bf16 on a CPU: 3e-4. A scaler leaves out first steps, and each changes losses by up to 3e-2.
ON_A_GPU: dict[str, tuple[dict[str, Any], float]] = {
    "fp32": ({"use_ema": True}, 1e-3),
    "tf32": ({"allow_tf32": True}, 3e-3),
    "bf16": ({"mixed_precision": "bf16", "use_ema": True}, 5e-3),
    "fp16": ({"mixed_precision": "fp16", "use_ema": True}, 0.1),
    "8 bits": ({"mixed_precision": "bf16", "use_8bit_adam": True}, 5e-3),
    "checkpoints": ({"mixed_precision": "bf16", "gradient_checkpointing": True}, 5e-3),
    "compiled": ({"compile_unet": True}, 3e-3),
    "compiled bf16": ({"compile_unet": True, "mixed_precision": "bf16"}, 5e-3),
    "compiled fp16": ({"compile_unet": True, "mixed_precision": "fp16"}, 0.1),
}
SOURCES: dict[str, dict[str, Any]] = {
    "pictures": {},
    "drawings": {"train_data_dir": "", "dataset_name": "sprites"},
}
OTHERS = [("text-to-image", "drawings"), ("lora", "pictures"), ("lora", "drawings")]
KINDS = [
    *(("text-to-image", "pictures", name) for name in ON_A_GPU),
    *((*other, name) for other in OTHERS for name in ("fp32", "bf16", "fp16")),
    *((*other, "compiled bf16") for other in OTHERS[:2]),
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("task", "source", "name"), KINDS)
def test_losses_on_a_gpu(
    task: str, source: str, name: str, tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    """Of whole trainings from the same draws, to the model that is saved."""
    given, near = ON_A_GPU[name]
    found = {}
    for kind, more in (("plain", {}), ("other", given)):
        values = {
            "model": tiny_model,
            "train_data_dir": pictures,
            "max_train_steps": 4,
            "output_dir": tmp_path / kind,
            "device": "cuda",
            **SOURCES[source],
            **more,
        }
        trainer.train(task, **values)
        rows = (tmp_path / kind / "metrics.jsonl").read_text().splitlines()
        found[kind] = [json.loads(row)["loss"] for row in rows]
    assert len(found["other"]) == 4
    assert found["other"] == pytest.approx(found["plain"], rel=near)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_compiled_steps_leave_nothing_to_torch(
    tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    made = session(
        "text-to-image",
        tiny_model,
        pictures,
        tmp_path,
        device="cuda",
        compile_unet=True,
        mixed_precision="bf16",
    )
    TrainingLoop(made, trainer.Watch()).run()
    report = strop.explain(made.unet)
    assert {graph.role for graph in report.graphs} >= {"forward", "backward"}
    assert not report.fallbacks


WAITS: dict[str, dict[str, Any]] = {
    "pixels and ids": {"use_ema": True},
    "moments and embeddings": {
        "cache_latents": True,
        "center_crop": True,
        "random_flip": True,
        "pre_compute_text_embeddings": True,
    },
    "threads": {
        "dataloader_num_workers": 2,
        "noise_offset": 0.1,
        "input_perturbation": 0.1,
        "snr_gamma": 5.0,
    },
    "text encoder": {"train_text_encoder": True, "gradient_accumulation_steps": 2},
    "fp16": {"mixed_precision": "fp16"},
    "bf16": {"mixed_precision": "bf16", "gradient_checkpointing": True},
    "drawings": SOURCES["drawings"],
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", WAITS)
def test_no_step_waits_for_the_gpu(
    name: str, tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    """From reading a batch, which is pinned, to the update. Reports of losses do wait."""
    made = session(
        "text-to-image",
        tiny_model,
        pictures,
        tmp_path,
        device="cuda",
        max_train_steps=8,
        **WAITS[name],
    )
    loop = TrainingLoop(made, trainer.Watch())
    loop.journal = Journal(made.settings, 0)
    size = made.settings.gradient_accumulation_steps
    reader = Reader(made.source, 0, 8 * size, made.settings.dataloader_num_workers, pins=True)
    made.learner.train()
    for step in range(8):
        if step < 4:  # memory is taken, kernels are loaded
            loop._one(reader)
        else:
            with no_waiting():
                loop._one(reader)
    loop._report()
    batch = Reader(made.source, 0, 1, 0, pins=True).next()
    assert all(t.is_cuda or t.is_pinned() for t in (batch.pictures, *batch.text.tensors.values()))
    reader.close()
    loop.journal.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_scaled_losses_on_a_gpu(tiny_model: Path, pictures: Path, tmp_path: Path) -> None:
    """A scale that is too large leaves out steps until it fits; the weights stay finite."""
    made = session(
        "text-to-image",
        tiny_model,
        pictures,
        tmp_path,
        device="cuda",
        mixed_precision="fp16",
        use_ema=True,
        max_train_steps=24,
    )
    scaler = made.learner.steps.scaler
    assert scaler is not None
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**30})
    before = [p.detach().clone() for p in made.learner.parameters]
    TrainingLoop(made, trainer.Watch()).run()
    assert 1 <= scaler.get_scale() < 2.0**30
    assert all(p.isfinite().all() for p in made.learner.parameters)
    assert any(
        not torch.equal(p, old) for p, old in zip(made.learner.parameters, before, strict=True)
    )


def test_channels_last_weights_are_saved(tiny_model: Path, pictures: Path, tmp_path: Path) -> None:
    """As a GPU has them."""
    made = session("text-to-image", tiny_model, pictures, tmp_path)
    nn.Module.to(made.model.unet, memory_format=torch.channels_last)
    TrainingLoop(made, trainer.Watch()).run()
    for name, tensor in trainer.weights(tmp_path).items():
        assert torch.equal(tensor, made.learner.named[f"unet.{name}"])
