"""Hold what products take on CPUs, with weights as they lie and packed, on one thread.

`python benchmarks/cpu_packed.py --table FILE...` writes this file from its own sweeps:
`cpu-packed_cpu_2026-11-27.json`.
"""

from __future__ import annotations

import torch

from strop.kernels.packed.costs import Line, PackedCase

F32, BF16 = torch.float32, torch.bfloat16
CASES = (
    PackedCase(
        "avx512_bf16",
        F32,
        "linear",
        Line(24.7, 73016.0, 12575.0, 14446.0),
        Line(57.6, 103308.0, 13716.0, 8245.0),
        14455,
    ),
    PackedCase(
        "avx512_bf16",
        BF16,
        "linear",
        Line(68.2, 175500.0, 9190.0, 13235.0),
        Line(59.4, 194709.0, 18693.0, 12274.0),
        14455,
    ),
    PackedCase(
        "avx512_bf16",
        F32,
        "conv2d",
        Line(38.9, 114183.0, 3684.0, 3879.0),
        Line(49.6, 113461.0, 1000000000.0, 8640.0),
        14455,
    ),
    PackedCase(
        "avx512_bf16",
        BF16,
        "conv2d",
        Line(60.9, 216205.0, 3677.0, 15887.0),
        Line(49.5, 225324.0, 1000000000.0, 13035.0),
        14455,
    ),
)
