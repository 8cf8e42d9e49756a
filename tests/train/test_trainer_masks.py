"""Masks: errors count where they are white."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from strop.errors import OptionError
from strop.train.crops import Crop, Placement, mask_of
from strop.train.objective import Objective
from tests.train import trainer

pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # of diffusers


def draw_masks(folder: Path, count: int = 5, size: tuple[int, int] = (48, 40)) -> Path:
    """White on the right of the middle."""
    folder.mkdir()
    for number in range(count):
        mask = Image.new("L", size)
        mask.paste(255, (size[0] // 2, 0, *size))
        mask.save(folder / f"{number}.png")
    return folder


def test_a_mask_is_cut_like_its_picture(tmp_path: Path) -> None:
    """White from pixel 24 on, in the file and where it is shown in full size."""
    mask = draw_masks(tmp_path / "m", 1) / "0.png"
    plain = mask_of(mask, Placement.of((48, 40), (40, 40), Crop(left=0.0)), 4)
    assert plain.shape == (1, 10, 10)
    assert plain[0, 3].tolist() == [0.0] * 6 + [1.0] * 4
    right = mask_of(mask, Placement.of((48, 40), (40, 40), Crop(left=1.0, mirrored=True)), 4)
    assert right[0, 3].tolist() == [1.0] * 6 + [0.0] * 4
    halves = mask_of(mask, Placement.of((48, 40), (40, 40), Crop(left=0.25)), 4)
    assert halves[0, 0].tolist() == [0.0] * 5 + [0.5] + [1.0] * 4


@pytest.mark.parametrize("cached", [False, True])
def test_errors_count_where_masks_are_white(
    cached: bool, tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    """The loss and its gradients are those of errors times the mask; pictures of the class count
    everywhere."""
    values: dict[str, Any] = {
        "model": tiny_model,
        "instance_data_dir": pictures,
        "instance_prompt": "a ring",
        "with_prior_preservation": True,
        "class_data_dir": tmp_path / "class",
        "class_prompt": "a circle",
        "num_class_images": 2,
        "center_crop": True,
        "cache_latents": cached,
        "output_dir": tmp_path / "out",
    }
    plain = trainer.session("dreambooth", **values)
    masked = trainer.session("dreambooth", **values, mask_data_dir=draw_masks(tmp_path / "masks"))
    assert masked.source.digest != plain.source.digest
    batch = masked.source.batch(0)
    assert batch.masks is not None
    count = len(batch.share)
    assert set(batch.masks[:count].unique().tolist()) == {0.0, 1.0}
    assert bool((batch.masks[count:] == 1).all())

    class Kept(torch.nn.Module):
        def forward(self, sample: torch.Tensor, **given: Any) -> tuple[torch.Tensor]:
            self.guess = torch.zeros_like(sample, requires_grad=True)
            return (self.guess,)

    gradients = []
    for made in (plain, masked):
        network = Kept()
        Objective(made.settings, made.model, network)(made.source.batch(0), 0).backward()
        gradients.append(network.guess.grad)
    torch.testing.assert_close(gradients[1], gradients[0] * batch.masks)
    assert gradients[0].abs().min() > 0


def test_masks_that_do_not_fit_are_named(tiny_model: Path, pictures: Path, tmp_path: Path) -> None:
    values = {"model": tiny_model, "train_data_dir": pictures, "output_dir": tmp_path / "out"}
    few, small = draw_masks(tmp_path / "few", 3), draw_masks(tmp_path / "small", 5, (24, 20))
    for place, message in (
        (few, r"few has no mask of 3\.png; put 3\.png there"),
        (small, r"small/0\.png has 24x20 pixels and its picture 48x40"),
        (tmp_path / "gone", r"gone is no folder"),
    ):
        with pytest.raises(OptionError, match=message):
            trainer.session("text-to-image", **values, mask_data_dir=place)
    (few / "0.png").write_bytes(b"no picture")
    with pytest.raises(OptionError, match=r"0\.png cannot be read"):
        trainer.session("text-to-image", **values, mask_data_dir=few)
    with pytest.raises(OptionError, match="drawings have no masks"):
        trainer.session(
            "text-to-image",
            model=tiny_model,
            dataset_name="sprites",
            output_dir=tmp_path / "out",
            mask_data_dir=few,
        )
