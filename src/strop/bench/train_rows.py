"""List the rows and the ladder of ``strop bench train``: what a step has to do, and how it does
it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from strop.bench import models
from strop.errors import OptionError
from strop.wording import counted

TINY_PIXELS, TINY_BATCH = 64, 2


@dataclass(frozen=True, slots=True)
class TrainModel:
    """Describe a model. ``tflop``: of forward and backward, a picture of full size."""

    unet: Mapping[str, Any]
    vae: Mapping[str, Any]
    clip: Mapping[str, Any]
    pixels: int
    tflop: float = 0.0


MODELS = {
    "sd15": TrainModel(models.SD15_UNET, models.SD_VAE, models.CLIP_L, 512, 2.407),
    "sdxl": TrainModel(models.SDXL_UNET, models.SD_VAE, models.CLIP_L, 1024, 20.23),
    "tiny-sd15": TrainModel(models.TINY_UNET, models.TINY_VAE, models.TINY_CLIP, TINY_PIXELS),
    "tiny-sdxl": TrainModel(models.TINY_SDXL_UNET, models.TINY_VAE, models.TINY_CLIP, TINY_PIXELS),
}


@dataclass(frozen=True, slots=True)
class Work:
    """Say what a step has to do beside forward, backward, clip and update. ``is_cached``: latents'
    moments and text states are given, else pictures and tokens."""

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
    "checkpoints" (diffusers') or "budget" (half the activations are kept)."""

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
    gpus: int = 1


@dataclass(frozen=True, slots=True)
class Contender:
    """Describe a contender. ``published``: pictures a second on an A100."""

    name: str
    work: Work
    setup: Setup
    note: str = ""
    published: float | None = None

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
    """Describe a row. ``unit``: "img/s", "ms" a step, or "x": how many times as fast as the script
    of diffusers. The number of a row is that of Strop's best contender with the work of the first
    one."""

    name: str
    title: str
    contenders: tuple[Contender, ...]
    unit: str = "img/s"
    must: float | None = None
    stretch: float | None = None
    is_tiny: bool = False
    published_split: Mapping[str, float] = field(default_factory=dict)

    def tiny(self) -> TrainRow:
        """Return the same row with tiny widths and sizes; its speed says nothing."""
        small = tuple(replace(c, work=c.work.tiny()) for c in self.contenders)
        return replace(self, contenders=small, is_tiny=True)


SCRIPT = Setup(precision="fp16", reads_loss=True)
TORCH = Setup(compiler="inductor", is_channels_last=True, optimizer="fused", ema="foreach")
OURS = Setup(compiler="strop", is_channels_last=True, optimizer="strop")
GRAPH = replace(OURS, graph="needed")


def _ours(work: Work) -> tuple[Contender, ...]:
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


def _peers(work: Work) -> tuple[Contender, ...]:
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
        Contender("torch", work, TORCH, "bf16, NHWC, Inductor, fused AdamW, foreach EMA"),
        *([graphs] if work.batch == 1 else []),
    )


def _contenders(work: Work) -> tuple[Contender, ...]:
    return (*_ours(work), *_peers(work))


_DREAMBOOTH = Work(batch=1, has_ema=False)
_SDXL = Work("sdxl", 4, is_cached=True, has_ema=False)
ROWS: tuple[TrainRow, ...] = (
    TrainRow(
        "P8",
        "SD1.5 512², full fine-tune, batch 8, VAE and text in the loop",
        _contenders(Work()),
        "img/s",
        72,
        90,
    ),
    TrainRow(
        "P9",
        "SD1.5 512², full fine-tune, batch 32, latents and text cached",
        _contenders(Work(batch=32, is_cached=True)),
        "img/s",
        115,
        140,
    ),
    TrainRow(
        "P11",
        "SD1.5 512², DreamBooth of the full UNet, batch 1",
        (
            *_ours(_DREAMBOOTH),
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
            *_peers(_DREAMBOOTH),
        ),
        "x",
        3,
    ),
    TrainRow(
        "P11-lora",
        "SD1.5 512², LoRA of rank 16, batch 1, cached",
        tuple(
            c
            for c in _contenders(replace(_DREAMBOOTH, trained="lora", is_cached=True))
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
    ("zero2", 24.03, {"gpus": 2}, "ZeRO-2"),
    (
        "compiled",
        None,
        {"gpus": 1, "precision": "bf16", "compiler": "strop", "reads_loss": False},
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


def chosen_rows(
    names: Sequence[str], *, ladder: bool = False, tiny: bool = False, only: Sequence[str] = ()
) -> tuple[TrainRow, ...]:
    """Return the rows by name; "P11" stands for P11 and P11-lora. None stands for all rows, or for
    the ladder alone if it is asked for. ``only`` keeps these contenders. Raises OptionError for
    what there is not."""
    known = {row.name.lower(): {row.name} for row in ROWS}
    for row in ROWS:
        known[row.name.lower().split("-")[0]].add(row.name)
    unknown = [name for name in names if name.lower() not in known]
    if unknown:
        listed = ", ".join(row.name for row in ROWS)
        raise OptionError(f"no row {', '.join(unknown)}; there are {listed}, and --ladder")
    wanted = set().union(*(known[name.lower()] for name in names))
    if not names and not ladder:
        wanted = {row.name for row in ROWS}
    found = [row for row in ROWS if row.name in wanted] + [LADDER] * ladder
    found = [row.tiny() if tiny else row for row in found]
    return tuple(_restricted(found, only)) if only else tuple(found)


def _restricted(rows: Sequence[TrainRow], only: Sequence[str]) -> list[TrainRow]:
    names = dict.fromkeys(c.name for row in rows for c in row.contenders)
    unknown = [name for name in only if name not in names]
    if unknown:
        raise OptionError(f"no contender {', '.join(unknown)}; there are {', '.join(names)}")
    kept = [
        replace(row, contenders=tuple(c for c in row.contenders if c.name in only)) for row in rows
    ]
    return [row for row in kept if row.contenders]


def contender_named(row: str, name: str, *, tiny: bool) -> Contender:
    """Return a contender of a row that was chosen."""
    found = row_named(row)
    found = found.tiny() if tiny else found
    return next(c for c in found.contenders if c.name == name)


def row_named(name: str) -> TrainRow:
    (found,) = (row for row in (*ROWS, LADDER) if row.name == name)
    return found
