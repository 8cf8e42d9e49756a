"""List all tiny pipelines."""

from __future__ import annotations

from strop.bench.pipelines.flux import FLUXES
from strop.bench.pipelines.images import IMAGES
from strop.bench.pipelines.others import OTHERS
from strop.bench.pipelines.stable import STABLE
from strop.bench.pipelines.tiny import TinyPipeline
from strop.bench.pipelines.today import TODAY
from strop.bench.pipelines.videos import VIDEOS

PIPELINES: tuple[TinyPipeline, ...] = (*STABLE, *FLUXES, *IMAGES, *VIDEOS, *TODAY, *OTHERS)
