"""Keep parts of a model that no step needs in the host's memory, where they leave room on a GPU.

With ``--pre_compute_text_embeddings`` no step reads a text encoder, and with ``--cache_latents``
none reads the autoencoder. Pictures between steps are drawn with both: they come back for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from strop.train.model import DiffusionModel
from strop.train.settings import Settings


class IdleParts:
    """Take weights and buffers of ``parts``, which nobody changes, to the host's memory. They go
    back to the same place there each time, so that nothing is copied back, and graphs that watch
    where weights lie see no change."""

    def __init__(self, parts: Sequence[nn.Module], device: torch.device) -> None:
        self._device = device
        tensors = {id(t): t for part in parts for t in (*part.parameters(), *part.buffers())}
        self._kept = [(t, host_copy(t.data)) for t in tensors.values()]
        self._leave()

    @torch.no_grad()
    def _leave(self) -> None:
        for tensor, host in self._kept:
            tensor.data = host

    @contextmanager
    def here(self) -> Iterator[None]:
        """Have the parts on the device in here."""
        try:
            for tensor, host in self._kept:
                tensor.data = device_copy(host, self._device)
            yield
        finally:
            self._leave()


def host_copy(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)


def device_copy(host: Tensor, device: torch.device) -> Tensor:
    return host.to(device, copy=True)


def idle_parts(settings: Settings, model: DiffusionModel) -> IdleParts:
    """Take what no step needs off the GPU. On a CPU all stays as it is."""
    names = names_of_idle(settings, model) if has_own_memory(model.device) else []
    return IdleParts([model.modules[name] for name in names], model.device)


def has_own_memory(device: torch.device) -> bool:
    return device.type != "cpu"


def names_of_idle(settings: Settings, model: DiffusionModel) -> list[str]:
    """Return the parts that no step of the optimizer reads."""
    found = list(model.encoders) if settings.pre_compute_text_embeddings else []
    if settings.cache_latents and settings.task != "controlnet":  # it may be shown latents
        found.append("vae")
    return [name for name in found if name not in model.parts(settings)]
