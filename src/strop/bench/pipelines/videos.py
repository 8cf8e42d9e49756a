"""Build pipelines that make videos or sound."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strop.bench.pipelines.images import SANA, qwen
from strop.bench.pipelines.parts import (
    EMBEDDED,
    HEADS,
    LENGTH,
    WIDTH,
    Parts,
    causal,
    clip,
    clip_tokenizer,
    clip_vision,
    controlnet,
    ddim,
    diffusers,
    flow,
    image_processor,
    llama_tokenizer,
    t5,
    t5_tokenizer,
    transformers,
    unet,
    vae,
)
from strop.bench.pipelines.stable import picture, sd15, sdxl
from strop.bench.pipelines.tiny import TinyPipeline


def clip_of_pictures(frames: int = 5, size: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.rand(1, frames, 3, size, size, generator=generator)


# A UNet with motion modules


def motion(**changes: Any) -> Any:
    return diffusers(
        "MotionAdapter",
        block_out_channels=(16, 32),
        motion_layers_per_block=1,
        motion_num_attention_heads=2,
        motion_norm_num_groups=4,
        **changes,
    )


def animated() -> Parts:
    return sd15() | {"motion_adapter": motion()}


def animated_xl() -> Parts:
    return sdxl() | {"motion_adapter": motion(use_motion_mid_block=False)}


def animated_controlled() -> Parts:
    return animated() | {"controlnet": controlnet()}


def stable_video() -> Parts:
    net = diffusers(
        "UNetSpatioTemporalConditionModel",
        sample_size=8,
        in_channels=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        num_frames=5,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        num_attention_heads=(2, 4),
        cross_attention_dim=WIDTH,
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=24,
    )
    frames = diffusers(
        "AutoencoderKLTemporalDecoder",
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        latent_channels=4,
        force_upcast=False,
    )
    scheduler = diffusers(
        "EulerDiscreteScheduler",
        prediction_type="v_prediction",
        interpolation_type="linear",
        use_karras_sigmas=True,
        timestep_type="continuous",
        timestep_spacing="leading",
    )
    return {
        "unet": net,
        "vae": frames,
        "scheduler": scheduler,
        "image_encoder": clip_vision(),
        "feature_extractor": image_processor(),
    }


def text_to_video() -> Parts:
    net = diffusers(
        "UNet3DConditionModel",
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        norm_num_groups=4,
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        cross_attention_dim=WIDTH,
        attention_head_dim=4,
    )
    return sd15() | {"unet": net}


# Transformers

CHANNELS = 16  # of Wan's latents


def frames_vae() -> Any:
    return diffusers(
        "AutoencoderKLWan",
        base_dim=8,
        z_dim=CHANNELS,
        dim_mult=[1] * 4,
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )


WAN: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": CHANNELS,
    "out_channels": CHANNELS,
    "text_dim": WIDTH,
    "freq_dim": 32,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}


def wan(kind: str = "WanTransformer3DModel", **changes: Any) -> Parts:
    return {
        "transformer": diffusers(kind, **(WAN | changes)),
        "vae": frames_vae(),
        "scheduler": flow(shift=7.0),
        "text_encoder": t5(),
        "tokenizer": t5_tokenizer(),
    }


def wan_two() -> Parts:
    """Return two transformers, for the noisy half of the loop and for the other one."""
    made = wan()
    return made | {
        "transformer_2": diffusers("WanTransformer3DModel", **WAN),
        "boundary_ratio": 0.5,
    }


def wan_image() -> Parts:
    return wan(in_channels=36, image_dim=WIDTH) | {
        "image_encoder": clip_vision("CLIPVisionModel"),
        "image_processor": image_processor(),
    }


def ltx() -> Parts:
    net = diffusers(
        "LTXVideoTransformer3DModel",
        in_channels=8,
        out_channels=8,
        num_layers=1,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        caption_channels=WIDTH,
    )
    frames = diffusers(
        "AutoencoderKLLTXVideo",
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        patch_size=1,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    )
    return {
        "transformer": net,
        "vae": frames,
        "scheduler": flow(),
        "text_encoder": t5(),
        "tokenizer": t5_tokenizer(),
    }


def cogvideo(**changes: Any) -> Parts:
    config = {
        "num_attention_heads": 4,
        "attention_head_dim": 8,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 8,
        "text_embed_dim": WIDTH,
        "num_layers": 1,
        "sample_width": 8,
        "sample_height": 8,
        "sample_frames": 9,
        "max_text_seq_length": 16,
    } | changes
    frames = diffusers(
        "AutoencoderKLCogVideoX",
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        temporal_compression_ratio=4,
    )
    return {
        "transformer": diffusers("CogVideoXTransformer3DModel", **config),
        "vae": frames,
        "scheduler": diffusers("CogVideoXDDIMScheduler"),
        "text_encoder": t5(),
        "tokenizer": t5_tokenizer(),
    }


def mochi() -> Parts:
    net = diffusers(
        "MochiTransformer3DModel",
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=12,
        text_embed_dim=WIDTH,
        time_embed_dim=4,
        max_sequence_length=16,
    )
    frames = diffusers(
        "AutoencoderKLMochi",
        latent_channels=12,
        out_channels=3,
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
    )
    return {
        "transformer": net,
        "vae": frames,
        "scheduler": flow(),
        "text_encoder": t5(),
        "tokenizer": t5_tokenizer(),
    }


def hunyuan_video() -> Parts:
    net = diffusers(
        "HunyuanVideoTransformer3DModel",
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        rope_axes_dim=(2, 4, 4),
    )
    frames = diffusers(
        "AutoencoderKLHunyuanVideo",
        latent_channels=4,
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        mid_block_add_attention=True,
    )
    return {
        "transformer": net,
        "vae": frames,
        "scheduler": flow(shift=7.0),
        "text_encoder": causal("LlamaModel"),
        "tokenizer": llama_tokenizer(),
        "text_encoder_2": clip(max_position_embeddings=77),
        "tokenizer_2": clip_tokenizer(77),
    }


def latte() -> Parts:
    net = diffusers(
        "LatteTransformer3DModel",
        **HEADS,
        sample_size=8,
        num_layers=1,
        patch_size=2,
        caption_channels=WIDTH,
        in_channels=4,
        out_channels=8,
        cross_attention_dim=WIDTH,
        attention_bias=True,
        video_length=2,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
    )
    return {
        "transformer": net,
        "vae": vae(),
        "scheduler": ddim(),
        "text_encoder": t5(),
        "tokenizer": t5_tokenizer(),
    }


def sana_video() -> Parts:
    config = SANA | {
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "attention_head_dim": 12,
        "cross_attention_head_dim": 12,
        "cross_attention_dim": 24,
    }
    return {
        "transformer": diffusers("SanaVideoTransformer3DModel", **config, rope_max_seq_len=32),
        "vae": frames_vae(),
        "scheduler": flow(),
        "text_encoder": causal("Gemma2Model", sliding_window=64),
        "tokenizer": llama_tokenizer("GemmaTokenizer"),
    }


def kandinsky5_video() -> Parts:
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
        "vae": hunyuan_video()["vae"],
        "scheduler": flow(),
        "text_encoder": qwen()["text_encoder"],
        "tokenizer": qwen()["tokenizer"],
        "text_encoder_2": clip(max_position_embeddings=77),
        "tokenizer_2": clip_tokenizer(77),
    }


# Sound


def stable_audio() -> Parts:
    net = diffusers(
        "StableAudioDiTModel",
        sample_size=4,
        in_channels=3,
        num_layers=2,
        attention_head_dim=4,
        num_attention_heads=2,
        num_key_value_attention_heads=2,
        out_channels=3,
        cross_attention_dim=4,
        time_proj_dim=8,
        global_states_input_dim=8,
        cross_attention_input_dim=4,
    )
    sound = diffusers(
        "AutoencoderOobleck",
        encoder_hidden_size=6,
        downsampling_ratios=[1, 2],
        decoder_channels=3,
        decoder_input_channels=3,
        audio_channels=2,
        channel_multiples=[2, 4],
        sampling_rate=4,
    )
    projection = diffusers(
        "StableAudioProjectionModel",
        text_encoder_dim=WIDTH,
        conditioning_dim=4,
        min_value=0,
        max_value=32,
    )
    scheduler = diffusers(
        "EDMDPMSolverMultistepScheduler",
        solver_order=2,
        prediction_type="v_prediction",
        sigma_data=1.0,
        sigma_schedule="exponential",
    )
    return {
        "transformer": net,
        "vae": sound,
        "projection_model": projection,
        "text_encoder": t5(),
        "tokenizer": t5_tokenizer(),
        "scheduler": scheduler,
    }


def vocoder() -> Any:
    return transformers(
        "SpeechT5HifiGan",
        model_in_dim=8,
        sampling_rate=16000,
        upsample_initial_channel=16,
        upsample_rates=[2, 2],
        upsample_kernel_sizes=[4, 4],
        resblock_kernel_sizes=[3, 7],
        resblock_dilation_sizes=[[1, 3, 5], [1, 3, 5]],
        normalize_before=False,
    )


def audio_ldm() -> Parts:
    """Return a picture of one channel, which is the spectrogram."""
    net = unet(
        cross_attention_dim=(16, 32),
        class_embed_type="simple_projection",
        projection_class_embeddings_input_dim=WIDTH,
        class_embeddings_concat=True,
    )
    words = transformers(
        "ClapTextModelWithProjection",
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=600,
        projection_dim=WIDTH,
        max_position_embeddings=80,
    )
    return {
        "unet": net,
        "vae": vae(in_channels=1, out_channels=1),
        "text_encoder": words,
        "tokenizer": clip_tokenizer(77),
        "scheduler": ddim(),
        "vocoder": vocoder(),
    }


def dance() -> Parts:
    net = diffusers(
        "UNet1DModel",
        block_out_channels=(32, 32, 64),
        extra_in_channels=64,
        sample_size=512,
        sample_rate=16000,
        in_channels=2,
        out_channels=2,
        flip_sin_to_cos=True,
        use_timestep_embedding=False,
        time_embedding_type="fourier",
        mid_block_type="UNetMidBlock1D",
    )
    return {"unet": net, "scheduler": diffusers("IPNDMScheduler")}


SMALL = {"num_frames": 5} | LENGTH
FILM = {"video": clip_of_pictures}
VIDEOS: tuple[TinyPipeline, ...] = (
    TinyPipeline("animatediff", "AnimateDiffPipeline", animated),
    TinyPipeline("animatediff-xl", "AnimateDiffSDXLPipeline", animated_xl),
    TinyPipeline(
        "animatediff-controlnet",
        "AnimateDiffControlNetPipeline",
        animated_controlled,
        {"conditioning_frames": lambda: [picture()] * 5},
    ),
    TinyPipeline(
        "animatediff-video", "AnimateDiffVideoToVideoPipeline", animated, FILM | {"strength": 1.0}
    ),
    TinyPipeline("animatediff-pag", "AnimateDiffPAGPipeline", animated),
    TinyPipeline(
        "pia", "PIAPipeline", lambda: sd15() | {"motion_adapter": motion(conv_in_channels=9)}
    ),
    TinyPipeline(
        "stable-video-diffusion",
        "StableVideoDiffusionPipeline",
        stable_video,
        {"image": lambda: picture(size=32), "height": 32, "width": 32},
    ),
    TinyPipeline("text-to-video", "TextToVideoSDPipeline", text_to_video),
    TinyPipeline("video-to-video", "VideoToVideoSDPipeline", text_to_video, FILM),
    TinyPipeline("wan", "WanPipeline", wan, SMALL),
    TinyPipeline("wan-2.2", "WanPipeline", wan_two, SMALL),
    TinyPipeline(
        "wan-image", "WanImageToVideoPipeline", wan_image, SMALL | EMBEDDED | {"image": picture}
    ),
    TinyPipeline("wan-video", "WanVideoToVideoPipeline", wan, LENGTH | EMBEDDED | FILM),
    TinyPipeline(
        "wan-vace",
        "WanVACEPipeline",
        lambda: wan("WanVACETransformer3DModel", vace_layers=[0], vace_in_channels=96),
        SMALL | EMBEDDED,
    ),
    TinyPipeline(
        "skyreels",
        "SkyReelsV2Pipeline",
        lambda: (
            wan("SkyReelsV2Transformer3DModel")
            | {
                "scheduler": diffusers(
                    "UniPCMultistepScheduler",
                    flow_shift=8.0,
                    use_flow_sigmas=True,
                    prediction_type="flow_prediction",
                )
            }
        ),
        SMALL | EMBEDDED,
    ),
    TinyPipeline("ltx", "LTXPipeline", ltx, {"num_frames": 9, "height": 32, "width": 32} | LENGTH),
    TinyPipeline(
        "ltx-image",
        "LTXImageToVideoPipeline",
        ltx,
        {"num_frames": 9, "height": 32, "width": 32, "image": lambda: picture(size=32)} | LENGTH,
    ),
    TinyPipeline("cogvideox", "CogVideoXPipeline", cogvideo, {"num_frames": 8} | LENGTH),
    TinyPipeline(
        "cogvideox-rotary",
        "CogVideoXPipeline",
        lambda: cogvideo(use_rotary_positional_embeddings=True, attention_head_dim=16),
        {"num_frames": 8} | LENGTH,
    ),
    TinyPipeline(
        "cogvideox-image",
        "CogVideoXImageToVideoPipeline",
        lambda: cogvideo(in_channels=8, sample_width=2, sample_height=2),
        {"num_frames": 8} | LENGTH,
    ),
    TinyPipeline(
        "cogvideox-video",
        "CogVideoXVideoToVideoPipeline",
        cogvideo,
        {"video": lambda: list(clip_of_pictures(8)[0]), "strength": 1.0} | LENGTH,
    ),
    TinyPipeline("mochi", "MochiPipeline", mochi, {"num_frames": 7} | LENGTH),
    TinyPipeline(
        "hunyuan-video",
        "HunyuanVideoPipeline",
        hunyuan_video,
        SMALL | {"prompt_template": {"template": "{}", "crop_start": 0}},
    ),
    TinyPipeline("latte", "LattePipeline", latte, {"video_length": 1, "clean_caption": False}),
    TinyPipeline(
        "sana-video",
        "SanaVideoPipeline",
        sana_video,
        {
            "frames": 5,
            "height": 32,
            "width": 32,
            "use_resolution_binning": False,
            "complex_human_instruction": None,
        }
        | LENGTH,
    ),
    TinyPipeline("kandinsky5-video", "Kandinsky5T2VPipeline", kandinsky5_video, SMALL),
    TinyPipeline("stable-audio", "StableAudioPipeline", stable_audio, {"audio_end_in_s": 1.0}),
    TinyPipeline("audio-ldm", "AudioLDMPipeline", audio_ldm, {"audio_length_in_s": 0.016}),
    TinyPipeline("dance-diffusion", "DanceDiffusionPipeline", dance, {"audio_length_in_s": 0.032}),
)
