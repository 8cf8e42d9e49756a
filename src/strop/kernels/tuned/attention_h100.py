"""Hold what attention takes on an H100, case by case, by each library and by kernels of ours.

`python benchmarks/attention_cases.py SWEEP...` writes this file from the sweeps of
`benchmarks/fit_kernels.py attn_libraries`:
`attn_libraries_h100_2026-11-27.json`.
"""

from __future__ import annotations

import torch

from strop.kernels.attention.cases import AttentionCase, Cases, MeasuredCase
from strop.kernels.attention.short import MaskedTile, Masking
from strop.kernels.attention.tma import TmaTile
from strop.kernels.attention.wgmma_tiles import WgmmaTile

CASES: Cases = (
    MeasuredCase(
        AttentionCase(1, 24, 4608, 4608, 128, Masking.NONE, "", 1, torch.bfloat16),
        {
            "sdpa": 406.67,
            "cudnn_attention": 411.35,
            "flash_attention": 869.59,
            "efficient_attention": 1685.08,
            "wgmma_attention": 367.47,
        },
        {"wgmma_attention": WgmmaTile(groups=2, keys=80, stages=3, programs=1, early=False)},
    ),
    MeasuredCase(
        AttentionCase(1, 12, 14040, 14040, 128, Masking.NONE, "", 1, torch.bfloat16),
        {
            "sdpa": 2289.45,
            "cudnn_attention": 2111.92,
            "flash_attention": 3498.41,
            "efficient_attention": 6753.42,
            "wgmma_attention": 1562.47,
        },
        {"wgmma_attention": WgmmaTile(groups=2, keys=80, stages=3, programs=1, early=False)},
    ),
    MeasuredCase(
        AttentionCase(1, 12, 14040, 512, 128, Masking.NONE, "", 1, torch.bfloat16),
        {
            "sdpa": 81.09,
            "cudnn_attention": 81.1,
            "flash_attention": 143.99,
            "efficient_attention": 273.46,
            "wgmma_attention": 94.19,
            "short_attention": 149.39,
        },
        {
            "wgmma_attention": WgmmaTile(groups=2, keys=64, stages=3, programs=1, early=False),
            "short_attention": MaskedTile(queries=64, keys=64, stages=3, num_warps=4, batch=1),
        },
    ),
    MeasuredCase(
        AttentionCase(1, 24, 4224, 4224, 128, Masking.NONE, "", 1, torch.bfloat16),
        {
            "sdpa": 328.57,
            "cudnn_attention": 335.76,
            "flash_attention": 678.11,
            "efficient_attention": 1398.95,
            "wgmma_attention": 301.18,
        },
        {"wgmma_attention": WgmmaTile(groups=2, keys=80, stages=3, programs=1, early=False)},
    ),
    MeasuredCase(
        AttentionCase(2, 24, 4429, 4429, 64, Masking.NONE, "", 1, torch.bfloat16),
        {
            "sdpa": 619.44,
            "cudnn_attention": 608.76,
            "flash_attention": 888.41,
            "efficient_attention": 1941.71,
            "wgmma_attention": 418.25,
        },
        {"wgmma_attention": WgmmaTile(groups=4, keys=64, stages=4, programs=1, early=True)},
    ),
    MeasuredCase(
        AttentionCase(2, 16, 256, 256, 64, Masking.BIAS, "hq", 1, torch.bfloat16),
        {
            "sdpa": 10.35,
            "cudnn_attention": 10.25,
            "efficient_attention": 17.1,
            "short_attention": 7.23,
        },
        {"short_attention": MaskedTile(queries=64, keys=64, stages=3, num_warps=4, batch=1)},
    ),
    MeasuredCase(
        AttentionCase(2, 16, 256, 256, 64, Masking.BIAS, "bhq", 1, torch.bfloat16),
        {
            "sdpa": 10.26,
            "cudnn_attention": 10.25,
            "efficient_attention": 17.05,
            "short_attention": 7.23,
        },
        {"short_attention": MaskedTile(queries=64, keys=64, stages=3, num_warps=4, batch=1)},
    ),
    MeasuredCase(
        AttentionCase(1, 64, 512, 512, 64, Masking.BIAS, "hq", 1, torch.bfloat16),
        {
            "sdpa": 31.61,
            "cudnn_attention": 31.6,
            "efficient_attention": 55.39,
            "short_attention": 26.26,
        },
        {"short_attention": MaskedTile(queries=128, keys=64, stages=3, num_warps=8, batch=1)},
    ),
    MeasuredCase(
        AttentionCase(8, 64, 512, 512, 64, Masking.BIAS, "hq", 1, torch.bfloat16),
        {
            "sdpa": 195.85,
            "cudnn_attention": 196.25,
            "efficient_attention": 404.22,
            "short_attention": 162.0,
        },
        {"short_attention": MaskedTile(queries=128, keys=64, stages=3, num_warps=8, batch=1)},
    ),
    MeasuredCase(
        AttentionCase(2, 64, 256, 256, 64, Masking.BIAS, "hq", 1, torch.bfloat16),
        {
            "sdpa": 17.32,
            "cudnn_attention": 17.3,
            "efficient_attention": 28.64,
            "short_attention": 13.59,
        },
        {"short_attention": MaskedTile(queries=128, keys=64, stages=3, num_warps=8, batch=1)},
    ),
    MeasuredCase(
        AttentionCase(1, 64, 77, 77, 64, Masking.BIAS, "hq", 1, torch.bfloat16),
        {
            "sdpa": 10.9,
            "cudnn_attention": 11.97,
            "efficient_attention": 13.77,
            "short_attention": 5.54,
        },
        {"short_attention": MaskedTile(queries=64, keys=64, stages=3, num_warps=4, batch=1)},
    ),
    MeasuredCase(
        AttentionCase(1, 12, 77, 77, 64, Masking.CAUSAL, "", 1, torch.bfloat16),
        {
            "sdpa": 6.77,
            "cudnn_attention": 6.81,
            "flash_attention": 6.36,
            "efficient_attention": 7.54,
            "short_attention": 3.65,
        },
        {"short_attention": MaskedTile(queries=16, keys=64, stages=4, num_warps=4, batch=1)},
    ),
    MeasuredCase(
        AttentionCase(2, 20, 77, 77, 64, Masking.CAUSAL, "", 1, torch.bfloat16),
        {
            "sdpa": 6.88,
            "cudnn_attention": 6.79,
            "flash_attention": 6.75,
            "efficient_attention": 7.74,
            "short_attention": 4.18,
        },
        {"short_attention": MaskedTile(queries=32, keys=64, stages=3, num_warps=4, batch=1)},
    ),
    MeasuredCase(
        AttentionCase(8, 20, 77, 77, 64, Masking.CAUSAL, "", 1, torch.bfloat16),
        {
            "sdpa": 9.64,
            "cudnn_attention": 9.62,
            "flash_attention": 7.85,
            "efficient_attention": 10.57,
            "short_attention": 6.65,
        },
        {"short_attention": MaskedTile(queries=64, keys=64, stages=3, num_warps=4, batch=1)},
    ),
    MeasuredCase(
        AttentionCase(1, 28, 512, 512, 128, Masking.CAUSAL, "", 7, torch.bfloat16),
        {
            "sdpa": 12.9,
            "cudnn_attention": 12.91,
            "flash_attention": 19.95,
            "short_attention": 16.07,
        },
        {"short_attention": MaskedTile(queries=64, keys=64, stages=3, num_warps=4, batch=1)},
    ),
    MeasuredCase(
        AttentionCase(8, 28, 128, 128, 128, Masking.CAUSAL, "", 7, torch.bfloat16),
        {
            "sdpa": 11.28,
            "cudnn_attention": 11.26,
            "flash_attention": 13.32,
            "short_attention": 12.24,
        },
        {"short_attention": MaskedTile(queries=64, keys=64, stages=3, num_warps=4, batch=1)},
    ),
    MeasuredCase(
        AttentionCase(8, 28, 128, 128, 128, Masking.CAUSAL, "", 1, torch.bfloat16),
        {
            "sdpa": 11.55,
            "cudnn_attention": 11.37,
            "flash_attention": 13.45,
            "efficient_attention": 17.71,
            "short_attention": 12.68,
        },
        {"short_attention": MaskedTile(queries=64, keys=64, stages=3, num_warps=4, batch=1)},
    ),
    MeasuredCase(
        AttentionCase(1, 28, 512, 512, 128, Masking.BOOL, "q", 1, torch.bfloat16),
        {
            "sdpa": 26.63,
            "cudnn_attention": 26.34,
            "efficient_attention": 42.61,
            "short_attention": 20.41,
        },
        {"short_attention": MaskedTile(queries=128, keys=64, stages=3, num_warps=8, batch=1)},
    ),
    MeasuredCase(
        AttentionCase(4, 12, 512, 512, 64, Masking.CAUSAL, "", 1, torch.bfloat16),
        {
            "sdpa": 13.75,
            "cudnn_attention": 13.69,
            "flash_attention": 18.88,
            "efficient_attention": 31.64,
            "short_attention": 17.47,
        },
        {"short_attention": MaskedTile(queries=64, keys=64, stages=3, num_warps=4, batch=1)},
    ),
    MeasuredCase(
        AttentionCase(8, 12, 1, 513, 64, Masking.NONE, "", 1, torch.bfloat16),
        {
            "sdpa": 7.35,
            "cudnn_attention": 7.35,
            "flash_attention": 14.88,
            "efficient_attention": 23.66,
            "wgmma_attention": 8.78,
            "tma_attention": 7.93,
            "short_attention": 8.34,
        },
        {
            "wgmma_attention": WgmmaTile(groups=2, keys=128, stages=2, programs=1, early=False),
            "tma_attention": TmaTile(
                queries=64, keys=64, stages=3, num_warps=4, parts=2, blocks=1, with_queries=False
            ),
            "short_attention": MaskedTile(queries=16, keys=64, stages=4, num_warps=4, batch=1),
        },
    ),
    MeasuredCase(
        AttentionCase(32, 12, 1, 513, 64, Masking.NONE, "", 1, torch.bfloat16),
        {
            "sdpa": 22.19,
            "cudnn_attention": 22.23,
            "flash_attention": 40.95,
            "efficient_attention": 36.58,
            "wgmma_attention": 27.5,
            "tma_attention": 21.9,
            "short_attention": 22.34,
        },
        {
            "wgmma_attention": WgmmaTile(groups=2, keys=128, stages=2, programs=1, early=False),
            "tma_attention": TmaTile(
                queries=64, keys=32, stages=4, num_warps=4, parts=2, blocks=0, with_queries=False
            ),
            "short_attention": MaskedTile(queries=16, keys=64, stages=4, num_warps=4, batch=1),
        },
    ),
    MeasuredCase(
        AttentionCase(1, 12, 128, 128, 64, Masking.NONE, "", 1, torch.bfloat16),
        {
            "sdpa": 6.19,
            "cudnn_attention": 6.2,
            "flash_attention": 5.39,
            "efficient_attention": 7.61,
            "wgmma_attention": 3.7,
            "tma_attention": 4.0,
            "short_attention": 3.64,
        },
        {
            "wgmma_attention": WgmmaTile(groups=2, keys=128, stages=2, programs=1, early=False),
            "tma_attention": TmaTile(
                queries=64, keys=64, stages=3, num_warps=4, parts=2, blocks=1, with_queries=False
            ),
            "short_attention": MaskedTile(queries=16, keys=64, stages=4, num_warps=4, batch=1),
        },
    ),
    MeasuredCase(
        AttentionCase(8, 16, 384, 384, 64, Masking.NONE, "", 1, torch.bfloat16),
        {
            "sdpa": 17.82,
            "cudnn_attention": 17.73,
            "flash_attention": 27.18,
            "efficient_attention": 46.08,
            "wgmma_attention": 16.29,
            "tma_attention": 17.86,
            "short_attention": 22.78,
        },
        {
            "wgmma_attention": WgmmaTile(groups=3, keys=80, stages=3, programs=1, early=True),
            "tma_attention": TmaTile(
                queries=64, keys=64, stages=3, num_warps=4, parts=2, blocks=1, with_queries=False
            ),
            "short_attention": MaskedTile(queries=64, keys=64, stages=3, num_warps=4, batch=1),
        },
    ),
    MeasuredCase(
        AttentionCase(8, 12, 128, 128, 64, Masking.BOOL, "bq", 1, torch.bfloat16),
        {
            "sdpa": 13.45,
            "cudnn_attention": 13.01,
            "efficient_attention": 15.95,
            "short_attention": 6.17,
        },
        {"short_attention": MaskedTile(queries=64, keys=64, stages=3, num_warps=4, batch=1)},
    ),
    MeasuredCase(
        AttentionCase(8, 16, 384, 384, 64, Masking.BOOL, "bq", 1, torch.bfloat16),
        {
            "sdpa": 37.62,
            "cudnn_attention": 36.55,
            "efficient_attention": 71.44,
            "short_attention": 27.97,
        },
        {"short_attention": MaskedTile(queries=64, keys=64, stages=3, num_warps=4, batch=1)},
    ),
    MeasuredCase(
        AttentionCase(2, 24, 1178, 1178, 64, Masking.BOOL, "bq", 1, torch.bfloat16),
        {"sdpa": 102.67, "cudnn_attention": 113.01, "efficient_attention": 242.97},
    ),
    MeasuredCase(
        AttentionCase(2, 24, 1536, 1536, 128, Masking.BOOL, "b", 1, torch.bfloat16),
        {"sdpa": 172.92, "cudnn_attention": 171.3, "efficient_attention": 483.12},
    ),
    MeasuredCase(
        AttentionCase(8, 16, 197, 197, 64, Masking.NONE, "", 1, torch.bfloat16),
        {
            "sdpa": 12.08,
            "cudnn_attention": 12.08,
            "flash_attention": 12.0,
            "efficient_attention": 21.03,
            "wgmma_attention": 8.96,
            "tma_attention": 10.09,
            "short_attention": 11.88,
        },
        {
            "wgmma_attention": WgmmaTile(groups=4, keys=64, stages=4, programs=1, early=True),
            "tma_attention": TmaTile(
                queries=64, keys=32, stages=4, num_warps=4, parts=2, blocks=0, with_queries=False
            ),
            "short_attention": MaskedTile(queries=64, keys=64, stages=3, num_warps=4, batch=1),
        },
    ),
    MeasuredCase(
        AttentionCase(1, 16, 197, 197, 64, Masking.NONE, "", 1, torch.bfloat16),
        {
            "sdpa": 7.8,
            "cudnn_attention": 7.79,
            "flash_attention": 9.12,
            "efficient_attention": 12.29,
            "wgmma_attention": 4.68,
            "tma_attention": 5.27,
            "short_attention": 5.39,
        },
        {
            "wgmma_attention": WgmmaTile(groups=2, keys=128, stages=2, programs=1, early=False),
            "tma_attention": TmaTile(
                queries=64, keys=64, stages=3, num_warps=4, parts=2, blocks=1, with_queries=False
            ),
            "short_attention": MaskedTile(queries=64, keys=64, stages=3, num_warps=4, batch=1),
        },
    ),
    MeasuredCase(
        AttentionCase(8, 16, 729, 729, 72, Masking.NONE, "", 1, torch.bfloat16),
        {
            "sdpa": 76.77,
            "cudnn_attention": 75.99,
            "flash_attention": 107.28,
            "efficient_attention": 235.35,
            "wgmma_attention": 53.6,
            "short_attention": 120.5,
        },
        {
            "wgmma_attention": WgmmaTile(groups=3, keys=64, stages=3, programs=1, early=True),
            "short_attention": MaskedTile(queries=64, keys=64, stages=3, num_warps=4, batch=1),
        },
    ),
    MeasuredCase(
        AttentionCase(512, 4, 49, 49, 32, Masking.BIAS, "hq", 1, torch.bfloat16),
        {
            "sdpa": 109.97,
            "cudnn_attention": 63.31,
            "efficient_attention": 35.48,
            "short_attention": 18.29,
        },
        {"short_attention": MaskedTile(queries=64, keys=64, stages=3, num_warps=4, batch=1)},
    ),
    MeasuredCase(
        AttentionCase(32, 16, 49, 49, 32, Masking.BIAS, "hq", 1, torch.bfloat16),
        {
            "sdpa": 31.14,
            "cudnn_attention": 21.59,
            "efficient_attention": 13.36,
            "short_attention": 6.15,
        },
        {"short_attention": MaskedTile(queries=64, keys=64, stages=3, num_warps=4, batch=1)},
    ),
    MeasuredCase(
        AttentionCase(512, 4, 49, 49, 32, Masking.BIAS, "bhq", 1, torch.bfloat16),
        {
            "sdpa": 115.5,
            "cudnn_attention": 75.36,
            "efficient_attention": 51.91,
            "short_attention": 20.83,
        },
        {"short_attention": MaskedTile(queries=64, keys=64, stages=3, num_warps=4, batch=1)},
    ),
)
