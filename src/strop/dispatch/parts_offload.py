"""Libraries take the weights of a model's parts to a GPU as these are called, and back
(``enable_group_offload``, ``enable_sequential_cpu_offload``). Compiled code calls no parts: the
hooks stay where they are and do nothing, and weights are streamed in the order in which a program
reads them, as under a budget of the user's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from strop.dispatch.group_offload import GroupOffload, group_offload
from strop.dispatch.sequential_offload import SequentialOffload, sequential_offload


class PartsOffload(Protocol):
    """This knows the hooks of one module that move its weights to ``device``, where they have at
    most ``most_bytes`` at a time. ``name`` is what the user has called."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def most_bytes(self) -> int: ...

    @property
    def around(self) -> tuple[Any, ...]:
        """Return the hooks of the module's own forward, from the inside."""

    def covered(self) -> set[int]:
        """Return the ids of the tensors that the hooks move."""

    def is_same(self, other: Any) -> bool:
        """Tell whether another look has found the same hooks."""

    def take(self, wake: Callable[[], object]) -> None:
        """Have the hooks do nothing, and Parameters hold the weights. ``wake`` is called before one
        of them moves weights after all, as somebody calls a part by itself."""

    def has_slipped(self) -> bool:
        """Tell whether a Parameter no longer holds its weight, as somebody has called a part."""

    def let_go(self) -> None:
        """Keep no copy of weights, as these are about to lie where programs read them."""

    def give_back(self) -> None:
        """Have the hooks do what they did, with weights that lie on the host."""


Found = GroupOffload | SequentialOffload


def parts_offload(
    module: nn.Module, parts: Sequence[tuple[str, nn.Module]]
) -> tuple[Found | None, str]:
    """Return what takes weights of a module's ``parts``, which are all of it, to a device and back,
    if anything does and we can stand for it; else why not, or nothing."""
    groups, reason = group_offload(module, parts)
    if groups is not None or reason:
        return groups, reason
    return sequential_offload(module, parts)
