"""The sprites language: captions, specs, the held-out split and the tokenizer."""

import pytest
import torch

from strop.models import sprites
from strop.models.sprites import grammar, network, specs
from strop.models.sprites.settings import FULL

CPU = torch.device("cpu")


def _specs(count: int, seed: int) -> torch.Tensor:
    return specs.draw_specs(count, torch.Generator().manual_seed(seed))


def test_captions_come_back_through_the_parser() -> None:
    drawn = _specs(3000, 0)
    for scene in specs.scenes(drawn):
        assert sprites.parse(sprites.caption(scene)) == scene


def test_specs_come_back_through_scenes() -> None:
    drawn = _specs(3000, 1)
    assert torch.equal(specs.specs_of(specs.scenes(drawn)), drawn)


def test_the_readme_prompt_is_in_the_grammar() -> None:
    scene = sprites.parse("a red circle above a blue square on a white background")
    assert scene == grammar.Scene(
        (grammar.Thing("red", "circle"), grammar.Thing("blue", "square")),
        relation="above",
        background="white",
    )


def test_articles_and_spelling_do_not_matter() -> None:
    assert sprites.parse("Red ring at the top left on grey background.") == sprites.parse(
        "a red ring at the top left on a gray background"
    )


def test_an_unknown_prompt_is_refused_with_examples() -> None:
    with pytest.raises(ValueError, match="outside the sprites grammar"):
        sprites.parse("a photograph of an astronaut")


def test_drawing_specs_is_deterministic() -> None:
    assert torch.equal(_specs(500, 3), _specs(500, 3))
    assert not torch.equal(_specs(500, 3), _specs(500, 4))


def test_no_held_out_caption_is_ever_trained_on() -> None:
    held = set(sprites.held_out_prompts(400, seed=0))
    assert len(held) == 400
    trained = specs.draw_training_specs(40_000, torch.Generator().manual_seed(5))
    assert not specs.is_held_out(trained).any()
    assert held.isdisjoint(grammar.caption(scene) for scene in specs.scenes(trained))
    assert specs.is_held_out(specs.specs_of([sprites.parse(prompt) for prompt in held])).all()


def test_the_other_wording_of_a_held_out_scene_is_held_out() -> None:
    for prompt in sprites.held_out_prompts(200, seed=1):
        scene = sprites.parse(prompt)
        if scene.relation is None:
            continue
        turned = grammar.RELATIONS[grammar.RELATIONS.index(scene.relation) ^ 1]
        other = grammar.Scene(scene.things[::-1], relation=turned, background="navy")
        assert bool(specs.is_held_out(specs.specs_of([other]))[0]), prompt


def test_held_out_share() -> None:
    share = specs.is_held_out(_specs(20_000, 6)).float().mean().item()
    assert 0.05 < share < 0.08


def test_token_rows_equal_the_tokenizer() -> None:
    tokens = network.tokenizer(FULL.network)
    drawn = _specs(3000, 7)
    captions = [grammar.caption(scene) for scene in specs.scenes(drawn)]
    length = tokens.model_max_length
    expected = tokens(captions, padding="max_length", max_length=length, return_tensors="pt")
    rows = specs.token_rows(drawn, network.tables(tokens, CPU))
    assert rows.shape == (3000, length)
    assert torch.equal(rows, expected.input_ids)


def test_every_word_is_one_known_token_and_decodes() -> None:
    tokens = network.tokenizer(FULL.network)
    for word in grammar.words():
        row = tokens(word, add_special_tokens=False).input_ids
        assert len(row) == 1
        assert row[0] != tokens.unk_token_id
        assert tokens.decode(row).strip() == word


def test_foreign_text_still_becomes_tokens() -> None:
    tokens = network.tokenizer(FULL.network)
    row = tokens("zebra café", add_special_tokens=False).input_ids
    assert row
    assert tokens.unk_token_id not in row
