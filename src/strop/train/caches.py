"""Compute latents and text embeddings once, and keep them on disk.

A file's name is a hash of all that its content depends on, so a file that is there is right. The
weights are part of it in the type that they have now: fp32, or that of mixed precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from strop.errors import CacheError, TrainingError
from strop.train import files
from strop.train import model as models
from strop.train.buckets import Shape
from strop.train.crops import Crop, pixels_of
from strop.train.data import Captions, digest_of
from strop.train.folders import Picture
from strop.train.model import DiffusionModel
from strop.train.prompts import Prompts, joined
from strop.train.ranks import ALONE, Ranks
from strop.train.settings import Settings

_SHARD = 256  # pictures of a file
_BATCH = 8
_TEXTS = 64
Progress = Callable[[str, int, int], None]
"""What is done, how many of it, of how many."""


class StoredMoments:
    """Hold mean and log-variance of each picture's latents, and of its mirror image's if wanted."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key
        self._open = lru_cache(maxsize=64)(self._opened)

    def file(self, shard: int) -> Path:
        return self.folder / f"moments-{self.key[:24]}-{shard:05d}.safetensors"

    def get(self, number: int, mirrored: bool) -> Tensor:
        tensor: Tensor = self._open(number // _SHARD).get_tensor(_name(number, mirrored))
        return tensor

    def _opened(self, shard: int) -> Any:
        return _opened(self.file(shard))


def cache_moments(
    folder: Path,
    model: DiffusionModel,
    pictures: Sequence[Picture],
    side: int,
    settings: Settings,
    on_progress: Progress,
    ranks: Ranks = ALONE,
    shapes: Sequence[Shape] = (),
) -> StoredMoments:
    """Encode the pictures whose files are not there yet, as squares or in these shapes. Each rank
    encodes its share of the batches of a file, and rank 0 writes it."""
    ranks.alone(lambda: folder.mkdir(parents=True, exist_ok=True))
    weights = models.digest_of(model.vae)
    how = (side, settings.random_flip, settings.image_interpolation_mode)
    digests = [p.digest for p in pictures]
    key = digest_of("moments", 3, weights, how, digests, *((shapes,) if shapes else ()))
    shown = shapes or [(side, side)] * len(pictures)
    stored = StoredMoments(folder, key)
    files_of = range(-(-len(pictures) // _SHARD))
    for shard in ranks.first(lambda: [s for s in files_of if not stored.file(s).is_file()]):
        numbers = range(shard * _SHARD, min((shard + 1) * _SHARD, len(pictures)))
        rows = _encode(model, pictures, numbers, shown, settings, on_progress, ranks)
        ranks.alone(partial(files.write_tensors, stored.file(shard), rows))
    on_progress("encoding pictures", len(pictures), len(pictures))
    return stored


def _encode(
    model: DiffusionModel,
    pictures: Sequence[Picture],
    numbers: Sequence[int],
    shown: Sequence[Shape],
    settings: Settings,
    on_progress: Progress,
    ranks: Ranks,
) -> dict[str, Tensor]:
    mirrored, resample = settings.random_flip, settings.image_interpolation_mode
    wanted = [(n, flip) for flip in (False, True)[: 1 + mirrored] for n in numbers]
    batches = []
    for shape in dict.fromkeys(shown[n] for n in numbers):
        alike = [item for item in wanted if shown[item[0]] == shape]
        batches += [alike[start : start + _BATCH] for start in range(0, len(alike), _BATCH)]

    def encode(some: Sequence[Sequence[tuple[int, bool]]]) -> list[Tensor]:
        found = []
        for place, batch in enumerate(some):
            done = numbers[0] + len(numbers) * place // len(some)
            on_progress("encoding pictures", done, len(pictures))
            pixels = [
                pixels_of(pictures[n].path, shown[n], Crop(mirrored=flip), resample)
                for n, flip in batch
            ]
            found.append(models.moments_of(model, torch.stack(pixels)).cpu())
            _check_finite(found[-1], [pictures[n].path for n, _ in batch])
        return found

    encoded = zip(batches, ranks.dealt(batches, encode), strict=True)
    return {
        _name(*item): row.clone()
        for batch, rows in encoded
        for item, row in zip(batch, rows, strict=True)
    }


def _check_finite(rows: Tensor, paths: Sequence[Path]) -> None:
    """Raise TrainingError for a picture whose latents would spoil every epoch."""
    for row, path in zip(rows, paths, strict=True):
        if not bool(row.isfinite().all()):
            raise TrainingError(
                f"the latents of {path} are not finite: the autoencoder overflows; "
                "use --mixed_precision bf16 or no"
            )


def _name(number: int, mirrored: bool) -> str:
    return f"{number}/mirrored" if mirrored else str(number)


def captions_of(model: DiffusionModel, pictures: Sequence[Picture]) -> Captions:
    """Return token ids of the different captions, and of the empty one."""
    texts = list(dict.fromkeys(text for picture in pictures for text in picture.captions))
    table = models.token_ids(model, [*texts, ""])
    return Captions({text: row for row, text in enumerate(texts)}, table)


def cache_embeddings(
    folder: Path,
    model: DiffusionModel,
    captions: Captions,
    on_progress: Progress,
    ranks: Ranks = ALONE,
) -> Captions:
    """Return the captions with embeddings in the place of ids. Each rank encodes its share, and
    rank 0 writes them."""
    ranks.alone(lambda: folder.mkdir(parents=True, exist_ok=True))
    weights = [models.digest_of(model.modules[name]) for name in model.encoders]
    ids = {name: rows.tolist() for name, rows in captions.table.tensors.items()}
    key = digest_of("embeddings", 3, model.family.name, weights, ids)
    path = folder / f"embeddings-{key[:24]}.safetensors"

    def encode(starts: Sequence[int]) -> list[Prompts]:
        made = []
        for start in starts:
            on_progress("encoding captions", start, len(captions.table))
            part = captions.table.rows(slice(start, start + _TEXTS))
            encoded = models.embeddings_of(model, part).tensors
            made.append(Prompts({name: rows.cpu() for name, rows in encoded.items()}, True))
        return made

    if not ranks.first(path.is_file):
        parts = ranks.dealt(range(0, len(captions.table), _TEXTS), encode)
        ranks.alone(lambda: files.write_tensors(path, joined(parts).tensors))
    on_progress("encoding captions", len(captions.table), len(captions.table))
    stored = _opened(path)
    tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    return Captions(captions.rows, Prompts(tensors, True))


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CacheError(f"{path} is damaged ({error}); delete it, and it is made anew") from error
