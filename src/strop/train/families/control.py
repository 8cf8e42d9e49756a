"""Define what a family's ControlNets are: the interface that the trainer asks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from strop.errors import OptionError
from strop.wording import counted

if TYPE_CHECKING:
    from strop.train.settings import Settings

Encoding = Callable[[Tensor, bool], Tensor]
"""Draws scaled latents of pixels from -1 to 1, and shifts them as the autoencoder says if asked."""


class Control(ABC):
    """Describe ControlNets that steer the denoisers of one family."""

    pipeline: ClassVar[str]
    """Names the class of diffusers that draws with one."""
    kind: ClassVar[str]
    """Names the class of the network."""
    shared: ClassVar[tuple[str, ...]]
    """Names settings that it must have in common with the denoiser."""
    picture: ClassVar[str] = "control_image"
    """Names the pipeline's argument for conditioning pictures."""

    @abstractmethod
    def begun(self, settings: Settings, pipe: Any) -> nn.Module:
        """Return a new ControlNet, a copy of the first blocks of the denoiser, with outputs of
        zeros. Raises OptionError for settings that the denoiser has nothing for."""

    @abstractmethod
    def check(self, folder: Path, config: Mapping[str, Any], pipe: Any) -> None:
        """Raise for a ControlNet with this config that is not for the pipeline, or not trained."""

    @abstractmethod
    def shown(self, net: Any, pixels: Tensor, encoded: Encoding) -> Tensor:
        """Return what the ControlNet is shown of conditioning pictures [rows, 3, height, width]
        from 0 to 1, as its pipeline has it."""

    @abstractmethod
    def joined(self, denoiser: nn.Module, net: nn.Module) -> nn.Module:
        """Return a module that takes the denoiser's arguments and ``controlnet_cond``, by which the
        ControlNet steers the denoiser."""


def check_shared(folder: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any], of: str) -> None:
    """Raise OptionError for the first setting of a ControlNet that the denoiser has otherwise."""
    for name, own in ours.items():
        pair = [list(one) if isinstance(one, tuple) else one for one in (theirs.get(name), own)]
        if pair[0] != pair[1]:
            raise OptionError(
                f"the ControlNet in {folder} was made for another model: its {name} is {pair[0]}, "
                f"that of the {of} is {pair[1]}; give one of this model's, or none"
            )


def counted_blocks(
    name: str, wish: int | None, usual: int, have: int, read: Callable[[int], int]
) -> int:
    """Return how many blocks a new ControlNet has: as many as one wishes, or as usual, of as many
    as ``have``. Of a number of blocks the denoiser reads the first ``read``; the others would learn
    nothing. Raises OptionError for such numbers."""
    whole = [count for count in range(have + 1) if read(count) == count]
    if wish is None:
        return max(count for count in whole if count <= usual)
    if wish not in whole:
        near = sorted(sorted(whole, key=lambda count: abs(count - wish))[:2])
        why = (
            f"the transformer has {counted(have, 'block')} that it may start from"
            if wish > have
            else f"the transformer reads what {read(wish)} of them give, and the rest would learn "
            "nothing"
        )
        raise OptionError(f"{name} is {wish}: {why}; take {' or '.join(map(str, near))}")
    return wish


def copy_first(copies: Any, blocks: Any) -> None:
    """Give each block of a ControlNet the weights of the denoiser's at its place."""
    for copy, block in zip(copies, blocks, strict=False):
        copy.load_state_dict(block.state_dict())


def refuse_layers(settings: Settings, names: tuple[str, ...], of: str) -> None:
    """Raise OptionError for numbers of layers that a family has nothing for."""
    for name in names:
        if getattr(settings, name) is not None:
            raise OptionError(f"{name} is not for ControlNets of {of}; leave it out")


def known_to(kind: Any, config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the part of a denoiser's settings that its ControlNet has too, with changes."""
    from inspect import signature

    names = signature(kind.__init__).parameters
    return {**{name: value for name, value in config.items() if name in names}, **changes}
