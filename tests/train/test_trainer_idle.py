"""Parts that no step reads are away while steps run, and there while pictures are drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.errors import TrainingError
from strop.train import idle_parts
from strop.train.loop import Outcome
from tests.train import trainer

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # of diffusers
CACHED = {"cache_latents": True, "center_crop": True, "pre_compute_text_embeddings": True}


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> dict[int, Tensor]:
    """A CPU stands for a GPU: what is away is NaN, and what is there a copy of what it was."""
    kept: dict[int, Tensor] = {}

    def host_copy(tensor: Tensor) -> Tensor:
        is_float = tensor.is_floating_point()
        junk = torch.full_like(tensor, float("nan")) if is_float else torch.zeros_like(tensor)
        kept[id(junk)] = tensor.clone()
        return junk

    monkeypatch.setattr(idle_parts, "host_copy", host_copy)
    monkeypatch.setattr(idle_parts, "device_copy", lambda host, device: kept[id(host)].clone())
    monkeypatch.setattr(idle_parts, "has_own_memory", lambda device: True)
    return kept


def _given(model: Path, pictures: Path, output: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "train_data_dir": str(pictures),
        "output_dir": str(output),
        "max_train_steps": 2,
        "validation_prompts": ["a ring"],
        "validation_steps": 1,
        "num_validation_images": 1,
        "validation_inference_steps": 2,
        **more,
    }


def test_steps_and_pictures_are_those_of_parts_that_stay(
    folders: dict[str, Path], pictures: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    made = []
    for name in ("stay", "go"):
        if name == "go":
            away = request.getfixturevalue("away")
        given = _given(folders["sdxl"], pictures, tmp_path / name, **CACHED)
        assert trainer.train("lora", **given) == Outcome(2, 2)
        files = sorted((tmp_path / name).glob("**/step-*.png"))
        files.append(tmp_path / name / "pytorch_lora_weights.safetensors")
        made.append([path.read_bytes() for path in files])
    assert len(made[0]) == 4
    assert made[0] == made[1]
    assert len(away) > 30


@pytest.mark.usefixtures("away")
def test_a_step_that_reads_them_would_be_seen(
    folders: dict[str, Path], pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_parts, "names_of_idle", lambda settings, model: ["text_encoder"])
    with pytest.raises(TrainingError, match="is nan"):
        trainer.train("lora", **_given(folders["sdxl"], pictures, tmp_path))


@pytest.mark.parametrize(
    ("task", "more", "names"),
    [
        ("lora", {}, []),
        ("lora", {"pre_compute_text_embeddings": True}, ["text_encoder", "text_encoder_2"]),
        ("lora", {"cache_latents": True, "center_crop": True}, ["vae"]),
        ("lora", CACHED, ["text_encoder", "text_encoder_2", "vae"]),
    ],
)
def test_what_is_idle(
    task: str, more: Any, names: list[str], folders: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    made = trainer.session(task, **_given(folders["sdxl"], pictures, tmp_path, **more))
    assert idle_parts.names_of_idle(made.settings, made.model) == names


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(folders: dict[str, Path], pictures: Path, tmp_path: Path) -> None:
    given = _given(folders["sdxl"], pictures, tmp_path, device="cuda", **CACHED)
    made = trainer.session("lora", **given)
    parts = [made.model.modules[name] for name in ("text_encoder", "text_encoder_2", "vae")]

    def devices() -> set[str]:
        return {t.device.type for part in parts for t in (*part.parameters(), *part.buffers())}

    assert devices() == {"cpu"}
    with made.idle.here():
        assert devices() == {"cuda"}
    assert devices() == {"cpu"}
    assert trainer.train("lora", **given) == Outcome(2, 2)
