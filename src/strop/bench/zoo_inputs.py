"""List sizes and inputs for the models of the zoo."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

Shape = tuple[int, ...]
Inputs = dict[str, Any]
VOCABULARY = 99


@dataclass(frozen=True, slots=True)
class ZooSizes:
    """List shapes that one graph should serve: a few of every parity, and ranges to draw more
    from."""

    first: tuple[Shape, ...]
    ranges: tuple[range, ...]

    def some(self, count: int) -> tuple[Shape, ...]:
        """Return ``count`` different shapes, the same in every run; fewer if there are no more."""
        source, found = random.Random(0), dict.fromkeys(self.first)
        for _ in range(100 * count):
            found[tuple(source.choice(each) for each in self.ranges)] = None
        return tuple(found)[:count]


BATCH = range(1, 7)

# batches and sizes of every parity

TEXT = ZooSizes(((2, 12), (3, 7), (1, 16), (4, 9)), (BATCH, range(2, 33)))
LONG_TEXT = ZooSizes(((2, 24), (3, 17), (1, 32), (4, 20)), (BATCH, range(17, 49)))
PAIRS = ZooSizes(
    ((2, 12, 5), (3, 7, 9), (1, 16, 4), (4, 9, 9)), (BATCH, range(2, 33), range(2, 17))
)
# new and past tokens
CACHED = ZooSizes(
    ((2, 1, 8), (3, 1, 5), (1, 1, 11), (4, 1, 16)), (BATCH, range(1, 2), range(2, 49))
)
BATCHES = ZooSizes(
    ((2, 32, 32), (3, 32, 32), (1, 32, 32), (5, 32, 32)),
    (range(1, 25), range(32, 33), range(32, 33)),
)
LARGE_BATCHES = ZooSizes(
    ((2, 64, 64), (3, 64, 64), (1, 64, 64), (4, 64, 64)),
    (range(1, 21), range(64, 65), range(64, 65)),
)
IMAGES = ZooSizes(
    ((2, 32, 32), (3, 48, 64), (1, 64, 32), (2, 64, 64)),
    (range(1, 5), range(32, 97, 16), range(32, 97, 16)),
)
LARGE_IMAGES = ZooSizes(
    ((2, 64, 64), (3, 64, 96), (1, 128, 64), (2, 96, 96)),
    (range(1, 4), range(64, 129, 32), range(64, 129, 32)),
)
WAVES = ZooSizes(((2, 800), (3, 1000), (1, 640), (4, 1200)), (BATCH, range(400, 1201)))
LATENTS = ZooSizes(
    ((2, 8, 8), (3, 8, 16), (1, 16, 8), (2, 12, 8)), (range(1, 5), range(6, 19, 2), range(6, 19, 2))
)
ONE_LATENT = ZooSizes(
    ((2, 8, 8), (3, 8, 8), (1, 8, 8), (4, 8, 8)), (range(1, 25), range(8, 9), range(8, 9))
)
STATIC_CACHE = ZooSizes(((2, 16), (3, 24), (1, 32), (4, 8)), (BATCH, range(4, 49)))
PATCHES = ZooSizes(
    ((2, 56, 56), (3, 56, 56), (1, 56, 56), (4, 56, 56)),
    (range(1, 25), range(56, 57), range(56, 57)),
)
TARGETS = ZooSizes(((2, 5), (3, 9), (1, 12), (4, 7)), (BATCH, range(2, 33)))
CLIPS = ZooSizes(
    ((2, 4, 16, 16), (3, 6, 24, 16), (1, 4, 32, 24), (2, 5, 16, 16)),
    (range(1, 4), range(3, 8), range(16, 33, 8), range(16, 33, 8)),
)
CLICKS = ZooSizes(((8,), (3,), (1,), (16,)), (range(1, 65),))


# inputs


def tokens(batch: int, length: int) -> Inputs:
    return {"input_ids": torch.randint(3, VOCABULARY, (batch, length))}


def padded_tokens(batch: int, length: int) -> Inputs:
    """Return tokens whose first row is shorter by two than the others."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, -2:] = 0
    return {**tokens(batch, length), "attention_mask": mask}


def token_pairs(batch: int, length: int, target_length: int) -> Inputs:
    target = tokens(batch, target_length)["input_ids"]
    return {**tokens(batch, length), "decoder_input_ids": target}


def tokens_and_cache(batch: int, length: int, past: int) -> Inputs:
    """Return two layers of keys and values with four heads of eight."""
    cache = [torch.randn(batch, 4, past, 8) for _ in range(4)]
    return {**tokens(batch, length), "cache": cache}


def pixels(batch: int, height: int, width: int) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, height, width)}


def noise(batch: int) -> Inputs:
    return {"noise": torch.randn(batch, 16)}


def frames(batch: int, count: int, height: int, width: int) -> Inputs:
    return {"frames": torch.randn(batch, 3, count, height, width)}


def wave(batch: int, samples: int) -> Inputs:
    return {"input_values": torch.randn(batch, samples)}


def mel(batch: int, target_length: int) -> Inputs:
    """Return a spectrogram for Whisper, whose window is fixed: 2 x max_source_positions frames."""
    target = tokens(batch, target_length)["input_ids"]
    return {"input_features": torch.randn(batch, 16, 60), "decoder_input_ids": target}


def sample(batch: int, height: int, width: int) -> Inputs:
    return {"sample": torch.randn(batch, 4, height, width)}


def rgb_sample(batch: int, height: int, width: int) -> Inputs:
    return {"sample": torch.randn(batch, 3, height, width)}


def noise_and_time(batch: int, height: int, width: int) -> Inputs:
    return {**sample(batch, height, width), "timestep": torch.randint(0, 1000, ())}


def conditioned(batch: int, height: int, width: int) -> Inputs:
    prompt = torch.randn(batch, 9, 32)
    return {**noise_and_time(batch, height, width), "encoder_hidden_states": prompt}


def sdxl_inputs(batch: int, height: int, width: int) -> Inputs:
    added = {"text_embeds": torch.randn(batch, 16), "time_ids": torch.randn(batch, 6)}
    return {**conditioned(batch, height, width), "added_cond_kwargs": added}


def controlnet_inputs(batch: int, height: int, width: int) -> Inputs:
    picture = torch.rand(batch, 3, 8 * height, 8 * width)
    return {**conditioned(batch, height, width), "controlnet_cond": picture}


def sd3_inputs(batch: int, height: int, width: int) -> Inputs:
    return {
        "hidden_states": torch.randn(batch, 4, height, width),
        "encoder_hidden_states": torch.randn(batch, 9, 32),
        "pooled_projections": torch.randn(batch, 16),
        "timestep": 1000 * torch.rand(batch),
    }


def flux_inputs(batch: int, height: int, width: int) -> Inputs:
    rows, columns = torch.arange(height), torch.arange(width)
    ids = torch.stack(
        [
            torch.zeros(height, width),
            rows[:, None].expand(height, width),
            columns[None].expand(height, width),
        ],
        -1,
    )
    return {
        "hidden_states": torch.randn(batch, height * width, 4),
        "encoder_hidden_states": torch.randn(batch, 9, 32),
        "pooled_projections": torch.randn(batch, 16),
        "timestep": torch.rand(batch),
        "guidance": 5 * torch.rand(batch),
        "img_ids": ids.reshape(-1, 3),
        "txt_ids": torch.zeros(9, 3),
    }


def pixart_inputs(batch: int, height: int, width: int) -> Inputs:
    return {
        "hidden_states": torch.randn(batch, 4, height, width),
        "encoder_hidden_states": torch.randn(batch, 9, 32),
        "timestep": 1000 * torch.rand(batch),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def dit_inputs(batch: int, height: int, width: int) -> Inputs:
    return {
        "hidden_states": torch.randn(batch, 4, height, width),
        "timestep": torch.randint(0, 1000, (batch,)),
        "class_labels": torch.randint(0, 10, (batch,)),
    }


def kandinsky_inputs(batch: int, height: int, width: int) -> Inputs:
    added = {"image_embeds": torch.randn(batch, 32)}
    given = {**noise_and_time(batch, height, width), "encoder_hidden_states": None}
    return {**given, "added_cond_kwargs": added}


def click_inputs(batch: int) -> Inputs:
    return {"dense": torch.randn(batch, 13), "sparse": torch.randint(0, 50, (batch, 5))}


def whisper_step(batch: int, length: int, past: int) -> Inputs:
    """Return tokens, keys and values of the past, and what Whisper's encoder has heard."""
    return {**tokens_and_cache(batch, length, past), "heard": torch.randn(batch, 30, 32)}


def static_step(batch: int, most: int) -> Inputs:
    """Return a token, its place, and two layers of keys and values for as many as ``most``."""
    cache = [torch.randn(2, batch, 4, most, 8) for _ in range(2)]
    position = torch.randint(0, most, (1,))
    return {**tokens(batch, 1), "position": position, "cache": cache}


def two_pictures(batch: int, height: int, width: int) -> Inputs:
    first, second = torch.rand(2, batch, 3, height, width)
    return {"first": first, "second": second}
