"""Say whether compiled code can use the weights of a model: it reads them where they lie."""

from __future__ import annotations

from typing import Any

from torch import nn

from .gguf_adapters import drop, follow
from .gguf_weights import layers_of


class Weights:
    """This looks at the layers of a model that ComfyUI may cast or patch while they run."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._layers: list[Any] = []
        self._of_gguf: list[nn.Module] = []

    def look_at(self, model: nn.Module) -> None:
        """Find the layers of a model, and have Strop know the classes of its weights, which it has
        to before it compiles the model."""
        if model is not self._model:
            self.forget()
            self._model = model
            self._layers = [part for part in model.modules() if hasattr(part, "weight_function")]
            self._of_gguf = layers_of(model)

    def reason(self, model: nn.Module) -> str:
        """Say why compiled code cannot use the weights as they are, or nothing. The layers are
        those of the first call: what replaces one later is a new structure for Strop anyway."""
        self.look_at(model)
        for layer in self._layers:
            if layer.weight_function or layer.bias_function:
                return (
                    "weights are patched in each step, as the model is loaded in part (low VRAM)"
                    " or a node wraps its weights"
                )
            if hasattr(layer, "_v"):
                return "weights are loaded layer by layer, under dynamic VRAM"
        return follow(self._of_gguf)

    def forget(self) -> None:
        """Keep nothing on the device for a model that is about to leave it."""
        drop(self._of_gguf)
