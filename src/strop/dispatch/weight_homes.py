"""Weights that are moved go back to where they were given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strop.dispatch.parts_offload import PartsOffload
from strop.dispatch.weight_regions import Region


class WeightHomes:
    """This notes where the weights of one module were given, and where they were put."""

    def __init__(self) -> None:
        self._home: torch.device | None = None  # of all weights,
        self._elsewhere: dict[int, tuple[Tensor, torch.device]] = {}  # but for these, by their ids
        self._put: dict[int, torch.device] = {}  # where they were put, by their ids

    @property
    def are_known(self) -> bool:
        return self._home is not None

    @property
    def elsewhere(self) -> list[tuple[Tensor, torch.device]]:
        """Return the weights that hooks do not move, with where they are at home."""
        return [*self._elsewhere.values()]

    def note(self, tensors: Sequence[Tensor], offload: PartsOffload | None) -> None:
        """Note where weights were given, before any has been moved. What hooks take to a device is
        at home on the host, and anything else where it is found first."""
        if offload is None:
            self._home = self._home or tensors[0].device
            return
        covered = offload.covered()
        for tensor in tensors:
            if id(tensor) not in covered and id(tensor) not in self._elsewhere:
                self._elsewhere[id(tensor)] = tensor, tensor.device
        self._home = torch.device("cpu")

    def of(self, region: Region) -> torch.device | None:
        """Return where the weights of a region were given."""
        found = (self._elsewhere.get(id(t)) for t in region.weights)
        return next((pair[1] for pair in found if pair is not None), self._home)

    def note_put(self, tensors: Sequence[Tensor]) -> None:
        """Note where all weights lie now, since we have put them there."""
        self._put = {id(tensor): tensor.device for tensor in tensors}

    def were_left(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether somebody has taken all weights to one device since, where some were not:
        there they are wanted."""
        is_one = len({tensor.device for tensor in tensors}) == 1
        return is_one and any(self._put.get(id(t), t.device) != t.device for t in tensors)

    def forget(self) -> None:
        self._home = None
        self._elsewhere.clear()
        self._put.clear()
