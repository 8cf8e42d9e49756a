"""What a model reads of weighted prompts, beside plain formulas and plain calls of pipelines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.bench.pipelines.stable import sdxl
from strop.bench.pipelines.tiny import TinyPipeline
from strop.drawing.draw import draw
from strop.drawing.embeddings import (
    NoWeightsError,
    _weighted,
    chunks_of,
    reads_weights,
    text_arguments,
)
from strop.drawing.request import PictureRequest, PictureSize
from strop.models import sprites

pytestmark = pytest.mark.filterwarnings("ignore")

RED = PictureRequest("a red circle", PictureSize(64, 32), 2, 4.0, seed=1, is_weighted=True)
LONG = ", ".join(["a red circle above a blue square"] * 4)


@pytest.fixture(scope="module")
def pipe(weighing_model: Path) -> Any:
    loaded = sprites.load_from(weighing_model)
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture(scope="module")
def large() -> Any:
    made = TinyPipeline("sdxl", "StableDiffusionXLPipeline", sdxl).made()
    made.set_progress_bar_config(disable=True)
    return made


@pytest.mark.parametrize("negative", ["", "a green star"])
@pytest.mark.parametrize("kind", ["pipe", "large"])
def test_a_plain_prompt_has_the_bits_of_a_plain_call(
    kind: str, negative: str, request: pytest.FixtureRequest
) -> None:
    own = request.getfixturevalue(kind)
    assert reads_weights(own)
    for guidance in (1.0, 4.0):
        asked = replace(RED, negative=negative, guidance=guidance)
        assert torch.equal(draw(own, [asked]), draw(own, [replace(asked, is_weighted=False)]))


@pytest.mark.parametrize("is_zero", [False, True])
def test_sdxl_guides_away_from_zeros_where_its_configuration_says_so(
    large: Any, is_zero: bool
) -> None:
    before = large.config.force_zeros_for_empty_prompt
    large.register_to_config(force_zeros_for_empty_prompt=is_zero)
    try:
        assert torch.equal(draw(large, [RED]), draw(large, [replace(RED, is_weighted=False)]))
        assert ("negative_prompt_embeds" in text_arguments(large, [RED])) is not is_zero
    finally:
        large.register_to_config(force_zeros_for_empty_prompt=before)


def _encoded(pipe: Any, prompt: str) -> Tensor:
    ids = pipe.tokenizer(prompt, padding="max_length", return_tensors="pt").input_ids
    with torch.no_grad():
        return pipe.text_encoder(ids)[0]  # type: ignore[no-any-return]


def test_weights_multiply_and_the_mean_comes_back(pipe: Any) -> None:
    """A1111's rule, in fp64: red is the third token behind the begin."""
    asked = replace(RED, prompt="a (red:1.5) [circle]", negative="a (blue:0.5) square")
    found = text_arguments(pipe, [asked])
    for name, prompt, weights in (
        ("prompt_embeds", "a red circle", {2: 1.5, 3: 1 / 1.1}),
        ("negative_prompt_embeds", "a blue square", {2: 0.5}),
    ):
        plain = _encoded(pipe, prompt).double()
        scaled = plain.clone()
        for place, weight in weights.items():
            scaled[:, place] *= weight
        expected = scaled * plain.mean() / scaled.mean()
        torch.testing.assert_close(found[name].double(), expected, atol=1e-7, rtol=1e-6)
    assert not torch.allclose(draw(pipe, [asked]), draw(pipe, [RED]), atol=1e-5)


def test_sdxl_weighs_both_encoders_and_not_the_pooled_text(large: Any) -> None:
    plain, weighted = (
        text_arguments(large, [replace(RED, prompt=text, negative="x")])
        for text in ("a red circle", "a red (circle:1.4)")
    )
    own, width = plain["prompt_embeds"], large.text_encoder.config.hidden_size
    place = next(n for n in range(own.shape[1]) if not _same(plain, weighted, n, slice(0, width)))
    for part in (slice(0, width), slice(width, None)):
        ratio = weighted["prompt_embeds"][..., part] / own[..., part]
        others = ratio[0, :place]
        assert others.std() / others.mean().abs() < 1e-4, "one number for the whole chunk"
        torch.testing.assert_close(
            ratio[0, place],
            others.mean() * 1.4 * torch.ones_like(ratio[0, place]),
            rtol=1e-3,
            atol=0,
        )
    assert torch.equal(plain["pooled_prompt_embeds"], weighted["pooled_prompt_embeds"])
    assert draw(large, [replace(RED, prompt="a red (circle:1.4)")]).isfinite().all()


def _same(one: dict[str, Tensor], other: dict[str, Tensor], place: int, part: slice) -> bool:
    """Whether a token has the share of the first one, which has no weight."""
    ratio = other["prompt_embeds"][0, :, part] / one["prompt_embeds"][0, :, part]
    return bool((ratio[place] / ratio[0] - 1).abs().max() < 0.1)


def test_long_prompts_are_chunks_that_end_at_commas(pipe: Any) -> None:
    """The model takes 22 tokens: 3 captions of 7 words and a comma are 24, and 2 are 16."""
    tokenizer = pipe.tokenizer
    length = tokenizer.model_max_length
    texts = [tokenizer.decode(chunk.ids, skip_special_tokens=True) for chunk in _chunks(pipe, LONG)]
    assert [text.count("circle") for text in texts] == [2, 2]
    assert texts[0].rstrip().endswith(",")
    (whole, rest) = _chunks(pipe, "red " * (length - 1))
    assert rest.ids[1] == whole.ids[1] != rest.ids[2] == tokenizer.eos_token_id
    assert len(_chunks(pipe, "red " * (length - 2))) == 1
    first, _ = _chunks(pipe, "red " * 9 + "," + "red " * (length - 12) + ", red")
    assert tokenizer.eos_token_id not in first.ids[:-1], "behind a comma nothing moves"
    assert len(_chunks(pipe, "a red circle BREAK a blue square BREAK")) == 2
    assert len(_chunks(pipe, "BREAK a blue square")) == 2
    assert len(_chunks(pipe, "")) == 1
    found = text_arguments(pipe, [replace(RED, prompt=LONG)])
    parts = [_encoded(pipe, text) for text in texts]
    torch.testing.assert_close(found["prompt_embeds"], torch.cat(parts, dim=1))
    empty = torch.cat([_encoded(pipe, "")] * 2, dim=1)
    torch.testing.assert_close(found["negative_prompt_embeds"], empty)


def _chunks(pipe: Any, prompt: str) -> list[Any]:
    return chunks_of(pipe.tokenizer, prompt)


def test_a_batch_draws_each_prompt_as_if_alone(pipe: Any) -> None:
    requests = [
        replace(RED, prompt=LONG, chunks=2),
        replace(RED, prompt="a (red:1.3) circle", seed=2, chunks=2),
        replace(RED, prompt=LONG.replace("red", "(red)"), seed=3, chunks=2),
    ]
    for pixels, request in zip(draw(pipe, requests), requests, strict=True):
        torch.testing.assert_close(pixels, draw(pipe, [request])[0], atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match=r"other numbers of chunks: \[1, 2\]"):
        draw(pipe, [replace(request, chunks=1) for request in requests[:2]])
    with pytest.raises(ValueError, match="one call"):
        draw(pipe, [RED, replace(RED, is_weighted=False)])


def test_a_mean_of_nothing_is_no_divisor(tiny_model: Path, pipe: Any) -> None:
    """A norm without an offset leaves a mean of nothing but rounding."""
    asked = replace(RED, prompt="a (red:1.5) circle")
    with pytest.raises(NoWeightsError, match="which is zero here"):
        draw(sprites.load_from(tiny_model), [asked])
    tokens = len(chunks_of(pipe.tokenizer, "")[0].ids)
    balanced = -(tokens - 3) / 3  # the weight of 3 words that makes the sum about zero
    with torch.no_grad():
        values = torch.ones(1, tokens, 4)
        with pytest.raises(NoWeightsError, match="take other weights"):
            _weighted(values, [*[1.0] * (tokens - 3), *[balanced] * 3])


def test_other_models_are_refused(tiny_dit: Path) -> None:
    flux = sprites.load_from(tiny_dit)
    assert not reads_weights(flux)
    with pytest.raises(NoWeightsError, match="CLIP alone; FluxPipeline is not"):
        draw(flux, [RED])
