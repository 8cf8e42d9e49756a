"""Make batches by number: what batch n holds depends on the seed and on n alone."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from strop.train.buckets import Shape, batches_of
from strop.train.conditions import condition_of
from strop.train.crops import Crop, Placement, mask_of, shown_pixels
from strop.train.draws import generator
from strop.train.folders import Picture, open_rgb
from strop.train.prompts import Prompts, pinned
from strop.train.settings import Settings
from strop.train.share import BatchShare


@dataclass(frozen=True)
class Batch:
    """Hold a rank's rows of a batch. The first ``len(share)`` of them are not of the class.

    pictures: RGB from -1 to 1, or moments of latents.
    sizes: [rows, 6], see ``Placement.sizes``.
    masks: what errors of the latents are multiplied by, [rows, 1, height, width]; None are ones.
    conditions: what a ControlNet is shown, [rows, 3, height, width] from 0 to 1.
    """

    pictures: Tensor
    are_moments: bool
    text: Prompts
    share: BatchShare
    sizes: Tensor
    masks: Tensor | None = None
    conditions: Tensor | None = None

    def __len__(self) -> int:
        return len(self.text)

    def pinned(self) -> Batch:
        """Move a batch into memory that a GPU copies from while the host goes on. Drawings lie on
        it already."""
        masks = None if self.masks is None else pinned(self.masks)
        conditions = None if self.conditions is None else pinned(self.conditions)
        return replace(
            self,
            pictures=pinned(self.pictures),
            text=self.text.pinned(),
            sizes=pinned(self.sizes),
            masks=masks,
            conditions=conditions,
        )


class Source(Protocol):
    """``batches_per_epoch`` is None where every picture is new."""

    @property
    def batches_per_epoch(self) -> int | None: ...

    @property
    def digest(self) -> str:
        """Hash everything that batches are made from."""
        ...

    def batch(self, number: int) -> Batch: ...


class Moments(Protocol):
    """Hold moments of latents that were computed before."""

    def get(self, number: int, mirrored: bool) -> Tensor: ...


@dataclass(frozen=True)
class Captions:
    """Hold the different captions, the empty one last, and their ids or embeddings, row by row, on
    the CPU."""

    rows: dict[str, int]
    table: Prompts


@dataclass(frozen=True)
class FolderSource:
    """Give pictures in an order that each epoch draws anew; class pictures come after the
    instances. ``masks`` are those of the instances, if there are any, at a ``factor``-th of their
    size. ``shapes`` are those of all pictures, if they are not squares; a batch has one.
    ``conditions`` are the conditioning pictures, if there are any."""

    settings: Settings
    side: int
    instances: tuple[Picture, ...]
    classes: tuple[Picture, ...]
    captions: Captions
    moments: Moments | None = None
    digest: str = ""
    rank: int = 0
    masks: tuple[Path, ...] = ()
    factor: int = 1
    shapes: tuple[Shape, ...] = ()
    conditions: tuple[Path, ...] = ()

    @cached_property
    def batches_per_epoch(self) -> int:
        size = self.settings.whole_batch_size
        if self.shapes:
            return len(batches_of(range(len(self.shapes)), self.shapes, size))
        return math.ceil(self._length / size)

    @property
    def _length(self) -> int:
        return max(len(self.instances), len(self.classes))

    @cached_property
    def pictures(self) -> tuple[Picture, ...]:
        return (*self.instances, *self.classes)

    @cached_property
    def order(self) -> Callable[[int], list[int]]:
        """Return the numbers of an epoch's pictures; threads may be in two epochs at a time."""

        def drawn(epoch: int) -> list[int]:
            source = generator(self.settings.seed, "order", epoch)
            places: list[int] = torch.randperm(self._length, generator=source).tolist()
            return places

        return lru_cache(maxsize=2)(drawn)

    @cached_property
    def batches(self) -> Callable[[int], list[list[int]]]:
        """Return the numbers of the pictures in each batch of an epoch: those of one shape, which
        all ranks have in the same step, with the batches shuffled."""

        def cut(epoch: int) -> list[list[int]]:
            size, order = self.settings.whole_batch_size, self.order(epoch)
            if not self.shapes:
                return [order[start : start + size] for start in range(0, len(order), size)]
            found = batches_of(order, self.shapes, size)
            source = generator(self.settings.seed, "buckets", epoch)
            return [found[i] for i in torch.randperm(len(found), generator=source).tolist()]

        return lru_cache(maxsize=2)(cut)

    def batch(self, number: int) -> Batch:
        epoch, place = divmod(number, self.batches_per_epoch)
        settings = self.settings
        places = self.batches(epoch)[place]
        chosen = [i % len(self.instances) for i in places]
        if self.classes:  # numbered after the instances
            chosen += [len(self.instances) + i % len(self.classes) for i in places]
        share = BatchShare.of(
            len(places), self.rank, settings.num_processes, 1 + bool(self.classes)
        )
        source = generator(settings.seed, "pictures", number)
        drawn = share.rows(torch.rand(share.drawn, 4, generator=source)).tolist()
        own = share.pick(chosen)
        cuts = [self._placement(i, row) for i, row in zip(own, drawn, strict=True)]
        pictures = [self._picture(i, cut) for i, cut in zip(own, cuts, strict=True)]
        source = generator(settings.seed, "captions", number)
        which = share.rows(torch.rand(share.drawn, generator=source)).tolist()
        text = [self._row(i, row[3], n) for i, row, n in zip(own, drawn, which, strict=True)]
        return Batch(
            torch.stack(pictures),
            self.moments is not None,
            self.captions.table.rows(torch.tensor(text)),
            share,
            torch.tensor([cut.sizes for cut in cuts], dtype=torch.float32),
            self._masks(own, cuts),
            self._conditions(own, cuts),
        )

    def _placement(self, number: int, drawn: Sequence[float]) -> Placement:
        picture = self.pictures[number]
        shown = self.shapes[number] if self.shapes else (self.side, self.side)
        return Placement.of((picture.width, picture.height), shown, self._crop(drawn))

    def _crop(self, drawn: Sequence[float]) -> Crop:
        mirrored = self.settings.random_flip and drawn[2] < 0.5
        if self.settings.center_crop:
            return Crop(mirrored=mirrored)
        return Crop(drawn[0], drawn[1], mirrored)

    def _picture(self, number: int, cut: Placement) -> Tensor:
        if self.moments is not None:
            return self.moments.get(number, cut.mirrored)
        picture = open_rgb(self.pictures[number].path)
        return shown_pixels(picture, cut, self.settings.image_interpolation_mode)

    def _masks(self, numbers: Sequence[int], cuts: Sequence[Placement]) -> Tensor | None:
        """Return masks of pictures; those of the class count everywhere."""
        if not self.masks:
            return None
        whole = torch.ones(1, *(self.side // self.factor,) * 2)
        return torch.stack(
            [
                mask_of(self.masks[i], cut, self.factor) if i < len(self.masks) else whole
                for i, cut in zip(numbers, cuts, strict=True)
            ]
        )

    def _conditions(self, numbers: Sequence[int], cuts: Sequence[Placement]) -> Tensor | None:
        if not self.conditions:
            return None
        resample, pairs = self.settings.image_interpolation_mode, zip(numbers, cuts, strict=True)
        return torch.stack([condition_of(self.conditions[i], cut, resample) for i, cut in pairs])

    def _row(self, number: int, drawn: float, which: float) -> int:
        if drawn < self.settings.proportion_empty_prompts:
            return len(self.captions.table) - 1
        texts = self.pictures[number].captions
        return self.captions.rows[texts[int(which * len(texts))]]


class SpritesSource:
    """Give drawings of the sprites generator: new ones in every batch, the picture sizes in
    turn."""

    batches_per_epoch = None
    digest = "sprites"

    def __init__(
        self,
        settings: Settings,
        tokenizers: Mapping[str, object],
        device: torch.device,
        rank: int = 0,
    ) -> None:
        from strop.models.sprites import network

        self.settings, self.device, self.rank = settings, device, rank
        self.tables, self.empty = {}, {}
        for encoder, tokenizer in tokenizers.items():
            table = network.tables(tokenizer, device)
            empty = tokenizer("", padding="max_length", max_length=table.length)  # type: ignore[operator]
            self.tables[encoder] = table
            self.empty[encoder] = torch.tensor(empty.input_ids, device=device)

    @torch.no_grad()
    def batch(self, number: int) -> Batch:
        from strop.models.sprites import BUCKETS, draw, specs

        source = generator(self.settings.seed, "pictures", number, self.device)
        width, height = BUCKETS[number % len(BUCKETS)]
        settings = self.settings
        share = BatchShare.of(settings.whole_batch_size, self.rank, settings.num_processes)
        scenes = specs.draw_training_specs(share.total, source)
        placed = draw.place(scenes, width, height, source).map(share.rows)
        drawn = torch.rand(share.total, 1, device=self.device, generator=source)
        scenes = share.rows(scenes)
        pictures = draw.render(scenes, placed, width, height) * 2 - 1
        is_empty = share.rows(drawn) < settings.proportion_empty_prompts
        ids = {
            name: torch.where(is_empty, self.empty[name], specs.token_rows(scenes, table))
            for name, table in self.tables.items()
        }
        sizes = torch.tensor([height, width, 0, 0, height, width], dtype=torch.float32)
        return Batch(
            pictures, False, Prompts(ids), share, sizes.expand(len(scenes), -1).contiguous()
        )


class Reader:
    """Read batches one after the other, pinned for a GPU; threads, if there are any, are some
    ahead."""

    def __init__(
        self, source: Source, start: int, end: int, workers: int, *, pins: bool = False
    ) -> None:
        self.source, self.workers, self.pins = source, workers, pins
        self._numbers = iter(range(start, end))
        self._pool = ThreadPoolExecutor(workers, "strop-reader") if workers else None
        self._waiting: deque[Future[Batch]] = deque()

    def next(self) -> Batch:
        if self._pool is None:
            return self._batch(next(self._numbers))
        for number in self._numbers:
            self._waiting.append(self._pool.submit(self._batch, number))
            if len(self._waiting) > 2 * self.workers:
                break
        return self._waiting.popleft().result()

    def _batch(self, number: int) -> Batch:
        batch = self.source.batch(number)
        return batch.pinned() if self.pins else batch

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def digest_of(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()
