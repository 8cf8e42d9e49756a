"""Kernels of the reference cases as machine code: no register is spilled."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.codegen.triton import emit
from tests.codegen.test_triton_compile import SHARED_LIMIT, compiled, resources
from tests.fusion.test_reference_cases import lowered

pytest.importorskip("triton")

CASES = (
    "two_outputs",
    "softmax",
    "softmax_across",
    "log_softmax",
    "log_softmax_first",
    "layer_norm_of_12345",
    "rms_norm",
    "two_layer_norms",
    "softmax_of_layer_norm",
    "standardised",
    "group_norm_silu_channels_last",
    "argmax",
    "argmax_of_all",
    "column_sum",
    "sum_of_all",
    "var_mean_of_all",
    "sum_of_40960",
)


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_spilled(name: str, arch: int, tmp_path: Path):
    for low in lowered(name):
        cubin = compiled(emit(low.kernel).source, arch)
        assert cubin.shared <= SHARED_LIMIT
        _, stack = resources(cubin, tmp_path)
        assert stack == 0
