"""Hold what products take on CPUs, with weights as they lie, packed, and by ours, on one thread.

`python benchmarks/cpu_packed.py --table FILE...` writes this file from its own sweeps:
`cpu-packed_cpu_2026-11-29.json`.
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
        Line(5.1, 104887.0, 54748.0),
        Line(16.6, 234486.0, 77365.0),
        36183,
        Line(1.6, 228451.0, 21979.0),
    ),
    PackedCase(
        "avx512_bf16",
        BF16,
        "linear",
        Line(21.1, 460422.0, 41103.0),
        Line(16.5, 490618.0, 65572.0),
        36183,
        Line(2.2, 467089.0, 25883.0),
    ),
    PackedCase(
        "avx512_bf16",
        F32,
        "conv2d",
        Line(25.1, 269863.0, 5229.0),
        Line(25.1, 269863.0, 1000000000.0),
        36183,
    ),
    PackedCase(
        "avx512_bf16",
        BF16,
        "conv2d",
        Line(31.7, 543708.0, 3629.0),
        Line(24.6, 543708.0, 1000000000.0),
        36183,
    ),
)
