"""Have the kernel library pack every weight that it can, whatever that gains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from strop.kernels import library
from strop.kernels.packed import rows
from strop.kernels.packed.costs import CONV, case_of
from strop.kernels.tuned.packed_cpu import CASES
from strop.runtime.build.processors import processor


@contextmanager
def packing_everything() -> Iterator[None]:
    """Skips a test where the processor was not measured."""
    isa = processor().isa
    for dtype in (torch.float32, torch.bfloat16):
        if case_of(CONV, dtype, isa, CASES) is None:
            pytest.skip(f"nothing is packed in {dtype} on this processor ({isa or 'no vectors'})")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "LEAST_BYTES", dict.fromkeys(rows.LEAST_BYTES, 0))
        patch.setattr(rows, "LEAST_GAINS", dict.fromkeys(rows.LEAST_GAINS, 1e-9))
        _forget_choices()
        try:
            yield
        finally:
            _forget_choices()


def _forget_choices() -> None:
    library.select.cache_clear()
    library._known.cache_clear()
