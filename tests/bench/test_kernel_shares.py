"""Times of kernels are added up by what the kernels do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.kernel_shares import KernelTime, class_of, lines_of, summary


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_bias_TNT", "product"),
        ("cutlass_80_tensorop_s16816gemm_f16_256x128_32x3_nn_align8", "product"),
        ("pytorch_flash::flash_fwd_kernel", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_knob_7_64x128x128", "attention"),
        ("sm90_xmma_fprop_implicit_gemm_f16f16", "convolution"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("row_native_layer_norm_mul_add", "other"),
    ],
)
def test_a_name_tells_the_class(name: str, kind: str) -> None:
    assert class_of(name) == kind


def test_times_are_those_of_a_call() -> None:
    kernels = [
        KernelTime("gemm", 0, 100),
        KernelTime("row_norm", 90, 140),  # beside the end of the one before
        KernelTime("gemm", 200, 300),
        KernelTime("row_norm", 300, 340),
    ]
    found = summary(reversed(kernels), 2)
    assert found["ms"] == {"other": 0.045, "product": 0.1}
    assert found["gap_ms"] == 0.03
    assert found["kernels"] == 2
    assert [(row["name"], row["count"], row["ms"]) for row in found["by_name"]] == [
        ("gemm", 1, 0.1),
        ("row_norm", 1, 0.045),
    ]
    first, second = lines_of("strop", found, 1)
    assert first == "strop: 2 kernels, ms: other 0.04, product 0.10, gaps 0.03"
    assert second.split() == ["0.100", "ms", "1", "x", "gemm"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_command(tmp_path: Path) -> None:
    out, command = tmp_path / "found.json", Path("benchmarks") / "kernel_shares.py"
    words = ["P1", "--contenders", "strop", "--without", "dot_merge", "--out", str(out)]
    subprocess.run([sys.executable, str(command), *words], check=True)
    found = json.loads(out.read_text())["contenders"]
    assert [*found] == ["strop", "strop-without"]
    assert found["strop"]["kernels"] < found["strop-without"]["kernels"]
