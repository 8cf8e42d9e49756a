"""Pipelines that make pictures with transformers other than Flux."""

from __future__ import annotations

from typing import Any

import torch

from strop.bench.pipelines.parts import (
    EMBEDDED,
    HEADS,
    LENGTH,
    WIDTH,
    WORDS,
    Parts,
    causal,
    clip,
    clip_tokenizer,
    ddim,
    diffusers,
    flow,
    flow_vae,
    llama_tokenizer,
    qwen_tokenizer,
    t5,
    t5_tokenizer,
    transformers,
    vae,
)
from strop.bench.pipelines.stable import picture
from strop.bench.pipelines.tiny import TinyPipeline

# Stable Diffusion 3

SD3: dict[str, Any] = HEADS | {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "joint_attention_dim": WIDTH,
    "caption_projection_dim": WIDTH,
    "pos_embed_max_size": 32,
    "pooled_projection_dim": 2 * WIDTH,
}


def sd3(channels: int = 4) -> Parts:
    texts = {}
    for n in ("", "_2"):
        texts[f"text_encoder{n}"] = clip("CLIPTextModelWithProjection", hidden_size=16)
        texts[f"tokenizer{n}"] = clip_tokenizer()
    return texts | {
        "vae": flow_vae(latent_channels=channels),
        "transformer": diffusers(
            "SD3Transformer2DModel", **(SD3 | {"in_channels": channels, "out_channels": channels})
        ),
        "scheduler": flow(),
        "text_encoder_3": t5(),
        "tokenizer_3": t5_tokenizer(),
    }


def sd3_controlled() -> Parts:
    return sd3() | {"controlnet": diffusers("SD3ControlNetModel", **SD3)}


# Cross-attention to the states of T5, of a language model, or of two encoders


def pixart(**changes: Any) -> Parts:
    net = diffusers(
        "PixArtTransformer2DModel",
        **HEADS,
        sample_size=8,
        num_layers=2,
        out_channels=8,
        caption_channels=WIDTH,
        cross_attention_dim=WIDTH,
        use_additional_conditions=False,
    )
    return {
        "transformer": net,
        "vae": vae(),
        "scheduler": ddim(),
        "text_encoder": t5(),
        "tokenizer": t5_tokenizer(),
    }


def deep_compression() -> Any:
    return diffusers(
        "AutoencoderDC",
        latent_channels=4,
        attention_head_dim=8,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 16),
        decoder_block_out_channels=(8, 16),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        scaling_factor=0.41,
        decoder_norm_types="rms_norm",
    )


SANA: dict[str, Any] = HEADS | {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 16,
    "cross_attention_dim": WIDTH,
    "caption_channels": WIDTH,
    "sample_size": 8,
}


def sana(**changes: Any) -> Parts:
    return {
        "transformer": diffusers("SanaTransformer2DModel", **SANA, **changes),
        "vae": deep_compression(),
        "scheduler": flow(shift=3.0),
        "text_encoder": causal("Gemma2Model", sliding_window=64),
        "tokenizer": llama_tokenizer("GemmaTokenizer"),
    }


def sana_sprint() -> Parts:
    made = sana(guidance_embeds=True, guidance_embeds_scale=0.1, qk_norm="rms_norm_across_heads")
    return made | {"scheduler": diffusers("SCMScheduler")}


def sana_controlled() -> Parts:
    return sana() | {"controlnet": diffusers("SanaControlNetModel", **SANA)}


def aura() -> Parts:
    net = diffusers(
        "AuraFlowTransformer2DModel",
        **HEADS,
        sample_size=8,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        joint_attention_dim=WIDTH,
        caption_projection_dim=WIDTH,
        pos_embed_max_size=64,
    )
    return {
        "transformer": net,
        "vae": vae(),
        "scheduler": flow(),
        "text_encoder": transformers(
            "UMT5EncoderModel",
            vocab_size=300,
            d_model=WIDTH,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
        ),
        "tokenizer": t5_tokenizer(),
    }


def lumina2() -> Parts:
    net = diffusers(
        "Lumina2Transformer2DModel",
        sample_size=8,
        in_channels=4,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=(4, 4, 8),
        axes_lens=(300, 64, 64),
        cap_feat_dim=WIDTH,
    )
    return {
        "transformer": net,
        "vae": flow_vae(),
        "scheduler": flow(),
        "text_encoder": causal("Gemma2Model", sliding_window=64),
        "tokenizer": llama_tokenizer("GemmaTokenizer"),
    }


def lumina() -> Parts:
    net = diffusers(
        "LuminaNextDiT2DModel",
        sample_size=8,
        in_channels=4,
        hidden_size=32,
        num_layers=2,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        cross_attention_dim=WIDTH,
        learn_sigma=True,
    )
    return {
        "transformer": net,
        "vae": vae(),
        "scheduler": flow(),
        "text_encoder": causal("GemmaModel"),
        "tokenizer": llama_tokenizer("GemmaTokenizer"),
    }


HUNYUAN: dict[str, Any] = HEADS | {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "hidden_size": 32,
    "mlp_ratio": 2.0,
    "cross_attention_dim": WIDTH,
    "cross_attention_dim_t5": WIDTH,
    "pooled_projection_dim": 16,
    "text_len": 77,
    "text_len_t5": 256,
    "use_style_cond_and_image_meta_size": False,
}


def hunyuan() -> Parts:
    net = diffusers("HunyuanDiT2DModel", **HUNYUAN, num_layers=2)
    words = transformers(
        "BertModel",
        hidden_size=WIDTH,
        num_hidden_layers=2,
        vocab_size=600,
        num_attention_heads=2,
        intermediate_size=48,
    )
    return {
        "transformer": net,
        "vae": vae(),
        "scheduler": ddim(),
        "text_encoder": words,
        "tokenizer": clip_tokenizer(77),
        "text_encoder_2": t5(),
        "tokenizer_2": t5_tokenizer(),
    }


def hunyuan_controlled() -> Parts:
    net = diffusers("HunyuanDiT2DControlNetModel", **HUNYUAN, transformer_num_layers=2)
    return hunyuan() | {"controlnet": net}


QWEN: dict[str, Any] = HEADS | {
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "joint_attention_dim": WIDTH,
    "axes_dims_rope": (4, 4, 8),
}


def qwen() -> Parts:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "vocab_size": 300,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_scaling": {"mrope_section": [2, 2, 4], "rope_type": "default", "type": "default"},
        "rope_theta": 1e6,
    }
    sight = {
        "depth": 2,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": WIDTH,
    }
    encoder = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=sight)
    ).eval()
    frames = diffusers(
        "AutoencoderKLQwenImage",
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    return {
        "transformer": diffusers("QwenImageTransformer2DModel", **QWEN),
        "vae": frames,
        "scheduler": flow(),
        "text_encoder": encoder,
        "tokenizer": qwen_tokenizer(),
    }


def qwen_controlled() -> Parts:
    return qwen() | {"controlnet": diffusers("QwenImageControlNetModel", **QWEN)}


def z_image() -> Parts:
    net = diffusers(
        "ZImageTransformer2DModel",
        in_channels=4,
        dim=32,
        n_layers=2,
        n_heads=2,
        n_refiner_layers=1,
        n_kv_heads=2,
        cap_feat_dim=WIDTH,
        axes_dims=[4, 4, 8],
        axes_lens=[300, 64, 64],
    )
    return {
        "transformer": net,
        "vae": flow_vae(),
        "scheduler": flow(),
        "text_encoder": causal("Qwen3Model"),
        "tokenizer": qwen_tokenizer(),
    }


def cogview3() -> Parts:
    net = diffusers(
        "CogView3PlusTransformer2DModel",
        **HEADS,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        text_embed_dim=WIDTH,
        time_embed_dim=8,
        condition_dim=2,
        pos_embed_max_size=8,
        sample_size=8,
    )
    scheduler = diffusers("CogVideoXDDIMScheduler")
    return {
        "transformer": net,
        "vae": vae(),
        "scheduler": scheduler,
        "text_encoder": t5(),
        "tokenizer": t5_tokenizer(),
    }


def cogview4(channels: int = 4) -> Parts:
    net = diffusers(
        "CogView4Transformer2DModel",
        **HEADS,
        in_channels=channels,
        out_channels=4,
        num_layers=2,
        text_embed_dim=WIDTH,
        time_embed_dim=8,
        condition_dim=4,
        rope_axes_dim=(64, 64),
    )
    return {
        "transformer": net,
        "vae": vae(),
        "scheduler": flow(
            base_shift=0.25,
            max_shift=0.75,
            base_image_seq_len=256,
            use_dynamic_shifting=True,
            time_shift_type="linear",
        ),
        "text_encoder": causal("LlamaModel"),
        "tokenizer": llama_tokenizer(),
    }


def prx() -> Parts:
    net = diffusers(
        "PRXTransformer2DModel",
        in_channels=4,
        context_in_dim=WIDTH,
        hidden_size=32,
        mlp_ratio=2.0,
        num_heads=2,
        depth=2,
        axes_dim=[8, 8],
    )
    return {
        "transformer": net,
        "vae": vae(shift_factor=0.1),
        "scheduler": flow(),
        "text_encoder": t5(),
        "tokenizer": t5_tokenizer(),
        "default_sample_size": 16,
    }


def dit() -> Parts:
    net = diffusers(
        "DiTTransformer2DModel",
        **HEADS,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=1000,
        norm_num_groups=4,
    )
    return {"transformer": net, "vae": vae(), "scheduler": ddim()}


def omnigen() -> Parts:
    net = diffusers(
        "OmniGenTransformer2DModel",
        in_channels=4,
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=48,
        num_layers=2,
        vocab_size=300,
        pad_token_id=0,
        time_step_dim=32,
        pos_embed_max_size=32,
        rope_scaling={"long_factor": list(range(1, 9)), "short_factor": list(range(1, 9))},
    )
    return {
        "transformer": net,
        "vae": vae(),
        "scheduler": flow(invert_sigmas=True),
        "tokenizer": llama_tokenizer(),
    }


def kandinsky5() -> Parts:
    net = diffusers(
        "Kandinsky5Transformer3DModel",
        in_text_dim=WIDTH,
        in_text_dim2=WIDTH,
        time_dim=32,
        model_dim=32,
        ff_dim=48,
        num_text_blocks=1,
        num_visual_blocks=1,
        axes_dims=(4, 4, 8),
    )
    return {
        "transformer": net,
        "vae": vae(),
        "scheduler": flow(),
        "text_encoder": qwen()["text_encoder"],
        "tokenizer": qwen_tokenizer(),
        "text_encoder_2": clip(max_position_embeddings=77),
        "tokenizer_2": clip_tokenizer(77),
    }


BARE = {"use_resolution_binning": False, "clean_caption": False}
MASKED = EMBEDDED | {
    "prompt_attention_mask": lambda: torch.ones(1, WORDS, dtype=torch.bool),
    "negative_prompt_attention_mask": lambda: torch.ones(1, WORDS, dtype=torch.bool),
}
SQUARE = {"height": 32, "width": 32, "image": lambda: picture(size=32)}
SHORT = BARE | LENGTH | SQUARE | {"complex_human_instruction": None}

IMAGES: tuple[TinyPipeline, ...] = (
    TinyPipeline("sd3", "StableDiffusion3Pipeline", sd3, LENGTH),
    TinyPipeline("sd3-img2img", "StableDiffusion3Img2ImgPipeline", sd3, LENGTH),
    TinyPipeline("sd3-inpaint", "StableDiffusion3InpaintPipeline", lambda: sd3(16), LENGTH),
    TinyPipeline("sd3-controlnet", "StableDiffusion3ControlNetPipeline", sd3_controlled, LENGTH),
    TinyPipeline(
        "sd3-pag",
        "StableDiffusion3PAGPipeline",
        lambda: sd3() | {"pag_applied_layers": ["blocks.0"]},
        LENGTH,
    ),
    TinyPipeline("pixart-alpha", "PixArtAlphaPipeline", pixart, BARE | LENGTH),
    TinyPipeline("pixart-sigma", "PixArtSigmaPipeline", pixart, BARE | LENGTH),
    TinyPipeline(
        "pixart-pag",
        "PixArtSigmaPAGPipeline",
        lambda: pixart() | {"pag_applied_layers": ["blocks.0"]},
        BARE | LENGTH,
    ),
    TinyPipeline("sana", "SanaPipeline", sana, SHORT),
    TinyPipeline(
        "sana-pag", "SanaPAGPipeline", lambda: sana() | {"pag_applied_layers": ["blocks.0"]}, SHORT
    ),
    TinyPipeline(
        "sana-sprint", "SanaSprintPipeline", sana_sprint, SHORT | {"num_inference_steps": 2}
    ),
    TinyPipeline(
        "sana-sprint-img2img",
        "SanaSprintImg2ImgPipeline",
        sana_sprint,
        SHORT | {"num_inference_steps": 2},
    ),
    TinyPipeline("sana-controlnet", "SanaControlNetPipeline", sana_controlled, SHORT),
    TinyPipeline("aura-flow", "AuraFlowPipeline", aura, LENGTH),
    TinyPipeline("lumina", "LuminaPipeline", lumina, SQUARE | {"clean_caption": False} | LENGTH),
    TinyPipeline("lumina2", "Lumina2Pipeline", lumina2, LENGTH | SQUARE),
    TinyPipeline("hunyuan-dit", "HunyuanDiTPipeline", hunyuan, {"use_resolution_binning": False}),
    TinyPipeline(
        "hunyuan-dit-controlnet",
        "HunyuanDiTControlNetPipeline",
        hunyuan_controlled,
        {"use_resolution_binning": False},
    ),
    TinyPipeline(
        "hunyuan-dit-pag",
        "HunyuanDiTPAGPipeline",
        lambda: hunyuan() | {"pag_applied_layers": ["blocks.0"]},
        {"use_resolution_binning": False},
    ),
    TinyPipeline("qwen-image", "QwenImagePipeline", qwen, LENGTH),
    TinyPipeline("qwen-image-img2img", "QwenImageImg2ImgPipeline", qwen, LENGTH),
    TinyPipeline("qwen-image-inpaint", "QwenImageInpaintPipeline", qwen, LENGTH),
    TinyPipeline("qwen-image-controlnet", "QwenImageControlNetPipeline", qwen_controlled, LENGTH),
    TinyPipeline("z-image", "ZImagePipeline", z_image, {"max_sequence_length": 64}),
    TinyPipeline("z-image-img2img", "ZImageImg2ImgPipeline", z_image, {"max_sequence_length": 64}),
    TinyPipeline("cogview3", "CogView3PlusPipeline", cogview3, LENGTH),
    TinyPipeline("cogview4", "CogView4Pipeline", cogview4, LENGTH),
    TinyPipeline("cogview4-control", "CogView4ControlPipeline", lambda: cogview4(8), LENGTH),
    TinyPipeline("prx", "PRXPipeline", prx, MASKED | {"use_resolution_binning": False}),
    TinyPipeline("dit", "DiTPipeline", dit, {"class_labels": [3]}),
    TinyPipeline("omnigen", "OmniGenPipeline", omnigen, needs=("torchvision",)),
    TinyPipeline("kandinsky5-image", "Kandinsky5T2IPipeline", kandinsky5),
)
