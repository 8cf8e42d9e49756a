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
    for option in ("wgmma_gemm", name):
        assert not found(**{option: False})
    assert not found(disable=(name,))
    assert not getattr(Options().on(has_wgmma=False), name)
