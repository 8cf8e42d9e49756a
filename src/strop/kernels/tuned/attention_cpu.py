"""Hold what attention takes on a CPU."""

from __future__ import annotations

import torch

from strop.kernels.attention.cpu_cases import CpuCase, CpuCases

CASES: CpuCases = (
    CpuCase("avx512_bf16", torch.float32, False, 8, 256, 256, 64, 1.0, 2.0),
    CpuCase("avx512_bf16", torch.bfloat16, False, 8, 256, 256, 64, 1.0, 2.0),
    CpuCase("avx512", torch.float32, False, 8, 256, 256, 64, 1.0, 2.0),
    CpuCase("avx512", torch.bfloat16, False, 8, 256, 256, 64, 1.0, 2.0),
    CpuCase("avx2", torch.float32, False, 8, 256, 256, 64, 1.0, 2.0),
    CpuCase("avx2", torch.bfloat16, False, 8, 256, 256, 64, 1.0, 2.0),
)
