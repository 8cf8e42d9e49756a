"""Pictures leave the GPU as bytes.

diffusers copies a picture to the host as floats, and multiplies, rounds and converts it there by
one thread, while a GPU has nothing to do. The same operations where the picture is give the same
bytes, a quarter or half as many to copy.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from strop.diffusion.changes import Changes, in_force, mend

CLASS = "VaeImageProcessor"  # of diffusers; those that are derived from it do other things
NAME = "postprocess"


class Pictures:
    """Stand in for ``postprocess`` of an image processor: floats (B, 3, H, W), which are
    denormalised to 0 to 1, become B pictures of PIL; all else is left to its own function."""

    def __init__(self, processor: Any) -> None:
        self.processor, self.original = processor, processor.postprocess

    def __call__(self, image: Any, output_type: str = "pil", do_denormalize: Any = None) -> Any:
        if not in_force(self):
            return self.original(image, output_type, do_denormalize)
        return self.converted(image, output_type, do_denormalize)

    def converted(self, image: Any, output_type: str = "pil", do_denormalize: Any = None) -> Any:
        if output_type == "pil" and _is_rgb(image) and self._denormalizes(do_denormalize):
            levels = self.processor.denormalize(image).permute(0, 2, 3, 1).float() * 255
            if not levels.isnan().any():  # of which numpy warns
                return _as_pil(levels.round().to(torch.uint8))
        return self.original(image, output_type, do_denormalize)

    def _denormalizes(self, each: Any) -> bool:
        """Tell whether all pictures are denormalised: others may not fit into bytes."""
        return bool(self.processor.config.do_normalize) if each is None else all(each)

    def agrees(self) -> bool:
        """Tell whether both ways give the same pictures, with this edition of diffusers."""
        floats = torch.linspace(-1.5, 1.5, 3 * 32 * 32).reshape(1, 3, 32, 32)
        (ours,), (theirs,) = self.converted(floats), self.original(floats, "pil")
        return bool(ours.mode == theirs.mode and ours.tobytes() == theirs.tobytes())

    def __reduce__(self) -> Any:
        """A copy of an image processor has its own function."""
        return getattr, (self.processor, NAME)


def _is_rgb(image: Any) -> bool:
    return (
        isinstance(image, Tensor)
        and image.dim() == 4
        and image.shape[1] == 3
        and image.is_floating_point()
    )


def _as_pil(levels: Tensor) -> list[Any]:
    place = importlib.import_module("PIL.Image")
    return [place.fromarray(each) for each in levels.cpu().contiguous().numpy()]


def convert_on_device(pipe: Any, changes: Changes) -> bool:
    """Put ``Pictures`` in the place of the function of a pipeline's image processor, and tell
    whether it is there: another processor than the known one, or one that somebody has changed,
    stays as it is.
    """
    processor: Any = getattr(pipe, "image_processor", None)
    if type(processor).__name__ != CLASS:
        return False
    mend(processor, NAME)
    own = vars(processor).get(NAME)
    if isinstance(own, Pictures):  # which another pipeline may want, too
        changes.share(own)
        return True
    if own is not None and not _is_of_class(processor, own):
        return False
    ours = Pictures(processor)
    if not ours.agrees():
        return False
    changes.put([processor], NAME, ours)
    return True


def _is_of_class(processor: Any, own: Any) -> bool:
    """Tell whether the function in a processor is that of its class, as copies have it."""
    is_bound = getattr(own, "__self__", None) is processor
    return is_bound and getattr(own, "__func__", None) is getattr(type(processor), NAME)
