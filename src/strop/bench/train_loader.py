"""Read pictures on disk by torch's DataLoader, as a training script does."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from strop.bench import mock_set
from strop.bench.train_work import Loader

TOKENS = mock_set.TOKENS
FILES, TINY_FILES = 256, 8


@dataclass(frozen=True)
class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Apply the transforms of diffusers' script: decode, resize, crop at random, flip, normalise.

    ``length`` items over and over from the ``files`` in the folder.
    """

    folder: Path
    files: int
    side: int
    vocabulary: int
    length: int
    first: int = 0  # of the items, which ranks have different ones of

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        from PIL import Image

        index += self.first
        source = torch.Generator().manual_seed(index)
        with Image.open(self.folder / f"{index % self.files}.jpg") as file:
            picture = file.convert("RGB")
        scale = self.side / min(picture.size)
        width, height = (max(self.side, round(edge * scale)) for edge in picture.size)
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
        across, down, mirror = torch.rand(3, generator=source).tolist()
        left, top = int(across * (width - self.side)), int(down * (height - self.side))
        picture = picture.crop((left, top, left + self.side, top + self.side))
        pixels = torch.from_numpy(numpy.asarray(picture).copy()).permute(2, 0, 1)
        pixels = pixels.flip(2) if mirror < 0.5 else pixels
        tokens = mock_set.tokens_of(mock_set.caption_of(index % self.files), self.vocabulary)
        return pixels.float().div(127.5).sub(1.0), tokens


def refusal(loader: Loader, batch_bytes: int) -> str:
    """Return why its workers cannot hand over batches of this size here, or nothing."""
    shared = Path("/dev/shm")
    needed = 2 * loader.workers * batch_bytes  # torch's prefetch_factor
    free = shutil.disk_usage(shared).free if shared.is_dir() else needed
    if free >= needed:
        return ""
    return f"its queues need {needed >> 20} MiB of {shared}, {free >> 20} are free"


def batches(pictures: Pictures, batch: int, loader: Loader) -> Iterator[list[Tensor]]:
    """Yield the pixels and tokens of batch after batch. Workers end when the iterator is dropped.

    They start from a server without threads or a GPU: forks of this process may not.
    """
    how: dict[str, Any] = {}
    if loader.workers:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        how["multiprocessing_context"] = context
    made: DataLoader[tuple[Tensor, Tensor]] = DataLoader(
        pictures,
        batch,
        shuffle=True,
        num_workers=loader.workers,
        pin_memory=loader.is_pinned,
        drop_last=True,
        **how,
    )
    return iter(made)
