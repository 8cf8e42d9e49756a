"""Every flag of diffusers' scripts does what it does there, or says why not and what to do."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from strop.cli import app
from strop.errors import OptionError, UnsupportedError
from strop.train import data_settings, given_settings, settings, unbuilt_flags
from strop.train.crops import Crop, pixels_of
from tests.train import trainer

# The argument parsers of diffusers 0.35.
EVERY_SCRIPT = """
adam_beta1 adam_beta2 adam_epsilon adam_weight_decay allow_tf32 center_crop checkpointing_steps
checkpoints_total_limit dataloader_num_workers enable_xformers_memory_efficient_attention
gradient_accumulation_steps gradient_checkpointing hub_model_id hub_token learning_rate local_rank
logging_dir lr_scheduler lr_warmup_steps max_grad_norm max_train_steps mixed_precision
num_train_epochs output_dir pretrained_model_name_or_path push_to_hub report_to resolution
resume_from_checkpoint revision scale_lr seed snr_gamma train_batch_size use_8bit_adam variant
"""
PICTURES = """
cache_dir caption_column dataset_config_name dataset_name image_column image_interpolation_mode
max_train_samples noise_offset prediction_type random_flip train_data_dir validation_epochs
"""
SUBJECT = """
class_data_dir class_labels_conditioning class_prompt instance_data_dir instance_prompt
lr_num_cycles lr_power num_class_images num_validation_images pre_compute_text_embeddings
prior_generation_precision prior_loss_weight sample_batch_size text_encoder_use_attention_mask
tokenizer_max_length tokenizer_name train_text_encoder validation_images validation_prompt
with_prior_preservation
"""
SCRIPTS = {
    "train_text_to_image.py": (
        "text-to-image",
        EVERY_SCRIPT
        + PICTURES
        + """
        dream_detail_preservation dream_training foreach_ema input_perturbation non_ema_revision
        offload_ema tracker_project_name use_ema validation_prompts""",
    ),
    "train_text_to_image_lora.py": (
        "lora",
        EVERY_SCRIPT
        + PICTURES
        + """
        num_validation_images rank validation_prompt""",
    ),
    "train_dreambooth.py": (
        "dreambooth",
        EVERY_SCRIPT
        + SUBJECT
        + """
        offset_noise set_grads_to_none skip_save_text_encoder validation_scheduler
        validation_steps""",
    ),
    "train_dreambooth_lora.py": (
        "lora",
        EVERY_SCRIPT
        + SUBJECT
        + """
        image_interpolation_mode rank use_dora validation_epochs""",
    ),
}
BEYOND = """
adam_weight_decay_text_encoder enable_npu_flash_attention optimizer prodigy_beta3 prodigy_decouple
prodigy_safeguard_warmup prodigy_use_bias_correction repeats text_encoder_lr
"""
FLOW = """
logit_mean logit_std max_sequence_length mode_scale upcast_before_saving weighting_scheme
"""
CONTROL = """
adam_beta1 adam_beta2 adam_epsilon adam_weight_decay allow_tf32 cache_dir caption_column
checkpointing_steps checkpoints_total_limit conditioning_image_column controlnet_model_name_or_path
dataloader_num_workers dataset_config_name dataset_name enable_xformers_memory_efficient_attention
gradient_accumulation_steps gradient_checkpointing hub_model_id hub_token image_column learning_rate
logging_dir lr_num_cycles lr_power lr_scheduler lr_warmup_steps max_grad_norm max_train_samples
max_train_steps mixed_precision num_train_epochs num_validation_images output_dir
pretrained_model_name_or_path proportion_empty_prompts push_to_hub report_to resolution
resume_from_checkpoint revision scale_lr seed set_grads_to_none tokenizer_name
tracker_project_name train_batch_size train_data_dir use_8bit_adam validation_image
validation_prompt validation_steps variant
"""
SUBJECTS = """
adam_beta1 adam_beta2 allow_tf32 caption_column center_crop class_data_dir class_prompt dataset_name
image_column instance_data_dir instance_prompt num_validation_images rank random_flip
train_text_encoder validation_epochs validation_prompt with_prior_preservation
"""
# Script -> the tasks that have its flags between them, and the flags.
SCRIPTS_OF_FAMILIES = {
    "train_text_to_image_sdxl.py": (
        "text-to-image",
        EVERY_SCRIPT
        + PICTURES
        + """
        enable_npu_flash_attention pretrained_vae_model_name_or_path proportion_empty_prompts
        timestep_bias_begin timestep_bias_end timestep_bias_multiplier timestep_bias_portion
        timestep_bias_strategy use_ema validation_prompt num_validation_images""",
    ),
    "train_text_to_image_lora_sdxl.py": (
        "lora",
        EVERY_SCRIPT
        + """
        debug_loss enable_npu_flash_attention pretrained_vae_model_name_or_path rank
        train_text_encoder""",
    ),
    "train_dreambooth_lora_sdxl.py": (
        "lora",
        SUBJECTS
        + BEYOND
        + """
        do_edm_style_training lora_dropout output_kohya_format pretrained_vae_model_name_or_path
        snr_gamma use_dora""",
    ),
    "train_controlnet.py": ("controlnet", CONTROL),
    "train_controlnet_sdxl.py": (
        "controlnet",
        CONTROL
        + """
        crops_coords_top_left_h crops_coords_top_left_w enable_npu_flash_attention
        image_interpolation_mode pretrained_vae_model_name_or_path upcast_before_saving""",
    ),
    "train_controlnet_sd3.py": (
        "controlnet",
        CONTROL
        + FLOW.replace("upcast_before_saving", "upcast_vae")
        + "dataset_preprocess_batch_size num_extra_conditioning_channels precondition_outputs",
    ),
    "train_controlnet_flux.py": (
        "controlnet",
        CONTROL
        + """
        enable_model_cpu_offload enable_npu_flash_attention guidance_scale jsonl_for_train
        logit_mean logit_std mode_scale num_double_layers num_single_layers
        pretrained_vae_model_name_or_path save_weight_dtype use_adafactor weighting_scheme""",
    ),
    "train_dreambooth_sd3.py": ("dreambooth", BEYOND + FLOW + "precondition_outputs"),
    "train_dreambooth_lora_sd3.py": (
        "lora",
        SUBJECTS + BEYOND + FLOW + "lora_blocks lora_layers precondition_outputs",
    ),
    "train_dreambooth_flux.py": ("dreambooth", BEYOND + FLOW + "guidance_scale"),
    "train_dreambooth_lora_flux.py": (
        "lora",
        SUBJECTS + BEYOND + FLOW + "guidance_scale lora_layers",
    ),
}


UNUSED = {*unbuilt_flags.UNBUILT, *unbuilt_flags.NEEDLESS}


@pytest.mark.parametrize("script", [*SCRIPTS, *SCRIPTS_OF_FAMILIES])
def test_every_flag_is_known(script: str) -> None:
    task, names = {**SCRIPTS, **SCRIPTS_OF_FAMILIES}[script]
    mine = {spelt for knob in settings.flags(task) for spelt in (knob.name, knob.metadata["alias"])}
    assert [name for name in names.split() if name not in mine | UNUSED] == []


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["train", *words], env={"COLUMNS": "300"})
    return done.exit_code, " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize("name", unbuilt_flags.UNBUILT)
def test_what_is_not_built_says_why(name: str) -> None:
    """On the command line in both spellings, with its value or without, and in a file."""
    reason = unbuilt_flags.UNBUILT[name]
    assert ";" in reason or "--" in reason, "it says what to do instead"
    forms = [[f"--{name}"], [f"--{name.replace('_', '-')}"]]
    if name not in unbuilt_flags.SWITCHES:
        forms = [[f"--{name}", "x"], [f"--{name.replace('_', '-')}=x"]]
    for form in forms:
        code, said = run("lora", "--model", "sprites", *form)
        assert (code, reason in said) == (2, True), said
    with pytest.raises(UnsupportedError, match=f"--{name}: "):
        given_settings.make("lora", {"model": "sprites", name: True})
    made = given_settings.make(
        "lora", {"model": "sprites", name: None, name.replace("_", "-"): False}
    )
    assert made.is_sprites


NEEDLESS_VALUES = {"prior_generation_precision": "fp16"}


@pytest.mark.parametrize("name", unbuilt_flags.NEEDLESS)
def test_what_is_needless_is_taken(name: str, tmp_path: Path) -> None:
    """With a warning, from the command line in both spellings and from a file."""
    said_why = f"warning: --{name} changes nothing: {unbuilt_flags.NEEDLESS[name]}"
    (tmp_path / "t.yaml").write_text(f"{name}: {NEEDLESS_VALUES.get(name, 'true')}\n")
    value = [NEEDLESS_VALUES[name]] if name in NEEDLESS_VALUES else []
    for form in (
        [f"--{name}", *value],
        [f"--{name.replace('_', '-')}", *value],
        ["--config", str(tmp_path / "t.yaml")],
    ):
        code, said = run("lora", "--model", "sprites", "--train_data_dir", "gone", *form)
        assert (code, said.count(said_why)) == (1, 1), said
        assert "the folder gone does not exist" in said  # it went on
    plain = {"model": "sprites"}
    assert given_settings.make("lora", {**plain, name: True}) == given_settings.make("lora", plain)
    assert given_settings.needless({**plain, name: None, name.replace("_", "-"): False}) == []


@pytest.mark.parametrize("tracker", ["wandb", "comet_ml", "all"])
def test_other_trackers(tracker: str) -> None:
    code, said = run("lora", "--model", "sprites", "--report_to", tracker)
    assert code == 2
    assert f"--report_to {tracker}: metrics.jsonl has every number" in said


# A slip -> what is suggested.
SLIPS = {
    "--rnak": "--rank",
    "--train_bath_size": "--train-batch-size",
    "--snr": "--snr-gamma",
    "--learning-rte": "--learning-rate",
    "--mixed_precison": "--mixed-precision",
}


@pytest.mark.parametrize("slip", SLIPS)
def test_slips(slip: str) -> None:
    code, said = run("lora", "--model", "sprites", slip, "4")
    assert code == 2
    assert "No such option" in said
    assert SLIPS[slip] in said
    if slip != "--snr":
        with pytest.raises(OptionError, match=r"did you mean"):
            given_settings.make("lora", {"model": "sprites", slip.removeprefix("--"): 4})


def test_switches_are_flags_that_are_not_built() -> None:
    assert UNUSED > unbuilt_flags.SWITCHES
    assert not unbuilt_flags.UNBUILT.keys() & unbuilt_flags.NEEDLESS
    kinds = {knob.name: knob.metadata.get("kind") for knob in fields(settings.Settings)}
    assert all(name in kinds for name, _ in unbuilt_flags.UNBUILT_VALUES)


def test_pictures_are_resized_as_is_asked(tmp_path: Path) -> None:
    """Two halves, black and white: nearest has no greys, and the others have their own."""
    path = tmp_path / "p.png"
    picture = Image.new("L", (30, 30))
    picture.paste(255, (0, 0, 15, 30))
    picture.save(path)
    found = {name: pixels_of(path, (8, 8), Crop(), name) for name in data_settings.FILTERS}
    assert set(found["nearest"].unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(found["lanczos"], pixels_of(path, (8, 8), Crop()))
    assert len({tuple(pixels.flatten().tolist()) for pixels in found.values()}) >= 5


def test_caches_know_how_pictures_were_resized(
    tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    given: dict[str, Any] = {
        "model": tiny_model,
        "train_data_dir": pictures,
        "center_crop": True,
        "output_dir": tmp_path,
        "cache_latents": True,
    }
    batches = []
    for name in ("bilinear", "nearest", "bilinear"):
        made = trainer.session("text-to-image", **given, image_interpolation_mode=name)
        batches.append(made.source.batch(0).pictures)
    assert torch.equal(batches[0], batches[2])
    assert not torch.equal(batches[0], batches[1])
    assert len(list((tmp_path / "cache").iterdir())) == 2
