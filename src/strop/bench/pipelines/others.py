"""Build pipelines of other kinds: priors, cascades, pictures without a prompt, and deprecated
ones."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from strop.bench.pipelines.parts import (
    UNET,
    WIDTH,
    WORDS,
    Parts,
    clip,
    clip_tokenizer,
    clip_vision,
    ddim,
    diffusers,
    image_processor,
    t5,
    t5_tokenizer,
    unet,
    vae,
)
from strop.bench.pipelines.stable import crossed, picture, sd15
from strop.bench.pipelines.tiny import TinyPipeline

# Without a prompt


def plain_unet(**changes: Any) -> Any:
    config: dict[str, Any] = {
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "sample_size": 8,
        "attention_head_dim": 8,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    return diffusers("UNet2DModel", **(config | changes))


def unconditional(scheduler: str, **config: Any) -> Any:
    return lambda: {"unet": plain_unet(), "scheduler": diffusers(scheduler, **config)}


def quantized(**changes: Any) -> Any:
    config: dict[str, Any] = {
        "block_out_channels": (8, 16),
        "norm_num_groups": 4,
        "latent_channels": 4,
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "num_vq_embeddings": 16,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    }
    return diffusers("VQModel", **(config | changes))


def latent_unconditional() -> Parts:
    return {
        "vqvae": quantized(),
        "unet": plain_unet(in_channels=4, out_channels=4),
        "scheduler": ddim(),
    }


def super_resolution() -> Parts:
    return {
        "vqvae": quantized(latent_channels=3),
        "unet": plain_unet(in_channels=6, out_channels=3),
        "scheduler": ddim(),
    }


def latent_bert() -> Parts:
    module = importlib.import_module(
        "diffusers.pipelines.latent_diffusion.pipeline_latent_diffusion"
    )
    config = module.LDMBertConfig(
        vocab_size=600,
        max_position_embeddings=77,
        encoder_layers=1,
        encoder_ffn_dim=48,
        encoder_attention_heads=2,
        head_dim=16,
        d_model=WIDTH,
    )
    return {
        "vqvae": vae(),
        "bert": module.LDMBertModel(config).eval(),
        "tokenizer": clip_tokenizer(77),
        "unet": unet(),
        "scheduler": ddim(),
    }


# Kandinsky


def decoder_unet(**changes: Any) -> Any:
    """Return a UNet that is told the embedding of a picture."""
    config = UNET | {
        "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
        "encoder_hid_dim": WIDTH,
        "encoder_hid_dim_type": "image_proj",
        "addition_embed_type": "image",
        "out_channels": 8,
        "resnet_time_scale_shift": "scale_shift",
        "attention_head_dim": 4,
    }
    return diffusers("UNet2DConditionModel", **(config | changes))


def spatial_vq() -> Any:
    return quantized(
        block_out_channels=(32, 64),
        norm_num_groups=32,
        vq_embed_dim=4,
        up_block_types=("UpDecoderBlock2D", "AttnUpDecoderBlock2D"),
        norm_type="spatial",
        down_block_types=("DownEncoderBlock2D", "AttnDownEncoderBlock2D"),
    )


def kandinsky22(**changes: Any) -> Parts:
    return {
        "unet": decoder_unet(**changes),
        "movq": spatial_vq(),
        "scheduler": diffusers("DDIMScheduler", clip_sample=False, steps_offset=1),
    }


def kandinsky() -> Parts:
    module = importlib.import_module("diffusers.pipelines.kandinsky.text_encoder")
    config = module.MCLIPConfig(
        transformerDimSize=WIDTH,
        imageDimSize=WIDTH,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_attention_heads=2,
        num_hidden_layers=2,
        vocab_size=600,
        max_position_embeddings=100,
    )
    words = module.MultilingualCLIP(config).eval()
    made = kandinsky22(
        encoder_hid_dim_type="text_image_proj",
        addition_embed_type="text_image",
        cross_attention_dim=WIDTH,
    )
    return made | {"text_encoder": words, "tokenizer": clip_tokenizer(77)}


def prior() -> Parts:
    net = diffusers(
        "PriorTransformer",
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        embedding_dim=WIDTH,
        num_embeddings=WORDS,
    )
    scheduler = diffusers(
        "UnCLIPScheduler",
        variance_type="fixed_small_log",
        clip_sample=True,
        prediction_type="sample",
    )
    return {
        "prior": net,
        "scheduler": scheduler,
        "image_encoder": clip_vision(),
        "image_processor": image_processor(),
        "tokenizer": clip_tokenizer(),
        "text_encoder": clip("CLIPTextModelWithProjection"),
    }


def kandinsky3() -> Parts:
    net = diffusers(
        "Kandinsky3UNet",
        in_channels=4,
        time_embedding_dim=4,
        groups=2,
        attention_head_dim=4,
        layers_per_block=3,
        block_out_channels=(32, 32, 64, 64),
        cross_attention_dim=WIDTH,
        encoder_hid_dim=WIDTH,
    )
    return {
        "unet": net,
        "movq": spatial_vq(),
        "scheduler": diffusers("DDPMScheduler"),
        "text_encoder": t5(),
        "tokenizer": t5_tokenizer(),
    }


def two_embeddings() -> dict[str, Any]:
    one = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(2))
    return {"image_embeds": lambda: one, "negative_image_embeds": lambda: -one}


# Cascades


def cascade_net(**changes: Any) -> Any:
    config: dict[str, Any] = {
        "in_channels": 4,
        "out_channels": 4,
        "conditioning_dim": 16,
        "num_attention_heads": (0, 2),
        "block_out_channels": (16, 32),
        "down_num_layers_per_block": (1, 1),
        "up_num_layers_per_block": (1, 1),
        "down_blocks_repeat_mappers": (1, 1),
        "up_blocks_repeat_mappers": (1, 1),
        "clip_text_pooled_in_channels": WIDTH,
        "block_types_per_layer": (
            ("SDCascadeResBlock", "SDCascadeTimestepBlock"),
            ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
        ),
    }
    return diffusers("StableCascadeUNet", **(config | changes))


def cascade_words() -> Parts:
    return {
        "text_encoder": clip("CLIPTextModelWithProjection"),
        "tokenizer": clip_tokenizer(),
        "scheduler": diffusers("DDPMWuerstchenScheduler"),
    }


def cascade_prior() -> Parts:
    net = cascade_net(
        clip_image_in_channels=WIDTH, clip_text_in_channels=WIDTH, switch_level=(False,)
    )
    return cascade_words() | {"prior": net}


def paella() -> Any:
    kind = "pipelines.deprecated.wuerstchen.modeling_paella_vq_model.PaellaVQModel"
    return diffusers(kind, bottleneck_blocks=1, num_vq_embeddings=8, embed_dim=16)


def cascade_decoder() -> Parts:
    net = cascade_net(effnet_in_channels=4)
    return cascade_words() | {"decoder": net, "vqgan": paella(), "latent_dim_scale": 4.0}


def wuerstchen_prior() -> Parts:
    kind = "pipelines.deprecated.wuerstchen.modeling_wuerstchen_prior.WuerstchenPrior"
    net = diffusers(kind, c_in=2, c=8, depth=2, c_cond=WIDTH, c_r=8, nhead=2)
    return cascade_words() | {"prior": net, "text_encoder": clip()}


def wuerstchen_decoder() -> Parts:
    kind = "pipelines.deprecated.wuerstchen.modeling_wuerstchen_diffnext.WuerstchenDiffNeXt"
    net = diffusers(
        kind,
        c_cond=WIDTH,
        c_hidden=[320],
        blocks=[1],
        nhead=[-1],
        level_config=["CT"],
        clip_embd=WIDTH,
        inject_effnet=[False],
    )
    return cascade_words() | {
        "decoder": net,
        "vqgan": paella(),
        "text_encoder": clip(),
        "latent_dim_scale": 4.0,
    }


# Others


def deep_floyd(in_channels: int = 3, **changes: Any) -> Parts:
    net = unet(
        in_channels=in_channels,
        out_channels=6,
        resnet_time_scale_shift="scale_shift",
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        act_fn="gelu",
        encoder_hid_dim=WIDTH,
        attention_head_dim=4,
        addition_embed_type="text",
        addition_embed_type_num_heads=2,
        cross_attention_norm="group_norm",
        **changes,
    )
    scheduler = diffusers(
        "DDPMScheduler", thresholding=True, variance_type="learned_range", sample_max_value=1.0
    )
    return {
        "unet": net,
        "scheduler": scheduler,
        "text_encoder": t5(),
        "tokenizer": t5_tokenizer(77),
    }


def alt_diffusion() -> Parts:
    """Return a text encoder of many languages."""
    module = importlib.import_module(
        "diffusers.pipelines.deprecated.alt_diffusion.modeling_roberta_series"
    )
    config = module.RobertaSeriesConfig(
        hidden_size=24,
        project_dim=WIDTH,
        intermediate_size=48,
        num_attention_heads=2,
        num_hidden_layers=2,
        vocab_size=600,
        max_position_embeddings=100,
    )
    words = module.RobertaSeriesModelWithTransformation(config).eval()
    return sd15() | {"text_encoder": words, "tokenizer": clip_tokenizer(77)}


def painted_by_example() -> Parts:
    module = importlib.import_module(
        "diffusers.pipelines.deprecated.paint_by_example.image_encoder"
    )
    from transformers import CLIPVisionConfig

    config = CLIPVisionConfig(
        hidden_size=WIDTH,
        projection_dim=WIDTH,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
    )
    encoder = module.PaintByExampleImageEncoder(config, proj_size=WIDTH).eval()
    return {
        "unet": unet(in_channels=9),
        "vae": vae(),
        "scheduler": ddim(),
        "image_encoder": encoder,
        "feature_extractor": image_processor(),
    }


def pndm() -> Any:
    return diffusers("PNDMScheduler", skip_prk_steps=True)


SMALL = {"height": 16, "width": 16}
OTHERS: tuple[TinyPipeline, ...] = (
    TinyPipeline("ddpm", "DDPMPipeline", unconditional("DDPMScheduler")),
    TinyPipeline("ddim", "DDIMPipeline", unconditional("DDIMScheduler")),
    TinyPipeline(
        "pndm",
        "PNDMPipeline",
        unconditional("PNDMScheduler"),
        {"output_type": "np", "num_inference_steps": 6},
    ),
    TinyPipeline(
        "score-sde-ve",
        "ScoreSdeVePipeline",
        unconditional("ScoreSdeVeScheduler"),
        {"output_type": "np"},
    ),
    TinyPipeline(
        "karras-ve", "KarrasVePipeline", unconditional("KarrasVeScheduler"), {"output_type": "np"}
    ),
    TinyPipeline(
        "repaint",
        "RePaintPipeline",
        unconditional("RePaintScheduler"),
        {"output_type": "np", "jump_length": 1, "jump_n_sample": 1},
    ),
    TinyPipeline(
        "consistency",
        "ConsistencyModelPipeline",
        unconditional("CMStochasticIterativeScheduler"),
        {"num_inference_steps": 2},
    ),
    TinyPipeline("ldm", "LDMPipeline", latent_unconditional, {"output_type": "np"}),
    TinyPipeline("ldm-text", "LDMTextToImagePipeline", latent_bert, {"output_type": "np"}),
    TinyPipeline(
        "ldm-super-resolution",
        "LDMSuperResolutionPipeline",
        super_resolution,
        {"output_type": "np", "image": lambda: picture(size=32)},
    ),
    TinyPipeline("kandinsky", "KandinskyPipeline", kandinsky, SMALL | two_embeddings()),
    TinyPipeline("kandinsky-prior", "KandinskyPriorPipeline", prior),
    TinyPipeline("kandinsky2.2", "KandinskyV22Pipeline", kandinsky22, SMALL | two_embeddings()),
    TinyPipeline(
        "kandinsky2.2-img2img",
        "KandinskyV22Img2ImgPipeline",
        kandinsky22,
        SMALL | two_embeddings() | {"strength": 0.8},
    ),
    TinyPipeline(
        "kandinsky2.2-inpaint",
        "KandinskyV22InpaintPipeline",
        lambda: kandinsky22(in_channels=9),
        SMALL | two_embeddings(),
    ),
    TinyPipeline("kandinsky2.2-prior", "KandinskyV22PriorPipeline", prior),
    TinyPipeline(
        "kandinsky2.2-prior-emb2emb",
        "KandinskyV22PriorEmb2EmbPipeline",
        prior,
        {"image": lambda: picture(size=32), "strength": 0.8},
    ),
    TinyPipeline("kandinsky3", "Kandinsky3Pipeline", kandinsky3),
    TinyPipeline("kandinsky3-img2img", "Kandinsky3Img2ImgPipeline", kandinsky3, {"strength": 0.8}),
    TinyPipeline(
        "stable-cascade-prior",
        "StableCascadePriorPipeline",
        cascade_prior,
        {"height": 128, "width": 128},
    ),
    TinyPipeline(
        "stable-cascade-decoder",
        "StableCascadeDecoderPipeline",
        cascade_decoder,
        {"image_embeddings": lambda: picture(4, 4)},
    ),
    TinyPipeline(
        "wuerstchen-prior",
        "WuerstchenPriorPipeline",
        wuerstchen_prior,
        {"height": 128, "width": 128},
    ),
    TinyPipeline(
        "wuerstchen-decoder",
        "WuerstchenDecoderPipeline",
        wuerstchen_decoder,
        {"image_embeddings": lambda: picture(4, 4)},
    ),
    TinyPipeline("deepfloyd", "IFPipeline", deep_floyd, {"clean_caption": False}),
    TinyPipeline("deepfloyd-img2img", "IFImg2ImgPipeline", deep_floyd, {"clean_caption": False}),
    TinyPipeline(
        "deepfloyd-super-resolution",
        "IFSuperResolutionPipeline",
        lambda: (
            deep_floyd(in_channels=6, class_embed_type="timestep")
            | {"image_noising_scheduler": diffusers("DDPMScheduler")}
        ),
        {"clean_caption": False},
    ),
    TinyPipeline("alt-diffusion", "AltDiffusionPipeline", alt_diffusion),
    TinyPipeline("alt-diffusion-img2img", "AltDiffusionImg2ImgPipeline", alt_diffusion),
    TinyPipeline(
        "paint-by-example",
        "PaintByExamplePipeline",
        painted_by_example,
        {"example_image": lambda: picture(size=32)},
    ),
    TinyPipeline(
        "semantic",
        "SemanticStableDiffusionPipeline",
        sd15,
        {"editing_prompt": "a dog", "edit_warmup_steps": 1},
    ),
    TinyPipeline(
        "controlnet-xs",
        "StableDiffusionControlNetXSPipeline",
        lambda: crossed(sd15(layers_per_block=2)),
    ),
    TinyPipeline(
        "ldm3d",
        "StableDiffusionLDM3DPipeline",
        lambda: sd15() | {"vae": vae(in_channels=6, out_channels=6)},
        {"output_type": "np"},
    ),
    TinyPipeline("panorama", "StableDiffusionPanoramaPipeline", sd15, {"height": 16, "width": 16}),
    TinyPipeline("safe", "StableDiffusionPipelineSafe", sd15),
    TinyPipeline("sag", "StableDiffusionSAGPipeline", sd15),
    TinyPipeline(
        "text-to-video-zero",
        "TextToVideoZeroPipeline",
        sd15,
        {"t0": 1, "t1": 2, "video_length": 2, "output_type": "np"},
    ),
    TinyPipeline("inpaint-legacy", "StableDiffusionInpaintPipelineLegacy", sd15),
    TinyPipeline(
        "model-editing",
        "StableDiffusionModelEditingPipeline",
        lambda: sd15() | {"scheduler": pndm()},
    ),
    TinyPipeline(
        "paradigms",
        "StableDiffusionParadigmsPipeline",
        lambda: sd15() | {"scheduler": diffusers("DDIMParallelScheduler", clip_sample=False)},
    ),
)
