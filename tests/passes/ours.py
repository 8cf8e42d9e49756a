"""What holds for each pass whose nodes only kernels of ours compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from strop.options import Options


def assert_needs_kernels_of_ours(name: str, found: Callable[..., Sequence[Any]]) -> None:
    """``found``: what the pass makes of a module that it fits, given a device, a ``dtype``, or
    options. Nothing elsewhere, in another type, or where it or these kernels are switched off."""
    assert found()
    assert not found("cpu")
    assert not found(dtype=torch.float32)
    assert not found(kernels_off=("wgmma_gemm",))
    assert not found(disable=(name,))
    assert name in Options().on(has_wgmma=False).disable
    assert name not in Options().on(has_wgmma=True).disable
