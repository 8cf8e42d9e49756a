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
        Line(26.1, 66752.0, 13289.0),
        Line(62.3, 87131.0, 15408.0),
        14455,
        Line(3.0, 89000.0, 20000.0),
    ),
    PackedCase(
        "avx512_bf16",
        BF16,
        "linear",
        Line(70.7, 159629.0, 9792.0),
        Line(62.0, 175192.0, 20811.0),
        14455,
        Line(3.0, 195000.0, 20000.0),
    ),
    PackedCase(
        "avx512_bf16",
        F32,
        "conv2d",
        Line(54.2, 108165.0, 3729.0),
        Line(54.2, 108165.0, 1000000000.0),
        14455,
    ),
    PackedCase(
        "avx512_bf16",
        BF16,
        "conv2d",
        Line(60.5, 218601.0, 3291.0),
        Line(51.5, 218601.0, 1000000000.0),
        14455,
    ),
)
