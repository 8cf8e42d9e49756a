"""List the rows and the ladder of ``strop bench train``, and choose among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from strop.bench.train_group_rows import GROUP_ROWS
from strop.bench.train_work import (
    COMPILERS,
    GRAPH,
    OURS,
    SCRIPT,
    TORCH,
    Contender,
    Loader,
    Setup,
    TrainRow,
    Work,
    contenders_of,
    ours_of,
    peers_of,
)
from strop.errors import OptionError

_DREAMBOOTH = Work(batch=1, has_ema=False)
_SDXL = Work("sdxl", 4, is_cached=True, has_ema=False)
ROWS: tuple[TrainRow, ...] = (
    TrainRow(
        "P8",
        "SD1.5 512², full fine-tune, batch 8, VAE and text in the loop",
        contenders_of(Work()),
        "img/s",
        72,
        90,
    ),
    TrainRow(
        "P9",
        "SD1.5 512², full fine-tune, batch 32, latents and text cached",
        contenders_of(Work(batch=32, is_cached=True)),
        "img/s",
        115,
        140,
    ),
    TrainRow(
        "P11",
        "SD1.5 512², DreamBooth of the full UNet, batch 1",
        (
            *ours_of(_DREAMBOOTH),
            Contender(
                "strop-cached",
                replace(_DREAMBOOTH, is_cached=True),
                OURS,
                "less work: latents and text cached",
            ),
            Contender(
                "strop-cached-graph",
                replace(_DREAMBOOTH, is_cached=True),
                GRAPH,
                "less work: latents and text cached; CUDA graph",
            ),
            *peers_of(_DREAMBOOTH),
        ),
        "x",
        3,
    ),
    TrainRow(
        "P11-lora",
        "SD1.5 512², LoRA of rank 16, batch 1, cached",
        tuple(
            c
            for c in contenders_of(replace(_DREAMBOOTH, trained="lora", is_cached=True))
            if not c.setup.is_shadow
        ),
        "ms",
        25,
        18,
    ),
    TrainRow(
        "P11x",
        "SDXL 1024², full fine-tune, batch 4, cached, no EMA",
        (
            Contender("strop", _SDXL, OURS),
            Contender(
                "strop-budget",
                _SDXL,
                replace(OURS, recompute="budget"),
                "half of the activations kept",
            ),
            Contender(
                "strop-shadow-budget",
                _SDXL,
                replace(OURS, is_shadow=True, recompute="budget"),
                "bf16 copies of weights, half of the activations kept",
            ),
            Contender(
                "diffusers",
                _SDXL,
                replace(SCRIPT, recompute="checkpoints"),
                "the script's flags for it: fp16, gradient checkpointing",
            ),
            Contender("torch", _SDXL, TORCH, "bf16, NHWC, Inductor, fused AdamW"),
            Contender(
                "torch-budget",
                _SDXL,
                replace(TORCH, recompute="budget"),
                "half of the activations kept",
            ),
        ),
        "img/s",
        10,
        14,
    ),
)

WORKERS = (1, 2, 4, 8, 16)
SWEEP = tuple(Loader(w, p) for p in (True, False) for w in WORKERS)
TINY_SWEEP = (Loader(0, False), Loader(1, False))
BEST_GUESS = Loader(8, True)  # where no sweep has said which is the best
_NO_LOADER: dict[str, Any] = {"loaders": (), "takes_best_loader": False}

# Each rung changes the one before it: name, published img/s, what changes, what it is here.
_RUNGS: tuple[tuple[str, float | None, dict[str, Any], str], ...] = (
    ("tf32", 8.11, {}, "tf32, naive attention, loader without workers"),
    ("fp16", 9.55, {"precision": "fp16"}, "fp16 autocast with GradScaler"),
    ("loader", 11.46, {"loaders": SWEEP}, "num_workers and pinning swept, the best"),
    (
        "fused",
        12.66,
        {"optimizer": "fused", "is_channels_last": True, "loaders": (), "takes_best_loader": True},
        "what plain torch has of fused layers: channels-last; AdamW(fused=True)",
    ),
    ("flash", 18.07, {"attention": "sdpa"}, "torch's scaled_dot_product_attention"),
    ("batch48", 23.57, {"batch": 48}, "batch 48"),
    ("ema", 23.75, {"ema": "foreach"}, "EMA in one foreach sweep"),
    (
        "zero2",
        24.03,
        {"gpus": 2, "optimizer": "strop", "parallel": "zero2"},
        "ZeRO-2 of the trainer: moments, EMA and summed gradients sharded, reduce-scattered within "
        "the backward pass; img/s a GPU",
    ),
    (
        "compiled",
        None,
        {
            "gpus": 1,
            "optimizer": "fused",
            "parallel": "average",
            "precision": "bf16",
            "compiler": "strop",
            "reads_loss": False,
        },
        "strop.optimize(train=True), NHWC, bf16; no loss read every step",
    ),
    ("one-pass", None, {"optimizer": "strop"}, "clip, AdamW and EMA in FusedAdamW"),
    ("caches", None, {"is_cached": True, **_NO_LOADER}, "less work: latents and text cached"),
    ("graph", None, {"graph": "needed"}, "whole step in a CUDA graph"),
    ("shadow", None, {"is_shadow": True, "graph": "if built"}, "bf16 copies of the weights"),
)
# Milliseconds of a step of the first rungs' script at batch 8, on the same A100.
PUBLISHED_SPLIT = {
    "VAE": 33.0,
    "text": 14.0,
    "forward": 82.0,
    "backward": 125.0,
    "clip": 32.0,
    "update": 96.0,
    "EMA": 38.0,
    "other": 16.0,
}


def _rungs() -> tuple[Contender, ...]:
    work = Work()
    setup = Setup("tf32", "naive", loaders=(Loader(),), reads_loss=True)
    found = []
    for name, published, changes, note in _RUNGS:
        of_work = {key: changes[key] for key in ("batch", "is_cached") if key in changes}
        work = replace(work, **of_work)
        setup = replace(setup, **{k: v for k, v in changes.items() if k not in of_work})
        found.append(Contender(name, work, setup, note, published))
    return tuple(found)


LADDER = TrainRow(
    "ladder",
    "SD1.5 512², full fine-tune, the published ladder and ours",
    _rungs(),
    published_split=PUBLISHED_SPLIT,
)


EVERY_ROW = (*ROWS, *GROUP_ROWS, LADDER)


def chosen_rows(
    names: Sequence[str],
    *,
    ladder: bool = False,
    tiny: bool = False,
    only: Sequence[str] = (),
    compilers: Sequence[str] = (),
    batch: int | None = None,
) -> tuple[TrainRow, ...]:
    """Return the rows by name; "P11" stands for P11 and P11-lora. None stands for all rows of one
    GPU, or for the ladder alone if it is asked for. ``only`` keeps these contenders, ``compilers``
    those that stand for these. ``batch`` takes the place of each row's. Raises OptionError for
    what there is not."""
    rows = (*ROWS, *GROUP_ROWS)
    known = {row.name.lower(): {row.name} for row in rows}
    for row in rows:
        known[row.name.lower().split("-")[0]].add(row.name)
    unknown = [name for name in names if name.lower() not in known]
    if unknown:
        listed = ", ".join(row.name for row in rows)
        raise OptionError(f"no row {', '.join(unknown)}; there are {listed}, and --ladder")
    wanted = set().union(*(known[name.lower()] for name in names))
    if not names and not ladder:
        wanted = {row.name for row in ROWS}
    found = [row for row in rows if row.name in wanted] + [LADDER] * ladder
    found = [_varied(row, tiny, batch) for row in found]
    return tuple(_restricted(found, only, compilers))


def _varied(row: TrainRow, tiny: bool, batch: int | None) -> TrainRow:
    row = row if batch is None else row.with_batch(batch)
    return row.tiny() if tiny else row


def _restricted(
    rows: Sequence[TrainRow], only: Sequence[str], compilers: Sequence[str]
) -> list[TrainRow]:
    _check_known("contender", only, [c.name for row in rows for c in row.contenders])
    _check_known("compiler", compilers, COMPILERS)

    def is_wanted(contender: Contender) -> bool:
        if compilers and contender.compiler not in compilers:
            return False
        return contender.name in only if only else bool(compilers) or not contender.is_extra

    kept = [replace(row, contenders=tuple(filter(is_wanted, row.contenders))) for row in rows]
    found = [row for row in kept if row.contenders]
    if not found:
        names = ", ".join(row.name for row in rows)
        of = ", ".join(dict.fromkeys(c.compiler for row in rows for c in row.contenders))
        raise OptionError(f"no contender of {names} is left; their compilers are {of}")
    return found


def _check_known(what: str, given: Sequence[str], names: Sequence[str]) -> None:
    unknown = [name for name in given if name not in names]
    if unknown:
        listed = ", ".join(dict.fromkeys(names))
        raise OptionError(f"no {what} {', '.join(unknown)}; there are {listed}")


def contender_named(row: str, name: str, *, tiny: bool, batch: int | None = None) -> Contender:
    """Return a contender of a row that was chosen."""
    found = _varied(row_named(row), tiny, batch)
    return next(c for c in found.contenders if c.name == name)


def row_named(name: str) -> TrainRow:
    (found,) = (row for row in EVERY_ROW if row.name == name)
    return found
