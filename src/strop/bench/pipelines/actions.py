"""List everything that a user does to a pipeline between two pictures, or between two steps of one.

``ACTIONS`` is the one list. From it come the sweep of the tests (is the next result that of a fresh
eager pipeline?), the matrix of changes that a single UNet sees, and rows of docs/compatibility.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from strop.bench.pipelines import (
    actions_adapters as adapters,
)
from strop.bench.pipelines import (
    actions_code as code,
)
from strop.bench.pipelines import (
    actions_loras as loras,
)
from strop.bench.pipelines import (
    actions_memory as memory,
)
from strop.bench.pipelines import (
    actions_pipeline as pipeline,
)
from strop.bench.pipelines import (
    actions_weights as weights,
)
from strop.bench.pipelines.tiny import takes

# An action applies to one of these: a module of the pipeline, or the whole pipeline.
DENOISER, UNET, VAE, TEXT, PIPE, STABLE = "denoiser", "unet", "vae", "text", "pipe", "stable"
PICTURED = "pictured"  # a pipeline with an IP-Adapter
JOINT = "joint"  # a pipeline whose transformer takes scales of adapters in a call
CACHED = "cached"  # the transformer of a pipeline whose class takes diffusers' caches
DENOISERS = ("unet", "transformer", "prior", "decoder")


@dataclass(frozen=True, slots=True)
class Action:
    """Describe an action. ``do`` gets the module or pipeline that ``on`` names. It may return
    another pipeline that is used from then on, arguments for the next call, or a context in which
    the next call happens."""

    do: Callable[[Any], Any]
    on: str
    is_seen: bool = True  # whether the next picture is another one
    inside: bool = True  # whether it can be done between two steps
    decibels: float = 100.0  # how near to eager's the picture must be: fp32 is at 130
    feature: str = ""  # what docs/compatibility.md calls it

    @property
    def name(self) -> str:
        return self.do.__name__

    def target(self, pipe: Any) -> Any:
        """Return what it applies to in a pipeline, or None."""
        kinds = {kind.__name__ for kind in type(pipe).__mro__}
        if self.on == PIPE:
            return pipe
        if self.on == STABLE:
            return pipe if "StableDiffusionPipeline" in kinds else None
        found = denoiser_of(pipe)
        if self.on == JOINT:
            return pipe if takes(pipe, "joint_attention_kwargs") else None
        if self.on == PICTURED:
            shown = getattr(found, "encoder_hid_proj", None)
            return pipe if hasattr(shown, "image_projection_layers") else None
        if self.on in (VAE, TEXT):
            found = getattr(pipe, {VAE: "vae", TEXT: "text_encoder"}[self.on], None)
        is_other = {
            UNET: type(found).__name__ != "UNet2DConditionModel",
            CACHED: not hasattr(found, "enable_cache"),
        }
        return found if isinstance(found, nn.Module) and not is_other.get(self.on) else None


def denoiser_of(pipe: Any) -> Any:
    return next((pipe.components[n] for n in DENOISERS if pipe.components.get(n) is not None), None)


LOW = 35.0  # decibels of pictures in half precision


ACTIONS: tuple[Action, ...] = (
    Action(weights.load_state_dict, DENOISER),
    Action(weights.load_state_dict_assign, DENOISER),
    Action(weights.copy_in_place, DENOISER),
    Action(weights.data_copy, DENOISER),
    Action(weights.data_assigned, DENOISER),
    Action(weights.one_data_assigned, DENOISER),
    Action(weights.data_assigned_transposed, DENOISER),
    Action(weights.new_parameter, DENOISER),
    Action(weights.ema, DENOISER),
    Action(weights.ema_restored, DENOISER, is_seen=False),
    Action(weights.to_channels_last, DENOISER),
    Action(weights.dtype_round_trip, DENOISER, is_seen=False),
    Action(weights.parametrized, DENOISER),
    Action(weights.pruned, DENOISER),
    Action(weights.buffers_written, DENOISER, is_seen=False),
    Action(weights.gradients_wanted, DENOISER, is_seen=False),
    Action(weights.load_vae, VAE),
    Action(weights.data_of_vae, VAE),
    Action(weights.load_text_encoder, TEXT, inside=False),
    Action(code.training_mode, DENOISER, is_seen=False),
    Action(code.swap_block, DENOISER),
    Action(code.swap_activation, UNET),
    Action(code.plain_attribute, UNET),
    Action(code.forward_hook, DENOISER),
    Action(code.forward_pre_hook, DENOISER),
    Action(code.hook_on_a_part, DENOISER),
    Action(code.hook_added_and_removed, DENOISER, is_seen=False),
    Action(code.global_hook, DENOISER, inside=False),
    Action(code.forward_replaced, DENOISER),
    Action(code.forward_of_a_part_replaced, DENOISER),
    Action(code.class_assigned, DENOISER),
    Action(code.class_patched, DENOISER, inside=False),
    Action(code.function_patched, DENOISER, inside=False),
    Action(code.swap_processors, UNET, is_seen=False),
    Action(code.scaled_processors, UNET),
    Action(code.counting_processors, UNET),
    Action(code.gradient_checkpointing, DENOISER, is_seen=False),
    Action(code.deep_copied, PIPE, is_seen=False, inside=False),
    Action(code.pickled, PIPE, is_seen=False, inside=False),
    Action(code.saved_and_loaded, PIPE, is_seen=False, inside=False),
    Action(code.restored_and_optimized, PIPE, is_seen=False),
    Action(code.repeated_blocks_compiled, DENOISER, is_seen=False, inside=False),
    Action(code.drawn_in_a_thread, PIPE, is_seen=False, inside=False),
    Action(adapters.add_adapter, DENOISER, feature="LoRA: add_adapter"),
    Action(adapters.two_adapters_weighted, DENOISER, feature="LoRA: two adapters, weighted"),
    Action(adapters.fuse_lora, DENOISER, feature="LoRA: fuse_lora"),
    Action(adapters.load_lora, UNET),
    Action(adapters.lora_loaded, STABLE, feature="LoRA: load_lora_weights"),
    Action(adapters.lora_scaled, STABLE, feature="LoRA: set_adapters with weights"),
    Action(adapters.lora_switched_off, STABLE, is_seen=False, feature="LoRA: disable_lora"),
    Action(adapters.lora_fused, STABLE, feature="LoRA: fuse_lora of a pipeline"),
    Action(adapters.lora_unfused, STABLE, is_seen=False, feature="LoRA: unfuse_lora"),
    Action(adapters.lora_unloaded, STABLE, is_seen=False, feature="LoRA: unload_lora_weights"),
    Action(adapters.lora_deleted, STABLE, is_seen=False, feature="LoRA: delete_adapters"),
    Action(adapters.lora_hot_swapped, STABLE, feature="LoRA: hot-swap"),
    Action(adapters.lora_by_call, STABLE, inside=False, feature="LoRA: scale of a call"),
    Action(loras.lora_by_block, STABLE),
    Action(loras.lora_switched_on, STABLE),
    Action(loras.lora_of_kohya, STABLE),
    Action(loras.lora_of_a_row, STABLE, inside=False),
    Action(loras.lora_by_joint_call, JOINT, inside=False),
    Action(loras.add_dora, DENOISER),
    Action(loras.add_loha, DENOISER),
    Action(loras.add_lokr, DENOISER),
    Action(loras.add_to_text_encoder, TEXT, inside=False),
    Action(loras.lora_swapped_as_prepared, STABLE),
    Action(adapters.textual_inversion, STABLE, inside=False, feature="textual inversion"),
    Action(adapters.fuse_qkv, UNET, is_seen=False, feature="fuse_qkv_projections"),
    Action(adapters.free_u, UNET, feature="FreeU"),
    Action(adapters.free_u_ended, UNET, is_seen=False, feature="disable_freeu"),
    Action(memory.attention_slicing, STABLE, is_seen=False, feature="attention slicing"),
    Action(memory.vae_slicing, VAE, is_seen=False, feature="VAE slicing"),
    Action(memory.vae_tiling, VAE, is_seen=False, feature="VAE tiling"),
    Action(memory.model_offload, PIPE, is_seen=False, inside=False, feature="model CPU offload"),
    Action(
        memory.sequential_offload,
        PIPE,
        is_seen=False,
        inside=False,
        feature="sequential CPU offload",
    ),
    Action(memory.group_offload, DENOISER, is_seen=False, feature="group offload, by block"),
    Action(memory.group_offload_by_leaf, DENOISER, is_seen=False, feature="group offload, by leaf"),
    Action(
        memory.offload_hooks_removed,
        PIPE,
        is_seen=False,
        inside=False,
        feature="offload, then remove_all_hooks",
    ),
    Action(memory.layerwise_casting, DENOISER, decibels=LOW, feature="layerwise casting to fp8"),
    Action(memory.half_precision, PIPE, inside=False, decibels=LOW, feature="to(bfloat16)"),
    Action(memory.channels_last_everywhere, STABLE, is_seen=False),
    Action(memory.pyramid_attention, CACHED, feature="Pyramid Attention Broadcast"),
    Action(memory.faster_cache, CACHED, inside=False, feature="FasterCache"),
    Action(memory.first_block_cache, CACHED, feature="First Block Cache"),
    Action(memory.taylor_cache, CACHED, feature="TaylorSeer cache"),
    Action(memory.mag_cache, CACHED, feature="MagCache"),
    Action(memory.cache_ended, CACHED, is_seen=False, feature="disable_cache"),
    Action(pipeline.latents_changed, PIPE),
    Action(pipeline.prompt_changed, PIPE),
    Action(pipeline.guidance_changed, STABLE),
    Action(pipeline.interrupted, PIPE),
    Action(pipeline.scheduler_swapped, PIPE, inside=False),
    Action(pipeline.scheduler_configured, STABLE, inside=False),
    Action(pipeline.other_unet, STABLE),
    Action(pipeline.other_vae, STABLE),
    Action(pipeline.from_pipe, STABLE, inside=False, is_seen=False),
    Action(pipeline.other_timesteps, STABLE, inside=False),
    Action(pipeline.guidance_off, STABLE, inside=False),
    Action(pipeline.guidance_rescaled, STABLE, inside=False),
    Action(pipeline.two_pictures, PIPE, inside=False),
    Action(pipeline.larger, PIPE, inside=False),
    Action(pipeline.default_dtype, PIPE, inside=False),
    Action(pipeline.deterministic, PIPE, inside=False, is_seen=False),
    Action(pipeline.autocast, PIPE, inside=False, decibels=LOW),
    Action(pipeline.inference_mode, PIPE, inside=False, is_seen=False),
    Action(pipeline.math_attention, PIPE, inside=False, is_seen=False),
    Action(pipeline.attention_replaced, PIPE, inside=False),
    Action(
        adapters.textual_inversion_of_several,
        STABLE,
        inside=False,
        feature="textual inversion of several tokens",
    ),
    Action(
        adapters.textual_inversion_unloaded,
        STABLE,
        inside=False,
        is_seen=False,
        feature="unload_textual_inversion",
    ),
    Action(adapters.ip_adapter_scaled, PICTURED, feature="IP-Adapter: set_ip_adapter_scale"),
    Action(adapters.ip_adapter_scaled_to_nothing, PICTURED, feature="IP-Adapter: a scale of 0"),
    Action(adapters.ip_adapter_scaled_by_block, PICTURED, feature="IP-Adapter: scales by block"),
    Action(adapters.other_ip_adapter, PICTURED, feature="IP-Adapter: another one"),
    Action(
        adapters.ip_adapter_loaded_again,
        PICTURED,
        is_seen=False,
        feature="IP-Adapter: unload, load",
    ),
    Action(
        adapters.ip_adapter_with_more_pictures,
        PICTURED,
        inside=False,
        feature="IP-Adapter: more pictures",
    ),
)
