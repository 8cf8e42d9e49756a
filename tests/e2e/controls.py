"""Tiny pipelines with what steers a picture beside its prompt: ControlNets, T2I and IP-Adapters."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    ControlNetModel,
    MultiAdapter,
    StableDiffusionAdapterPipeline,
    StableDiffusionControlNetPipeline,
    T2IAdapter,
)
from diffusers.models.attention_processor import AttnProcessor2_0, IPAdapterAttnProcessor2_0
from diffusers.models.embeddings import (
    ImageProjection,
    IPAdapterPlusImageProjection,
    MultiIPAdapterImageProjection,
)
from torch import Tensor, nn

from tests.e2e import tiny

IMAGE_WIDTH, IMAGE_TOKENS = 12, 4  # of what an image encoder would give, and of what is made of it


def controlnet(unet: nn.Module, seed: int = 0) -> ControlNetModel:
    torch.manual_seed(seed)
    found = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(8, 16))
    for weight in found.controlnet_down_blocks.parameters():
        nn.init.normal_(weight, std=0.05)  # they begin as zeros
    return found.eval()


def with_controlnets(count: int) -> Any:
    """One ControlNet, or a MultiControlNetModel of several."""
    pipe = tiny.pipeline()
    nets = [controlnet(pipe.unet, seed) for seed in range(count)]
    return StableDiffusionControlNetPipeline(
        **pipe.components, controlnet=nets[0] if count == 1 else nets, requires_safety_checker=False
    )


def with_t2i_adapters(count: int) -> Any:
    pipe = tiny.pipeline()
    adapters = []
    for seed in range(count):
        torch.manual_seed(seed)
        adapters.append(
            T2IAdapter(
                in_channels=3, channels=[16, 32], num_res_blocks=1, downscale_factor=2
            ).eval()
        )
    parts = {name: part for name, part in pipe.components.items() if name != "image_encoder"}
    adapter = adapters[0] if count == 1 else MultiAdapter(adapters).eval()
    return StableDiffusionAdapterPipeline(**parts, adapter=adapter, requires_safety_checker=False)


def with_ip_adapter(*, is_plus: bool) -> Any:
    """As ``load_ip_adapter`` leaves a UNet, but for the weights."""
    pipe, width = tiny.pipeline(), tiny.PROMPT_DIM
    unet = pipe.unet
    torch.manual_seed(0)
    projection: nn.Module = ImageProjection(IMAGE_WIDTH, width, IMAGE_TOKENS)
    if is_plus:
        projection = IPAdapterPlusImageProjection(
            embed_dims=IMAGE_WIDTH,
            output_dims=width,
            hidden_dims=16,
            depth=1,
            dim_head=8,
            heads=2,
            num_queries=IMAGE_TOKENS,
        )
    unet.encoder_hid_proj = MultiIPAdapterImageProjection([projection])
    unet.register_to_config(encoder_hid_dim_type="ip_image_proj")
    processors: dict[str, Any] = {}
    for name in unet.attn_processors:
        attention = unet.get_submodule(name.removesuffix(".processor"))
        processors[name] = AttnProcessor2_0()
        if "attn2" in name:
            processors[name] = IPAdapterAttnProcessor2_0(
                attention.inner_dim, width, (IMAGE_TOKENS,), 0.6
            )
    unet.set_attn_processor(processors)
    return pipe


def image_embeds(*, is_plus: bool) -> list[Tensor]:
    """Without and with guidance, in one tensor: (2, 1, IMAGE_WIDTH), of the plus kind with 9 tokens
    more."""
    shape = (2, 1, 9, IMAGE_WIDTH) if is_plus else (2, 1, IMAGE_WIDTH)
    return [torch.randn(shape, generator=torch.Generator().manual_seed(5))]


def picture(
    pipe: Any, height: int, width: int, batch: int = 1, steps: int = 3, **more: Any
) -> Tensor:
    """(B, 4, H / 2, W / 2), a latent, from random embeddings of a prompt."""
    g = torch.Generator().manual_seed(3)
    prompt = torch.randn(batch, 7, tiny.PROMPT_DIM, generator=g)
    pipe.set_progress_bar_config(disable=True)
    found = pipe(
        prompt_embeds=prompt,
        negative_prompt_embeds=prompt * 0.5,
        num_inference_steps=steps,
        height=height,
        width=width,
        generator=g,
        output_type="latent",
        **more,
    ).images
    return torch.as_tensor(found)
