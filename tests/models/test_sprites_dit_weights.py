"""The weights of sprites-dit that ship inside the package, and the pictures that they draw."""

import hashlib
import json
from pathlib import Path

import pytest

import strop
from strop.models import sprites
from strop.models.sprites import evaluate
from strop.models.sprites.export import FILE_LIMIT, TOTAL_LIMIT
from strop.testing import psnr
from tests.e2e.tiny import cache_dir

pytestmark = pytest.mark.filterwarnings("ignore")

# The SHA-256 of each file that was in the folder in which the transformer was trained.
TRAINED_WITH = {
    "vae/diffusion_pytorch_model.safetensors": (
        "d2eba068806a55ca89717aadf5e9a57714d267cac0b7db0e62097515e417a3bd"
    ),
    "text_encoder/model.safetensors": (
        "8883c983fc876a4df14efcc6c5365d8c6b634426854bdd9e5eac5c35f7cdfc2c"
    ),
    "tokenizer/vocab.json": "f4778bff7e57f285e86eddbff957a45afe35d5c5177f1be76f00c9bbfb40dcf1",
    "tokenizer/merges.txt": "3132f0c451746bf16e24a4667155923789906fb484a4a33a0752140787c381d1",
}
TRAINED_WITH |= {
    file.replace(part, f"{part}_2"): digest
    for file, digest in TRAINED_WITH.items()
    for part in ("text_encoder", "tokenizer")
    if file.startswith(part)
}


def _weights() -> list[Path]:
    """All weights that the model loads; those that it loads twice count twice."""
    index = json.loads((sprites.DIT_WEIGHTS / "model_index.json").read_text())
    parts = [name for name, kind in index.items() if isinstance(kind, list) and kind[0]]
    places = [sprites.folder_of_part(sprites.DIT_WEIGHTS, part) for part in parts]
    return [file for place in places for file in place.glob("*.safetensors")]


def test_the_files_are_small_enough_to_ship() -> None:
    sizes = [file.stat().st_size for file in _weights()]
    assert len(sizes) == 4
    assert max(sizes) <= FILE_LIMIT
    assert sum(sizes) <= TOTAL_LIMIT
    own = [file.parent.name for file in sprites.DIT_WEIGHTS.rglob("*.safetensors")]
    assert own == ["transformer"]  # the other parts ship once


def test_nothing_in_the_folder_is_pickled() -> None:
    suffixes = {file.suffix for file in sprites.DIT_WEIGHTS.rglob("*") if file.is_file()}
    assert suffixes <= {".safetensors", ".json"}


@pytest.mark.parametrize("file", TRAINED_WITH)
def test_the_parts_that_it_shares_are_those_it_was_trained_with(file: str) -> None:
    part, name = file.split("/")
    found = (sprites.folder_of_part(sprites.DIT_WEIGHTS, part) / name).read_bytes()
    assert hashlib.sha256(found).hexdigest() == TRAINED_WITH[file]


def test_held_out_prompts_are_right_and_pictures_those_of_eager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STROP_CACHE_DIR", cache_dir())
    pipe = sprites.load_dit()
    pipe.set_progress_bar_config(disable=True)
    prompts = sprites.held_out_prompts(10)
    few = prompts[:2]
    eager = evaluate.draw_prompts(pipe, few, 96, 64, evaluate.Options())
    strop.optimize(pipe)
    ours = evaluate.draw_prompts(pipe, prompts, 96, 64, evaluate.Options())
    right = [sprites.score(i, p).all_right for i, p in zip(ours, prompts, strict=True)]
    assert sum(right) >= 9, right
    # A picture depends on nothing else of its batch, but for the last bits.
    assert psnr(ours[: len(few)], eager) >= 60
    assert strop.explain(pipe).fallbacks == {}


@pytest.mark.nightly
def test_nine_of_ten_of_all_held_out_prompts_are_right_at_every_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STROP_CACHE_DIR", cache_dir())
    pipe = strop.optimize(sprites.load_dit())
    summary = evaluate.evaluate_pipeline(pipe, evaluate.Options(count=200))["summary"]
    assert summary["prompts"] == 200
    for name in ("all_right", "one_thing", "two_things", *(f"{w}x{h}" for w, h in sprites.BUCKETS)):
        assert summary[name] >= 0.9, (name, summary)
    report = strop.explain(pipe)
    assert report.fallbacks == {}
    assert report.num_graphs == 4  # all sizes and batches have the same ones
