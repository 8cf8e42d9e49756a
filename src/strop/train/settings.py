"""Say what a training does, in one frozen dataclass, whose fields are also the flags of ``strop
train`` and the keys of its YAML files. Names and defaults are those of diffusers' example
scripts."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from strop.errors import OptionError, UnsupportedError

TASKS = ("text-to-image", "dreambooth", "lora")
TRAINERS = ("text-to-image", "lora")  # tasks that read folders with captions
SUBJECTS = ("dreambooth", "lora")  # tasks that read folders of one subject
SPRITES = "sprites"
FILTERS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")
SCHEDULES = (
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
)


def _flag(
    default: Any,
    kind: type,
    panel: str,
    doc: str,
    *,
    tasks: tuple[str, ...] = TASKS,
    alias: str = "",
    choices: tuple[str, ...] = (),
    least: float | None = None,
    above: float | None = None,
    fixed: bool = False,
    per_task: Mapping[str, Any] | None = None,
) -> Any:
    """Declare a setting. ``fixed``: a resumed training must have the same value. ``least`` is the
    smallest value; ``above``: it is smaller than all."""
    metadata = {
        "kind": kind,
        "panel": panel,
        "doc": doc,
        "tasks": tasks,
        "alias": alias,
        "choices": choices,
        "least": least,
        "above": above,
        "fixed": fixed,
        "per_task": per_task or {},
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Hold all settings of one training. ``None`` leaves a choice to the model or to the task."""

    task: str

    pretrained_model_name_or_path: str = _flag(
        "",
        str,
        "Model",
        "Start from this model: 'sprites', which ships with Strop, or a diffusers folder.",
        alias="model",
        fixed=True,
    )
    train_text_encoder: bool = _flag(
        False, bool, "Model", "Train the text encoder too.", fixed=True
    )
    from_scratch: bool = _flag(
        False,
        bool,
        "Model",
        "Start from random weights in the model's architecture.",
        tasks=("text-to-image",),
        fixed=True,
    )
    rank: int = _flag(
        4, int, "Model", "Give the adapters this rank.", tasks=("lora",), least=1, fixed=True
    )
    lora_alpha: float | None = _flag(
        None,
        float,
        "Model",
        "Scale the adapters by alpha / rank; without it alpha is the rank.",
        tasks=("lora",),
        above=0,
        fixed=True,
    )
    lora_dropout: float = _flag(
        0.0,
        float,
        "Model",
        "Drop this share of what goes into the adapters.",
        tasks=("lora",),
        least=0,
        fixed=True,
    )

    train_data_dir: str = _flag(
        "",
        str,
        "Data",
        "Train on the pictures of this folder, with metadata.jsonl or with a .txt beside each.",
        tasks=TRAINERS,
    )
    dataset_name: str = _flag(
        "",
        str,
        "Data",
        "Train on 'sprites': drawings of the built-in generator, which are new in every step.",
        tasks=TRAINERS,
        fixed=True,
    )
    caption_column: str = _flag(
        "text", str, "Data", "Read captions from this key of metadata.jsonl.", tasks=TRAINERS
    )
    max_train_samples: int | None = _flag(
        None, int, "Data", "Use at most this many pictures.", tasks=TRAINERS, least=1
    )
    instance_data_dir: str = _flag(
        "", str, "Data", "Train on the pictures of the subject in this folder.", tasks=SUBJECTS
    )
    instance_prompt: str = _flag(
        "", str, "Data", "Teach the model that this text means the subject.", tasks=SUBJECTS
    )
    with_prior_preservation: bool = _flag(
        False,
        bool,
        "Data",
        "Also train on pictures of the subject's class that the model drew before.",
        tasks=SUBJECTS,
        fixed=True,
    )
    class_data_dir: str = _flag(
        "",
        str,
        "Data",
        "Read pictures of the class from this folder; missing ones are drawn with "
        "the class prompt.",
        tasks=SUBJECTS,
    )
    class_prompt: str = _flag(
        "", str, "Data", "Draw the pictures of the class with this text.", tasks=SUBJECTS
    )
    num_class_images: int = _flag(
        100, int, "Data", "Have this many pictures of the class.", tasks=SUBJECTS, least=1
    )
    sample_batch_size: int = _flag(
        4, int, "Data", "Draw this many pictures of the class at once.", tasks=SUBJECTS, least=1
    )
    prior_loss_weight: float = _flag(
        1.0,
        float,
        "Data",
        "Multiply the loss of the class pictures by this.",
        tasks=SUBJECTS,
        least=0,
        fixed=True,
    )
    resolution: int | None = _flag(
        None,
        int,
        "Data",
        "Resize and crop pictures to squares of this side; without it, of the model's own.",
        least=8,
        fixed=True,
    )
    center_crop: bool = _flag(False, bool, "Data", "Crop in the middle, not at random.", fixed=True)
    random_flip: bool = _flag(
        False, bool, "Data", "Mirror half of the pictures, at random.", fixed=True
    )
    image_interpolation_mode: str = _flag(
        "lanczos", str, "Data", "Resize pictures with this filter.", choices=FILTERS, fixed=True
    )
    proportion_empty_prompts: float = _flag(
        0.0,
        float,
        "Data",
        "Leave out this share of the captions, so that guidance works.",
        least=0,
        fixed=True,
    )
    bad_files: str = _flag(
        "skip",
        str,
        "Data",
        "Skip empty, damaged and other files after naming them, or refuse to start.",
        choices=("skip", "refuse"),
    )
    allow_upscaling: bool = _flag(
        False,
        bool,
        "Data",
        "Also take pictures that are smaller than the resolution, and enlarge them.",
    )
    cache_latents: bool = _flag(
        False,
        bool,
        "Data",
        "Encode pictures once, and keep mean and variance of their latents on disk.",
        fixed=True,
    )
    pre_compute_text_embeddings: bool = _flag(
        False, bool, "Data", "Encode captions once, and keep their embeddings on disk.", fixed=True
    )
    cache_dir: str = _flag(
        "",
        str,
        "Data",
        "Keep latents and embeddings in this folder; without it, in OUTPUT_DIR/cache.",
    )
    dataloader_num_workers: int = _flag(
        0, int, "Data", "Read pictures ahead in this many threads.", least=0
    )

    output_dir: str = _flag(
        "",
        str,
        "Output",
        "Write the trained model and its checkpoints into this folder.",
        per_task={
            "text-to-image": "sd-model-finetuned",
            "dreambooth": "dreambooth-model",
            "lora": "sd-model-finetuned-lora",
        },
    )
    save_precision: str = _flag(
        "fp32",
        str,
        "Output",
        "Save the trained model in this number format.",
        choices=("fp32", "fp16", "bf16"),
    )
    checkpointing_steps: int = _flag(
        500, int, "Output", "Write a checkpoint after every so many steps.", least=1
    )
    checkpoints_total_limit: int | None = _flag(
        None, int, "Output", "Keep this many checkpoints, and delete older ones.", least=1
    )
    resume_from_checkpoint: str = _flag(
        "", str, "Output", "Continue exactly from this checkpoint folder, or from the 'latest'."
    )
    validation_prompt: tuple[str, ...] = _flag(
        (),
        tuple,
        "Output",
        "Draw this text during training; the option may be given more than once.",
        alias="validation_prompts",
    )
    num_validation_images: int = _flag(
        4, int, "Output", "Draw this many pictures of each validation prompt.", least=1
    )
    validation_steps: int | None = _flag(
        None,
        int,
        "Output",
        "Draw validation pictures every so many steps, and not only before "
        "the first and after the last.",
        least=1,
    )
    validation_guidance_scale: float | None = _flag(
        None,
        float,
        "Output",
        "Draw validation pictures with this guidance; without it, with 4 "
        "for sprites and 7.5 for others.",
        least=0,
    )
    validation_inference_steps: int = _flag(
        20, int, "Output", "Draw validation pictures in this many steps.", least=1
    )
    report_to: str = _flag(
        "none",
        str,
        "Output",
        "Also write the numbers for TensorBoard; metrics.jsonl is always written.",
        choices=("none", "tensorboard"),
    )
    logging_dir: str = _flag(
        "logs", str, "Output", "Write for TensorBoard into this folder of OUTPUT_DIR."
    )

    train_batch_size: int = _flag(
        16,
        int,
        "Training",
        "Put this many pictures into a batch.",
        least=1,
        fixed=True,
        per_task={"dreambooth": 4},
    )
    num_train_epochs: int = _flag(
        100,
        int,
        "Training",
        "Train for this many epochs, unless steps are given.",
        least=1,
        per_task={"dreambooth": 1},
    )
    max_train_steps: int | None = _flag(
        None, int, "Training", "Train for this many steps of the optimizer.", least=1
    )
    gradient_accumulation_steps: int = _flag(
        1,
        int,
        "Training",
        "Accumulate the gradients of this many batches in a step.",
        least=1,
        fixed=True,
    )
    gradient_checkpointing: bool = _flag(
        False, bool, "Training", "Compute activations twice to save memory."
    )
    learning_rate: float = _flag(
        1e-4,
        float,
        "Training",
        "Train with this learning rate, after the warm-up.",
        least=0,
        fixed=True,
        per_task={"dreambooth": 5e-6},
    )
    scale_lr: bool = _flag(
        False,
        bool,
        "Training",
        "Multiply the learning rate by batch size and accumulation steps.",
        fixed=True,
    )
    lr_scheduler: str = _flag(
        "constant",
        str,
        "Training",
        "Change the learning rate by this schedule.",
        choices=SCHEDULES,
        fixed=True,
    )
    lr_warmup_steps: int = _flag(
        500,
        int,
        "Training",
        "Raise the learning rate to its value over this many steps.",
        least=0,
        fixed=True,
    )
    lr_num_cycles: int = _flag(
        1, int, "Training", "Restart cosine_with_restarts this many times.", least=1, fixed=True
    )
    lr_power: float = _flag(
        1.0, float, "Training", "Lower the rate by this power in polynomial.", least=0, fixed=True
    )
    adam_beta1: float = _flag(
        0.9, float, "Training", "Average gradients with this decay (AdamW).", least=0, fixed=True
    )
    adam_beta2: float = _flag(
        0.999,
        float,
        "Training",
        "Average squares of gradients with this decay (AdamW).",
        least=0,
        fixed=True,
    )
    adam_weight_decay: float = _flag(
        1e-2, float, "Training", "Decay weights by this (AdamW).", least=0, fixed=True
    )
    adam_epsilon: float = _flag(
        1e-8, float, "Training", "Add this to AdamW's denominator.", least=0, fixed=True
    )
    use_8bit_adam: bool = _flag(
        False,
        bool,
        "Training",
        "Keep AdamW's moments in 8 bits, in a quarter of their memory; numbers change a little.",
        fixed=True,
    )
    max_grad_norm: float = _flag(
        1.0,
        float,
        "Training",
        "Clip gradients to this norm; 1e9 clips nothing.",
        above=0,
        fixed=True,
    )
    use_ema: bool = _flag(
        False, bool, "Training", "Average the weights, and save the averages.", fixed=True
    )
    ema_decay: float = _flag(
        0.9999,
        float,
        "Training",
        "Decay the averages by this factor in each step.",
        least=0,
        fixed=True,
    )
    snr_gamma: float | None = _flag(
        None,
        float,
        "Training",
        "Weigh the loss by min-SNR with this gamma; 5 is usual.",
        above=0,
        fixed=True,
    )
    noise_offset: float = _flag(
        0.0,
        float,
        "Training",
        "Shift the noise of each channel at random by this scale; 0.1 is usual.",
        least=0,
        fixed=True,
    )
    input_perturbation: float = _flag(
        0.0,
        float,
        "Training",
        "Add more noise of this scale to the UNet's input alone; 0.1 is usual.",
        least=0,
        fixed=True,
    )
    prediction_type: str | None = _flag(
        None,
        str,
        "Training",
        "Let the UNet predict this; without it, what its scheduler says.",
        choices=("epsilon", "v_prediction", "sample"),
        fixed=True,
    )
    mixed_precision: str = _flag(
        "no",
        str,
        "Training",
        "Autocast to this type, which weights that are not trained take as well.",
        choices=("no", "fp16", "bf16"),
        fixed=True,
    )
    compile_unet: bool = _flag(
        False,
        bool,
        "Training",
        "Compile the UNet's forward and backward passes; the first step takes longer.",
        fixed=True,
    )
    allow_tf32: bool = _flag(False, bool, "Training", "Multiply matrices in TF32 on a GPU.")
    deterministic: bool = _flag(
        False,
        bool,
        "Training",
        "Give the same bits in every run and after a resume, also on a "
        "GPU, which gets slower. A CPU does so anyway.",
        fixed=True,
    )
    seed: int = _flag(
        0, int, "Training", "Draw everything random from this seed.", least=0, fixed=True
    )
    threads: int = _flag(
        0,
        int,
        "Training",
        "Use this many CPU threads; 0 takes as many as cores are free, or as the checkpoint had.",
        least=0,
    )
    device: str = _flag(
        "auto",
        str,
        "Training",
        "Train on this device; auto takes a GPU if there is one.",
        choices=("auto", "cpu", "cuda"),
    )

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise OptionError(f"task {self.task!r}: there are {', '.join(TASKS)}")
        for knob in fields(self):
            if knob.metadata:
                _check_range(knob.name, getattr(self, knob.name), knob.metadata)
        _check_together(self)

    @property
    def is_sprites(self) -> bool:
        return self.pretrained_model_name_or_path == SPRITES

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
    def parts(self) -> tuple[str, ...]:
        """Return what is trained of the model: its weights, or adapters beside them."""
        return ("unet", "text_encoder") if self.train_text_encoder else ("unet",)

    @property
    def trained(self) -> tuple[str, ...]:
        """Return parts whose own weights change."""
        return () if self.task == "lora" else self.parts

    @property
    def rate(self) -> float:
        scale = self.gradient_accumulation_steps * self.train_batch_size if self.scale_lr else 1
        return self.learning_rate * scale

    @property
    def output(self) -> Path:
        return Path(self.output_dir).expanduser()

    @property
    def fixed(self) -> dict[str, Any]:
        """Return what a resumed training must have in common with its checkpoint, ready for
        JSON."""
        names = [knob.name for knob in fields(self) if knob.metadata.get("fixed")]
        return {"task": self.task, **{name: getattr(self, name) for name in names}}


# Flags of diffusers' scripts that are known and not built -> why, and what to do.
_UPLOADS = "nothing is uploaded; run 'hf upload' on the output folder"
_FOLDERS = "models are not downloaded; give a folder ('hf download' makes one)"
_IF = "that is for DeepFloyd IF, and training is built for Stable Diffusion 1 and 2; leave it out"
UNBUILT: dict[str, str] = {
    "class_labels_conditioning": _IF,
    "dataset_config_name": "hub datasets are not built; download one and use --train_data_dir",
    "dream_detail_preservation": "DREAM is not built; leave it out",
    "dream_training": "DREAM is not built; leave it out",
    "hub_model_id": _UPLOADS,
    "hub_token": _UPLOADS,
    "image_column": "pictures are those that file_name names in metadata.jsonl; leave it out",
    "local_rank": "one process trains on one device; leave it out",
    "non_ema_revision": _FOLDERS,
    "offload_ema": "averages stay on the device; leave it out",
    "offset_noise": "write --noise_offset 0.1, which is the same",
    "push_to_hub": _UPLOADS,
    "revision": _FOLDERS,
    "skip_save_text_encoder": "the saved model is whole, so that it loads; delete the folder"
    " text_encoder afterwards",
    "text_encoder_lr": "UNet and text encoder share --learning_rate",
    "text_encoder_use_attention_mask": _IF,
    "tokenizer_max_length": "captions are padded to the tokenizer's own length; leave it out",
    "tokenizer_name": "the tokenizer is that of the model's folder; put another one there",
    "tracker_project_name": "TensorBoard has no projects; use --logging_dir",
    "use_dora": "DoRA is not built; leave it out for plain LoRA",
    "validation_epochs": "validations are counted in steps; use --validation_steps",
    "validation_images": "Stable Diffusion starts from noise, not from a picture; leave it out",
    "validation_scheduler": "pictures are drawn with the model's own scheduler; leave it out",
    "variant": _FOLDERS,
}
# Flags that are taken and change nothing -> why there is nothing to do.
NEEDLESS: dict[str, str] = {
    "enable_xformers_memory_efficient_attention": "attention is torch's"
    " scaled_dot_product_attention, which is fused as well",
    "foreach_ema": "averages are part of the fused step",
    "prior_generation_precision": "class pictures are drawn in the type of --mixed_precision",
    "set_grads_to_none": "gradients are None between steps anyway",
}
# Settings that change nothing -> without which other.
IDLE = {
    "class_data_dir": "with_prior_preservation",
    "class_prompt": "with_prior_preservation",
    "validation_steps": "validation_prompt",
}
# Those of both that take no value on a command line.
SWITCHES = frozenset(
    (
        "dream_training",
        "enable_xformers_memory_efficient_attention",
        "foreach_ema",
        "offload_ema",
        "offset_noise",
        "push_to_hub",
        "set_grads_to_none",
        "skip_save_text_encoder",
        "text_encoder_use_attention_mask",
        "use_dora",
    )
)
_JSONL = "metrics.jsonl has every number and is always written; use tensorboard, or none"
UNBUILT_VALUES: dict[tuple[str, Any], str] = {
    ("report_to", "all"): _JSONL,
    ("report_to", "comet_ml"): _JSONL,
    ("report_to", "wandb"): _JSONL,
}


def flags(task: str) -> list[Any]:
    """Return the fields that ``strop train TASK`` takes."""
    return [knob for knob in fields(Settings) if task in knob.metadata.get("tasks", ())]


def default_of(knob: Any, task: str) -> Any:
    return knob.metadata["per_task"].get(task, knob.default)


def make(task: str, given: Mapping[str, Any]) -> Settings:
    """Make settings from names and values as YAML or a command line has them.

    Raises OptionError for an unknown name or a value of the wrong kind, and UnsupportedError for
    a flag of diffusers that is not built.
    """
    knobs = {knob.name: knob for knob in flags(task)}
    names = {knob.metadata["alias"]: name for name, knob in knobs.items() if knob.metadata["alias"]}
    values = {name: default_of(knob, task) for name, knob in knobs.items()}
    for key, value in given.items():
        name = key.replace("-", "_")
        name = names.get(name, name)
        if name in NEEDLESS or (name in UNBUILT and _is_off(value)):
            continue
        if name in UNBUILT:
            raise UnsupportedError(f"--{name}: {UNBUILT[name]}")
        if isinstance(value, str) and (name, value) in UNBUILT_VALUES:
            raise UnsupportedError(f"--{name} {value}: {UNBUILT_VALUES[name, value]}")
        if name not in knobs:
            close = difflib.get_close_matches(name, knobs, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; 'strop train {task} -h' lists"
            raise OptionError(f"{task} has no setting {key!r}{hint}")
        if value is not None:
            values[name] = _convert(name, value, knobs[name].metadata)
    return Settings(task=task, **values)


def needless(given: Mapping[str, Any]) -> list[str]:
    """Return what to tell of the flags among these that change nothing."""
    found = {key.replace("-", "_"): value for key, value in given.items()}
    return [
        f"--{name} changes nothing: {reason}"
        for name, reason in NEEDLESS.items()
        if not _is_off(found.get(name))
    ]


def idle(settings: Settings) -> list[str]:
    """Return what to tell of settings that would need another one."""
    return [
        f"--{name} changes nothing without --{needed}"
        for name, needed in IDLE.items()
        if getattr(settings, name) and not getattr(settings, needed)
    ]


def _is_off(value: object) -> bool:
    """Tell whether a flag is off, as in a file that lists a script's defaults."""
    return value is None or value is False


def read_yaml(path: Path) -> dict[str, Any]:
    """Read names and values of a YAML file."""
    try:
        import yaml
    except ImportError as error:
        raise OptionError("--config needs pyyaml: pip install 'strop[train]'") from error
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--config {path}: {error}; give a YAML file") from error
    except yaml.YAMLError as error:
        raise OptionError(f"--config {path} is no YAML: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise OptionError(f"--config {path}: write one 'name: value' a line, as in rank: 8")
    return content


def _convert(name: str, value: Any, metadata: Mapping[str, Any]) -> Any:
    """Convert a value: YAML reads 1e-4 as text, 1 as an integer where a float is meant, and no as
    false."""
    kind = metadata["kind"]
    if value is False and "no" in metadata["choices"]:
        return "no"
    wrong = OptionError(f"{name} is {value!r}: it must be {_KINDS[kind]}")
    if kind is bool or isinstance(value, bool):
        if kind is bool and isinstance(value, bool):
            return value
        raise wrong
    if kind is tuple:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(i, str) for i in items):
            raise wrong
        return tuple(items)
    if kind is str:
        if isinstance(value, str | int | float | Path):
            return str(value)
        raise wrong
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise wrong from None
    if not math.isfinite(number) or (kind is int and number != int(number)):
        raise wrong
    return kind(number)


_KINDS = {
    bool: "true or false",
    tuple: "a text or a list of texts",
    str: "a text",
    int: "a whole number",
    float: "a number",
}


def _check_range(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
    if value is None:
        return
    choices, least, above = (metadata[key] for key in ("choices", "least", "above"))
    if choices and value not in choices:
        raise OptionError(f"{name} is {value!r}: choose {', '.join(choices)}")
    if least is not None and value < least:
        raise OptionError(f"{name} is {value}: it must be at least {least}")
    if above is not None and not value > above:
        raise OptionError(f"{name} is {value}: it must be above {above}")


def _check_together(settings: Settings) -> None:
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
    for name in ("adam_beta1", "adam_beta2", "lora_dropout"):
        if not getattr(s, name) < 1:
            raise OptionError(f"{name} is {getattr(s, name)}: it must be below 1")
    for name in ("ema_decay", "proportion_empty_prompts"):
        if not getattr(s, name) <= 1:
            raise OptionError(f"{name} is {getattr(s, name)}: it must be at most 1")
    _check_caches(s)


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
    if s.cache_latents and not s.center_crop:
        raise OptionError(
            "cache_latents would freeze one random crop of each picture: add --center_crop"
        )
