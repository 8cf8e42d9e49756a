"""Prepare everything that a training needs before its first step, from its settings."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from strop.errors import OptionError, TrainingError
from strop.train import (
    attempts,
    block_swap,
    buckets,
    caches,
    checkpoint,
    drawing,
    files,
    frozen_base,
    loading,
    lora,
    masks,
    metrics,
)
from strop.train import model as models
from strop.train.block_swap import BlockSwap
from strop.train.compiled import prepare
from strop.train.conditions import read_controlled
from strop.train.data import Captions, FolderSource, Source, SpritesSource, digest_of
from strop.train.folders import Folder, check_files, check_sizes, read_captioned, read_subject
from strop.train.idle_parts import IdleParts, idle_parts
from strop.train.learner import Learner
from strop.train.lock import Hold
from strop.train.model import DiffusionModel
from strop.train.ranks import ALONE, Ranks
from strop.train.settings import Settings
from strop.wording import counted

Warn = Callable[[str], None]


@dataclass(frozen=True)
class Session:
    """Hold a prepared training; ``step`` is where it starts: 0, or that of the checkpoint it
    resumes."""

    settings: Settings
    model: DiffusionModel
    side: int
    source: Source
    learner: Learner
    unet: nn.Module
    step: int
    total: int
    hold: Hold | None  # of the output folder, until the loop has ended; rank 0 has it
    idle: IdleParts  # of the model, in no step
    swap: BlockSwap | None = None  # of blocks whose weights lie in the host's memory
    run: str = ""  # what its checkpoints call this training, in all of its attempts
    ranks: Ranks = ALONE

    @property
    def batches_per_epoch(self) -> int | None:
        return self.source.batches_per_epoch

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, beside the learner's numbers, to be resumed exactly."""
        return {
            "settings": self.settings.fixed,
            "data": self.source.digest,
            "total": self.total,
            "run": self.run,
            "ranks": self.ranks.count,
            "shard_optimizer": self.settings.shards_states,
            "shard_gradients": self.settings.shard_gradients,
            "host": _host(self.model.device),
        }


def prepare_session(
    settings: Settings, on_progress: caches.Progress, warn: Warn, ranks: Ranks = ALONE
) -> Session:
    """Check, load, cache, resume. What a user can get wrong is looked at before the slow parts.

    Raises a StropError that says what was got, where, and what to do.
    """
    settings = replace(settings, num_processes=ranks.count)
    device = _device(settings)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    metrics.check_available(settings)
    loading.folder_of(settings)
    if settings.base_weights:
        frozen_base.check_library(settings.base_weights)
    _check_places(settings)
    folder = _read_folder(settings, on_progress, warn, ranks)
    _make_output(settings.output)
    hold = ranks.alone(lambda: Hold(settings.output, warn))
    try:
        return _prepare(settings, device, folder, hold, ranks, on_progress, warn)
    except BaseException:
        if hold is not None:
            hold.release()
        raise


def _prepare(
    settings: Settings,
    device: torch.device,
    folder: Folder | None,
    hold: Hold | None,
    ranks: Ranks,
    on_progress: caches.Progress,
    warn: Warn,
) -> Session:
    began = ranks.first(
        lambda: attempts.start(settings.output, ranks.attempt, lambda: _checkpoint(settings, warn))
    )
    found = began.folder
    if ranks.attempt and ranks.is_first:
        where = found.name if found else "the beginning"
        warn(f"all processes were started again, and go on from {where}")
    on_progress("loading the model", 0, 1)
    model = loading.load(settings, device)
    _warn_of_attention(settings, model, warn)
    side = models.resolution_of(settings, model)
    drawing.conditions_to_draw(settings, side)
    source = _source(settings, model, side, folder, ranks, on_progress, warn)
    _warn_of_cut_captions(model, folder, warn)
    total = _total(settings, source)
    idle = idle_parts(settings, model)
    learner, swap = _learner(settings, model, ranks)
    step = 0 if found is None else _resume(settings, found, source, learner, total, warn)
    ranks.check_same("settings", lambda: settings.fixed)
    ranks.check_same("pictures, steps and first step", lambda: (source.digest, total, step))
    ranks.check_same("weights", learner.fingerprint)
    ranks.alone(lambda: files.sweep(settings.output))
    return Session(
        settings,
        model,
        side,
        source,
        learner,
        prepare(model, settings.compile_unet),
        step,
        total,
        hold,
        idle,
        swap,
        began.run,
        ranks,
    )


def _warn_of_attention(settings: Settings, model: DiffusionModel, warn: Warn) -> None:
    """Say that attention runs without cuDNN, which torch would take for half types on a GPU."""
    is_half_on_gpu = model.half is not None and model.device.type == "cuda"
    if is_half_on_gpu and model.family.splits_attention and not settings.compile_unet:
        warn(
            "attention runs without cuDNN, whose gradients torch gets wrong for Flux "
            "(docs/limits.md); --compile_unet trains with it, and faster"
        )


def _device(settings: Settings) -> torch.device:
    is_there = torch.cuda.is_available()
    if settings.device == "cuda" and not is_there:
        raise OptionError("--device cuda: torch finds no GPU; use --device cpu")
    device = torch.device("cpu")
    if is_there and settings.device != "cpu":
        device = torch.device("cuda", torch.cuda.current_device())
    if settings.mixed_precision == "fp16" and device.type == "cpu":
        raise OptionError("--mixed_precision fp16 needs a GPU; use bf16 or no")
    if settings.allow_tf32 and device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    if settings.deterministic and device.type == "cuda":
        os.putenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it before its first product
        torch.use_deterministic_algorithms(True)
    return device


# ---- pictures ----------------------------------------------------------------------------------


def _check_places(settings: Settings) -> None:
    """Raise OptionError for folders that the training would write into and read from."""
    pictures = settings.train_data_dir or settings.instance_data_dir
    for name in ("output_dir", "cache_dir", "class_data_dir") if pictures else ():
        place = getattr(settings, name)
        if place and _real(place).is_relative_to(_real(pictures)):
            raise OptionError(
                f"{name} {place} lies in the folder of the pictures, {pictures}; choose another"
            )
    given = settings.controlnet_model_name_or_path
    starts = [loading.folder_of(settings).resolve(), *([_real(given)] if given else [])]
    if _real(settings.output_dir) in starts:
        raise OptionError(
            f"output_dir {settings.output_dir} is the model to start from; choose another"
        )


def _real(place: str) -> Path:
    return Path(place).expanduser().resolve()


def _read_folder(
    settings: Settings, on_progress: caches.Progress, warn: Warn, ranks: Ranks
) -> Folder | None:
    def watch(done: int, total: int) -> None:
        on_progress("reading pictures", done, total)

    if settings.draws_sprites:
        if not settings.is_sprites:
            warn("the sprites generator speaks the words of the sprites model only")
        return None
    if settings.has_subject:
        folder = read_subject(
            Path(settings.instance_data_dir).expanduser(),
            settings.instance_prompt,
            on_progress=watch,
            ranks=ranks,
        )
    elif settings.task == "controlnet":
        folder = read_controlled(settings, watch, ranks)
    else:
        folder = read_captioned(
            Path(settings.train_data_dir).expanduser(),
            settings.caption_column,
            settings.max_train_samples,
            watch,
            ranks,
        )
    _judge(settings, folder, warn)
    return folder


def _judge(settings: Settings, folder: Folder, warn: Warn) -> None:
    check_files(folder, settings.bad_files == "refuse")
    for bad in folder.bad:
        warn(f"skipped {bad}")


def _source(
    settings: Settings,
    model: DiffusionModel,
    side: int,
    folder: Folder | None,
    ranks: Ranks,
    on_progress: caches.Progress,
    warn: Warn,
) -> Source:
    if folder is None:
        tokenizers = {name: model.tokenizer(name) for name in model.encoders}
        return SpritesSource(settings, tokenizers, model.device, ranks.rank)
    found = [folder]
    if settings.with_prior_preservation:
        style = drawing.style_of(settings, model, side)
        found.append(drawing.class_pictures(settings, model, style, on_progress, ranks))
        _judge(settings, found[-1], warn)
    pictures = [picture for item in found for picture in item.pictures]
    shapes: tuple[buckets.Shape, ...] = ()
    if settings.aspect_buckets:
        grid = model.family.grid(model.modules)
        shapes = buckets.choose(pictures, buckets.shapes_of(side, grid))
    if not settings.allow_upscaling and shapes:
        buckets.check_sizes(pictures, shapes)
    elif not settings.allow_upscaling:
        for item in found:
            check_sizes(item, side)
    own = Path(settings.cache_dir).expanduser()
    where = own if settings.cache_dir else settings.output / "cache"
    captions: Captions = caches.captions_of(model, pictures)
    if settings.pre_compute_text_embeddings:
        captions = caches.cache_embeddings(where, model, captions, on_progress, ranks)
    moments = None
    if settings.cache_latents:
        moments = caches.cache_moments(
            where, model, pictures, side, settings, on_progress, ranks, shapes
        )
    own_masks: tuple[Path, ...] = ()
    if settings.mask_data_dir:
        own_masks = masks.masks_of(folder, Path(settings.mask_data_dir).expanduser())
    digests = [item.digest for item in found]
    digest = digest_of(side, *digests, *((masks.digest_of(own_masks),) if own_masks else ()))
    classes = found[1].pictures if len(found) > 1 else ()
    return FolderSource(
        settings,
        side,
        folder.pictures,
        classes,
        captions,
        moments,
        digest,
        ranks.rank,
        own_masks,
        model.factor,
        shapes,
        folder.conditions,
    )


def _warn_of_cut_captions(model: DiffusionModel, folder: Folder | None, warn: Warn) -> None:
    pictures = folder.pictures if folder else ()
    texts = sorted({text for picture in pictures for text in picture.captions})
    cut = models.cut_prompts(model, texts) if texts else []
    if cut:
        name = models.longest_encoder(model)
        limit = model.length(name) - model.tokenizer(name).num_special_tokens_to_add()
        warn(
            f"found {counted(len(cut), 'caption')} with more than the {counted(limit, 'token')} "
            f"that this model reads; it ignores the rest of each: {cut[0]!r}"
        )


def _total(settings: Settings, source: Source) -> int:
    if settings.max_train_steps is not None:
        return settings.max_train_steps
    if source.batches_per_epoch is None:
        raise OptionError("the sprites generator has no epochs: give --max_train_steps")
    batches = settings.num_train_epochs * source.batches_per_epoch
    return math.ceil(batches / settings.gradient_accumulation_steps)


# ---- weights -----------------------------------------------------------------------------------


def _learner(
    settings: Settings, model: DiffusionModel, ranks: Ranks
) -> tuple[Learner, BlockSwap | None]:
    trained = {name: model.modules[name] for name in model.parts(settings)}
    if settings.task == "lora":
        lora.attach(settings, model)
    else:
        for module in trained.values():
            module.requires_grad_(True)
    if settings.gradient_checkpointing:
        for network in model.denoisers:
            network.enable_gradient_checkpointing()
        for name in model.family.trained_encoders if settings.train_text_encoder else ():
            text, new = model.modules[name], "activation_checkpointing_enable"
            getattr(text, new if hasattr(text, new) else "gradient_checkpointing_enable")()
    if model.device.type == "cuda":
        for network in model.denoisers:
            nn.Module.to(network, memory_format=torch.channels_last)  # type: ignore[call-overload]
    if settings.base_weights:
        frozen_base.quantise(model.unet, settings.base_weights)
    swap = None
    if settings.blocks_to_swap:
        swap = block_swap.install(model.unet, settings.blocks_to_swap, model.device)
    return Learner(settings, trained, ranks), swap


def _make_output(output: Path) -> None:
    if output.exists() and not output.is_dir():
        raise OptionError(f"output_dir {output} is a file; give a folder")
    output.mkdir(parents=True, exist_ok=True)
    if not os.access(output, os.W_OK):
        raise OptionError(f"output_dir {output} is not writable; choose another")


def _checkpoint(settings: Settings, warn: Warn) -> Path | None:
    """Return the checkpoint to resume. Raises if there is one that a new training would
    overwrite."""
    output = settings.output
    if settings.resume_from_checkpoint:
        found = checkpoint.find(output, settings.resume_from_checkpoint)
        if found is None:
            warn(f"{output} holds no checkpoint: starting anew")
        return found
    have = checkpoint.numbered(output)
    if have:
        raise TrainingError(
            f"{output} holds {have[-1][1].name} of another training; continue it with "
            "--resume_from_checkpoint latest, or choose another --output_dir"
        )
    return None


def _resume(
    settings: Settings, folder: Path, source: Source, learner: Learner, total: int, warn: Warn
) -> int:
    tensors, state = checkpoint.load(folder)
    defaults = {knob.name: knob.default for knob in fields(Settings)}  # it may know fewer settings
    ranks_then: int = state.get("ranks", 1)
    fixed_then = _of_all_ranks(defaults | state["settings"], ranks_then)
    checkpoint.check_same(folder, fixed_then, _of_all_ranks(settings.fixed, settings.num_processes))
    if state["data"] != source.digest:
        raise OptionError(
            f"{folder} belongs to a training on other pictures or captions; put "
            "them back, or start anew in another --output_dir"
        )
    step: int = state["step"]
    if step > total:
        raise OptionError(
            f"{folder} is past max_train_steps {total}; ask for more steps, or "
            "resume an earlier checkpoint"
        )
    learner.load(tensors, state)
    if state["host"]["threads"] and not settings.threads:
        torch.set_num_threads(state["host"]["threads"])  # sums depend on their number
    host = _host(learner.parameters[0].device)
    odd = [
        f"{name} {state['host'].get(name)} then, {value} now"
        for name, value in host.items()
        if state["host"].get(name) != value
    ]
    if ranks_then != settings.num_processes:
        now = counted(settings.num_processes, "process")
        odd.append(f"{counted(ranks_then, 'process')} then, {now} now")
    is_cut = {
        "shard_optimizer": settings.shards_states,
        "shard_gradients": settings.shard_gradients,
    }
    for name, is_now in is_cut.items() if settings.num_processes > 1 else ():
        if state.get(name, False) != is_now:
            odd.append(f"{name} {state.get(name, False)} then, {is_now} now")
    if total != state["total"] and not settings.lr_scheduler.startswith("constant"):
        then = counted(state["total"], "step")
        odd.append(f"{then} then, {total} now, which changes the learning rate")
    if odd:
        warn(f"this continues {folder.name}, but not to the bit: {'; '.join(odd)}")
    return step


def _of_all_ranks(fixed: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return settings that compare over another number of ranks: what counts is the whole batch."""
    rest = {name: value for name, value in fixed.items() if name != "train_batch_size"}
    return {**rest, "train_batch_size of all ranks together": fixed["train_batch_size"] * ranks}


def _host(device: torch.device) -> dict[str, Any]:
    """Return what bits depend on beside the settings."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    threads = torch.get_num_threads() if device.type == "cpu" else None
    return {"torch": torch.__version__, "device": name, "threads": threads}
