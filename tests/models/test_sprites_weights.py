"""The weights that ship inside the package."""

import pytest
import torch

from strop.models import sprites
from strop.models.sprites import evaluate
from strop.models.sprites.export import FILE_LIMIT, TOTAL_LIMIT

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_files_are_small_enough_to_ship() -> None:
    sizes = [file.stat().st_size for file in sprites.WEIGHTS.rglob("*.safetensors")]
    assert len(sizes) == 3
    assert max(sizes) <= FILE_LIMIT
    assert sum(sizes) <= TOTAL_LIMIT


def test_nothing_in_the_folder_is_pickled() -> None:
    suffixes = {file.suffix for file in sprites.WEIGHTS.rglob("*") if file.is_file()}
    assert suffixes <= {".safetensors", ".json", ".txt"}


def test_the_scorer_is_right_after_a_round_trip_through_the_autoencoder() -> None:
    vae = evaluate.load_vae(sprites.WEIGHTS / "vae", torch.device("cpu"))
    shares = evaluate.validate_scorer(vae, count=100, seed=3)
    assert shares["true"] >= 0.98
    assert shares["shuffled"] <= 0.03


def test_the_model_draws_what_it_is_told() -> None:
    pipe = sprites.load()
    pipe.set_progress_bar_config(disable=True)
    prompts = [
        "a red circle above a blue square on a white background",
        "a yellow star to the left of a green heart on a navy background",
        "an orange ring at the top left on a black background",
        "a large purple diamond in the center on a beige background",
    ]
    images = evaluate.draw_prompts(pipe, prompts, 96, 64, evaluate.Options())
    right = [sprites.score(i, p).all_right for i, p in zip(images, prompts, strict=True)]
    assert sum(right) >= 3, right


def test_the_weights_load_in_half_precision() -> None:
    pipe = sprites.load(dtype=torch.bfloat16)
    assert next(pipe.unet.parameters()).dtype == torch.bfloat16
    assert next(pipe.text_encoder.parameters()).dtype == torch.bfloat16
