"""Attention on a GPU: whatever runs a kind of call, by a table or by none, is right.

Each library and each kernel of ours is made to be the fastest in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from strop.kernels import library
from strop.kernels.attention import short_rows
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
# batch, heads, heads of keys, queries, keys, size of a head; kinds of masks
CASES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "few words": ((2, 12, 12, 77, 77, 64), ("causal", "bias", "marks")),
    "T5": ((2, 16, 16, 256, 256, 64), ("bias", "bias of each", "expanded", "oddly laid")),
    "unequal lengths": ((2, 4, 4, 130, 300, 128), ("none", "causal", "padding")),
    "fewer keys": ((1, 4, 4, 300, 130, 64), ("none", "causal", "bias")),
    "grouped": ((2, 28, 4, 128, 128, 128), ("none", "causal", "marks")),
    "one query": ((3, 12, 12, 1, 513, 64), ("none", "padding")),
    "windows": ((64, 4, 4, 49, 49, 32), ("bias", "bias of each")),
    "heads of 72": ((2, 16, 16, 100, 200, 72), ("none", "oddly laid")),
}


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


def given(name: str) -> Iterator[tuple[list[Tensor], Problem, MaskedTile]]:
    """Yield the operands of each kind of a case, and a tile of ours."""
    torch.manual_seed(0)
    shape, kinds = CASES[name]
    for number, kind in enumerate(kinds):
        dtype = (torch.float16, torch.bfloat16)[number % 2]
        inputs, mask = operands(shape, dtype), mask_of(kind, shape, dtype)
        inputs += [] if mask is None else [mask]
        yield inputs, problem_of(inputs, kind == "causal"), TILES[number % len(TILES)]


@pytest.fixture(scope="module")
def _built() -> None:
    """Build all kernels at once: one after the other they take minutes."""
    every = [(problem, tile) for name in CASES for _, problem, tile in given(name)]
    launches = (short_rows.launches(problem, tile) for problem, tile in every)
    sources = dict.fromkeys(source for each in launches for source in each.sources)
    kernel_loader("cuda", 0, "", 0).build(list(sources))


@pytest.mark.usefixtures("_built")
@pytest.mark.parametrize("contender", CONTENDERS)
@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_call_is_right(name: str, contender: str) -> None:
    stream, ran = torch.cuda.Stream(), set()
    with torch.cuda.stream(stream), torch.no_grad():
        for inputs, problem, tile in given(name):
            with fastest(contender, problem, tile):
                kernel, found = attended(problem, inputs, stream)
            ran.add(kernel)
            judge(found, inputs, is_causal=problem.attr("causal"))
    assert ran == {contender} or contender == "table"


@contextmanager
def fastest(contender: str, problem: Problem, tile: MaskedTile) -> Iterator[None]:
    """Let a contender be the fastest in this case; the table stays as it is if that is named."""
    case = case_of(problem)
    assert case is not None
    tiles = {"short_attention": tile} if contender == "short_attention" else {}
    if contender == "table":
        yield
    else:
        with measured(MeasuredCase(case, {"sdpa": 2.0, contender: 1.0}, tiles)):
            yield


def judge(found: Tensor, inputs: list[Tensor], *, is_causal: bool) -> None:
    """Hold a result against fp64. A query without keys gets what torch's own choice or the formula
    gives it."""
    exact = torchs(inputs, is_causal, torch.float64)
    eager = torchs(inputs, is_causal)
    both = found.isnan() & eager.isnan()
    truth = exact.to(found.dtype)
    found, eager = torch.where(both, truth, found), torch.where(eager.isnan(), truth, eager)
    assert_as_accurate_as_eager(found, eager, exact)


@pytest.mark.usefixtures("_built")
def test_a_graph_of_short_attention_is_replayed() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        inputs, problem, tile = next(given("T5"))
        with fastest("short_attention", problem, tile):
            kernel, before = attended(problem, inputs, stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                captured = attended(problem, inputs, stream)[1]
        assert kernel == "short_attention"
        captured.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, before)
