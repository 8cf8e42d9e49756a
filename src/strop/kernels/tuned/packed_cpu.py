"""Hold what products take on CPUs, with weights as they lie, packed, and by ours, on one thread.

`python benchmarks/cpu_packed.py --table FILE...` writes this file from its own sweeps:
`cpu-packed_cpu_2026-11-29.json`,
`cpu-packed-avx2_cpu_2026-12-01.json`.
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
        Line(4.9, 102066.0, 52370.0),
        Line(15.5, 228461.0, 71757.0),
        39554,
        Line(1.5, 235107.0, 35710.0),
    ),
    PackedCase(
        "avx512_bf16",
        BF16,
        "linear",
        Line(20.2, 430673.0, 42586.0),
        Line(15.5, 456925.0, 85344.0),
        39554,
        Line(1.8, 463745.0, 34978.0),
    ),
    PackedCase(
        "avx512_bf16",
        F32,
        "conv2d",
        Line(29.2, 250982.0, 4706.0),
        Line(29.2, 250982.0, 97911.0),
        39554,
        Line(4.0, 239836.0, 31816.0),
    ),
    PackedCase(
        "avx512_bf16",
        BF16,
        "conv2d",
        Line(37.3, 494875.0, 3265.0),
        Line(28.8, 494875.0, 84093.0),
        39554,
        Line(4.9, 483789.0, 25349.0),
    ),
    PackedCase(
        "avx2",
        F32,
        "linear",
        Line(21.9, 83174.0, 22233.0),
        Line(47.1, 79000.0, 36408.0),
        23981,
        Line(6.6, 84633.0, 14467.0),
    ),
    PackedCase(
        "avx2",
        F32,
        "conv2d",
        Line(82.3, 81513.0, 2906.0),
        Line(82.3, 81513.0, 95694.0),
        23981,
        Line(46.2, 72103.0, 1000000000.0),
    ),
)
