"""The weights of sprites-dit that ship inside the package, once they are trained."""

import pytest
import torch

import strop
from strop.models import sprites
from strop.models.sprites import evaluate
from strop.models.sprites.export import FILE_LIMIT, TOTAL_LIMIT
from tests.e2e.tiny import cache_dir

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    # Vanishes with the first commit of the weights.
    pytest.mark.skipif(not sprites.DIT_WEIGHTS.exists(), reason="the weights are not trained yet"),
]


def test_the_files_are_small_enough_to_ship() -> None:
    sizes = [file.stat().st_size for file in sprites.DIT_WEIGHTS.rglob("*.safetensors")]
    assert len(sizes) == 4
    assert max(sizes) <= FILE_LIMIT
    assert sum(sizes) <= TOTAL_LIMIT


def test_nothing_in_the_folder_is_pickled() -> None:
    suffixes = {file.suffix for file in sprites.DIT_WEIGHTS.rglob("*") if file.is_file()}
    assert suffixes <= {".safetensors", ".json", ".txt"}


def test_held_out_prompts_are_right_in_eager_and_optimised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STROP_CACHE_DIR", cache_dir())
    pipe = sprites.load_dit()
    pipe.set_progress_bar_config(disable=True)
    prompts = sprites.held_out_prompts(10)
    eager = evaluate.draw_prompts(pipe, prompts, 96, 64, evaluate.Options())
    right = [sprites.score(i, p).all_right for i, p in zip(eager, prompts, strict=True)]
    assert sum(right) >= 9, right
    ours = evaluate.draw_prompts(strop.optimize(pipe), prompts, 96, 64, evaluate.Options())
    torch.testing.assert_close(ours, eager, atol=1e-2, rtol=0)
    assert [sprites.score(i, p).all_right for i, p in zip(ours, prompts, strict=True)] == right
