"""Attention on a GPU: whatever runs a kind of call, by a table or by none, is right.

Each library and each kernel of ours is made to be the fastest in turn.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from strop.kernels import library
from strop.kernels.attention.cases import MeasuredCase, case_of
from strop.kernels.attention.short import MaskedTile
from strop.kernels.kernel import Problem
from strop.kernels.libraries import ATTENTION_LIBRARIES
from strop.runtime.build.loader import kernel_loader
from strop.runtime.run.launched_calls import CallSite, Launched
from strop.runtime.run.library_calls import allocating_on
from strop.testing import assert_as_accurate_as_eager
from tests.gpus import H100
from tests.kernels.launching import measured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs an NVIDIA GPU of sm_90",
    ),
]
INF = float("inf")
CONTENDERS = ("table", "sdpa", *ATTENTION_LIBRARIES, "short_attention")
TILES = (MaskedTile(64, 64, 3, 4), MaskedTile(128, 64, 3, 8), MaskedTile(16, 64, 4, 4))
# batch, heads, heads of keys, queries, keys, size of a head
SHAPES = {
    "few words": (2, 12, 12, 77, 77, 64),
    "T5": (2, 16, 16, 256, 256, 64),
    "unequal lengths": (2, 4, 4, 130, 300, 128),
    "fewer keys": (1, 4, 4, 300, 130, 64),
    "grouped": (2, 28, 4, 128, 128, 128),
    "one query": (3, 12, 12, 1, 513, 64),
    "windows": (64, 4, 4, 49, 49, 32),
    "heads of 72": (2, 16, 16, 100, 200, 72),
}
MASKS = ("none", "causal", "bias", "bias of each", "marks", "padding", "expanded", "oddly laid")


def operands(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Parts of one merged product, whose heads lie side by side."""
    batch, heads, few, queries, keys, head = shape
    longest = max(queries, keys)
    merged = torch.randn(batch, longest, heads + 2 * few, head, device="cuda").to(dtype)
    q, k, v = merged.transpose(1, 2).split((heads, few, few), 1)
    return [q[:, :, :queries], k[:, :, :keys], v[:, :, :keys]]


def mask_of(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """Return a mask, whose last row of queries has no key, where rows differ."""
    batch, heads, _, queries, keys, _ = shape
    new: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    if kind in ("none", "causal"):
        return None
    if kind == "padding":
        return torch.arange(keys, device="cuda").expand(batch, 1, 1, keys) < max(keys - 5, 1)
    sizes = (batch if kind == "bias of each" else 1, heads, queries, keys)
    if kind == "oddly laid":
        mask = torch.randn(*sizes[:-1], keys + 3, **new)[..., :keys]
    elif kind == "marks":
        mask = torch.rand(batch, 1, queries, keys, device="cuda") > 0.3
        mask[..., 0] = True
    else:
        mask = torch.randn(*sizes, **new)
    if queries > 1:
        mask[:, :, -1] = False if kind == "marks" else -INF
    return mask.expand(batch, heads, queries, keys) if kind == "expanded" else mask


def problem_of(inputs: list[Tensor], causal: bool) -> Problem:
    attrs = (("causal", causal), ("scale", inputs[0].shape[-1] ** -0.5))
    shapes = tuple(tuple(x.shape) for x in inputs)
    mask = inputs[3].dtype if len(inputs) > 3 else None
    return Problem("attention", attrs, shapes, inputs[0].dtype, mask)


def attended(problem: Problem, inputs: list[Tensor], stream: Any) -> tuple[str, Tensor]:
    """Run what the library of kernels chooses, as a program does."""
    kernels = kernel_loader("cuda", 0, "", 0)
    choice = library.select(problem.call, problem, H100)
    usual = allocating_on(H100, choice.kernel)["attention"](dict(problem.attrs))
    if choice.launches is None:
        return choice.kernel, usual(inputs)
    site = CallSite(kernels, stream.cuda_stream, is_early=False, is_steady=True)
    scratch = None
    return choice.kernel, Launched(choice.launches, site, scratch).allocating(usual)(inputs)


def torchs(inputs: list[Tensor], causal: bool, dtype: torch.dtype | None = None) -> Tensor:
    """Return torch's formula, in another type, or else torch's own choice."""
    q, k, v, *mask = (x.to(dtype) if dtype and x.is_floating_point() else x for x in inputs)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    with sdpa_kernel(SDPBackend.MATH) if dtype else nullcontext():
        return scaled_dot_product_attention(q, k, v, mask[0] if mask else None, is_causal=causal)


@pytest.mark.parametrize("contender", CONTENDERS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_kind_of_call_is_right(name: str, contender: str) -> None:
    shape, stream, ran = SHAPES[name], torch.cuda.Stream(), set()
    torch.manual_seed(0)
    with torch.cuda.stream(stream), torch.no_grad():
        for number, kind in enumerate(MASKS):
            dtype = (torch.float16, torch.bfloat16)[number % 2]
            inputs, mask = operands(shape, dtype), mask_of(kind, shape, dtype)
            inputs += [] if mask is None else [mask]
            problem = problem_of(inputs, kind == "causal")
            case = case_of(problem)
            assert case is not None
            us = {"sdpa": 2.0, contender: 1.0}
            tiles = {"short_attention": TILES[number % len(TILES)]}
            rows = [MeasuredCase(case, us, tiles if contender in tiles else {})]
            with measured(*rows) if contender != "table" else nullcontext():
                kernel, found = attended(problem, inputs, stream)
            ran.add(kernel)
            judge(found, inputs, is_causal=kind == "causal")
    assert contender in ran or contender == "table"


def judge(found: Tensor, inputs: list[Tensor], *, is_causal: bool) -> None:
    """Hold a result against fp64. A query without keys gets what torch's own choice or the formula
    gives it."""
    exact = torchs(inputs, is_causal, torch.float64)
    eager = torchs(inputs, is_causal)
    both = found.isnan() & eager.isnan()
    truth = exact.to(found.dtype)
    found, eager = torch.where(both, truth, found), torch.where(eager.isnan(), truth, eager)
    assert_as_accurate_as_eager(found, eager, exact)


def test_a_graph_of_short_attention_is_replayed() -> None:
    shape, stream = SHAPES["T5"], torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        inputs = operands(shape, torch.float16)
        mask = mask_of("bias", shape, torch.float16)
        assert mask is not None
        inputs.append(mask)
        problem = problem_of(inputs, causal=False)
        case = case_of(problem)
        assert case is not None
        with measured(
            MeasuredCase(case, {"sdpa": 2.0, "short_attention": 1.0}, {"short_attention": TILES[0]})
        ):
            kernel, before = attended(problem, inputs, stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                captured = attended(problem, inputs, stream)[1]
        assert kernel == "short_attention"
        captured.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, before)
