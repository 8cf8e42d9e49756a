"""The nodes that a user sees."""

from __future__ import annotations

from typing import Any

from .compiled_model import compiled_for, optimized, plain

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


class StropReport:
    """This node shows what has run compiled, and what has not, and why."""

    CATEGORY, FUNCTION, RETURN_TYPES = CATEGORY, "report", ("STRING",)
    RETURN_NAMES = ("report",)
    OUTPUT_NODE = True
    DESCRIPTION = (
        "Show what Strop has compiled. Connect the model, and to 'after' what is to be done first,"
        " such as the latent of the sampler."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "after": ("*",)}}

    @classmethod
    def VALIDATE_INPUTS(cls, input_types: Any) -> bool:
        """Take anything for ``after``."""
        return True

    @classmethod
    def IS_CHANGED(cls, **_: Any) -> float:
        """Have it run in every prompt: what it shows is of that prompt."""
        return float("nan")

    def report(self, model: Any, after: Any) -> dict[str, Any]:
        text = compiled_for(model.model).report()
        return {"ui": {"text": (text,)}, "result": (text,)}


NODE_CLASS_MAPPINGS = {
    "StropOptimizeModel": StropOptimizeModel,
    "StropReport": StropReport,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "StropOptimizeModel": "Strop Optimize (model)",
    "StropReport": "Strop Report",
}
