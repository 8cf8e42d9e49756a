"""Hold what products take on CPUs, with weights as they lie, packed, and by ours, on one thread.

`python benchmarks/cpu_packed.py --table FILE...` writes this file from its own sweeps:
`cpu-packed_cpu_2026-11-28.json`.
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
        Line(11.8, 90627.0, 27243.0),
        Line(27.6, 101283.0, 40110.0),
        31280,
        Line(2.9, 97087.0, 14541.0),
    ),
    PackedCase(
        "avx512_bf16",
        BF16,
        "linear",
        Line(36.0, 195006.0, 32212.0),
        Line(29.7, 208188.0, 64282.0),
        31280,
        Line(4.1, 200087.0, 16292.0),
    ),
    PackedCase(
        "avx512_bf16",
        F32,
        "conv2d",
        Line(48.0, 119146.0, 3953.0),
        Line(48.0, 119146.0, 1000000000.0),
        31280,
    ),
    PackedCase(
        "avx512_bf16",
        BF16,
        "conv2d",
        Line(54.4, 241142.0, 3719.0),
        Line(45.0, 241142.0, 1000000000.0),
        31280,
    ),
)
