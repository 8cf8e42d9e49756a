"""Say what a row of ``strop bench train`` is made of: a model, what a step has to do, and how a
contender does it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from strop.bench import models, transformer_models
from strop.wording import counted

TINY_PIXELS, TINY_BATCH = 64, 2
COMPILERS = ("strop", "inductor", "eager", "diffusers")


@dataclass(frozen=True, slots=True)
class TrainModel:
    """Describe a model. ``tflop``: of forward and backward, a picture of full size. ``kind`` is
    "unet", which predicts noise, or "flux", which predicts the way from noise to latents; the base
    of the latter is in bf16."""

    unet: Mapping[str, Any]
    vae: Mapping[str, Any]
    clip: Mapping[str, Any]
    pixels: int
    tflop: float = 0.0
    kind: str = "unet"


_TINY = (models.TINY_VAE, models.TINY_CLIP, TINY_PIXELS)
MODELS = {
    "sd15": TrainModel(models.SD15_UNET, models.SD_VAE, models.CLIP_L, 512, 2.407),
    "sd2": TrainModel(models.SD2_UNET, models.SD_VAE, models.CLIP_L, 512),
    "sdxl": TrainModel(models.SDXL_UNET, models.SD_VAE, models.CLIP_L, 1024, 20.23),
    "flux": TrainModel(transformer_models.FLUX, {}, models.CLIP_L, 512, kind="flux"),
    "tiny-sd15": TrainModel(models.TINY_UNET, *_TINY),
    "tiny-sd2": TrainModel(models.TINY_SD2_UNET, *_TINY),
    "tiny-sdxl": TrainModel(models.TINY_SDXL_UNET, *_TINY),
    "tiny-flux": TrainModel(transformer_models.TINY_FLUX, *_TINY, kind="flux"),
}


@dataclass(frozen=True, slots=True)
class Work:
    """Say what a step has to do beside forward, backward, clip and update. ``batch`` is that of
    one process. ``is_cached``: latents' moments and text states are given, else pictures and
    tokens."""

    model: str = "sd15"
    batch: int = 8
    trained: str = "unet"  # or "lora": adapters of rank 16
    is_cached: bool = False
    has_ema: bool = True

    def tiny(self) -> Work:
        return replace(self, model=f"tiny-{self.model}", batch=min(self.batch, TINY_BATCH))

    @property
    def text(self) -> str:
        """Say in words, for tables, what the work is."""
        given = "latents and text cached" if self.is_cached else "VAE and text in the loop"
        what = "" if self.trained == "unet" else f"{self.trained}, "
        return f"{what}batch {self.batch}, {given}, {'EMA' if self.has_ema else 'no EMA'}"


@dataclass(frozen=True, slots=True)
class Loader:
    """Describe how torch's DataLoader is set up."""

    workers: int = 0
    is_pinned: bool = False

    @property
    def text(self) -> str:
        return f"{counted(self.workers, 'worker')}{', pinned' if self.is_pinned else ''}"


@dataclass(frozen=True, slots=True)
class Setup:
    """Say how a step is done. ``optimizer``: "plain" (what a script gets), "fused" (torch's) or
    "strop", which clips and averages too. ``ema``: "loop" (diffusers) or "foreach". ``compiler``:
    "", "inductor", "inductor-graphs" or "strop". ``graph`` is that of the whole step: "", "needed"
    or "if built". ``loaders``: measured one after the other; the best counts. ``recompute``: "",
    "checkpoints" (diffusers') or "budget" (half the activations are kept). ``parallel`` is how
    several processes put their gradients together: "ddp" (torch's), "average" (the trainer's flat
    buckets), "zero1" (``strop train --shard_optimizer``) or "zero2" (``--shard_gradients``);
    ``gpus`` is how many it takes at least."""

    precision: str = "bf16"  # or tf32, fp16 with a GradScaler
    attention: str = "sdpa"  # or "naive": all scores in memory
    compiler: str = ""
    is_channels_last: bool = False
    optimizer: str = "plain"
    ema: str = "loop"
    is_shadow: bool = False
    graph: str = ""
    loaders: tuple[Loader, ...] = ()
    takes_best_loader: bool = False  # of an earlier rung; with more workers if they are waited for
    recompute: str = ""
    reads_loss: bool = False  # every step, as diffusers' scripts do
    parallel: str = "ddp"
    gpus: int = 1


@dataclass(frozen=True, slots=True)
class Contender:
    """Describe a contender. ``published``: pictures a second on an A100. ``is_extra``: it runs
    only if it is asked for, by its name or its compiler."""

    name: str
    work: Work
    setup: Setup
    note: str = ""
    published: float | None = None
    is_extra: bool = False

    @property
    def compiler(self) -> str:
        """Return which of ``COMPILERS`` it stands for."""
        made_by = self.setup.compiler.partition("-")[0]
        return made_by or ("diffusers" if self.name.startswith("diffusers") else "eager")

    @property
    def cost_s(self) -> float:
        """Return the seconds that it takes on a GPU at least; with less time left it does not
        begin."""
        return {"": 15.0, "strop": 60.0}.get(self.setup.compiler, 90.0)

    @property
    def limit_s(self) -> float:
        """Return the seconds after which it is given up."""
        return 600.0 if self.setup.compiler or self.setup.loaders else 300.0


@dataclass(frozen=True, slots=True)
class TrainRow:
    """Describe a row. The number of a row is that of Strop's best contender with the work of the
    first one, or with any batch if ``any_batch``.

    ``unit`` is "img/s" (of all GPUs together), "img/s a GPU", "ms" a step, "x" (how many times as
    fast as ``against`` on as many GPUs) or "x 1 GPU" (how many times as fast as the same contender
    on one). ``processes``: how many, each with a GPU, are measured unless a number is asked for.
    ``batch`` is the one that was asked for instead of the row's."""

    name: str
    title: str
    contenders: tuple[Contender, ...]
    unit: str = "img/s"
    must: float | None = None
    stretch: float | None = None
    is_tiny: bool = False
    published_split: Mapping[str, float] = field(default_factory=dict)
    processes: tuple[int, ...] = (1,)
    against: str = "diffusers"
    any_batch: bool = False
    batch: int | None = None

    def tiny(self) -> TrainRow:
        """Return the same row with tiny widths and sizes; its speed says nothing."""
        small = [replace(c, work=c.work.tiny()) for c in self.contenders]
        if self.batch is not None:
            small = [replace(c, work=replace(c.work, batch=self.batch)) for c in small]
        return replace(self, contenders=tuple(small), is_tiny=True)

    def with_batch(self, batch: int) -> TrainRow:
        """Return the row with so many pictures a step and process for all contenders; those that
        differ in their batch alone become one."""
        changed: dict[str, Contender] = {}
        for contender in self.contenders:
            name = contender.name.replace(f"-{contender.work.batch}", "")
            work = replace(contender.work, batch=batch)
            changed.setdefault(name, replace(contender, name=name, work=work))
        return replace(self, contenders=tuple(changed.values()), batch=batch)


SCRIPT = Setup(precision="fp16", reads_loss=True)
TORCH = Setup(compiler="inductor", is_channels_last=True, optimizer="fused", ema="foreach")
EAGER = replace(TORCH, compiler="")
OURS = Setup(compiler="strop", is_channels_last=True, optimizer="strop", parallel="average")
GRAPH = replace(OURS, graph="needed")


def ours_of(work: Work) -> tuple[Contender, ...]:
    return (
        Contender("strop", work, OURS),
        Contender("strop-graph", work, GRAPH, "whole step in a CUDA graph"),
        Contender(
            "strop-shadow",
            work,
            replace(GRAPH, is_shadow=True),
            "bf16 copies of weights; whole step in a CUDA graph",
        ),
    )


def peers_of(work: Work) -> tuple[Contender, ...]:
    """Return the contenders of a row, the slowest to compile last, with CUDA graphs at batch 1,
    where launches are what costs."""
    graphs = Contender(
        "torch-graphs",
        work,
        replace(TORCH, compiler="inductor-graphs"),
        "Inductor with CUDA graphs",
    )
    return (
        Contender("diffusers", work, SCRIPT, "the script's defaults, fp16"),
        eager_of(work),
        Contender("torch", work, TORCH, "bf16, NHWC, Inductor, fused AdamW, foreach EMA"),
        *([graphs] if work.batch == 1 else []),
    )


def eager_of(work: Work) -> Contender:
    note = "bf16, NHWC, nothing compiled, fused AdamW, foreach EMA"
    return Contender("eager", work, EAGER, note, is_extra=True)


def contenders_of(work: Work) -> tuple[Contender, ...]:
    return (*ours_of(work), *peers_of(work))
