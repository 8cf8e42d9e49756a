"""Build pipelines around the UNets of Stable Diffusion 1.5, 2 and XL."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from strop.bench.pipelines.parts import (
    REFINER,
    WIDTH,
    XL,
    Parts,
    clip,
    clip_tokenizer,
    clip_vision,
    controlnet,
    ddim,
    diffusers,
    image_processor,
    transformers,
    unet,
    vae,
)
from strop.bench.pipelines.tiny import LEFT_OUT, STEPS, TinyPipeline


def sd15(**changes: Any) -> Parts:
    """Make Stable Diffusion 1.5. ``changes`` are those of the UNet's configuration."""
    return {
        "unet": unet(**changes),
        "vae": vae(),
        "text_encoder": clip(),
        "tokenizer": clip_tokenizer(),
        "scheduler": ddim(),
    }


def sdxl(**changes: Any) -> Parts:
    return {
        "unet": unet(**(XL | changes)),
        "vae": vae(),
        "text_encoder": clip(),
        "tokenizer": clip_tokenizer(),
        "tokenizer_2": clip_tokenizer(),
        "scheduler": ddim(),
        "text_encoder_2": clip("CLIPTextModelWithProjection"),
    }


def refiner() -> Parts:
    return {
        "unet": unet(**REFINER),
        "vae": vae(),
        "scheduler": ddim(),
        "text_encoder": None,
        "tokenizer": None,
        "requires_aesthetics_score": True,
        "tokenizer_2": clip_tokenizer(),
        "text_encoder_2": clip("CLIPTextModelWithProjection"),
    }


def controlled(count: int = 1) -> Parts:
    """Add ``count`` ControlNets. More than one is a MultiControlNet."""
    nets = [controlnet() for _ in range(count)]
    return sd15() | {"controlnet": nets if count > 1 else nets[0]}


XL_CONTROL: dict[str, Any] = {name: value for name, value in XL.items() if name != "up_block_types"}


def controlled_xl() -> Parts:
    return sdxl() | {"controlnet": controlnet(**XL_CONTROL)}


def union() -> Parts:
    net = controlnet(
        "ControlNetUnionModel",
        **XL_CONTROL,
        num_trans_channel=16,
        num_trans_head=2,
        num_proj_channel=16,
    )
    return sdxl() | {"controlnet": net}


def crossed(parts: Parts) -> Parts:
    """Add a ControlNet-XS: an adapter that runs within the UNet."""
    kind: Any = importlib.import_module("diffusers").ControlNetXSAdapter
    net = kind.from_unet(
        parts["unet"],
        size_ratio=0.5,
        num_attention_heads=2,
        conditioning_embedding_out_channels=(8, 16),
    )
    return parts | {"controlnet": net.eval()}


def adapted(parts: Parts, count: int = 1) -> Parts:
    """Add T2I-Adapters."""
    kind, factor = ("full_adapter_xl", 4) if "tokenizer_2" in parts else ("full_adapter", 2)
    made = [
        diffusers(
            "T2IAdapter",
            channels=[16, 32],
            num_res_blocks=1,
            downscale_factor=factor,
            adapter_type=kind,
        )
        for _ in range(count)
    ]
    return parts | {"adapter": made if count > 1 else made[0]}


def with_pictures_of_prompts() -> Parts:
    """Add the image encoder and the processor of an IP-Adapter."""
    return sd15() | {"image_encoder": clip_vision(), "feature_extractor": image_processor()}


def latent_upscaler() -> Parts:
    made = unet(
        in_channels=8,
        out_channels=5,
        time_cond_proj_dim=128 + WIDTH,
        time_embedding_type="fourier",
        act_fn="gelu",
        conv_in_kernel=1,
        conv_out_kernel=1,
        resnet_time_scale_shift="scale_shift",
        only_cross_attention=False,
        down_block_types=("KDownBlock2D", *("KCrossAttnDownBlock2D",) * 3),
        attention_head_dim=8,
        mid_block_type=None,
        up_block_types=(*("KCrossAttnUpBlock2D",) * 3, "KUpBlock2D"),
        timestep_post_act="gelu",
        block_out_channels=(32, 32, 64, 64),
    )
    scheduler = diffusers("EulerDiscreteScheduler")
    return sd15() | {"unet": made, "scheduler": scheduler}


def upscaler() -> Parts:
    parts = sd15(in_channels=7, num_class_embeds=1000)
    return parts | {"low_res_scheduler": diffusers("DDPMScheduler")}


def depth() -> Parts:
    estimator = transformers(
        "DPTForDepthEstimation",
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        image_size=32,
        patch_size=16,
        is_hybrid=False,
        fusion_hidden_size=16,
        neck_hidden_sizes=[8, 8, 16, 16],
        backbone_out_indices=[0, 1, 1, 1],
    )
    return sd15(in_channels=5) | {"depth_estimator": estimator}


NORMALIZER = "pipelines.stable_diffusion.stable_unclip_image_normalizer"
NORMALIZER += ".StableUnCLIPImageNormalizer"


def unclip() -> Parts:
    """Make unCLIP, whose UNet is told the embedding of a picture, to which noise has been added."""
    return sd15(class_embed_type="projection", projection_class_embeddings_input_dim=2 * WIDTH) | {
        "image_normalizer": diffusers(NORMALIZER, embedding_dim=WIDTH),
        "image_noising_scheduler": diffusers("DDPMScheduler"),
    }


def unclip_prior() -> Parts:
    prior = diffusers(
        "PriorTransformer",
        num_attention_heads=2,
        attention_head_dim=16,
        embedding_dim=WIDTH,
        num_layers=1,
        num_embeddings=16,
    )
    schedule = diffusers(
        "DDPMScheduler",
        variance_type="fixed_small_log",
        clip_sample=True,
        prediction_type="sample",
        beta_schedule="squaredcos_cap_v2",
    )
    return unclip() | {
        "prior": prior,
        "prior_scheduler": schedule,
        "prior_tokenizer": clip_tokenizer(),
        "prior_text_encoder": clip("CLIPTextModelWithProjection"),
    }


def unclip_picture() -> Parts:
    return unclip() | {"image_encoder": clip_vision(), "feature_extractor": image_processor()}


def variation() -> Parts:
    return {
        "unet": unet(),
        "vae": vae(),
        "scheduler": ddim(),
        "image_encoder": clip_vision(),
        "feature_extractor": image_processor(),
    }


def consistent() -> Parts:
    """Make a latent consistency model, which hears the guidance as an embedding."""
    scheduler = diffusers("LCMScheduler", original_inference_steps=50)
    return sd15(time_cond_proj_dim=16) | {"scheduler": scheduler}


def gligen() -> Parts:
    return sd15(attention_type="gated", use_linear_projection=True)


def ledits() -> Parts:
    scheduler = diffusers(
        "DPMSolverMultistepScheduler", algorithm_type="sde-dpmsolver++", solver_order=2
    )
    return sd15() | {"scheduler": scheduler}


def _inverted(pipe: Any) -> None:
    """Invert a picture, which LEDITS++ does before it edits it."""
    pipe.invert(
        image=picture(size=32),
        num_inversion_steps=STEPS,
        skip=0.0,
        generator=torch.Generator().manual_seed(1),
    )


def marigold() -> Parts:
    return sd15(in_channels=8) | {"prediction_type": "depth"}


def picture(channels: int = 3, size: int = 16) -> Tensor:
    return torch.rand(1, channels, size, size, generator=torch.Generator().manual_seed(7))


def _ip_adapter(plus: bool) -> Any:
    """Give the UNet an IP-Adapter's weights, random ones, as a file has them."""

    def load(pipe: Any) -> None:
        pipe.unet._load_ip_adapter_weights(
            [ip_adapter_state(pipe.unet, plus)], low_cpu_mem_usage=False
        )
        pipe.set_ip_adapter_scale(0.7)

    return load


def ip_adapter_state(
    model: Any, plus: bool = False, seed: int = 2, pictured: int = WIDTH
) -> dict[str, Any]:
    """Return what a file of an IP-Adapter holds. ``pictured``: the width of what its image encoder
    makes of a picture, where it is not ``plus``."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    layers: dict[str, Tensor] = {}
    crossed = [
        name
        for name in model.attn_processors
        if not name.endswith("attn1.processor") and "motion_modules" not in name
    ]
    for number, name in enumerate(crossed):
        attention = model.get_submodule(name.removesuffix(".processor"))
        inner, width = attention.inner_dim, attention.cross_attention_dim
        for part in ("to_k_ip", "to_v_ip"):
            layers[f"{2 * number + 1}.{part}.weight"] = drawn(inner, width)
    width = model.config.cross_attention_dim
    if not plus:
        shown = {
            "proj.weight": drawn(4 * width, pictured),
            "proj.bias": drawn(4 * width),
            "norm.weight": drawn(width),
            "norm.bias": drawn(width),
        }
        return {"image_proj": shown, "ip_adapter": layers}
    inner = 64  # one head of 64 channels, which the converter takes for granted
    shown = {
        "latents": drawn(1, 4, WIDTH),
        "proj_in.weight": drawn(WIDTH, WIDTH),
        "proj_in.bias": drawn(WIDTH),
        "proj_out.weight": drawn(width, WIDTH),
        "proj_out.bias": drawn(width),
        "norm_out.weight": drawn(width),
        "norm_out.bias": drawn(width),
    }
    for number in range(4):
        for name in ("ln0", "ln1", "ff.0"):
            shown[f"layers.{number}.{name}.weight"] = drawn(WIDTH)
            shown[f"layers.{number}.{name}.bias"] = drawn(WIDTH)
        shown[f"layers.{number}.attn.to_q.weight"] = drawn(inner, WIDTH)
        shown[f"layers.{number}.attn.to_kv.weight"] = drawn(2 * inner, WIDTH)
        shown[f"layers.{number}.attn.to_out.weight"] = drawn(WIDTH, inner)
        shown[f"layers.{number}.ff.1.net.0.proj.weight"] = drawn(4 * WIDTH, WIDTH)
        shown[f"layers.{number}.ff.1.net.2.weight"] = drawn(WIDTH, 4 * WIDTH)
    return {"image_proj": shown, "ip_adapter": layers}


TWO = {"image": lambda: [picture(), picture() / 2], "controlnet_conditioning_scale": [0.5, 0.8]}
PROMPT_PICTURE = {"ip_adapter_image_embeds": lambda: [torch.cat([_embeds(), _embeds() / 2])]}
PATCHES = {"ip_adapter_image_embeds": lambda: [torch.cat([_embeds(9), _embeds(9) / 2])]}


def pictures_of_prompts(pipe: Any, count: int) -> dict[str, Any]:
    """Return arguments of a call with so many pictures for the IP-Adapter that a pipeline has."""
    is_plus = hasattr(pipe.unet.encoder_hid_proj.image_projection_layers[0], "latents")
    shape = (2, count, 9, WIDTH) if is_plus else (2, count, WIDTH)
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    return {"ip_adapter_image_embeds": [drawn]}


def _embeds(patches: int = 0) -> Tensor:
    shape = (1, 1, patches, WIDTH) if patches else (1, 1, WIDTH)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


STABLE: tuple[TinyPipeline, ...] = (
    TinyPipeline("sd15", "StableDiffusionPipeline", sd15),
    TinyPipeline("sd15-img2img", "StableDiffusionImg2ImgPipeline", sd15),
    TinyPipeline("sd15-inpaint", "StableDiffusionInpaintPipeline", sd15),
    TinyPipeline("sd15-inpaint-9", "StableDiffusionInpaintPipeline", lambda: sd15(in_channels=9)),
    TinyPipeline("sd15-controlnet", "StableDiffusionControlNetPipeline", controlled),
    TinyPipeline("sd15-controlnet-img2img", "StableDiffusionControlNetImg2ImgPipeline", controlled),
    TinyPipeline("sd15-controlnet-inpaint", "StableDiffusionControlNetInpaintPipeline", controlled),
    TinyPipeline(
        "sd15-two-controlnets", "StableDiffusionControlNetPipeline", lambda: controlled(2), TWO
    ),
    TinyPipeline("sd15-t2i-adapter", "StableDiffusionAdapterPipeline", lambda: adapted(sd15())),
    TinyPipeline(
        "sd15-two-t2i-adapters",
        "StableDiffusionAdapterPipeline",
        lambda: adapted(sd15(), 2),
        {"image": lambda: [picture(), picture() / 2], "adapter_conditioning_scale": [0.5, 0.8]},
    ),
    TinyPipeline(
        "sd15-ip-adapter",
        "StableDiffusionPipeline",
        with_pictures_of_prompts,
        PROMPT_PICTURE,
        _ip_adapter(plus=False),
    ),
    TinyPipeline(
        "sd15-ip-adapter-plus",
        "StableDiffusionPipeline",
        with_pictures_of_prompts,
        PATCHES,
        _ip_adapter(plus=True),
    ),
    TinyPipeline("sd15-pag", "StableDiffusionPAGPipeline", sd15),
    TinyPipeline("sd15-pag-img2img", "StableDiffusionPAGImg2ImgPipeline", sd15),
    TinyPipeline("sd15-pag-inpaint", "StableDiffusionPAGInpaintPipeline", sd15),
    TinyPipeline("sd15-pag-controlnet", "StableDiffusionControlNetPAGPipeline", controlled),
    TinyPipeline(
        "sd15-pag-controlnet-inpaint", "StableDiffusionControlNetPAGInpaintPipeline", controlled
    ),
    TinyPipeline(
        "sd15-ledits",
        "LEditsPPPipelineStableDiffusion",
        ledits,
        {
            "editing_prompt": "a dog",
            "negative_prompt": LEFT_OUT,
            "generator": LEFT_OUT,
            "use_intersect_mask": False,
        },
        _inverted,
    ),
    TinyPipeline(
        "sd15-pix2pix", "StableDiffusionInstructPix2PixPipeline", lambda: sd15(in_channels=8)
    ),
    TinyPipeline(
        "sd15-variation",
        "StableDiffusionImageVariationPipeline",
        variation,
        {"image": lambda: picture(size=32)},
    ),
    TinyPipeline(
        "sd15-gligen",
        "StableDiffusionGLIGENPipeline",
        gligen,
        {"gligen_phrases": ["a cat"], "gligen_boxes": [[0.1, 0.2, 0.7, 0.8]]},
    ),
    TinyPipeline("sd15-marigold", "MarigoldDepthPipeline", marigold, {"processing_resolution": 0}),
    TinyPipeline(
        "sd2-depth",
        "StableDiffusionDepth2ImgPipeline",
        depth,
        {"depth_map": lambda: picture()[:, 0]},
    ),
    TinyPipeline("sd2-upscaler", "StableDiffusionUpscalePipeline", upscaler),
    TinyPipeline("sd2-latent-upscaler", "StableDiffusionLatentUpscalePipeline", latent_upscaler),
    TinyPipeline(
        "sd2-unclip", "StableUnCLIPPipeline", unclip_prior, {"prior_num_inference_steps": 2}
    ),
    TinyPipeline(
        "sd2-unclip-img2img",
        "StableUnCLIPImg2ImgPipeline",
        unclip_picture,
        {"image": lambda: picture(size=32)},
    ),
    TinyPipeline("lcm", "LatentConsistencyModelPipeline", consistent),
    TinyPipeline(
        "lcm-img2img",
        "LatentConsistencyModelImg2ImgPipeline",
        consistent,
        {"num_inference_steps": 4, "strength": 0.8},
    ),
    TinyPipeline("sdxl", "StableDiffusionXLPipeline", sdxl),
    TinyPipeline("sdxl-img2img", "StableDiffusionXLImg2ImgPipeline", sdxl, {"strength": 0.8}),
    TinyPipeline("sdxl-inpaint", "StableDiffusionXLInpaintPipeline", sdxl, {"strength": 0.8}),
    TinyPipeline("sdxl-refiner", "StableDiffusionXLImg2ImgPipeline", refiner, {"strength": 0.8}),
    TinyPipeline(
        "sdxl-pix2pix", "StableDiffusionXLInstructPix2PixPipeline", lambda: sdxl(in_channels=8)
    ),
    TinyPipeline("sdxl-controlnet", "StableDiffusionXLControlNetPipeline", controlled_xl),
    TinyPipeline(
        "sdxl-controlnet-img2img", "StableDiffusionXLControlNetImg2ImgPipeline", controlled_xl
    ),
    TinyPipeline(
        "sdxl-controlnet-inpaint", "StableDiffusionXLControlNetInpaintPipeline", controlled_xl
    ),
    TinyPipeline(
        "sdxl-union",
        "StableDiffusionXLControlNetUnionPipeline",
        union,
        {"control_mode": [1], "control_image": lambda: [picture()]},
    ),
    TinyPipeline(
        "sdxl-union-img2img",
        "StableDiffusionXLControlNetUnionImg2ImgPipeline",
        union,
        {"control_mode": [1], "control_image": lambda: [picture()]},
    ),
    TinyPipeline(
        "sdxl-union-inpaint",
        "StableDiffusionXLControlNetUnionInpaintPipeline",
        union,
        {"control_mode": [1], "control_image": lambda: [picture()]},
    ),
    TinyPipeline("sdxl-t2i-adapter", "StableDiffusionXLAdapterPipeline", lambda: adapted(sdxl())),
    TinyPipeline("sdxl-pag", "StableDiffusionXLPAGPipeline", sdxl),
    TinyPipeline(
        "sdxl-pag-img2img", "StableDiffusionXLPAGImg2ImgPipeline", sdxl, {"strength": 0.8}
    ),
    TinyPipeline("sdxl-pag-inpaint", "StableDiffusionXLPAGInpaintPipeline", sdxl),
    TinyPipeline("sdxl-pag-controlnet", "StableDiffusionXLControlNetPAGPipeline", controlled_xl),
    TinyPipeline(
        "sdxl-pag-controlnet-img2img",
        "StableDiffusionXLControlNetPAGImg2ImgPipeline",
        controlled_xl,
    ),
)
