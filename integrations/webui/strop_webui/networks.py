"""Put LoRA into weights before a compiled call, as A1111's layers do within their forward.

A1111's built-in extension for LoRA replaces the forward of torch's layers, for all layers of the
process: each first brings its weights in line with the networks of the prompt, in place, and then
runs. Compiled code does not call layers. So the weights are brought in line before it, by that
extension's own function, and torch's own forward stands in the classes while it runs: what Strop
compiles then knows nothing of networks, and another LoRA is no other graph.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .calls import origin_of

# What a class of torch is called in the extension, and the class.
LAYERS: dict[str, type[nn.Module]] = {
    "Linear": nn.Linear,
    "Conv2d": nn.Conv2d,
    "GroupNorm": nn.GroupNorm,
    "LayerNorm": nn.LayerNorm,
    "MultiheadAttention": nn.MultiheadAttention,
}
# What A1111 writes into layers: their names, and what their weights are made of now.
BOOKS = (
    "network_layer_name",
    "network_current_names",
    "network_weights_backup",
    "network_bias_backup",
)


def reason_against(options: Any) -> str:
    """Say why layers of torch cannot run compiled, or nothing. ``options`` are the web UI's."""
    networks = sys.modules.get("networks")
    for name, kind in LAYERS.items():
        own = getattr(networks, f"network_{name}_forward", None)
        if kind.forward is not own and not kind.forward.__module__.startswith("torch."):
            return f"torch's {name} has another forward: {origin_of(kind.forward)}"
    if getattr(options, "lora_functional", False) and getattr(networks, "loaded_networks", ()):
        return "LoRA is computed beside each layer (the setting 'use old method')"
    return ""


class NetworkLayers:
    """These are the parts of one UNet, for whose weights A1111 keeps books in the parts."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._layers = [
            part for part in model.modules() if isinstance(part, tuple(LAYERS.values()))
        ]
        self._books = [part.__dict__ for part in model.modules()]

    def bring_in_line(self) -> None:
        """Give layers the weights that the networks of the prompt ask for."""
        networks = sys.modules.get("networks")
        if networks is not None:
            with torch.no_grad():
                for layer in self._layers:
                    networks.network_apply_weights(layer)

    @contextlib.contextmanager
    def without_networks(self) -> Iterator[None]:
        """Have layers of torch's own meanwhile: their classes' forward, and no books. Strop takes
        attributes of a part for settings, and would compile the UNet again for each other LoRA."""
        taken = [
            (book, {key: book.pop(key) for key in BOOKS if key in book}) for book in self._books
        ]
        originals = getattr(sys.modules.get("networks"), "originals", None)
        with contextlib.ExitStack() as after:
            for name, kind in LAYERS.items():
                own = getattr(originals, f"{name}_forward", None)
                if own is not None and own is not kind.forward:
                    after.callback(setattr, kind, "forward", kind.forward)
                    kind.forward = own
            try:
                yield
            finally:
                for book, entries in taken:
                    book.update(entries)
