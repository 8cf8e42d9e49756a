"""Aspect buckets: each picture near its own shape, one shape in a batch and on all ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from strop.errors import OptionError
from strop.train.buckets import batches_of, choose, shapes_of
from strop.train.folders import Picture
from strop.train.objective import Objective
from tests.train import trainer

pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # of diffusers

SIZES = [(128, 128), (192, 96), (96, 192), (180, 96), (140, 120), (96, 180), (128, 132)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "pictures"
    place.mkdir()
    for number, size in enumerate(SIZES):
        noise = torch.randint(256, (size[1], size[0], 3), dtype=torch.uint8)
        Image.fromarray(noise.numpy()).save(place / f"{number}.png")
        (place / f"{number}.txt").write_text("a ring")
    return place


def picture(size: tuple[int, int]) -> Picture:
    return Picture(Path("p.png"), "p.png", ("",), *size, "")


@pytest.mark.parametrize(("side", "grid"), [(1024, 64), (512, 64), (32, 8), (64, 32), (32, 32)])
def test_shapes_have_about_the_area_of_the_square(side: int, grid: int) -> None:
    shapes = shapes_of(side, grid)
    assert (side, side) in shapes
    assert len(set(shapes)) == len(shapes)
    for width, height in shapes:
        assert width % grid == height % grid == 0
        short, long = sorted((width, height))
        assert short * long <= side * side < (short + grid) * long
        assert max(width / height, height / width) <= 2


def test_a_picture_gets_the_nearest_shape() -> None:
    shapes = shapes_of(1024, 64)
    sizes = [(2000, 2000), (4000, 2000), (3000, 2000), (1000, 9000)]
    found = choose([picture(size) for size in sizes], shapes)
    assert found == ((1024, 1024), (1408, 704), (1216, 832), (704, 1408))


def test_an_epoch_has_every_picture_once_in_batches_of_one_shape(
    folder: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """Whatever the number of ranks, all have that shape in the same step."""
    values: dict[str, Any] = {"model": tiny_model, "train_data_dir": folder}
    values |= {"output_dir": tmp_path / "out", "aspect_buckets": True, "resolution": 64}
    source = trainer.session("text-to-image", **values).source
    count = source.batches_per_epoch
    numbers = [number for batch in source.batches(0) for number in batch]
    assert sorted(numbers) == list(range(len(SIZES)))
    assert len(source.batches(0)) == count
    assert source.batches(0) != source.batches(1)
    shapes = [tuple(source.batch(number).pictures.shape[2:]) for number in range(2 * count)]
    assert len(set(shapes)) > 2
    # Three ranks with the same whole batch: their rows, one with weight 0 where there is none.
    several = replace(source.settings, num_processes=3)
    ranks = [replace(source, settings=several, rank=rank) for rank in range(3)]
    for number in range(2 * ranks[0].batches_per_epoch):
        batches = [rank.batch(number) for rank in ranks]
        assert len({batch.pictures.shape[2:] for batch in batches}) == 1
        assert len({tuple(batch.sizes[0, 4:].tolist()) for batch in batches}) == 1


def test_batches_are_cut_by_shape() -> None:
    a, b = (8, 8), (16, 8)
    assert batches_of([3, 0, 2, 1, 4], (a, b, a, a, b), 2) == [[3, 0], [2], [1, 4]]


@pytest.mark.parametrize("mirrored", [False, True])
def test_caches_change_nothing(
    mirrored: bool, folder: Path, tiny_model: Path, tmp_path: Path
) -> None:
    values: dict[str, Any] = {"model": tiny_model, "train_data_dir": folder}
    values |= {"output_dir": tmp_path / "out", "aspect_buckets": True, "resolution": 64}
    values |= {"random_flip": mirrored, "center_crop": True}
    losses = []
    for cached in (False, True):
        made = trainer.session("text-to-image", **values, cache_latents=cached)
        objective = Objective(made.settings, made.model, made.unet)
        losses.append([objective(made.source.batch(n), n).item() for n in range(5)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_resumed_training_has_the_same_bits(
    folder: Path, tiny_model: Path, tmp_path: Path
) -> None:
    values: dict[str, Any] = {"model": tiny_model, "train_data_dir": folder, "threads": 1}
    values |= {"aspect_buckets": True, "checkpointing_steps": 3, "resolution": 64}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    trainer.train("lora", **values, output_dir=whole, max_train_steps=6)
    trainer.train("lora", **values, output_dir=cut, max_train_steps=3)
    latest = {"max_train_steps": 6, "resume_from_checkpoint": "latest"}
    trainer.train("lora", **values, output_dir=cut, **latest)
    expected, actual = (trainer.checkpoint_sums(f / "checkpoint-6") for f in (whole, cut))
    assert expected == actual


def test_refusals(folder: Path, tiny_model: Path, tmp_path: Path) -> None:
    values: dict[str, Any] = {"model": tiny_model, "output_dir": tmp_path / "out"}
    with pytest.raises(OptionError, match="aspect_buckets needs --train_data_dir"):
        trainer.session("text-to-image", **values, dataset_name="sprites", aspect_buckets=True)
    values |= {"train_data_dir": folder, "aspect_buckets": True}
    with pytest.raises(OptionError, match=r"png has \d+x\d+ pixels and would be shown as"):
        trainer.session("text-to-image", **values, resolution=192)
    made = trainer.session("text-to-image", **values, resolution=192, allow_upscaling=True)
    assert made.source.batch(0).pictures.shape[2] >= 128
