"""List the models of ``strop bench models``: published architectures at tiny widths, random
weights.

One row a model: how it is built (from a config, never from a download), how its inputs look, and
the sizes that one graph should serve. A shape is what its input maker takes, for example
(batch, length) or (batch, height, width).
"""

from __future__ import annotations

from torch import nn

from strop.bench import zoo_convnets as convnets
from strop.bench import zoo_fed as fed
from strop.bench import zoo_modules as own
from strop.bench.zoo_diffusion import DIFFUSION
from strop.bench.zoo_inputs import (
    CACHED,
    CLICKS,
    STATIC_CACHE,
    TARGETS,
    TEXT,
    VOCABULARY,
    WAVES,
    click_inputs,
    mel,
    static_step,
    tokens,
    wave,
    whisper_step,
)
from strop.bench.zoo_model import BART, SIZES, Config, ZooModel, hf
from strop.bench.zoo_texts import TEXTS
from strop.bench.zoo_vision import VISION

SPEECH: Config = {
    **SIZES,
    "vocab_size": VOCABULARY,
    "intermediate_size": 64,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}

WHISPER: Config = {
    **{**BART, "max_position_embeddings": 64},
    "num_mel_bins": 16,
    "max_source_positions": 30,
    "max_target_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

OTHERS: tuple[ZooModel, ...] = (
    ZooModel(
        "whisper",
        "audio",
        hf(
            "WhisperModel",
            **WHISPER,
        ),
        mel,
        TARGETS,
    ),
    ZooModel(
        "whisper-decode", "audio", lambda: fed.WhisperDecoder(**WHISPER), whisper_step, CACHED
    ),
    ZooModel("wav2vec2", "audio", hf("Wav2Vec2Model", **SPEECH), wave, WAVES),
    ZooModel("hubert", "audio", hf("HubertModel", **SPEECH), wave, WAVES),
    ZooModel("wavenet", "audio", convnets.WaveNet, wave, WAVES),
    ZooModel("lstm", "sequence", lambda: own.Tagger(nn.LSTM), tokens, TEXT),
    ZooModel("gru", "sequence", lambda: own.Tagger(nn.GRU), tokens, TEXT),
    ZooModel("transformer-encoder", "sequence", lambda: own.Encoder(), tokens, TEXT),
    ZooModel("llama-static-decode", "text", lambda: fed.StaticDecode(), static_step, STATIC_CACHE),
    ZooModel("dlrm", "recommendation", lambda: own.DLRM(), click_inputs, CLICKS),
)

ZOO: tuple[ZooModel, ...] = DIFFUSION + VISION + TEXTS + OTHERS
