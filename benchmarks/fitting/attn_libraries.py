"""Attention of transformers by each of torch's libraries, masked and biased too.

One H100, bf16: encoders of texts (T5 with its biases, CLIP, BERT), GPT-2, encoders of pictures,
windows of Swin, and diffusion transformers. ``run`` is what ``strop`` calls today. A library that
refuses a shape is left out of its row. Errors are against fp32 by torch's plain formula.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.fitting import contest
from strop.runtime.run.library_calls import CUDA_ALLOCATING

SECONDS = 60
NONE, CAUSAL, BIAS, PADDING = "", "causal", "bias", "padding"
# batch, heads, queries, keys, size of a head, mask
SHAPES = (
    (1, 24, 4608, 4608, 128, NONE),  # Flux.1
    (1, 12, 14040, 14040, 128, NONE),  # Wan 2.1
    (1, 12, 14040, 512, 128, NONE),
    (1, 24, 4224, 4224, 128, NONE),  # Qwen-Image
    (2, 24, 4429, 4429, 64, NONE),  # SD3 medium
    (1, 64, 512, 512, 64, BIAS),  # T5-XXL
    (8, 64, 512, 512, 64, BIAS),
    (2, 16, 256, 256, 64, BIAS),  # T5-large
    (1, 12, 77, 77, 64, CAUSAL),  # CLIP
    (8, 20, 77, 77, 64, CAUSAL),
    (8, 28, 128, 128, 128, CAUSAL),  # Qwen2.5-VL
    (4, 12, 512, 512, 64, CAUSAL),  # GPT-2
    (8, 12, 1, 513, 64, NONE),
    (32, 12, 1, 513, 64, NONE),
    (8, 12, 128, 128, 64, PADDING),  # BERT
    (8, 16, 384, 384, 64, PADDING),
    (8, 16, 197, 197, 64, NONE),  # ViT-L
    (8, 16, 729, 729, 72, NONE),  # SigLIP
    (512, 4, 49, 49, 32, BIAS),  # Swin-B, its first and third stage
    (32, 16, 49, 49, 32, BIAS),
)
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def operands(shape: tuple[Any, ...]) -> tuple[list[Tensor], Tensor | None]:
    """Return queries, keys and values as linears leave them, and the mask."""
    batch, heads, queries, keys, head, kind = shape
    torch.manual_seed(0)
    new: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    given = [torch.randn(batch, n, heads, head, **new) for n in (queries, keys, keys)]
    mask = None
    if kind == BIAS:
        mask = torch.randn(1, heads, queries, keys, **new)
    elif kind == PADDING:
        mask = torch.zeros(batch, 1, 1, keys, **new).expand(-1, -1, queries, -1).contiguous()
        mask[:, :, :, -keys // 8 :] = float("-inf")
    return [each.transpose(1, 2) for each in given], mask


def calls_of(given: list[Tensor], mask: Tensor | None, kind: str) -> dict[str, Callable[[], Any]]:
    attrs = {"causal": kind == CAUSAL, "scale": None, "masked": mask is not None}
    ours = CUDA_ALLOCATING["attention"](attrs)
    found: dict[str, Callable[[], Any]] = {
        "run": lambda: ours([*given, mask] if mask is not None else given)
    }
    for name, backend in BACKENDS.items():

        def call(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(*given, mask, is_causal=kind == CAUSAL)

        try:
            call()
        except RuntimeError as error:  # torch says that no kernel takes these
            print(f"{name}: {str(error).splitlines()[0][:90]}")
            continue
        found[name] = call
    return found


def measure(shape: tuple[Any, ...], library: Any) -> dict[str, Any]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        given, mask = operands(shape)
        wide = [each[:1].float() for each in given]
        few = None if mask is None else mask[:1].float()
        with sdpa_kernel(SDPBackend.MATH):
            truth = scaled_dot_product_attention(*wide, few, is_causal=shape[-1] == CAUSAL)
        calls = calls_of(given, mask, shape[-1])
        errors = {name: contest.error(call()[:1].float(), truth) for name, call in calls.items()}
        del wide, truth
        torch.cuda.empty_cache()
        return {**contest.us_in_turns(calls, stream), "errors": errors}


def run(args: argparse.Namespace) -> None:
    contest.hold("attn_libraries", args, (), SHAPES, measure)
