"""Draw batches with the model. One thread does it, which owns the model."""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from strop.drawing import draw as drawing
from strop.drawing.controls import NO_NETS
from strop.drawing.embeddings import num_chunks
from strop.drawing.prompts import unread
from strop.drawing.request import PictureRequest, StepDone
from strop.serve.order import Adapters, ModelCard


class Stopped(Exception):
    """Nobody wants the pictures of a batch any more."""


@dataclass(frozen=True)
class PictureBatch:
    """Hold requests to be drawn by one call, all with the same adapters. ``previews`` says, for
    each, after how many steps it is shown; 0: never."""

    requests: Sequence[PictureRequest]
    adapters: Adapters = ()
    previews: Sequence[int] = ()
    is_eager: bool = False


@dataclass(frozen=True)
class StepTold:
    """Tell how far a batch is, with JPEG previews by the place of the request in it."""

    number: int
    total: int
    previews: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class BatchDone:
    """Hold the pictures of a batch as bytes of RGB, each ``requests[i].final_size`` large, and the
    seconds that the call took."""

    pictures: Sequence[bytes]
    seconds: float


class Painter(Protocol):
    """Name what the service asks of whoever draws."""

    card: ModelCard

    def draw(
        self, batch: PictureBatch, tell: Callable[[StepTold], None], is_wanted: Callable[[], bool]
    ) -> BatchDone:
        """Draw a batch; blocks. Raises Stopped soon after ``is_wanted`` has turned False."""

    def report(self) -> str:
        """Return what Strop made of the model, as text."""

    def notes(self, request: PictureRequest) -> Sequence[str]:
        """Return what is to be said about a request: what the model will not read of it."""

    def chunks(self, request: PictureRequest) -> int:
        """Return how many chunks of tokens a weighted request has."""


class Studio:
    """Own a pipeline that Strop has optimised, and perhaps the same one in eager."""

    def __init__(
        self,
        card: ModelCard,
        pipe: Any,
        eager: Any | None = None,
        controlled: Mapping[str, Any] = NO_NETS,
    ) -> None:
        """``controlled`` has for the name of each ControlNet an optimised pipeline of the same
        parts and this ControlNet."""
        self.card = card
        self._controlled = controlled  # which keeps their ControlNets compiled
        self._nets = {name: one.controlnet for name, one in controlled.items()}
        self._pipes = {False: pipe, True: eager}
        # Asking a tokenizer for what it would cut changes it for the thread that draws.
        self._reader = SimpleNamespace(tokenizer=copy.deepcopy(getattr(pipe, "tokenizer", None)))
        self._active: dict[bool, Adapters | None] = {False: None, True: None}

    def draw(
        self, batch: PictureBatch, tell: Callable[[StepTold], None], is_wanted: Callable[[], bool]
    ) -> BatchDone:
        """Draw a batch; blocks. Raises Stopped soon after ``is_wanted`` has turned False, and what
        ``strop.drawing.draw`` raises."""
        pipe = self._pipes[batch.is_eager]
        self._activate(batch.is_eager, batch.adapters)

        def on_step(done: StepDone) -> None:
            if not is_wanted():
                raise Stopped
            tell(StepTold(done.number, done.total, _previews(pipe, batch, done)))

        start = time.perf_counter()
        pixels = drawing.draw(pipe, batch.requests, on_step, self._nets)
        return BatchDone([_as_bytes(one) for one in pixels], time.perf_counter() - start)

    def report(self) -> str:
        """Return the text of ``strop.explain``, for the pipeline and then for each ControlNet."""
        import strop

        parts = [str(strop.explain(self._pipes[False]))]
        parts += [f"{name}\n{strop.explain(net)}" for name, net in self._nets.items()]
        return "\n\n".join(parts)

    def notes(self, request: PictureRequest) -> Sequence[str]:
        """Return what the model will not read of a request."""
        return notes_of(self._reader, request)

    def chunks(self, request: PictureRequest) -> int:
        """Return how many chunks of tokens a weighted request has."""
        return chunks_of(self._reader, request)

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer of the notes; None where the model has none."""
        return self._reader.tokenizer

    def _activate(self, is_eager: bool, adapters: Adapters) -> None:
        """Let exactly these adapters have effect. Without any a layer has the weight of the
        checkpoint, bit for bit."""
        if self._active[is_eager] == adapters or not self.card.loras:
            return
        pipe = self._pipes[is_eager]
        assert pipe is not None
        self._active[is_eager] = None  # until all of it is done
        if adapters:
            pipe.enable_lora()
            pipe.set_adapters([name for name, _ in adapters], [scale for _, scale in adapters])
        else:
            pipe.disable_lora()
        self._active[is_eager] = adapters


def notes_of(reader: Any, request: PictureRequest) -> Sequence[str]:
    """Return what a model will not read of a request, by its ``reader.tokenizer``. It reads all of
    a weighted one, in chunks."""
    if request.is_weighted:
        return []
    texts = ((request.prompt, "prompt"), (request.negative, "negative prompt"))
    found = [unread(reader, text, what) for text, what in texts if text]
    return [note for note in found if note]


def chunks_of(reader: Any, request: PictureRequest) -> int:
    """Return how many chunks of tokens a weighted request has, by a ``reader.tokenizer``."""
    return num_chunks(reader.tokenizer, request.prompt, request.negative)


def _previews(pipe: Any, batch: PictureBatch, done: StepDone) -> dict[int, bytes]:
    """Return the pictures that requests of a batch want to be shown after a step. Each is decoded
    by itself, whatever the batch: the decoder then meets no batch that it would not meet anyway."""
    if done.number == done.total:
        return {}
    wanted = [n for n, every in enumerate(batch.previews) if every and done.number % every == 0]
    return {
        n: _as_jpeg(drawing.to_preview(pipe, done.latents[n : n + 1], batch.requests[n]))
        for n in wanted
    }


def _as_bytes(pixels: Tensor) -> bytes:
    """Convert RGB [3, height, width] from 0 to 1 to 8 bit, row by row."""
    rounded = (pixels * 255).round().clamp(0, 255).to(torch.uint8)
    return rounded.permute(1, 2, 0).contiguous().numpy().tobytes()


def _as_jpeg(pixels: Tensor) -> bytes:
    from PIL import Image

    target, size = io.BytesIO(), (pixels.shape[2], pixels.shape[1])
    Image.frombytes("RGB", size, _as_bytes(pixels)).save(target, format="JPEG", quality=80)
    return target.getvalue()
