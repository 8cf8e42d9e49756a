"""Turn weighted prompts of any length into what a model of Stable Diffusion's kind reads of them.

As A1111 documents it: a prompt is cut into chunks of as many tokens as the text encoder takes, each
is encoded by itself, and the results stand one behind the other. What the encoder gives for a token
is multiplied by the weight of the token, and the whole chunk then by a number that gives it the
mean that it had before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strop.drawing.emphasis import Piece, read
from strop.drawing.prompts import MOST_TOKENS
from strop.drawing.request import PictureRequest
from strop.errors import StropError

_FROM_COMMA = 20  # tokens behind a comma that go into the next chunk with what follows
_LEAST_TOKENS = 3  # the begin, the end, and one between
_LEAST_MEAN = 1e-4  # of the root mean square; fp16 leaves some 2e-6 of it
_KINDS = ("CLIPTextModel", "CLIPTextModelWithProjection")


class NoWeightsError(StropError, ValueError):
    """A model's text encoder is not one whose prompts have weights here, or the weights leave
    nothing of what it gives."""


@dataclass(frozen=True)
class Chunk:
    """Hold as many token ids as a text encoder takes, and their weights."""

    ids: tuple[int, ...]
    weights: tuple[float, ...]


def reads_weights(pipe: Any) -> bool:
    """Tell whether a pipeline has a UNet, and nothing but CLIP to read prompts."""
    parts = _parts(pipe)
    return (
        getattr(pipe, "unet", None) is not None
        and bool(parts)
        and all(type(encoder).__name__ in _KINDS for _, encoder in parts)
        and not any(getattr(one.config, "use_attention_mask", False) for _, one in parts)
        and all(_LEAST_TOKENS <= one.model_max_length < MOST_TOKENS for one, _ in parts)
    )


def _parts(pipe: Any) -> list[tuple[Any, Any]]:
    """Return the tokenizers with their text encoders: two for SDXL, of which a refiner has one."""
    pairs = [
        (getattr(pipe, f"tokenizer{end}", None), getattr(pipe, f"text_encoder{end}", None))
        for end in ("", "_2", "_3")
    ]
    return [(one, other) for one, other in pairs if one is not None and other is not None]


def num_chunks(tokenizer: Any, *prompts: str) -> int:
    """Return how many chunks the longest of some prompts has."""
    return max(len(chunks_of(tokenizer, prompt)) for prompt in prompts)


def chunks_of(tokenizer: Any, prompt: str) -> list[Chunk]:
    """Return the chunks of a prompt, one at least. A chunk that ends within 20 tokens behind a
    comma ends at the comma, as A1111 has it by default. Raises PromptSyntaxError."""
    length = tokenizer.model_max_length - 2
    sections = read(prompt).sections
    texts = [piece.text for section in sections for piece in section]
    found = iter(_ids(tokenizer, [*texts, ","]))
    rows = [_tokens(section, found) for section in sections]
    (comma,) = next(found)
    if len(rows) > 1 and not rows[-1]:
        del rows[-1]  # BREAK at the end begins nothing
    return [_padded(part, tokenizer) for row in rows for part in _cut(row, length, comma)]


_Tokens = list[tuple[int, float]]


def _ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    found: list[list[int]] = tokenizer(
        list(texts), add_special_tokens=False, truncation=False, verbose=False
    ).input_ids
    return found


def _tokens(section: Sequence[Piece], found: Iterator[list[int]]) -> _Tokens:
    return [(token, piece.weight) for piece in section for token in next(found)]


def _cut(row: _Tokens, length: int, comma: int) -> Iterator[_Tokens]:
    while len(row) > length:
        end = length
        if row[length][0] != comma:
            near = range(length - 1, max(-1, length - 1 - _FROM_COMMA), -1)
            end = next((place + 1 for place in near if row[place][0] == comma), length)
        yield row[:end]
        row = row[end:]
    yield row


def _padded(part: _Tokens, tokenizer: Any) -> Chunk:
    rest = tokenizer.model_max_length - 2 - len(part)
    ids = (token for token, _ in part)
    padding = (tokenizer.eos_token_id, *[tokenizer.pad_token_id] * rest)
    weights = (weight for _, weight in part)
    return Chunk((tokenizer.bos_token_id, *ids, *padding), (1.0, *weights, 1.0, *[1.0] * rest))


@dataclass(frozen=True)
class _Read:
    """Hold the chunks of a text as one row [1, tokens, channels], and what SDXL knows of the first
    chunk as a whole [1, channels]."""

    row: Tensor
    pooled: Tensor | None


def text_arguments(pipe: Any, requests: Sequence[PictureRequest]) -> dict[str, Any]:
    """Return the arguments of a call that stand for the weighted prompts of some requests.

    Each chunk is encoded by itself, so what a prompt becomes does not depend on others beside it.
    Shorter prompts get chunks of no text. Products and means are computed in fp64 and rounded once.

    Raises:
        NoWeightsError: the model is read by other encoders than CLIP, or a mean is zero.
        PromptSyntaxError: a prompt asks for what is not built.
        ValueError: the requests have other numbers of chunks.
    """
    if not reads_weights(pipe):
        raise NoWeightsError(
            f"weights of words are built for UNets that read CLIP alone; {type(pipe).__name__} is"
            " not one of them"
        )
    first = requests[0]
    is_guided = first.guidance > 1
    is_zero = not first.negative and bool(pipe.config.get("force_zeros_for_empty_prompt"))
    tokenizer = _parts(pipe)[0][0]
    pairs = [(r.prompt, r.negative if is_guided else "") for r in requests]
    counts = {max(num_chunks(tokenizer, *pair), first.chunks) for pair in pairs}
    if len(counts) > 1:
        raise ValueError(f"these requests have other numbers of chunks: {sorted(counts)}")
    (count,) = counts
    texts = dict.fromkeys([pair[0] for pair in pairs])
    if is_guided and not is_zero:  # or else the pipeline guides away from zeros
        texts |= dict.fromkeys(pair[1] for pair in pairs)
    with torch.no_grad():
        known = {text: _read_text(pipe, text, count) for text in texts}
    found = _named("", [known[text] for text, _ in pairs])
    if is_guided and not is_zero:
        found |= _named("negative_", [known[text] for _, text in pairs])
    return {**found, "guidance_scale": first.guidance}


def _named(which: str, those: Sequence[_Read]) -> dict[str, Tensor]:
    found = {f"{which}prompt_embeds": torch.cat([one.row for one in those])}
    pooled = [one.pooled for one in those if one.pooled is not None]
    return found | ({f"{which}pooled_prompt_embeds": torch.cat(pooled)} if pooled else {})


def _read_text(pipe: Any, text: str, count: int) -> _Read:
    parts = [_encoded(pipe, *part, text, count) for part in _parts(pipe)]
    return _Read(torch.cat([row for row, _ in parts], dim=-1), parts[-1][1])


def _encoded(
    pipe: Any, tokenizer: Any, encoder: Any, text: str, count: int
) -> tuple[Tensor, Tensor | None]:
    """Return what one text encoder makes of a text, called as diffusers calls it."""
    chunks = chunks_of(tokenizer, text)
    chunks += chunks_of(tokenizer, "") * (count - len(chunks))
    is_xl = hasattr(pipe, "text_encoder_2")
    how: Mapping[str, Any] = {"output_hidden_states": True} if is_xl else {"attention_mask": None}
    rows, pooled = [], []
    for chunk in chunks:
        ids = torch.tensor([chunk.ids], device=pipe._execution_device)
        made = encoder(ids, **how)
        rows.append(_weighted(made.hidden_states[-2] if is_xl else made[0], chunk.weights))
        pooled.append(made[0])
    return torch.cat(rows, dim=1), pooled[0] if is_xl else None


def _weighted(values: Tensor, weights: Sequence[float]) -> Tensor:
    """Return values [1, tokens, channels] times the weights of their tokens, with the mean that
    they had. Raises NoWeightsError where a mean is no more than what rounding leaves, so that their
    quotient would be anything."""
    if all(weight == 1 for weight in weights):
        return values
    exact = values.double()
    scaled = exact * torch.tensor(weights, dtype=torch.float64, device=values.device)[None, :, None]
    for one in (exact, scaled):
        if one.mean().abs() < _LEAST_MEAN * one.square().mean().sqrt():
            raise NoWeightsError(
                "the rule for weights of words divides by the mean of what the text encoder gives,"
                " which is zero here; take other weights, or none"
            )
    return (scaled * (exact.mean() / scaled.mean())).to(values.dtype)
