"""Build today's pipelines at full size for benchmarks, with text encoders and VAE, from their
configuration: weights are random, words are tokens of a tokenizer that is made here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from strop.bench import network_models
from strop.bench.models import CLIP_BIG_G, CLIP_L, SD_VAE, Build, Size, Workload, made_on
from strop.bench.pipelines import flux as fluxes
from strop.bench.pipelines import images
from strop.bench.pipelines.parts import (
    Parts,
    causal,
    clip,
    clip_tokenizer,
    diffusers,
    flow,
    qwen_tokenizer,
    t5,
    t5_tokenizer,
)
from strop.bench.pipelines.tiny import TinyPipeline
from strop.bench.transformer_models import FLUX, SD35

T5_XXL: dict[str, Any] = {**network_models.T5_XXL, "vocab_size": 32128}
QWEN3_4B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
QWEN_VL_7B: dict[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "vocab_size": 152064,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128000,
    "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
    "rope_theta": 1e6,
}
QWEN_SIGHT: dict[str, Any] = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420}
QWEN_SIGHT |= {"num_heads": 16, "out_hidden_size": 3584}  # it is not asked for a text
FLOW_VAE = SD_VAE | {
    "latent_channels": 16,
    "sample_size": 1024,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
}
SD3_VAE = FLOW_VAE | {"scaling_factor": 1.5305, "shift_factor": 0.0609}
KLEIN_4B: dict[str, Any] = {
    "num_layers": 5,
    "num_single_layers": 20,
    "num_attention_heads": 24,
    "joint_attention_dim": 3 * QWEN3_4B["hidden_size"],
    "guidance_embeds": False,
}
SENTENCES = "a photograph of the red circle above some blue square in front of green hills at dawn"
QWEN_PROMPT = 123  # words: with the five tokens behind them, 128 tokens reach the transformer
QWEN_TEMPLATE = (  # words of Qwen-Image's own, of which the pipeline drops the first 34 tokens
    "system Describe the image by detailing the color, shape, size, texture, quantity, text,"
    " spatial relationships of the objects and background: user assistant"
)


def prompt_of(words: int) -> str:
    return " ".join(islice(cycle(SENTENCES.split()), words))


def worded(tokenizer: Any) -> Any:
    """Make each word that prompts and templates here have one token, as real vocabularies do: other
    letters are a token each."""
    text = f"{QWEN_TEMPLATE} {SENTENCES} {SENTENCES}"
    words = re.findall(r"[A-Za-z]+", text)
    known = dict.fromkeys([*words, *(f" {word}" for word in words)])
    tokenizer.add_tokens([word for word in known if len(word) > 1])
    return tokenizer


def _qwen_words() -> Any:
    return worded(qwen_tokenizer(1024 + 34))


_FLUX_FLOW: dict[str, Any] = {"shift": 3.0, "use_dynamic_shifting": True}
_QWEN_FLOW: dict[str, Any] = {
    "use_dynamic_shifting": True,
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
}


def _flux() -> Parts:
    return {
        "transformer": diffusers("FluxTransformer2DModel", **FLUX),
        "vae": diffusers("AutoencoderKL", **FLOW_VAE),
        "scheduler": flow(**_FLUX_FLOW),
        "text_encoder": clip(**CLIP_L, projection_dim=768),
        "tokenizer": clip_tokenizer(77),
        "text_encoder_2": t5(**T5_XXL),
        "tokenizer_2": t5_tokenizer(512),
    }


def _qwen() -> Parts:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(text_config=QWEN_VL_7B, vision_config=QWEN_SIGHT)
    return {
        "transformer": diffusers("QwenImageTransformer2DModel"),
        "vae": diffusers("AutoencoderKLQwenImage"),
        "scheduler": flow(**_QWEN_FLOW),
        "text_encoder": Qwen2_5_VLForConditionalGeneration(config).eval(),
        "tokenizer": _qwen_words(),
    }


def _z_image() -> Parts:
    net = diffusers("ZImageTransformer2DModel")
    for token in (net.x_pad_token, net.cap_pad_token):  # diffusers leaves them as memory was
        torch.nn.init.normal_(token, std=0.02)
    return {
        "transformer": net,
        "vae": diffusers("AutoencoderKL", **FLOW_VAE),
        "scheduler": flow(shift=3.0),
        "text_encoder": causal("Qwen3Model", **QWEN3_4B),
        "tokenizer": _qwen_words(),
    }


def _klein() -> Parts:
    return {
        "transformer": diffusers("Flux2Transformer2DModel", **KLEIN_4B),
        "vae": diffusers("AutoencoderKLFlux2"),
        "scheduler": flow(**_FLUX_FLOW),
        "text_encoder": causal("Qwen3ForCausalLM", **QWEN3_4B),
        "tokenizer": _qwen_words(),
        "is_distilled": True,
    }


def _sd35() -> Parts:
    kind = "CLIPTextModelWithProjection"
    return {
        "transformer": diffusers("SD3Transformer2DModel", **SD35),
        "vae": diffusers("AutoencoderKL", **SD3_VAE),
        "scheduler": flow(shift=3.0),
        "text_encoder": clip(kind, **CLIP_L, projection_dim=768),
        "tokenizer": clip_tokenizer(77),
        "text_encoder_2": clip(kind, **CLIP_BIG_G),
        "tokenizer_2": clip_tokenizer(77),
        "text_encoder_3": t5(**T5_XXL),
        "tokenizer_3": t5_tokenizer(256),
    }


def _tiny_sd35() -> Parts:
    config = images.SD3 | {"dual_attention_layers": (0,), "qk_norm": "rms_norm"}
    return images.sd3() | {"transformer": diffusers("SD3Transformer2DModel", **config)}


def _with_flow(parts: Callable[[], Parts], **config: Any) -> Callable[[], Parts]:
    return lambda: parts() | {"scheduler": flow(**config)}


_SHORT = {"max_sequence_length": 16}
_LAYERS = {"max_sequence_length": 48, "text_encoder_out_layers": (0, 1, 2)}
_CFG = {"true_cfg_scale": 4.0, "negative_prompt": " "}
_QWEN_WORDS = {"prompt": prompt_of(QWEN_PROMPT)}

# Each at full size, and tiny with the same schedules and ways of guidance.
FAMILIES: dict[str, tuple[TinyPipeline, TinyPipeline]] = {
    name: (TinyPipeline(name, kind, full, given), TinyPipeline(name, kind, tiny, given | changes))
    for name, kind, full, tiny, given, changes in (
        (
            *("flux-pipe", "FluxPipeline", _flux, _with_flow(fluxes.flux, **_FLUX_FLOW)),
            *({"guidance_scale": 3.5, "max_sequence_length": 512}, _SHORT),
        ),
        (
            *("qwen-image-pipe", "QwenImagePipeline", _qwen, _with_flow(images.qwen, **_QWEN_FLOW)),
            *(_CFG | _QWEN_WORDS, {"prompt": "a red cat"}),
        ),
        (
            *("z-image-pipe", "ZImagePipeline", _z_image, _with_flow(images.z_image, shift=3.0)),
            *({"guidance_scale": 0.0} | _QWEN_WORDS, {"prompt": "a red cat"}),
        ),
        (
            *("klein-pipe", "Flux2KleinPipeline", _klein, _with_flow(fluxes.flux2, **_FLUX_FLOW)),
            *({"guidance_scale": 1.0, "max_sequence_length": 512}, _LAYERS),
        ),
        (
            *("sd3.5-pipe", "StableDiffusion3Pipeline", _sd35, _tiny_sd35),
            *({"guidance_scale": 4.5, "negative_prompt": "", "max_sequence_length": 256}, _SHORT),
        ),
    )
}
_TEXTS = ("prompt", "negative_prompt")
DEFAULT_PROMPT = {"prompt": prompt_of(30)}


def family_workload(family: TinyPipeline, steps: int) -> Build:
    """Return a workload that draws from text through a plain ``pipe(...)``."""

    def build(device: torch.device, dtype: torch.dtype) -> Workload:
        with made_on(device, dtype):
            pipe = family.made()

        def inputs(size: Size, batch: int) -> dict[str, Any]:
            given = {**DEFAULT_PROMPT, **family.given}
            asked = [name for name in _TEXTS if name in given]
            texts: dict[str, Any] = {name: [given[name]] * batch for name in asked}
            return {
                **given,
                **texts,
                "height": size[0],
                "width": size[1],
                "num_inference_steps": steps,
                "generator": [torch.Generator().manual_seed(i) for i in range(batch)],
                "output_type": "pt",
            }

        return Workload(pipe, inputs, _draw)

    return build


def _draw(pipe: Any, given: Mapping[str, Any]) -> Tensor:
    """Draw from lists of texts of its own: Z-Image's pipeline writes its template into the list."""
    for number, generator in enumerate(given["generator"]):
        generator.manual_seed(number)
    texts = {name: list(given[name]) for name in _TEXTS if name in given}
    result: Tensor = pipe(**{**given, **texts}).images
    return result
