"""The nodes that a user sees."""

from __future__ import annotations

from typing import Any

from .compiled_model import compiled_for, optimized, plain
from .parts import optimized_clip, optimized_vae, plain_clip, plain_vae, report_of

CATEGORY = "Strop"


class StropOptimizeModel:
    """This node compiles a diffusion model: once, for all sizes, batches and LoRAs."""

    CATEGORY, FUNCTION, RETURN_TYPES = CATEGORY, "optimize", ("MODEL",)
    DESCRIPTION = (
        "Compile the model with Strop: one compile for every size, batch and LoRA. Place it behind"
        " the nodes that load LoRAs or before them, as you like. Other branches are left alone."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"model": ("MODEL",)},
            "optional": {"enabled": ("BOOLEAN", {"default": True})},
        }

    def optimize(self, model: Any, enabled: bool = True) -> tuple[Any]:
        return (optimized(model) if enabled else plain(model),)


class StropOptimizeVAE:
    """This node compiles the encoder and the decoder of a VAE."""

    CATEGORY, FUNCTION, RETURN_TYPES = CATEGORY, "optimize", ("VAE",)
    DESCRIPTION = "Compile a VAE with Strop. Other branches of the workflow are left alone."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"vae": ("VAE",)},
            "optional": {"enabled": ("BOOLEAN", {"default": True})},
        }

    def optimize(self, vae: Any, enabled: bool = True) -> tuple[Any]:
        return (optimized_vae(vae) if enabled else plain_vae(vae),)


class StropOptimizeCLIP:
    """This node compiles the layers of CLIP."""

    CATEGORY, FUNCTION, RETURN_TYPES = CATEGORY, "optimize", ("CLIP",)
    DESCRIPTION = (
        "Compile CLIP's layers with Strop. Other text encoders run as they are, and so do other"
        " branches of the workflow."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"clip": ("CLIP",)},
            "optional": {"enabled": ("BOOLEAN", {"default": True})},
        }

    def optimize(self, clip: Any, enabled: bool = True) -> tuple[Any]:
        return (optimized_clip(clip) if enabled else plain_clip(clip),)


class StropReport:
    """This node shows what has run compiled, and what has not, and why."""

    CATEGORY, FUNCTION, RETURN_TYPES = CATEGORY, "report", ("STRING",)
    RETURN_NAMES = ("report",)
    OUTPUT_NODE = True
    DESCRIPTION = (
        "Show what Strop has compiled. Connect what you want to know of, and to 'after' what is to"
        " be done first: the latent of the sampler, or the picture of the VAE."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        parts = {"model": ("MODEL",), "vae": ("VAE",), "clip": ("CLIP",)}
        return {"required": {"after": ("*",)}, "optional": parts}

    @classmethod
    def VALIDATE_INPUTS(cls, input_types: Any) -> bool:
        """Take anything for ``after``."""
        return True

    @classmethod
    def IS_CHANGED(cls, **_: Any) -> float:
        """Have it run in every prompt: what it shows is of that prompt."""
        return float("nan")

    def report(self, after: Any, model: Any = None, vae: Any = None, clip: Any = None) -> Any:
        texts = [compiled_for(model.model).report()] if model is not None else []
        if vae is not None:
            texts.append(report_of(vae.first_stage_model))
        if clip is not None:
            texts.append(report_of(clip.cond_stage_model))
        text = "\n\n".join(texts) or "Connect a model, a VAE or CLIP."
        return {"ui": {"text": (text,)}, "result": (text,)}


NODE_CLASS_MAPPINGS = {
    "StropOptimizeModel": StropOptimizeModel,
    "StropOptimizeVAE": StropOptimizeVAE,
    "StropOptimizeCLIP": StropOptimizeCLIP,
    "StropReport": StropReport,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "StropOptimizeModel": "Strop Optimize (model)",
    "StropOptimizeVAE": "Strop Optimize (VAE)",
    "StropOptimizeCLIP": "Strop Optimize (CLIP)",
    "StropReport": "Strop Report",
}
