"""Say of each model that may be split which of its arguments have a row for each picture.

The sizes of a tensor do not tell: a table of two positions looks as a batch of two does. So what is
not listed here is not split. An argument is listed by the name that diffusers gives it in the
``forward`` of its models, and means the same in all of ``FAMILIES``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

ROWS = "rows"  # tensors with a row for each picture, or with one for all; by themselves or nested
WHOLE = "whole"  # the same for all pictures
ITEMS = "items"  # a list with an item for each picture
Kind = Any  # one of these, or a mapping of the keys of a dict to kinds

_CROSS_ATTENTION: Mapping[str, Kind] = {
    "scale": WHOLE,
    "ip_adapter_masks": WHOLE,  # (1, pictures, height, width), which layers repeat for each row
    "ip_adapter_image_embeds": ROWS,
    "ip_hidden_states": ROWS,
}

ARGUMENTS: Mapping[str, Kind] = {
    "sample": ROWS,
    "hidden_states": ROWS,
    "timestep": ROWS,
    "encoder_hidden_states": ROWS,
    "encoder_hidden_states_image": ROWS,
    "encoder_hidden_states_mask": ROWS,
    "encoder_hidden_states_t5": ROWS,
    "encoder_attention_mask": ROWS,
    "attention_mask": ROWS,
    "text_embedding_mask": ROWS,
    "text_embedding_mask_t5": ROWS,
    "pooled_projections": ROWS,
    "guidance": ROWS,
    "class_labels": ROWS,
    "timestep_cond": ROWS,
    "image_meta_size": ROWS,
    "style": ROWS,
    "ofs": ROWS,
    "additional_t_cond": ROWS,
    "controlnet_cond": ROWS,
    "controlnet_mode": ROWS,
    "down_block_additional_residuals": ROWS,
    "down_intrablock_additional_residuals": ROWS,
    "mid_block_additional_residual": ROWS,
    "controlnet_block_samples": ROWS,
    "controlnet_single_block_samples": ROWS,
    "block_controlnet_hidden_states": ROWS,
    "added_cond_kwargs": {
        "text_embeds": ROWS,
        "time_ids": ROWS,
        "image_embeds": ROWS,
        "resolution": ROWS,
        "aspect_ratio": ROWS,
    },
    "cross_attention_kwargs": _CROSS_ATTENTION,
    "joint_attention_kwargs": _CROSS_ATTENTION,
    "attention_kwargs": _CROSS_ATTENTION,
    "img_shapes": ITEMS,
    "img_ids": WHOLE,
    "txt_ids": WHOLE,
    "image_rotary_emb": WHOLE,
    "rope_interpolation_scale": WHOLE,
    "conditioning_scale": WHOLE,
    "skip_layers": WHOLE,
}


@dataclass(frozen=True, slots=True)
class SplitModel:
    """``lead`` is the argument that says how many rows a call has."""

    lead: str


_UNET, _TRANSFORMER = SplitModel("sample"), SplitModel("hidden_states")

# By the name of the class. All compute each row by itself.
FAMILIES: Mapping[str, SplitModel] = {
    **dict.fromkeys(
        ("UNet2DConditionModel", "UNet2DModel", "ControlNetModel", "MultiControlNetModel"), _UNET
    ),
    **dict.fromkeys(
        (
            "AuraFlowTransformer2DModel",
            "ChromaTransformer2DModel",
            "CogVideoXTransformer3DModel",
            "DiTTransformer2DModel",
            "FluxControlNetModel",
            "FluxTransformer2DModel",
            "HunyuanDiT2DModel",
            "HunyuanVideoTransformer3DModel",
            "LTXVideoTransformer3DModel",
            "Lumina2Transformer2DModel",
            "MochiTransformer3DModel",
            "PixArtTransformer2DModel",
            "QwenImageTransformer2DModel",
            "SanaTransformer2DModel",
            "SD3ControlNetModel",
            "SD3Transformer2DModel",
            "WanTransformer3DModel",
        ),
        _TRANSFORMER,
    ),
}

# Functions of attention that look at one row at a time. Others do not: those for perturbed
# attention guidance (PAG) take the batch apart, those of Text2Video-Zero look at its first row.
PROCESSORS = frozenset(
    {
        "AttnAddedKVProcessor",
        "AttnAddedKVProcessor2_0",
        "AttnProcessor",
        "AttnProcessor2_0",
        "AuraFlowAttnProcessor2_0",
        "CogVideoXAttnProcessor2_0",
        "FluxAttnProcessor",
        "FluxAttnProcessor2_0",
        "FluxIPAdapterAttnProcessor",
        "FluxIPAdapterJointAttnProcessor2_0",
        "FusedAttnProcessor2_0",
        "FusedAuraFlowAttnProcessor2_0",
        "FusedCogVideoXAttnProcessor2_0",
        "FusedFluxAttnProcessor2_0",
        "FusedHunyuanAttnProcessor2_0",
        "FusedJointAttnProcessor2_0",
        "HunyuanAttnProcessor2_0",
        "HunyuanVideoAttnProcessor2_0",
        "IPAdapterAttnProcessor",
        "IPAdapterAttnProcessor2_0",
        "IPAdapterXFormersAttnProcessor",
        "JointAttnProcessor2_0",
        "LTXVideoAttentionProcessor2_0",
        "LTXVideoAttnProcessor",
        "Lumina2AttnProcessor2_0",
        "MochiAttnProcessor2_0",
        "QwenDoubleStreamAttnProcessor2_0",
        "SD3IPAdapterJointAttnProcessor2_0",
        "SanaAttnProcessor2_0",
        "SanaLinearAttnProcessor2_0",
        "SanaMultiscaleAttnProcessor2_0",
        "SlicedAttnAddedKVProcessor",
        "SlicedAttnProcessor",
        "WanAttnProcessor",
        "WanAttnProcessor2_0",
        "XFormersAttnAddedKVProcessor",
        "XFormersAttnProcessor",
        "XFormersJointAttnProcessor",
    }
)
# Whose modules compute each row by itself in evaluation mode.
PACKAGES = frozenset({"torch", "diffusers", "peft", "transformers"})


def family_of(module: nn.Module) -> SplitModel | None:
    """Return what says how calls of a module are split, or None: a class of a user's own may
    compute in another way than the one that it inherits from."""
    return FAMILIES.get(type(module).__name__)
