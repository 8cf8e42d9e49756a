"""List actions with LoRA, textual inversion and other things that diffusers adds to a model."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch

from strop.api import restore
from strop.bench.pipelines.stable import ip_adapter_state, pictures_of_prompts

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


def lora_config() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=2, lora_alpha=4, target_modules=TARGETS, init_lora_weights=False)


def add_adapter(model: Any) -> None:
    torch.manual_seed(4)
    model.add_adapter(lora_config(), "first")


def two_adapters_weighted(model: Any) -> None:
    add_adapter(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")
        model.add_adapter(lora_config(), "second")
    model.set_adapters(["first", "second"], [0.3, 0.8])


def fuse_lora(model: Any) -> None:
    add_adapter(model)
    model.fuse_lora()


def _state(unet: Any, seed: int) -> dict[str, Any]:
    """Return the state of a LoRA of a UNet as files have it."""
    from peft.utils import get_peft_model_state_dict

    giver = copy.deepcopy(unet)
    restore(giver)
    if getattr(giver, "peft_config", None):
        giver.unload_lora()
        giver.peft_config = {}
    torch.manual_seed(seed)
    giver.add_adapter(lora_config(), "given")
    layers = get_peft_model_state_dict(giver, adapter_name="given")
    return {f"unet.{name}": value for name, value in layers.items()}


def load_lora(unet: Any) -> None:
    from diffusers.loaders import StableDiffusionLoraLoaderMixin

    StableDiffusionLoraLoaderMixin.load_lora_into_unet(
        _state(unet, 4), network_alphas=None, unet=unet, adapter_name="loaded"
    )


def lora_loaded(pipe: Any) -> None:
    pipe.load_lora_weights(_state(pipe.unet, 4), adapter_name="one")


def lora_scaled(pipe: Any) -> None:
    lora_loaded(pipe)
    pipe.set_adapters(["one"], [0.4])


def lora_switched_off(pipe: Any) -> None:
    lora_loaded(pipe)
    pipe.disable_lora()


def lora_fused(pipe: Any) -> None:
    lora_loaded(pipe)
    pipe.fuse_lora(lora_scale=0.7)


def lora_unfused(pipe: Any) -> None:
    lora_loaded(pipe)
    pipe.fuse_lora(lora_scale=0.7)
    pipe.unfuse_lora()
    pipe.disable_lora()


def lora_unloaded(pipe: Any) -> None:
    lora_loaded(pipe)
    pipe.unload_lora_weights()


def lora_deleted(pipe: Any) -> None:
    lora_loaded(pipe)
    pipe.delete_adapters(["one"])


def hot_swapped(pipe: Any) -> None:
    pipe.load_lora_weights(_state(pipe.unet, 5), adapter_name="one", hotswap=True)


def lora_hot_swapped(pipe: Any) -> None:
    lora_loaded(pipe)
    hot_swapped(pipe)


def lora_by_call(pipe: Any) -> dict[str, Any]:
    lora_loaded(pipe)
    return {"cross_attention_kwargs": {"scale": 0.3}}


def textual_inversion(pipe: Any) -> dict[str, Any]:
    width = pipe.text_encoder.get_input_embeddings().weight.shape[1]
    generator = torch.Generator().manual_seed(6)
    learned = {"<cat>": torch.randn(width, generator=generator)}
    pipe.load_textual_inversion(learned, token="<cat>")
    return {"prompt": "a red <cat>"}


def textual_inversion_of_several(pipe: Any) -> dict[str, Any]:
    textual_inversion(pipe)
    width = pipe.text_encoder.get_input_embeddings().weight.shape[1]
    generator = torch.Generator().manual_seed(7)
    learned = {"<cow>": torch.randn(3, width, generator=generator)}
    pipe.load_textual_inversion(learned, token="<cow>")
    return {"prompt": "a <cow> and a <cat>"}


def textual_inversion_unloaded(pipe: Any) -> None:
    textual_inversion_of_several(pipe)
    pipe.unload_textual_inversion()


def ip_adapter_scaled(pipe: Any) -> None:
    pipe.set_ip_adapter_scale(0.1)


def ip_adapter_scaled_to_nothing(pipe: Any) -> None:
    pipe.set_ip_adapter_scale(0)


def ip_adapter_scaled_by_block(pipe: Any) -> None:
    pipe.set_ip_adapter_scale({"down": 1, "up": {"block_1": [0.0, 0.3]}})


def other_ip_adapter(pipe: Any) -> None:
    """One of the same shapes comes in the place of the first."""
    state = ip_adapter_state(pipe.unet, plus=_is_plus(pipe), seed=5)
    pipe.unet._load_ip_adapter_weights([state], low_cpu_mem_usage=False)


def ip_adapter_loaded_again(pipe: Any) -> None:
    plus = _is_plus(pipe)
    pipe.unload_ip_adapter()
    state = ip_adapter_state(pipe.unet, plus)
    pipe.unet._load_ip_adapter_weights([state], low_cpu_mem_usage=False)
    pipe.set_ip_adapter_scale(0.7)


def ip_adapter_with_more_pictures(pipe: Any) -> dict[str, Any]:
    return pictures_of_prompts(pipe, 3)


def _is_plus(pipe: Any) -> bool:
    return hasattr(pipe.unet.encoder_hid_proj.image_projection_layers[0], "latents")


def fuse_qkv(unet: Any) -> None:
    unet.fuse_qkv_projections()


def free_u(unet: Any) -> None:
    unet.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)


def free_u_ended(unet: Any) -> None:
    free_u(unet)
    unet.disable_freeu()
