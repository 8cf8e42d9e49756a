"""Hand generators of random numbers among the arguments of a call to torch, which draws by them as
in eager."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from strop.ir.graph import GeneratorRef

_MOST_GENERATORS = 1000
_FIRST_SEED = 7_418_530_000  # of generators that stand for those of a call in its trace


def stand_in(generator: GeneratorRef, device: torch.device) -> torch.Generator:
    """Make a generator for a trace, which draws nothing; copies of it are known by their seed."""
    return torch.Generator(device).manual_seed(_FIRST_SEED + generator.index)


def stands_for(generator: torch.Generator) -> GeneratorRef | None:
    """Return which generator of the call it is in a trace; None for one that the code itself
    holds."""
    index = generator.initial_seed() - _FIRST_SEED
    return GeneratorRef(index) if 0 <= index < _MOST_GENERATORS else None


def _by_generator(
    whole: Callable[..., Tensor], write: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Draw into an empty tensor: ``torch.randn`` and ``torch.rand`` with a generator want sizes
    that are known, and do no more than that."""

    def draw(*size: Any, generator: Any = None, **kwargs: Any) -> Tensor:
        if generator is None:
            return whole(*size, **kwargs)
        if kwargs.get("out") is not None:
            return whole(*size, generator=generator, **kwargs)
        return write(torch.empty(*size, **kwargs), generator=generator)

    return draw


DRAWS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.randn: _by_generator(torch.randn, Tensor.normal_),
    torch.rand: _by_generator(torch.rand, Tensor.uniform_),
}


def draws(node: Node) -> bool:
    """Tell whether a traced call draws random numbers. Attention is tagged so, and without dropout
    does not."""
    if node.target is operator.getitem:
        return draws(node.args[0])  # type: ignore[arg-type]
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    return bool(node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p"))
