"""Refuse settings of a training: values out of range, and contradictions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from strop.errors import OptionError
from strop.train.setting import FROZEN, SLOTS, SPRITES

if TYPE_CHECKING:
    from strop.train.settings import Settings


def check_range(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
    if value is None:
        return
    choices, least, above = (metadata[key] for key in ("choices", "least", "above"))
    if choices and value not in choices:
        raise OptionError(f"{name} is {value!r}: choose {', '.join(choices)}")
    if least is not None and value < least:
        raise OptionError(f"{name} is {value}: it must be at least {least}")
    if above is not None and not value > above:
        raise OptionError(f"{name} is {value}: it must be above {above}")


def check_together(settings: Settings) -> None:
    """Raise for settings that are missing, or that contradict each other."""
    s = settings
    if not s.pretrained_model_name_or_path:
        raise OptionError("give the model to start from: --model sprites, or a diffusers folder")
    if s.dataset_name not in ("", SPRITES):
        raise OptionError(
            f"dataset_name {s.dataset_name!r}: only 'sprites' is built in; download "
            "other datasets and give their folder as train_data_dir"
        )
    sources = [
        name for name in ("train_data_dir", "dataset_name", "instance_data_dir") if getattr(s, name)
    ]
    if len(sources) > 1:
        raise OptionError(f"{' and '.join(sources)} are given: pictures come from one of them")
    if s.task == "dreambooth" and not s.instance_data_dir:
        raise OptionError("give the folder of the subject's pictures: --instance_data_dir DIR")
    if not sources and not s.is_sprites:
        raise OptionError(
            "give the folder of pictures: --train_data_dir DIR"
            + (", or --instance_data_dir DIR" if s.task == "lora" else "")
        )
    _check_subject(s)
    _check_control(s)
    for name in ("adam_beta1", "adam_beta2", "lora_dropout"):
        if not getattr(s, name) < 1:
            raise OptionError(f"{name} is {getattr(s, name)}: it must be below 1")
    for name in ("ema_decay", "proportion_empty_prompts"):
        if not getattr(s, name) <= 1:
            raise OptionError(f"{name} is {getattr(s, name)}: it must be at most 1")
    _check_averages(s)
    _check_caches(s)
    _check_adapters(s)
    _check_swap(s)
    _check_optimizer(s)
    _check_sync(s)


def _check_sync(s: Settings) -> None:
    if s.gradient_sync != "fp32" and s.shards_states:
        raise OptionError(
            f"gradient_sync {s.gradient_sync} is built for gradients that all processes get: leave "
            "it out, or shard_optimizer and shard_gradients"
        )


def _check_optimizer(s: Settings) -> None:
    if s.optimizer == "adamw":
        return
    ours = {
        "use_8bit_adam": s.use_8bit_adam,
        "shard_optimizer": s.shard_optimizer,
        "shard_gradients": s.shard_gradients,
        "mixed_precision fp16": s.mixed_precision == "fp16",
    }
    for name, is_on in ours.items():
        if is_on:
            raise OptionError(
                f"{name} is built for Strop's AdamW, and the optimizer is {s.optimizer}: take "
                "--optimizer adamw"
                + (", or --mixed_precision bf16" if "fp16" in name else f", or leave {name} out")
            )


def _check_averages(s: Settings) -> None:
    if s.optimizer == "schedule-free" and s.use_ema:
        raise OptionError(
            "use_ema averages weights, and those of schedule-free are averages already: leave it "
            "out"
        )
    if s.offload_ema and not s.use_ema:
        raise OptionError(
            "offload_ema says where averages are kept: add --use_ema, or leave it out"
        )


def _check_adapters(s: Settings) -> None:
    if s.base_weights and s.use_dora:
        raise OptionError(
            "use_dora trains the lengths of the base's rows, which base_weights quantises: leave "
            "one of the two out"
        )
    if s.base_weights == "nf4" and s.adapter != "lora":
        raise OptionError(
            f"{s.adapter} reads the shapes of weights, which nf4 packs: take --base_weights int8 "
            "or fp8, or --adapter lora"
        )
    if s.base_weights and s.compile_unet:
        raise OptionError(
            "compile_unet is not built for training beside quantised weights: leave it or "
            "base_weights out"
        )
    if s.adapter == "lora":
        return
    for name in ("use_dora", "lora_dropout"):
        if getattr(s, name):
            raise OptionError(f"{name} is for LoRA, and the adapters are {s.adapter}: leave it out")


def _check_swap(s: Settings) -> None:
    if not s.blocks_to_swap:
        return
    if s.task not in FROZEN:
        raise OptionError(
            f"blocks_to_swap moves weights that are not trained, and {s.task} trains them all: "
            "take strop train lora, or save memory by --gradient_checkpointing, --use_8bit_adam, "
            "--offload_ema or, on several GPUs, --shard_gradients"
        )
    if s.blocks_to_swap <= SLOTS:
        raise OptionError(
            f"blocks_to_swap is {s.blocks_to_swap}, which saves nothing, as the GPU has room for "
            f"{SLOTS} of them: take {SLOTS + 1} or more, or leave it out"
        )
    others = {
        "base_weights": "are quantised weights, which are not moved",
        "compile_unet": "makes passes that read all weights where they lie",
    }
    for name, why in others.items():
        if getattr(s, name):
            raise OptionError(f"{name} {why}: leave it or blocks_to_swap out")


def _check_subject(s: Settings) -> None:
    if s.instance_data_dir and not s.instance_prompt:
        raise OptionError("give the text that is to mean the subject: --instance_prompt TEXT")
    if s.instance_prompt and not s.instance_data_dir:
        raise OptionError("instance_prompt needs --instance_data_dir DIR")
    if not s.with_prior_preservation:
        return
    if not s.instance_data_dir:
        raise OptionError("with_prior_preservation needs --instance_data_dir DIR")
    for name, what in (("class_data_dir", "DIR"), ("class_prompt", "TEXT")):
        if not getattr(s, name):
            raise OptionError(f"with_prior_preservation needs --{name} {what}")


def _check_control(s: Settings) -> None:
    if s.task != "controlnet":
        return
    if s.draws_sprites:
        raise OptionError(
            "the sprites generator draws no conditioning pictures: give a folder that has them, "
            "--train_data_dir DIR"
        )
    prompts, pictures = len(s.validation_prompt), len(s.validation_image)
    if prompts and pictures not in (1, prompts):
        raise OptionError(
            f"there are {prompts} of validation_prompt and {pictures} of validation_image: give "
            "one --validation_image for all prompts, or one for each"
        )


def _check_caches(s: Settings) -> None:
    if s.pre_compute_text_embeddings and s.train_text_encoder:
        raise OptionError(
            "pre_compute_text_embeddings keeps what the text encoder gives now, and "
            "train_text_encoder changes it: choose one"
        )
    if s.draws_sprites and (s.cache_latents or s.pre_compute_text_embeddings):
        raise OptionError(
            "the sprites generator draws new pictures in every step, so there is "
            "nothing to cache: leave out the caches"
        )
    if s.aspect_buckets and not s.train_data_dir:
        raise OptionError("aspect_buckets needs --train_data_dir DIR; leave it out")
    if s.draws_sprites and s.mask_data_dir:
        raise OptionError("mask_data_dir needs a folder of pictures: drawings have no masks")
    if s.cache_latents and not s.center_crop:
        raise OptionError(
            "cache_latents would freeze one random crop of each picture: add --center_crop"
        )
