"""List the models of ``strop bench models``: published architectures at tiny widths, random
weights.

One row a model: how it is built (from a config, never from a download), how its inputs look, and
the sizes that one graph should serve. A shape is what its input maker takes, for example
(batch, length) or (batch, height, width).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from strop.bench import zoo_convnets as convnets
from strop.bench import zoo_modules as own
from strop.bench.zoo_inputs import (
    BATCHES,
    CACHED,
    CLICKS,
    CLIPS,
    IMAGES,
    LARGE_BATCHES,
    LARGE_IMAGES,
    LATENTS,
    LONG_TEXT,
    ONE_LATENT,
    PAIRS,
    TARGETS,
    TEXT,
    VOCABULARY,
    WAVES,
    Inputs,
    Shape,
    Sizes,
    click_inputs,
    conditioned,
    controlnet_inputs,
    dit_inputs,
    flux_inputs,
    frames,
    kandinsky_inputs,
    mel,
    noise,
    noise_and_time,
    padded_tokens,
    pixart_inputs,
    pixels,
    rgb_sample,
    sample,
    sd3_inputs,
    sdxl_inputs,
    token_pairs,
    tokens,
    tokens_and_cache,
    wave,
)

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ZooModel:
    """Describe one architecture. ``build`` needs no argument, ``inputs`` a shape; both draw from
    torch's generator."""

    name: str
    family: str
    build: Callable[[], nn.Module]
    inputs: Callable[..., Inputs]
    sizes: Sizes

    def made(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.build().eval().requires_grad_(False)

    def given(self, shape: Shape, seed: int = 1) -> Inputs:
        torch.manual_seed(seed)
        return self.inputs(*shape)


# builders


def _hf(kind: str, **config: Any) -> Callable[[], nn.Module]:
    """Return a builder of a class of transformers from its own config class."""

    def build() -> nn.Module:
        model = getattr(importlib.import_module("transformers"), kind)
        made: nn.Module = model(model.config_class(**config))
        return made

    return build


def _cached(kind: str, **config: Any) -> Callable[[], nn.Module]:
    """Return a builder of a model that takes and gives keys and values of the past as plain
    tensors."""
    build = _hf(kind, **config)
    return lambda: own.WithCache(build())


def _diffusers(kind: str, method: str = "forward", **config: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        made: nn.Module = getattr(importlib.import_module("diffusers"), kind)(**config)
        return made if method == "forward" else own.Method(made, method)

    return build


# tiny widths in the words of each config class

_SIZES: Config = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_BERT: Config = {
    **_SIZES,
    "vocab_size": VOCABULARY,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
_LLAMA: Config = {
    **_BERT,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VIT: Config = {**_SIZES, "intermediate_size": 64, "image_size": 32, "patch_size": 8}
_SWIN: Config = {
    "image_size": 64,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": (2, 2),
    "num_heads": (2, 4),
    "window_size": 4,
}
_BART: Config = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
}
_T5: Config = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_GPT2: Config = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WAVES: Config = {
    **_SIZES,
    "vocab_size": VOCABULARY,
    "intermediate_size": 64,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
_UNET: Config = {
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "sample_size": 8,
}
_CROSS: Config = {
    **_UNET,
    "cross_attention_dim": 32,
    "attention_head_dim": 4,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
}
_CONTROL: Config = {k: v for k, v in _CROSS.items() if k != "sample_size"}
_CROSS_UP: Config = {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
_VAE: Config = {
    "block_out_channels": (16, 32),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "norm_num_groups": 8,
    "latent_channels": 4,
}
_RESNET: Config = {"embedding_size": 16, "hidden_sizes": (16, 32, 32, 64)}

DIFFUSION: tuple[ZooModel, ...] = (
    ZooModel(
        "sd15-unet",
        "diffusion",
        _diffusers("UNet2DConditionModel", **_CROSS, **_CROSS_UP),
        conditioned,
        LATENTS,
    ),
    ZooModel(
        "sdxl-unet",
        "diffusion",
        _diffusers(
            "UNet2DConditionModel",
            **_CROSS,
            **_CROSS_UP,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=16 + 6 * 8,
            transformer_layers_per_block=2,
        ),
        sdxl_inputs,
        LATENTS,
    ),
    ZooModel(
        "sd-vae-encoder",
        "diffusion",
        _diffusers("AutoencoderKL", "_encode", **_VAE),
        rgb_sample,
        IMAGES,
    ),
    ZooModel(
        "sd-vae-decoder",
        "diffusion",
        _diffusers("AutoencoderKL", "_decode", **_VAE),
        sample,
        LATENTS,
    ),
    ZooModel(
        "controlnet",
        "diffusion",
        _diffusers(
            "ControlNetModel", **_CONTROL, conditioning_embedding_out_channels=(8, 16, 16, 16)
        ),
        controlnet_inputs,
        LATENTS,
    ),
    ZooModel(
        "sd3-transformer",
        "diffusion",
        _diffusers(
            "SD3Transformer2DModel",
            sample_size=32,
            patch_size=2,
            in_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=32,
            caption_projection_dim=32,
            pooled_projection_dim=16,
            out_channels=4,
            pos_embed_max_size=32,
        ),
        sd3_inputs,
        LATENTS,
    ),
    ZooModel(
        "flux-transformer",
        "diffusion",
        _diffusers(
            "FluxTransformer2DModel",
            patch_size=1,
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=16,
            guidance_embeds=True,
            axes_dims_rope=(4, 6, 6),
        ),
        flux_inputs,
        LATENTS,
    ),
    ZooModel(
        "pixart-transformer",
        "diffusion",
        _diffusers(
            "PixArtTransformer2DModel",
            num_attention_heads=4,
            attention_head_dim=8,
            in_channels=4,
            out_channels=8,
            num_layers=2,
            cross_attention_dim=32,
            sample_size=8,
            patch_size=2,
            caption_channels=32,
            norm_num_groups=8,
            use_additional_conditions=False,
        ),
        pixart_inputs,
        ONE_LATENT,
    ),
    ZooModel(
        "dit",
        "diffusion",
        _diffusers(
            "DiTTransformer2DModel",
            num_attention_heads=4,
            attention_head_dim=8,
            in_channels=4,
            out_channels=8,
            num_layers=2,
            sample_size=8,
            patch_size=2,
            num_embeds_ada_norm=10,
            norm_num_groups=8,
        ),
        dit_inputs,
        ONE_LATENT,
    ),
    ZooModel(
        "kandinsky-unet",
        "diffusion",
        _diffusers(
            "UNet2DConditionModel",
            **_UNET,
            cross_attention_dim=32,
            attention_head_dim=4,
            down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
            up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
            mid_block_type="UNetMidBlock2DSimpleCrossAttn",
            encoder_hid_dim=32,
            encoder_hid_dim_type="image_proj",
            addition_embed_type="image",
            resnet_time_scale_shift="scale_shift",
        ),
        kandinsky_inputs,
        LATENTS,
    ),
    ZooModel(
        "unet2d",
        "diffusion",
        _diffusers(
            "UNet2DModel",
            **_UNET,
            in_channels=4,
            out_channels=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=8,
        ),
        noise_and_time,
        LATENTS,
    ),
    ZooModel(
        "vq-decoder",
        "diffusion",
        _diffusers("VQModel", "decode", **_VAE, num_vq_embeddings=16),
        sample,
        LATENTS,
    ),
    ZooModel(
        "tiny-autoencoder",
        "diffusion",
        _diffusers(
            "AutoencoderTiny",
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            num_encoder_blocks=(1, 2),
            num_decoder_blocks=(2, 1),
            latent_channels=4,
        ),
        rgb_sample,
        IMAGES,
    ),
)

VISION: tuple[ZooModel, ...] = (
    ZooModel(
        "resnet50",
        "vision",
        _hf("ResNetForImageClassification", **_RESNET, depths=(3, 4, 6, 3)),
        pixels,
        IMAGES,
    ),
    ZooModel(
        "regnet",
        "vision",
        _hf("RegNetForImageClassification", **_RESNET, depths=(1, 2, 2, 1), groups_width=8),
        pixels,
        IMAGES,
    ),
    ZooModel(
        "convnext",
        "vision",
        _hf("ConvNextForImageClassification", hidden_sizes=(8, 16, 16, 32), depths=(1, 1, 2, 1)),
        pixels,
        IMAGES,
    ),
    ZooModel(
        "convnextv2",
        "vision",
        _hf("ConvNextV2ForImageClassification", hidden_sizes=(8, 16, 16, 32), depths=(1, 1, 2, 1)),
        pixels,
        IMAGES,
    ),
    ZooModel(
        "efficientnet",
        "vision",
        _hf(
            "EfficientNetModel",
            width_coefficient=0.25,
            depth_coefficient=0.4,
            image_size=64,
            hidden_dim=320,
        ),
        pixels,
        LARGE_IMAGES,
    ),
    ZooModel(
        "mobilenet-v1",
        "vision",
        _hf("MobileNetV1ForImageClassification", depth_multiplier=0.25),
        pixels,
        LARGE_IMAGES,
    ),
    ZooModel(
        "mobilenet-v2",
        "vision",
        _hf("MobileNetV2ForImageClassification", depth_multiplier=0.35),
        pixels,
        LARGE_IMAGES,
    ),
    ZooModel("vit", "vision", _hf("ViTForImageClassification", **_VIT), pixels, BATCHES),
    ZooModel("deit", "vision", _hf("DeiTModel", **_VIT), pixels, BATCHES),
    ZooModel(
        "beit",
        "vision",
        _hf("BeitModel", **_VIT, use_relative_position_bias=True, use_mask_token=False),
        pixels,
        BATCHES,
    ),
    ZooModel("swin", "vision", _hf("SwinModel", **_SWIN), pixels, LARGE_IMAGES),
    ZooModel("swinv2", "vision", _hf("Swinv2Model", **_SWIN), pixels, LARGE_BATCHES),
    ZooModel(
        "segformer",
        "vision",
        _hf(
            "SegformerForSemanticSegmentation",
            num_encoder_blocks=2,
            depths=(1, 1),
            sr_ratios=(4, 2),
            hidden_sizes=(16, 32),
            patch_sizes=(7, 3),
            strides=(4, 2),
            num_attention_heads=(1, 2),
            mlp_ratios=(2, 2),
            decoder_hidden_size=32,
        ),
        pixels,
        LARGE_IMAGES,
    ),
    ZooModel("dinov2", "vision", _hf("Dinov2Model", **{**_VIT, "mlp_ratio": 2}), pixels, BATCHES),
    ZooModel(
        "poolformer",
        "vision",
        _hf("PoolFormerModel", hidden_sizes=(8, 16, 16, 32), depths=(1, 1, 1, 1)),
        pixels,
        LARGE_IMAGES,
    ),
    ZooModel(
        "yolos",
        "vision",
        _hf("YolosForObjectDetection", **{**_VIT, "image_size": (32, 32)}, num_detection_tokens=5),
        pixels,
        BATCHES,
    ),
    ZooModel("clip-vision", "vision", _hf("CLIPVisionModel", **_VIT), pixels, BATCHES),
    ZooModel("siglip-vision", "vision", _hf("SiglipVisionModel", **_VIT), pixels, BATCHES),
    ZooModel("vgg", "vision", convnets.vgg, pixels, IMAGES),
    ZooModel("densenet", "vision", convnets.densenet, pixels, IMAGES),
    ZooModel("inception", "vision", convnets.inception, pixels, IMAGES),
    ZooModel("shufflenet", "vision", convnets.shufflenet, pixels, IMAGES),
    ZooModel("mobilenet-v3", "vision", convnets.mobilenet_v3, pixels, IMAGES),
    ZooModel("unet-segmenter", "vision", convnets.Segmenter, pixels, IMAGES),
    ZooModel("dcgan", "vision", convnets.Generator, noise, CLICKS),
    ZooModel("video-convnet", "vision", convnets.Video, frames, CLIPS),
    ZooModel("detr", "vision", lambda: own.TinyDetr(), pixels, LARGE_IMAGES),
    ZooModel("mlp-mixer", "vision", lambda: own.Mixer(), pixels, BATCHES),
)

TEXTS: tuple[ZooModel, ...] = (
    ZooModel("bert", "text", _hf("BertModel", **_BERT), padded_tokens, TEXT),
    ZooModel("roberta", "text", _hf("RobertaModel", **_BERT, pad_token_id=1), padded_tokens, TEXT),
    ZooModel(
        "xlm-roberta",
        "text",
        _hf("XLMRobertaForMaskedLM", **_BERT, pad_token_id=1),
        padded_tokens,
        TEXT,
    ),
    ZooModel(
        "distilbert",
        "text",
        _hf(
            "DistilBertModel",
            vocab_size=VOCABULARY,
            dim=32,
            n_layers=2,
            n_heads=4,
            hidden_dim=64,
            max_position_embeddings=64,
        ),
        padded_tokens,
        TEXT,
    ),
    ZooModel("albert", "text", _hf("AlbertModel", **_BERT, embedding_size=16), padded_tokens, TEXT),
    ZooModel(
        "electra", "text", _hf("ElectraModel", **_BERT, embedding_size=16), padded_tokens, TEXT
    ),
    ZooModel(
        "deberta-v2",
        "text",
        _hf(
            "DebertaV2Model",
            **_BERT,
            relative_attention=True,
            position_buckets=8,
            pos_att_type=["p2c", "c2p"],
        ),
        padded_tokens,
        TEXT,
    ),
    ZooModel("mpnet", "text", _hf("MPNetModel", **_BERT), padded_tokens, TEXT),
    ZooModel(
        "clip-text",
        "text",
        _hf("CLIPTextModel", **_BERT, bos_token_id=1, eos_token_id=2),
        tokens,
        TEXT,
    ),
    ZooModel(
        "siglip-text",
        "text",
        _hf("SiglipTextModel", **_BERT, bos_token_id=1, eos_token_id=2),
        tokens,
        TEXT,
    ),
    ZooModel("gpt2-prefill", "text", _hf("GPT2LMHeadModel", **_GPT2), tokens, TEXT),
    ZooModel("gpt2-decode", "text", _cached("GPT2LMHeadModel", **_GPT2), tokens_and_cache, CACHED),
    ZooModel("gpt-neox", "text", _hf("GPTNeoXForCausalLM", **_BERT), tokens, TEXT),
    ZooModel(
        "opt",
        "text",
        _hf(
            "OPTForCausalLM",
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=64,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
        ),
        padded_tokens,
        TEXT,
    ),
    ZooModel(
        "bloom",
        "text",
        _hf("BloomForCausalLM", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
        padded_tokens,
        TEXT,
    ),
    ZooModel(
        "falcon",
        "text",
        _hf(
            "FalconForCausalLM",
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
        ),
        tokens,
        TEXT,
    ),
    ZooModel("llama", "text", _hf("LlamaForCausalLM", **_LLAMA), tokens, TEXT),
    ZooModel(
        "llama-decode",
        "text",
        _cached("LlamaForCausalLM", **{**_LLAMA, "num_key_value_heads": 4}),
        tokens_and_cache,
        CACHED,
    ),
    ZooModel(
        "mistral", "text", _hf("MistralForCausalLM", **_LLAMA, sliding_window=16), tokens, LONG_TEXT
    ),
    ZooModel("qwen2", "text", _hf("Qwen2ForCausalLM", **_LLAMA), padded_tokens, TEXT),
    ZooModel("qwen3", "text", _hf("Qwen3ForCausalLM", **_LLAMA, head_dim=8), tokens, TEXT),
    ZooModel("gemma", "text", _hf("GemmaForCausalLM", **_LLAMA, head_dim=8), tokens, TEXT),
    ZooModel(
        "gemma2",
        "text",
        _hf("Gemma2ForCausalLM", **_LLAMA, head_dim=8, sliding_window=16),
        tokens,
        LONG_TEXT,
    ),
    ZooModel("phi", "text", _hf("PhiForCausalLM", **_LLAMA), tokens, TEXT),
    ZooModel(
        "mixtral",
        "text",
        _hf(
            "MixtralForCausalLM",
            **_LLAMA,
            num_local_experts=4,
            num_experts_per_tok=2,
            experts_implementation="batched_mm",
        ),
        tokens,
        TEXT,
    ),
    ZooModel(
        "mamba",
        "text",
        _hf(
            "MambaForCausalLM",
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            state_size=8,
        ),
        tokens,
        TEXT,
    ),
    ZooModel("t5", "text", _hf("T5ForConditionalGeneration", **_T5), token_pairs, PAIRS),
    ZooModel("t5-encoder", "text", _hf("T5EncoderModel", **_T5), padded_tokens, TEXT),
    ZooModel("bart", "text", _hf("BartForConditionalGeneration", **_BART), token_pairs, PAIRS),
    ZooModel("mbart", "text", _hf("MBartModel", **_BART), token_pairs, PAIRS),
    ZooModel("pegasus", "text", _hf("PegasusModel", **_BART), token_pairs, PAIRS),
)

OTHERS: tuple[ZooModel, ...] = (
    ZooModel(
        "whisper",
        "audio",
        _hf(
            "WhisperModel",
            **{**_BART, "max_position_embeddings": 64},
            num_mel_bins=16,
            max_source_positions=30,
            max_target_positions=64,
            bos_token_id=1,
            eos_token_id=2,
        ),
        mel,
        TARGETS,
    ),
    ZooModel("wav2vec2", "audio", _hf("Wav2Vec2Model", **_WAVES), wave, WAVES),
    ZooModel("hubert", "audio", _hf("HubertModel", **_WAVES), wave, WAVES),
    ZooModel("wavenet", "audio", convnets.WaveNet, wave, WAVES),
    ZooModel("lstm", "sequence", lambda: own.Tagger(nn.LSTM), tokens, TEXT),
    ZooModel("gru", "sequence", lambda: own.Tagger(nn.GRU), tokens, TEXT),
    ZooModel("transformer-encoder", "sequence", lambda: own.Encoder(), tokens, TEXT),
    ZooModel("dlrm", "recommendation", lambda: own.DLRM(), click_inputs, CLICKS),
)

ZOO: tuple[ZooModel, ...] = DIFFUSION + VISION + TEXTS + OTHERS
