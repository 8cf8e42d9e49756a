"""List the rows of ``strop bench train`` for several GPUs, and the one for the largest batch. Each
process has a GPU; the batch of a row is that of one process."""

from __future__ import annotations

from dataclasses import replace

from strop.bench.train_work import GRAPH, OURS, SCRIPT, TORCH, Contender, TrainRow, Work, eager_of

_CACHED = Work(batch=32, is_cached=True)
_SDXL = Work("sdxl", 4, is_cached=True, has_ema=False)
_IN_LOOP = Work(batch=8)
_FLUX = Work("flux", 1, trained="lora", is_cached=True, has_ema=False)
_SD2 = Work("sd2", 64, is_cached=True, has_ema=False)
_RECIPE = "the plain recipe: fp16 autocast with GradScaler, DDP"
_INDUCTOR = "torch.compile(DDP(unet)), bf16, NHWC, fused AdamW"
_FEWER = "half of the activations kept"
_SHADOW = replace(OURS, is_shadow=True)


def _ours(work: Work) -> tuple[Contender, ...]:
    """Return Strop's contenders; with a graph, the sums over ranks are in it."""
    travels = "bf16 copies of weights, whose gradients travel"
    whole = "whole step in a CUDA graph"
    return (
        Contender("strop", work, OURS),
        Contender("strop-graph", work, GRAPH, whole),
        Contender("strop-shadow", work, _SHADOW, travels),
        Contender(
            "strop-shadow-graph", work, replace(GRAPH, is_shadow=True), f"{travels}; {whole}"
        ),
    )


def _scaling(work: Work) -> tuple[Contender, ...]:
    return (
        *_ours(work),
        Contender("diffusers", work, SCRIPT, _RECIPE),
        eager_of(work),
        Contender("torch", work, TORCH, _INDUCTOR),
    )


def _largest() -> tuple[Contender, ...]:
    """Return contenders by batch, the largest first: what does not fit fails, and says so."""
    found = []
    for name, setup in (("strop", OURS), ("torch", TORCH)):
        for batch, recompute in ((64, ""), (64, "budget"), (48, ""), (32, "")):
            way = replace(setup, recompute=recompute)
            work = replace(_SD2, batch=batch)
            label = f"{name}-{batch}{'-budget' if recompute else ''}"
            found.append(Contender(label, work, way, _FEWER if recompute else ""))
    small = replace(_SD2, batch=32)
    return (*found, Contender("diffusers-32", small, SCRIPT, _RECIPE), eager_of(small))


GROUP_ROWS: tuple[TrainRow, ...] = (
    TrainRow(
        "P12",
        "SD1.5 512², full fine-tune, batch 32 a GPU, cached, clip and EMA: scaling",
        _scaling(_CACHED),
        "x 1 GPU",
        1.94,
        1.97,
        processes=(1, 2),
    ),
    TrainRow(
        "P12s",
        "SD1.5 512², full fine-tune, batch 4 a GPU, cached, clip and EMA: scaling",
        _scaling(replace(_CACHED, batch=4)),
        "x 1 GPU",
        1.85,
        1.92,
        processes=(1, 2),
    ),
    TrainRow(
        "P12b",
        "SDXL 1024², full fine-tune, batch 4 a GPU, cached, no EMA, ZeRO-1: scaling",
        (
            Contender("strop-zero1", _SDXL, replace(OURS, parallel="zero1"), "moments sharded"),
            Contender(
                "strop-zero1-budget",
                _SDXL,
                replace(OURS, parallel="zero1", recompute="budget"),
                f"moments sharded, {_FEWER}",
            ),
            Contender(
                "strop-zero2",
                _SDXL,
                replace(OURS, parallel="zero2"),
                "moments and summed gradients sharded",
            ),
            Contender("strop-budget", _SDXL, replace(OURS, recompute="budget"), _FEWER),
            Contender(
                "diffusers",
                _SDXL,
                replace(SCRIPT, recompute="checkpoints"),
                f"{_RECIPE}, gradient checkpointing",
            ),
            eager_of(_SDXL),
            Contender("torch-budget", _SDXL, replace(TORCH, recompute="budget"), _FEWER),
        ),
        "x 1 GPU",
        1.90,
        1.95,
        processes=(1, 2),
    ),
    TrainRow(
        "P12c",
        "SD1.5 512², batch 8 a GPU, VAE and text in the loop: beside the plain recipe",
        (
            *_ours(_IN_LOOP),
            Contender("diffusers", _IN_LOOP, SCRIPT, _RECIPE),
            eager_of(_IN_LOOP),
        ),
        "x",
        2.4,
        2.7,
        processes=(1, 2),
    ),
    TrainRow(
        "P12d",
        "SD1.5 512², batch 8 a GPU, VAE and text in the loop: beside DDP with Inductor",
        (
            *_ours(_IN_LOOP),
            Contender("torch", _IN_LOOP, TORCH, _INDUCTOR),
            eager_of(_IN_LOOP),
        ),
        "x",
        1.6,
        1.8,
        processes=(2,),
        against="torch",
    ),
    TrainRow(
        "P12e",
        "Flux.1 512², LoRA of rank 16, batch 1, bf16 base, cached",
        (
            Contender("strop", _FLUX, OURS),
            Contender("strop-graph", _FLUX, GRAPH, "whole step in a CUDA graph"),
            eager_of(_FLUX),
            Contender("torch", _FLUX, TORCH, "Inductor, fused AdamW"),
        ),
        "ms",
        160,
        130,
    ),
    TrainRow(
        "SD2",
        "SD2 512², full fine-tune, cached, no EMA, at the largest batch",
        _largest(),
        "img/s a GPU",
        145,
        155,
        any_batch=True,
    ),
)
