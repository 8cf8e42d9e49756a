"""A shape that a module has been called with, bound to the program that serves it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from strop.dispatch.aliases import AliasOfArgument
from strop.dispatch.coded_weights import CodedWeight
from strop.dispatch.variants import Variant
from strop.runtime.run.executor import Bound


@dataclass
class Entry:
    """One shape that a compiled program serves."""

    number: int  # its key in the graph pool: cheaper to hash than a call's shapes
    variant: Variant
    device: torch.device
    env: dict[str, int] = field(default_factory=dict)
    uses: int = 0
    has_graph: bool = True  # False once its CUDA graph could not be had
    addresses: tuple[int, ...] = ()  # of the arguments of the first call
    bounds: dict[int, Bound] = field(default_factory=dict)
    placed: list[Tensor | None] | None = None
    coded: list[CodedWeight] = field(default_factory=list)  # whose tensors are among ``placed``
    aliases: tuple[AliasOfArgument, ...] = ()
    steady: tuple[int, ...] = ()  # see ``Adapter.steady``
    timestep: int | None = None  # see ``Adapter.timestep``
    piece: str = ""  # of a step that a step cache divides
    is_pure: bool = False  # see ``Program``
    has_exchanges: bool = False  # see ``Program``
    free: frozenset[int] = frozenset()  # places of arguments that it serves at any length
    settings: Hashable = ()  # of torch's libraries, under which its graph is captured

    def let_go(self) -> None:
        """Keep nothing that refers to weights."""
        self.bounds.clear()
        self.placed = None
        self.coded = []

    def repeated(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return the places of arguments that lie where they lay in the first call."""
        pairs = zip(self.addresses, tensors, strict=False)
        return [n for n, (address, given) in enumerate(pairs) if given.data_ptr() == address]

    def is_like(self, other: Entry) -> bool:
        """Tell whether the other runs the same program at the same sizes. Calls do that differ in
        what is converted anyway, such as timesteps of another type."""
        own, its = (
            (e.variant, e.device, e.env, e.steady, e.timestep, e.aliases, e.settings)
            for e in (self, other)
        )
        return own[0] is its[0] and own[1:] == its[1:]
