"""List the rows of ``strop bench infer``: what is run, at which size, and what it should take."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from strop.bench import models
from strop.bench.cases import BenchCase
from strop.bench.family_pipelines import FAMILIES, family_workload
from strop.bench.models import Build, Size
from strop.bench.network_models import NETWORKS, NetworkModel
from strop.bench.transformer_models import TRANSFORMERS
from strop.errors import OptionError

TINY_SCALE = 8  # how many times smaller the sides of a tiny row are
TINY_STEP = 16  # of which they are multiples
SPEED_BATCHES = (1, 8, 32)
TINY_STEPS = 2


@dataclass(frozen=True, slots=True)
class Draws:
    """Hold legal sizes to draw from: batches, and sides in multiples of ``step`` pixels."""

    batches: range
    sides: range
    most: int = 1000  # shapes that are worth their time
    rows: range | None = None  # heights, where they are others than widths

    def some(self, count: int, seed: int) -> list[tuple[Size, int]]:
        """Draw ``count`` different shapes, the same for the same seed."""
        source, found = random.Random(seed), dict[tuple[Size, int], None]()
        count = min(count, self.most)
        while len(found) < count:
            size = (source.choice(self.rows or self.sides), source.choice(self.sides))
            found[size, source.choice(self.batches)] = None
        return list(found)


@dataclass(frozen=True, slots=True)
class InferModel:
    """Describe a model, which ``full`` and ``tiny`` build for a number of denoising steps.

    ``is_large``: a GPU has no room for weights of each contender, so they have the same ones.
    ``tiny_size`` stands where a tiny model has a size of its own.
    """

    full: Callable[[int], Build]
    tiny: Callable[[int], Build]
    draws: Draws
    tiny_draws: Draws
    kind: str = "step"  # of BenchCase
    is_large: bool = False
    tiny_size: Size | None = None


def _sides(low: int, high: int, step: int) -> range:
    return range(low, high + 1, step)


def _always(build: Build, steps: int) -> Build:
    return build


def _drawn(size: Size) -> Draws:
    """Draw batches of inputs of one size: networks check it."""
    return Draws(range(1, 33), range(size[1], size[1] + 1), rows=range(size[0], size[0] + 1))


_SD15 = (models.SD15_UNET, models.SD_VAE, models.CLIP_L)
_TINY = (models.TINY_UNET, models.TINY_VAE, models.TINY_CLIP)
_BOTH_CLIPS = (models.CLIP_L, models.CLIP_BIG_G)
_TINY_UNET_DRAWS = Draws(range(1, 4), _sides(32, 128, 16))
_TINY_FAMILY_SIZE = (32, 32)  # their VAEs halve sides
_PICTURES, _TINY_PICTURES = (
    Draws(range(1, 3), _sides(256, 768, 64), most=4),
    Draws(range(1, 3), _sides(32, 96, 16), most=4),
)

MODELS: dict[str, InferModel] = {
    "sd15-unet": InferModel(
        lambda steps: models.unet_workload(models.SD15_UNET),
        lambda steps: models.unet_workload(models.TINY_UNET, tokens=7),
        Draws(range(1, 9), _sides(256, 1024, 64)),
        _TINY_UNET_DRAWS,
    ),
    "sdxl-unet": InferModel(
        lambda steps: models.unet_workload(models.SDXL_UNET),
        lambda steps: models.unet_workload(models.TINY_SDXL_UNET, tokens=7),
        Draws(range(1, 5), _sides(512, 1280, 64)),
        _TINY_UNET_DRAWS,
    ),
    "sd-vae": InferModel(
        lambda steps: models.vae_workload(models.SD_VAE),
        lambda steps: models.vae_workload(models.TINY_VAE),
        Draws(range(1, 5), _sides(256, 1024, 8)),
        Draws(range(1, 4), _sides(32, 128, 8)),
    ),
    "sd15-pipe": InferModel(
        lambda steps: models.pipeline_workload(*_SD15, steps),
        lambda steps: models.pipeline_workload(*_TINY, steps),
        _PICTURES,
        _TINY_PICTURES,
        kind="pipe",
    ),
    "sd15-img2img": InferModel(
        lambda steps: models.pipeline_workload(*_SD15, steps, from_picture=True),
        lambda steps: models.pipeline_workload(*_TINY, 2 * steps, from_picture=True),
        _PICTURES,
        _TINY_PICTURES,
        kind="pipe",
    ),
    **{
        name: InferModel(
            partial(_always, full),
            partial(_always, tiny),
            Draws(range(1, 3), _sides(512, 1280, 64)),
            Draws(range(1, 3), _sides(64, 160, 16)),
            is_large=name in ("flux", "qwen-image", "wan-14b-guided"),
        )
        for name, (full, tiny) in TRANSFORMERS.items()
    },
    **{
        network.name: InferModel(
            partial(_always, network.full),
            partial(_always, network.tiny),
            _drawn(network.size),
            _drawn(network.tiny_size),
            tiny_size=network.tiny_size,
        )
        for network in NETWORKS
    },
    "sdxl-pipe": InferModel(
        lambda steps: models.sdxl_pipeline_workload(
            models.SDXL_UNET, models.SD_VAE, _BOTH_CLIPS, steps
        ),
        lambda steps: models.sdxl_pipeline_workload(
            models.TINY_SDXL_UNET, models.TINY_VAE, (models.TINY_CLIP, models.TINY_CLIP_G), steps
        ),
        replace(_PICTURES, sides=_sides(512, 1024, 64)),
        _TINY_PICTURES,
        kind="pipe",
    ),
    **{
        name: InferModel(
            partial(family_workload, full),
            partial(family_workload, tiny),
            replace(_PICTURES, sides=_sides(512, 1024, 64)),
            replace(_TINY_PICTURES, sides=_sides(16, 64, 16)),
            kind="pipe",
            is_large=True,
            tiny_size=_TINY_FAMILY_SIZE,
        )
        for name, (full, tiny) in FAMILIES.items()
    },
}


@dataclass(frozen=True, slots=True)
class InferRow:
    """Describe a row. ``kind``: "step" is timed in ms and "picture" in s a call; "start" is the
    seconds of a cold compile, and "memory" the peak as a share of eager's. ``must`` and ``stretch``
    are in that unit, or shares of what Inductor takes in a CUDA graph. ``cost_s`` is what Strop and
    eager need on a GPU, once the model has been compiled. ``dtype`` is that on a GPU.
    ``parallel`` is how Strop spreads calls over GPUs, "" for one GPU; ``numerics`` what Strop may
    compute in, "" for exact. ``samples`` is for calls that take seconds: so many are timed at most,
    nothing is run to warm up but Strop's own second call, no profile is taken, and a step is
    compared with eager's alone. ``public`` is what others have published."""

    name: str
    title: str
    kind: str
    model: str
    size: Size
    batch: int
    must: float | None
    stretch: float | None
    cost_s: float
    steps: int = 0
    is_tiny: bool = False
    dtype: str = "fp16"
    must_share: float | None = None
    stretch_share: float | None = None
    parallel: str = ""
    numerics: str = ""
    samples: int = 0
    public: str = ""

    def case(self, dtype: torch.dtype) -> BenchCase:
        model = MODELS[self.model]
        builder = (model.tiny if self.is_tiny else model.full)(self.steps)
        shape = (self.size,), (self.batch,)
        return BenchCase(self.name, builder, *shape, dtype, model.kind, model.is_large)

    @property
    def draws(self) -> Draws:
        model = MODELS[self.model]
        return model.tiny_draws if self.is_tiny else model.draws

    @property
    def unit(self) -> str:
        return {"step": "ms", "memory": "of eager"}.get(self.kind, "s")

    def tiny(self) -> InferRow:
        """Return the same row with tiny widths, a small size and few steps; its speed says
        nothing."""
        height, width = (-(-side // TINY_SCALE // TINY_STEP) * TINY_STEP for side in self.size)
        return replace(
            self,
            size=MODELS[self.model].tiny_size or (height, width),
            steps=min(self.steps, TINY_STEPS),
            cost_s=0.0,
            is_tiny=True,
        )


def _square(side: int) -> Size:
    return (side, side)


_480P, _WAN = (480, 832), (0.92, 0.85)  # height and width; shares of Inductor in a CUDA graph


ROWS: tuple[InferRow, ...] = (
    InferRow(
        "P1", "SD1.5 UNet step 512², batch 2", "step", "sd15-unet", _square(512), 2, 4.8, 4.0, 12
    ),
    InferRow(
        "P2", "SD1.5 UNet step 1024², batch 2", "step", "sd15-unet", _square(1024), 2, 21, 18, 20
    ),
    InferRow(
        "P2b", "SD1.5 UNet step 512², batch 8", "step", "sd15-unet", _square(512), 8, 15, 13, 18
    ),
    InferRow(
        "P3", "SDXL UNet step 1024², batch 2", "step", "sdxl-unet", _square(1024), 2, 26, 23, 40
    ),
    InferRow("P4-512", "SD VAE decode 512²", "step", "sd-vae", _square(512), 1, 6.5, 5.5, 10),
    InferRow("P4-1024", "SD VAE decode 1024²", "step", "sd-vae", _square(1024), 1, 26, 21, 20),
    *(
        InferRow(
            f"P5-{side}{suffix}",
            f"SD1.5, 50 steps, {what} {side}²",
            "picture",
            model,
            _square(side),
            1,
            must,
            stretch,
            cost,
            steps=50,
        )
        for suffix, what, model in (
            ("", "prompt to picture", "sd15-pipe"),
            ("-img2img", "picture to picture", "sd15-img2img"),
        )
        for side, must, stretch, cost in (
            (512, 0.27 if not suffix else None, 0.23 if not suffix else None, 18.0),
            (768, None, None, 22.0),
            (1024, None, None, 30.0),
        )
    ),
    InferRow(
        "P5x",
        "SDXL 1024², 30 steps, prompt to picture",
        "picture",
        "sdxl-pipe",
        _square(1024),
        1,
        0.9,
        0.8,
        60,
        steps=30,
    ),
    InferRow(
        "P6",
        "cold compile SD1.5 UNet, optimize to first output",
        "start",
        "sd15-unet",
        _square(512),
        2,
        20,
        12,
        15,
    ),
    InferRow(
        "P7",
        "peak memory of P5 at 1024²",
        "memory",
        "sd15-pipe",
        _square(1024),
        1,
        1.0,
        0.8,
        20,
        steps=4,
    ),
    *(
        InferRow(
            name, title, "step", model, size, batch, must, stretch, cost, 0, False, "bf16", *shares
        )
        for name, title, model, size, batch, must, stretch, cost, shares in (
            ("D1", "Flux.1 step 1024²", "flux", _square(1024), 1, 120, 110, 60, ()),
            ("D1w", "Wan 2.1 1.3B step, 480p, 33 frames", "wan", _480P, 1, None, None, 60, _WAN),
            (
                *("D1w-81", "Wan 2.1 1.3B step, 480p, 81 frames", "wan-81"),
                *(_480P, 1, None, None, 90, _WAN),
            ),
            (
                *("D1q", "Qwen-Image step 1024²", "qwen-image"),
                *(_square(1024), 1, None, None, 90, (0.88, 0.82)),
            ),
            ("D1s", "SD3 medium step 1024²", "sd3-medium", _square(1024), 2, 33, 30, 40, ()),
            ("D1s35", "SD3.5 medium step 1024²", "sd3.5-medium", _square(1024), 2, 42, 38, 40, ()),
        )
    ),
)


def _family_row(
    name: str,
    title: str,
    model: str,
    steps: int,
    must: float,
    stretch: float,
    public: str,
    *,
    cost_s: float = 45,
    samples: int = 0,
) -> InferRow:
    size, kind = (_square(1024), "picture") if steps else (_480P, "step")
    return InferRow(
        name, title, kind, model, size, 1, must, stretch, cost_s, steps,
        dtype="bf16", samples=samples, public=public,
    )  # fmt: skip


# Pipelines of today, from prompt to picture, and a step of a large video model. By name only: each
# takes a large part of a GPU's memory, and one to two minutes.
FAMILY_ROWS = (
    _family_row(
        *("D2", "Flux.1-dev 1024², 28 steps, prompt to picture", "flux-pipe", 28, 3.5, 3.2),
        "SGLang about 3.86 s, TheStage 4.18, torch.compile 4.2",
        cost_s=70,
        samples=3,
    ),
    _family_row(
        *("D3", "Qwen-Image 1024², 50 steps with CFG, 128 tokens of text", "qwen-image-pipe", 50),
        *(12.5, 11.8, "SGLang 12.77 s, diffusers 18.5"),
        cost_s=100,
        samples=1,
    ),
    _family_row(
        *("D4-z-image", "Z-Image-Turbo 1024², 9 steps", "z-image-pipe", 9, 0.82, 0.75),
        "SGLang 0.906 s",
    ),
    _family_row(
        *("D4-klein", "FLUX.2 Klein 4B 1024², 4 steps", "klein-pipe", 4, 0.36, 0.32),
        "SGLang 0.40 s",
    ),
    _family_row(
        *("D5", "SD3.5 medium 1024², 28 steps, CFG", "sd3.5-pipe", 28, 1.2, 1.1),
        "none found",
    ),
    _family_row(
        "D6",
        "Wan 2.1 14B text to video, 480p, 81 frames, step with CFG, all 40 blocks",
        *("wan-14b-guided", 0, 5500, 5200, "LightX2V 5.18 s, SGLang 6.13"),
        cost_s=70,
        samples=3,
    ),
)


def _speed_row(network: NetworkModel, batch: int) -> InferRow:
    return InferRow(
        f"D7-{network.name}-b{batch}",
        f"{network.name}, batch {batch}",
        "step",
        network.name,
        network.size,
        batch,
        None,
        None,
        15.0,
        dtype=network.dtype,
        must_share=1.02,
        stretch_share=0.90,
    )


# of ``strop bench models --speed``; ``strop bench infer`` knows them by name
SPEED_ROWS = tuple(_speed_row(network, batch) for network in NETWORKS for batch in SPEED_BATCHES)


def _parallel_row(name: str, how: str, title: str, batch: int) -> InferRow:
    side = _square(1024)
    return InferRow(
        name, title, "picture", "sdxl-pipe", side, batch, None, None, 90, steps=30, parallel=how
    )


# ``strop bench infer`` knows them by name: they need two GPUs. With the peer "strop-one-gpu" they
# say how much sooner a picture is there than on one; 1.75 times as soon is asked for.
PARALLEL_ROWS = (
    _parallel_row("P5x2-cfg", "cfg", "SDXL 1024², 30 steps, guidance on two GPUs", 1),
    _parallel_row("P5x2-batch", "batch", "SDXL 1024², 30 steps, 4 pictures on all GPUs", 4),
)


def _numerics_row(
    name: str, exact: str, numerics: str, must: float | None = None, stretch: float | None = None
) -> InferRow:
    """Return an exact row of ``ROWS`` with numerics by name, commas between them."""
    row = next(row for row in ROWS if row.name == exact)
    title = f"{row.title}, {numerics.replace(',', ', ')}"
    return replace(row, name=name, title=title, must=must, stretch=stretch, numerics=numerics)


# By name only, as they are less exact. With the peer "strop-one-gpu", Strop with default options,
# they say what other numerics gain. F5 is for ``--arch 80``: what a GPU without products of fp8
# does.
NUMERICS_ROWS = (
    _numerics_row("F1", "P3", "fp8", 19, 16.5),
    _numerics_row("F2", "P5x", "fp8", 0.62, 0.55),
    _numerics_row("F3", "P2", "fp8", 17, 15.5),
    _numerics_row("F4", "D1", "fp8", 89, 82),  # 28 of them take 2.5 and 2.3 s
    _numerics_row("F5", "P3", "int8"),
    _numerics_row("F6", "P5x", "step_cache", 0.42),
    _numerics_row("F7", "P5x", "fp8,step_cache", 0.35),
)


def chosen_rows(names: Sequence[str], *, tiny: bool = False) -> tuple[InferRow, ...]:
    """Return the rows by name, in the order of the table; "P5" stands for all of "P5-...", None for
    all rows of ``ROWS``."""
    every = (*ROWS, *FAMILY_ROWS, *SPEED_ROWS, *PARALLEL_ROWS, *NUMERICS_ROWS)
    known = {row.name.lower(): {row.name} for row in every}
    for row in every:
        known.setdefault(row.name.lower().split("-")[0], set()).add(row.name)
    unknown = [name for name in names if name.lower() not in known]
    if unknown:
        listed = ", ".join(
            (
                *(row.name for row in (*ROWS, *FAMILY_ROWS, *PARALLEL_ROWS, *NUMERICS_ROWS)),
                "D7-<network>-b<batch>",
            )
        )
        raise OptionError(f"no row {', '.join(unknown)}; there are {listed}")
    wanted = set().union(*(known[name.lower()] for name in names)) or {row.name for row in ROWS}
    found = (row for row in every if row.name in wanted)
    return tuple(row.tiny() if tiny else row for row in found)


def groups_of(rows: Sequence[InferRow]) -> list[tuple[InferRow, ...]]:
    """Return rows that share a process: those of one model, except for starts and peaks."""
    found: dict[tuple[str, str], list[InferRow]] = {}
    for row in rows:
        alone = row.name if row.kind in ("start", "memory") else ""
        found.setdefault((row.model, alone or row.parallel or row.numerics), []).append(row)
    return [tuple(group) for group in found.values()]
