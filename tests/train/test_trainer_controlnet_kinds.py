"""Which ControlNets of Stable Diffusion 3 and Flux.1 there can be, and which are refused."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.errors import OptionError, UnsupportedError
from strop.train.families import control_flux, control_sd3
from strop.train.objective import Objective
from tests.train import trainer
from tests.train.controls import FEWER, KINDS, NUMBER, awake, given_for, session

diffusers = pytest.importorskip("diffusers")
# Importing and saving through transformers and diffusers warns about their own future.
pytestmark = pytest.mark.filterwarnings("ignore")

HEADS = {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32}
SIZES: dict[str, dict[str, Any]] = {
    "sd3": HEADS
    | {"sample_size": 4, "in_channels": 4, "out_channels": 4, "caption_projection_dim": 32}
    | {"pos_embed_max_size": 8, "pooled_projection_dim": 32},
    "flux": HEADS
    | {"in_channels": 16, "num_single_layers": 0, "pooled_projection_dim": 32}
    | {"axes_dims_rope": (4, 4, 8)},
}


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("sd3", {"num_double_layers": 3}, r"is 3: the transformer has 2 blocks.*take 0 or 1"),
        ("sd3", {"num_double_layers": 0}, "a ControlNet of no block steers nothing"),
        ("sd3", {"num_single_layers": 1}, "num_single_layers is not for ControlNets of Stable"),
        ("sd3", {"num_double_layers": 2}, "layers is 2: the transformer reads what 1 of them give"),
        ("flux", {"num_single_layers": 4}, "is 4: the transformer has 3 blocks.*take 2 or 3"),
        ("flux", {"num_double_layers": 0, "num_single_layers": 0}, "no block steers nothing"),
        ("flux", {"snr_gamma": 5.0}, "snr_gamma is not for flow matching"),
    ],
)
def test_numbers_that_do_not_fit(
    name: str,
    more: dict[str, Any],
    message: str,
    deep: dict[str, Path],
    controlled: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(OptionError, match=message):
        session(deep[name], controlled, tmp_path, **more)


@pytest.mark.parametrize("have", range(2, 7))
def test_what_a_transformer_reads(have: int) -> None:
    """What a ControlNet of any number of blocks gives for each of them is asked for or not."""
    for name, kind in (("sd3", "SD3Transformer2DModel"), ("flux", "FluxTransformer2DModel")):
        config = SIZES[name] | {"num_layers": have}
        made = getattr(diffusers, kind)(**config)
        for count in range(1, have + 1):
            read = (
                control_sd3._read(made, count) if name == "sd3" else control_flux._read(have, count)
            )
            assert read == len(asked(name, made, count)), (name, have, count)


def asked(name: str, made: Any, count: int) -> set[int]:
    class Answers(list[Tensor]):
        def __getitem__(self, place: Any) -> Any:
            found.add(place)
            return super().__getitem__(place)

    found: set[int] = set()
    added = Answers(torch.zeros(1, 4, 32) for _ in range(count))
    states = {"encoder_hidden_states": torch.zeros(1, 2, 32), "timestep": torch.ones(1)}
    states["pooled_projections"] = torch.zeros(1, 32)
    if name == "sd3":
        made(torch.zeros(1, 4, 4, 4), block_controlnet_hidden_states=added, **states)
    else:
        places = {"img_ids": torch.zeros(4, 3), "txt_ids": torch.zeros(2, 3)}
        made(torch.zeros(1, 4, 16), controlnet_block_samples=added, **states, **places)
    return found


def test_layers_are_for_transformers(tiny_model: Path, controlled: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="num_double_layers is not for ControlNets of UNets"):
        session(tiny_model, controlled, tmp_path, num_double_layers=1)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "sd3",
            {"_class_name": "ControlNetModel"},
            "holds a ControlNetModel; training is built for a SD3",
        ),
        ("sd3", {"extra_conditioning_channels": 1}, "1 extra_conditioning_channels.*inpainting"),
        ("sd3", {"use_pos_embed": False}, "use_pos_embed, joint_attention_dim.*not trained"),
        ("sd3", {"pooled_projection_dim": 48}, "its pooled_projection_dim is 48"),
        ("flux", {"num_mode": 3}, r"several kinds of pictures \(num_mode 3\)"),
        ("flux", {"joint_attention_dim": 48}, "its joint_attention_dim is 48"),
    ],
)
def test_controlnets_of_others_are_refused(
    name: str,
    changes: dict[str, Any],
    message: str,
    deep: dict[str, Path],
    started: dict[str, Path],
    controlled: Path,
    tmp_path: Path,
) -> None:
    config = json.loads((started[name] / "config.json").read_text())
    folder = tmp_path / "net"
    if "_class_name" in changes:
        shutil.copytree(started[name], folder)
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
    else:
        kind = getattr(diffusers, KINDS[name])
        names = inspect.signature(kind).parameters
        kind(**{k: v for k, v in {**config, **changes}.items() if k in names}).save_pretrained(
            folder
        )
    given = {"controlnet_model_name_or_path": folder}
    with pytest.raises((OptionError, UnsupportedError), match=message):
        session(deep[name], controlled, tmp_path / "out", **given)


def test_its_own_blocks_or_new_ones(
    deep: dict[str, Path], started: dict[str, Path], controlled: Path, tmp_path: Path
) -> None:
    given = {"controlnet_model_name_or_path": started["sd3"], **FEWER["sd3"]}
    with pytest.raises(OptionError, match="num_double_layers is for a new ControlNet"):
        session(deep["sd3"], controlled, tmp_path, **given)


def test_one_that_reads_pixels(
    deep: dict[str, Path], controlled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ControlNets of Flux with layers for pixels are shown these, from -1 to 1, and their blocks
    are added in turns, as in the pipeline. They read eight pixels for a latent."""
    config = json.loads((deep["flux"] / "transformer" / "config.json").read_text())
    names = set(inspect.signature(diffusers.FluxControlNetModel).parameters)
    known = {name: value for name, value in config.items() if name in names}
    size = {"patch_size": 2, "num_layers": 1, "num_single_layers": 0}
    net = diffusers.FluxControlNetModel(**{**known, **size, "conditioning_embedding_channels": 4})
    awake(net)
    net.save_pretrained(tmp_path / "net")
    given = {"controlnet_model_name_or_path": tmp_path / "net"}
    with pytest.raises(OptionError, match="its pixels per latent is 8, that of the model is 2"):
        session(deep["flux"], controlled, tmp_path / "out", **given)
    vae = diffusers.AutoencoderKL.load_config(deep["flux"] / "vae")
    kinds = {
        f"{a}_block_types": (f"{b}2D",) * 4
        for a, b in (("down", "DownEncoderBlock"), ("up", "UpDecoderBlock"))
    }
    diffusers.AutoencoderKL.from_config(
        {**vae, **kinds, "block_out_channels": (8, 8, 8, 8)}
    ).save_pretrained(tmp_path / "vae")
    given["pretrained_vae_model_name_or_path"] = tmp_path / "vae"
    made = session(deep["flux"], controlled, tmp_path / "out", **given)
    asked: list[dict[str, Any]] = []
    forward = made.model.unet.forward

    def noted(**given: Any) -> Any:
        asked.append(given)
        return forward(**given)

    monkeypatch.setattr(made.model.unet, "forward", noted)
    objective, batch = Objective(made.settings, made.model, made.unet), made.source.batch(NUMBER)
    assert batch.conditions is not None
    drawn = objective.drawn(batch, NUMBER)
    assert torch.equal(drawn.conditions, 2 * batch.conditions - 1)
    assert objective.loss(drawn).isfinite()
    assert asked[0]["controlnet_blocks_repeat"]
    assert asked[0]["controlnet_single_block_samples"] is None


def test_stable_diffusion_3_5(folders: dict[str, Path], controlled: Path, tmp_path: Path) -> None:
    """Its blocks have norms of queries and keys, and the first ones a second attention."""
    folder = tmp_path / "model"
    shutil.copytree(folders["sd3"], folder)
    config = json.loads((folder / "transformer" / "config.json").read_text())
    later = {"num_layers": 4, "qk_norm": "rms_norm", "dual_attention_layers": [0]}
    shutil.rmtree(folder / "transformer")
    made = diffusers.SD3Transformer2DModel.from_config({**config, **later})
    made.save_pretrained(folder / "transformer")
    shown = [str(controlled / "greys" / "0.png")]
    more = {"validation_prompt": ["a ring"], "validation_image": shown, "max_train_steps": 1}
    more |= {"num_validation_images": 1, "validation_inference_steps": 1}
    trainer.train("controlnet", **given_for(folder, controlled, tmp_path / "out", **more))
    net = diffusers.SD3ControlNetModel.from_pretrained(tmp_path / "out")
    kinds = [block.use_dual_attention for block in net.transformer_blocks]
    assert kinds == [True, False]
    assert net.config.qk_norm == "rms_norm"
    assert all(bool(layer.weight.any()) for layer in net.controlnet_blocks)


def test_flux_of_clips(tiny_dit: Path, controlled: Path, tmp_path: Path) -> None:
    """Such as sprites-dit."""
    shown = [str(controlled / "greys" / "0.png")]
    more = {"validation_prompt": ["a ring"], "validation_image": shown, "max_train_steps": 1}
    more |= {"num_validation_images": 1, "validation_inference_steps": 1}
    trainer.train("controlnet", **given_for(tiny_dit, controlled, tmp_path, **more))
    net = diffusers.FluxControlNetModel.from_pretrained(tmp_path)
    assert any(bool(layer.weight.any()) for layer in net.controlnet_blocks)
    assert (tmp_path / "validation" / "step-000001.png").is_file()
