"""All tiny pipelines."""

from __future__ import annotations

from strop.bench.pipelines.images import IMAGES
from strop.bench.pipelines.stable import STABLE
from strop.bench.pipelines.tiny import TinyPipeline

PIPELINES: tuple[TinyPipeline, ...] = (*STABLE, *IMAGES)
