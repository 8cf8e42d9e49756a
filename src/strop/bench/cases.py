"""List what is measured: a model, its sizes, batches and dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from strop.bench import models
from strop.bench.models import Build, Size, Workload
from strop.errors import OptionError

PIPE_SIZES: tuple[Size, ...] = (
    (512, 512),
    (512, 768),
    (768, 512),
    (640, 640),
    (576, 960),
    (768, 768),
)


@dataclass(frozen=True, slots=True)
class BenchCase:
    """Describe a case. ``kind``: "step" is one call of a module, "pipe" a whole picture."""

    name: str
    builder: Build
    sizes: tuple[Size, ...]
    batches: tuple[int, ...]
    dtype: torch.dtype = torch.float16
    kind: str = "step"
    is_large: bool = False  # contenders have the same weights

    def build(self, device: torch.device) -> Workload:
        return self.builder(device, self.dtype)

    @property
    def shapes(self) -> tuple[tuple[Size, int], ...]:
        return tuple((size, batch) for size in self.sizes for batch in self.batches)


_SD15_UNET = models.unet_workload(models.SD15_UNET)
_SD_VAE = models.vae_workload(models.SD_VAE)
_TINY_UNET = models.unet_workload(models.TINY_UNET, tokens=7)
_FLOAT = torch.float32

CASES: tuple[BenchCase, ...] = (
    BenchCase("sd15-unet-512", _SD15_UNET, ((512, 512),), (2,)),
    BenchCase("sd15-unet-1024", _SD15_UNET, ((1024, 1024),), (2,)),
    BenchCase("sd15-unet-512-b8", _SD15_UNET, ((512, 512),), (8,)),
    BenchCase("sdxl-unet-1024", models.unet_workload(models.SDXL_UNET), ((1024, 1024),), (2,)),
    BenchCase("vae-512", _SD_VAE, ((512, 512),), (1,)),
    BenchCase(
        "sd15-pipe",
        models.pipeline_workload(models.SD15_UNET, models.SD_VAE, models.CLIP_L, steps=20),
        PIPE_SIZES,
        (1, 2),
        kind="pipe",
    ),
    # Small enough for a laptop CPU and for tests: the same code, no meaningful speed.
    BenchCase("tiny-unet", _TINY_UNET, ((64, 64), (96, 64)), (2,), _FLOAT),
    BenchCase("tiny-vae", models.vae_workload(models.TINY_VAE), ((64, 64), (32, 48)), (1,), _FLOAT),
    BenchCase(
        "tiny-pipe",
        models.pipeline_workload(models.TINY_UNET, models.TINY_VAE, models.TINY_CLIP, steps=2),
        ((64, 64), (64, 96)),
        (1, 2),
        _FLOAT,
        kind="pipe",
    ),
)


def case_named(name: str) -> BenchCase:
    for case in CASES:
        if case.name == name:
            return case
    raise OptionError(f"no benchmark case {name!r}; there are {', '.join(c.name for c in CASES)}")
