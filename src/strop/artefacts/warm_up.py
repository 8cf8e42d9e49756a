"""Compile a pipeline ahead of its first picture."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from strop.dispatch.dispatcher import Dispatcher
from strop.errors import OptionError

NUM_STEPS = 2  # the first one of a loop and a later one, which is served otherwise


def warm_up_pipeline(
    pipe: Any,
    dispatchers: Sequence[Dispatcher],
    sizes: Sequence[tuple[int, int]],
    given: dict[str, Any],
) -> None:
    """Draw a picture of each size, in few steps, and wait for all kernels."""
    names = inspect.signature(type(pipe).__call__).parameters
    missing = [name for name in ("height", "width") if name not in names]
    if missing:
        raise OptionError(
            f"strop.warmup: a {type(pipe).__name__} takes no {' and no '.join(missing)}: call it"
            " once, as you are going to"
        )
    usual = {"prompt": "", "num_inference_steps": NUM_STEPS}
    usual = {name: value for name, value in usual.items() if name in names}
    for height, width in sizes:
        pipe(**(usual | given | {"height": height, "width": width}))
    for dispatcher in dispatchers:
        dispatcher.variants.wait()


def check_sizes(sizes: Any) -> tuple[tuple[int, int], ...]:
    """Return pairs of height and width. Raises OptionError for anything else."""
    try:
        found = tuple((height, width) for height, width in sizes)
    except (TypeError, ValueError):
        found = ()
    if not found or not all(type(n) is int and n > 0 for pair in found for n in pair):
        raise OptionError(
            f"strop.warmup got sizes={sizes!r}; it takes heights and widths of pictures, such as"
            " sizes=[(512, 512), (768, 512)]"
        )
    return found
