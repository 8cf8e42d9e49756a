"""Say what a training does, in one frozen dataclass, whose fields are also the flags of ``strop
train`` and the keys of its YAML files. Names and defaults are those of diffusers' example
scripts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from strop.errors import OptionError
from strop.train.data_settings import DataSettings
from strop.train.noise_settings import NoiseSettings
from strop.train.setting import CONTROL, SPRITES, SPRITES_DIT, TASKS, setting
from strop.train.settings_checks import check_range, check_together
from strop.train.training_settings import TrainingSettings


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Hold the panel "Model" of ``strop train -h``."""

    pretrained_model_name_or_path: str = setting(
        "",
        str,
        "Model",
        "Start from this model: 'sprites' or 'sprites-dit', which ship with Strop, or a diffusers "
        "folder.",
        alias="model",
        fixed=True,
    )
    pretrained_vae_model_name_or_path: str = setting(
        "",
        str,
        "Model",
        "Take the autoencoder of this folder in the place of the model's own.",
        fixed=True,
    )
    vae_precision: str | None = setting(
        None,
        str,
        "Model",
        "Encode pictures in this type; without it, in fp32 for SDXL and Stable Diffusion 3, and "
        "else in that of --mixed_precision.",
        choices=("fp32", "mixed"),
        fixed=True,
    )
    max_sequence_length: int | None = setting(
        None,
        int,
        "Model",
        "Let a T5 read this many tokens; without it, 77 for Stable Diffusion 3 and 512 for Flux.",
        least=1,
        fixed=True,
    )
    train_text_encoder: bool = setting(
        False,
        bool,
        "Model",
        "Train the text encoders too, but not a T5.",
        tasks=("text-to-image", "dreambooth", "lora"),
        fixed=True,
    )
    controlnet_model_name_or_path: str = setting(
        "",
        str,
        "Model",
        "Start from the ControlNet in this diffusers folder; without it, from a copy of the first "
        "half of the UNet, or of the transformer's first blocks.",
        tasks=CONTROL,
        fixed=True,
    )
    num_double_layers: int | None = setting(
        None,
        int,
        "Model",
        "Start a new ControlNet from this many blocks of Flux.1 that keep text and picture apart, "
        "or of Stable Diffusion 3; without it, from 4, or 12.",
        tasks=CONTROL,
        least=0,
        fixed=True,
    )
    num_single_layers: int | None = setting(
        None,
        int,
        "Model",
        "Start it from this many blocks of Flux.1 that have both together; without it, from 4.",
        tasks=CONTROL,
        least=0,
        fixed=True,
    )
    from_scratch: bool = setting(
        False,
        bool,
        "Model",
        "Start from random weights in the model's architecture.",
        tasks=("text-to-image",),
        fixed=True,
    )
    rank: int = setting(
        4, int, "Model", "Give the adapters this rank.", tasks=("lora",), least=1, fixed=True
    )
    lora_alpha: float | None = setting(
        None,
        float,
        "Model",
        "Scale the adapters by alpha / rank; without it alpha is the rank.",
        tasks=("lora",),
        above=0,
        fixed=True,
    )
    lora_dropout: float = setting(
        0.0,
        float,
        "Model",
        "Drop this share of what goes into the adapters.",
        tasks=("lora",),
        least=0,
        fixed=True,
    )
    adapter: str = setting(
        "lora",
        str,
        "Model",
        "Train adapters of this kind; LoHa and LoKr are those of LyCORIS.",
        tasks=("lora",),
        choices=("lora", "loha", "lokr"),
        fixed=True,
    )
    use_dora: bool = setting(
        False,
        bool,
        "Model",
        "Train the length of each row of the adapted weights too (DoRA).",
        tasks=("lora",),
        fixed=True,
    )
    lokr_factor: int = setting(
        -1,
        int,
        "Model",
        "Give the smaller factors of LoKr at most this size; -1 takes about the square root.",
        tasks=("lora",),
        least=-1,
        fixed=True,
    )
    base_weights: str | None = setting(
        None,
        str,
        "Model",
        "Quantise the linears of the UNet or the transformer beside the adapters: int8 and fp8 by "
        "torchao, nf4 by bitsandbytes.",
        tasks=("lora",),
        choices=("int8", "fp8", "nf4"),
        fixed=True,
    )
    lora_layers: str = setting(
        "",
        str,
        "Model",
        "Adapt these layers of the UNet or the transformer, named by the ends of their paths with "
        "commas between; without it, those of attention, and for Flux.1 of its MLPs.",
        tasks=("lora",),
        fixed=True,
    )


@dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """Hold the panel "Output" of ``strop train -h``."""

    output_dir: str = setting(
        "",
        str,
        "Output",
        "Write the trained model and its checkpoints into this folder.",
        per_task={
            "text-to-image": "sd-model-finetuned",
            "dreambooth": "dreambooth-model",
            "lora": "sd-model-finetuned-lora",
            "controlnet": "controlnet-model",
        },
    )
    save_precision: str = setting(
        "fp32",
        str,
        "Output",
        "Save the trained model in this number format.",
        choices=("fp32", "fp16", "bf16"),
    )
    checkpointing_steps: int = setting(
        500, int, "Output", "Write a checkpoint after every so many steps.", least=1
    )
    background_checkpoints: bool = setting(
        True,
        bool,
        "Output",
        "Write checkpoints while the training goes on, from a copy in the host's memory.",
    )
    checkpoints_total_limit: int | None = setting(
        None, int, "Output", "Keep this many checkpoints, and delete older ones.", least=1
    )
    resume_from_checkpoint: str = setting(
        "", str, "Output", "Continue exactly from this checkpoint folder, or from the 'latest'."
    )
    validation_prompt: tuple[str, ...] = setting(
        (),
        tuple,
        "Output",
        "Draw this text during training; the option may be given more than once.",
        alias="validation_prompts",
    )
    validation_image: tuple[str, ...] = setting(
        (),
        tuple,
        "Output",
        "Draw validation prompts by this conditioning picture: one for all, or one for each in "
        "their order.",
        tasks=CONTROL,
    )
    num_validation_images: int = setting(
        4, int, "Output", "Draw this many pictures of each validation prompt.", least=1
    )
    validation_steps: int | None = setting(
        None,
        int,
        "Output",
        "Draw validation pictures every so many steps, and not only before "
        "the first and after the last.",
        least=1,
    )
    validation_guidance_scale: float | None = setting(
        None,
        float,
        "Output",
        "Draw validation pictures with this guidance; without it, with 4 "
        "for sprites, 5 for SDXL, 7 for Stable Diffusion 3, 3.5 for Flux.1 and 7.5 for others.",
        least=0,
    )
    validation_inference_steps: int = setting(
        20, int, "Output", "Draw validation pictures in this many steps.", least=1
    )
    report_to: str = setting(
        "none",
        str,
        "Output",
        "Also write the numbers for TensorBoard; metrics.jsonl is always written.",
        choices=("none", "tensorboard"),
    )
    logging_dir: str = setting(
        "logs", str, "Output", "Write for TensorBoard into this folder of OUTPUT_DIR."
    )


# The bases lie in the opposite order of their panels: fields start with those of the last base.
@dataclass(frozen=True, kw_only=True)
class Settings(NoiseSettings, TrainingSettings, OutputSettings, DataSettings, ModelSettings):
    """Hold all settings of one training. ``None`` leaves a choice to the model or to the task."""

    task: str

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise OptionError(f"task {self.task!r}: there are {', '.join(TASKS)}")
        for knob in fields(self):
            if knob.metadata:
                check_range(knob.name, getattr(self, knob.name), knob.metadata)
        check_together(self)

    @property
    def is_sprites(self) -> bool:
        return self.pretrained_model_name_or_path in (SPRITES, SPRITES_DIT)

    @property
    def draws_sprites(self) -> bool:
        """Tell whether pictures come from the generator of drawings."""
        wants_folder = self.train_data_dir or self.instance_data_dir
        return self.dataset_name == SPRITES or (self.is_sprites and not wants_folder)

    @property
    def has_subject(self) -> bool:
        """Tell whether the pictures are of one subject and share a prompt."""
        return bool(self.instance_data_dir)

    @property
    def shards_states(self) -> bool:
        """Tell whether the optimizer's state is cut over processes."""
        return self.shard_optimizer or self.shard_gradients

    @property
    def rate(self) -> float:
        scale = self.gradient_accumulation_steps * self.whole_batch_size if self.scale_lr else 1
        return self.learning_rate * scale

    @property
    def whole_batch_size(self) -> int:
        """Return the pictures of a batch over all processes."""
        return self.train_batch_size * self.num_processes

    @property
    def output(self) -> Path:
        return Path(self.output_dir).expanduser()

    @property
    def fixed(self) -> dict[str, Any]:
        """Return what a resumed training must have in common with its checkpoint, ready for
        JSON."""
        names = [knob.name for knob in fields(self) if knob.metadata.get("fixed")]
        return {"task": self.task, **{name: getattr(self, name) for name in names}}


def flags(task: str) -> list[Any]:
    """Return the fields that ``strop train TASK`` takes."""
    return [knob for knob in fields(Settings) if task in knob.metadata.get("tasks", ())]


def default_of(knob: Any, task: str) -> Any:
    return knob.metadata["per_task"].get(task, knob.default)
