"""The drawings and the scorer that reads them back."""

import pytest
import torch

from strop.models import sprites
from strop.models.sprites import draw, evaluate, grammar, specs
from strop.models.sprites.score import Score


def _picture(prompt: str, width: int = 96, height: int = 64, seed: int = 0) -> torch.Tensor:
    drawn = specs.specs_of([sprites.parse(prompt)])
    return draw.pictures(drawn, width, height, torch.Generator().manual_seed(seed))[0]


def test_pictures_are_deterministic_and_in_range() -> None:
    def make(seed: int) -> torch.Tensor:
        source = torch.Generator().manual_seed(seed)
        return draw.pictures(specs.draw_specs(16, source), 64, 96, source)

    assert make(0).shape == (16, 3, 96, 64)
    assert torch.equal(make(0), make(0))
    assert not torch.equal(make(0), make(1))
    assert 0 <= float(make(0).min()) <= float(make(0).max()) <= 1


@pytest.mark.parametrize("code", range(len(grammar.SHAPES)), ids=grammar.SHAPES)
def test_shapes_stay_inside_their_box(code: int) -> None:
    axis = torch.linspace(-1.5, 1.5, 301)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    inside = draw.shape_distance(code, x, y) < 0
    reach = torch.maximum(x.abs(), y.abs())[inside].max()
    assert 0.7 < float(reach) <= 1.01


def test_true_pictures_are_right_and_shuffled_prompts_are_not() -> None:
    shares = evaluate.validate_scorer(None, count=200, seed=11)
    assert shares["true"] >= 0.99
    assert shares["shuffled"] <= 0.02


TRUTH = "a small red circle above a blue square on a white background"


@pytest.mark.parametrize(
    ("prompt", "wrong"),
    [
        (TRUTH, set()),
        ("a blue square below a red circle", set()),
        ("a small green circle above a blue square on a white background", {"colours"}),
        ("a small red ring above a blue square on a white background", {"shapes"}),
        ("a large red circle above a blue square on a white background", {"sizes"}),
        ("a small red circle below a blue square on a white background", {"layout"}),
        ("a small red circle above a blue square on a black background", {"background"}),
        ("a red square above a blue circle on a white background", {"shapes"}),
    ],
)
def test_each_attribute_is_judged_by_itself(prompt: str, wrong: set[str]) -> None:
    judged = sprites.score(_picture(TRUTH), prompt)
    seen = {name for name in Score.__dataclass_fields__ if not getattr(judged, name)}
    assert seen == wrong
    assert judged.all_right == (not wrong)


def test_a_missing_thing_is_a_wrong_count() -> None:
    judged = sprites.score(_picture("a red circle at the top on a white background"), TRUTH)
    assert not judged.count
    assert judged.background
    assert not judged.all_right


@pytest.mark.parametrize("place", list(grammar.PLACES))
def test_places_are_told_apart(place: str) -> None:
    picture = _picture(f"a pink star {grammar.PLACES[place]} on a navy background", 64, 96)
    right = [
        other
        for other in grammar.PLACES
        if sprites.score(picture, f"a pink star {grammar.PLACES[other]}").all_right
    ]
    assert right == [place]


def test_noise_is_wrong_without_an_error() -> None:
    noise = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert not sprites.score(noise, TRUTH).all_right
    assert not sprites.score(torch.zeros(3, 64, 64), TRUTH).all_right


def test_a_wrong_picture_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[3, height, width\]"):
        sprites.score(torch.zeros(64, 64, 3), TRUTH)
