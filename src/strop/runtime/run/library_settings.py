"""Say by which settings of torch its libraries compute on a GPU.

Eager looks at them in each call. A CUDA graph has the kernels that were chosen when it was
captured, so that it serves calls under the same settings alone: whoever turns TF32 off, or asks for
another kind of attention, gets another graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from operator import call

import torch

PRECISIONS = (("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"))
FLAGS = (
    "cublas_allow_fp16_reduced_precision_reduction",
    "cublas_allow_bf16_reduced_precision_reduction",
    "cublas_allow_fp16_accumulation",
    "math_sdp_allow_fp16_bf16_reduction",
    "flash_sdp_enabled",
    "mem_efficient_sdp_enabled",
    "cudnn_sdp_enabled",
    "math_sdp_enabled",
    "cudnn_enabled",
    "cudnn_benchmark",
    "cudnn_deterministic",
    "deterministic_algorithms",
)

_precision = torch._C._get_fp32_precision_getter
_questions: tuple[Callable[[], Hashable], ...] = (
    *(partial(_precision, *of) for of in PRECISIONS),
    *(getattr(torch._C, f"_get_{name}") for name in FLAGS),
)


def library_settings() -> Hashable:
    """Return what is equal where the libraries compute alike. It takes 1 us; nothing is asked in
    a process that has no work for a GPU yet."""
    if not torch.cuda.is_initialized():
        return ()
    return tuple(map(call, _questions))


def convolves_in_tf32() -> bool:
    """Tell whether convolutions of fp32 may be computed in TF32. Torch's ``cudnn.allow_tf32``
    raises where convolutions and recurrent layers have different precisions."""
    return bool(_precision("cuda", "conv") == "tf32")


def wants_same_bits() -> bool:
    """Tell whether convolutions have to give the same bits in each run."""
    return torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
