"""Make a mock set of pictures with captions: a training reads it, and nothing is downloaded."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy
import torch
from torch import Tensor

TOKENS = 77
_ASPECT = 1.25  # of width to height
_BLOB = 8  # pixels of what looks like something: JPEG packs noise badly and plain areas too well
_KINDS = ("photo", "drawing", "painting", "sketch", "poster")
_LOOKS = ("red", "green", "blue", "grey", "golden", "dark", "bright")
_THINGS = ("house", "river", "market", "mountain", "harbour", "garden", "street", "forest", "room")


def write(folder: Path, side: int, count: int) -> None:
    """Write JPEG files a quarter larger than ``side`` pixels, so that resizing has work, and
    ``metadata.jsonl`` with a caption for each, as ``strop train --train_data_dir`` reads it. The
    same numbers give the same files."""
    from PIL import Image

    source = numpy.random.default_rng(0)
    height = side * 5 // 4
    size = (int(height * _ASPECT), height)
    rows = []
    for number in range(count):
        coarse = source.integers(0, 255, (height // _BLOB, size[0] // _BLOB, 3), numpy.uint8)
        smooth = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
        grain = source.integers(-12, 12, (size[1], size[0], 3))
        pixels = (numpy.asarray(smooth).astype(numpy.int64) + grain).clip(0, 255)
        Image.fromarray(pixels.astype(numpy.uint8)).save(folder / f"{number}.jpg", quality=92)
        rows.append({"file_name": f"{number}.jpg", "text": caption_of(number)})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metadata.jsonl").write_text(lines, encoding="utf-8")


def caption_of(number: int) -> str:
    """Return the caption of a picture of the set."""
    kind, look, thing = (
        words[number * step % len(words)]
        for words, step in ((_KINDS, 1), (_LOOKS, 3), (_THINGS, 5))
    )
    return f"a {kind} of a {look} {thing}, number {number}"


def tokens_of(caption: str, vocabulary: int) -> Tensor:
    """Return int64 tokens [77] of a caption: a checksum of each word stands for an entry of the
    vocabulary, of which the last one fills the rest."""
    words = [zlib.crc32(word.encode()) % (vocabulary - 1) for word in caption.split()][:TOKENS]
    return torch.tensor(words + [vocabulary - 1] * (TOKENS - len(words)))
