"""Attention of transformers by each of torch's libraries and by kernels of ours, masked and biased.

One H100, bf16: diffusion transformers, encoders of texts (T5 with its biases, CLIP, BERT), GPT-2,
Qwen2.5-VL with grouped heads, encoders of pictures, windows of Swin. ``sdpa`` is what runs where
nothing was measured. A library that refuses a case is left out of its row. Errors are against fp64,
of some queries of the first and the last head; ``dead`` says what became of a query whose keys are
all masked: torch's formula gives 0. ``python benchmarks/attention_cases.py`` makes the table of
``strop.kernels.tuned.attention_h100`` of it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from benchmarks.fitting import contest
from strop.ir.device import Device
from strop.kernels.attention import rows as attention
from strop.kernels.attention import short_rows
from strop.kernels.attention.cases import AttentionCase, case_of
from strop.kernels.attention.cross import CrossTile
from strop.kernels.attention.short import MaskedTile, Masking
from strop.kernels.attention.times import AnyTile
from strop.kernels.attention.tma import TmaTile
from strop.kernels.attention.wgmma_tiles import WgmmaTile
from strop.kernels.kernel import Launches, Problem
from strop.kernels.libraries import ATTENTION_LIBRARIES, SDPA_NAME
from strop.kernels.tuned import h100, tuned
from strop.runtime.build.loader import KernelLoader
from strop.runtime.run import attention_calls
from strop.runtime.run.launched_calls import CallSite, Launched
from strop.runtime.run.library_calls import allocating_on, widest_of_cudnn

SECONDS = 140
DTYPE = torch.bfloat16
NONE, CAUSAL, BIAS, BOOL = (masking.value for masking in Masking)
# batch, heads, queries, keys, size of a head, masking, dims of the mask, heads for one of keys
SHAPES: tuple[tuple[Any, ...], ...] = (
    (1, 24, 4608, 4608, 128, NONE, "", 1),  # Flux.1
    (1, 12, 14040, 14040, 128, NONE, "", 1),  # Wan 2.1
    (1, 12, 14040, 512, 128, NONE, "", 1),
    (1, 24, 4224, 4224, 128, NONE, "", 1),  # Qwen-Image
    (2, 24, 4429, 4429, 64, NONE, "", 1),  # SD3 medium
    (2, 16, 256, 256, 64, BIAS, "hq", 1),  # T5-large
    (2, 16, 256, 256, 64, BIAS, "bhq", 1),  # the same of padded texts
    (1, 64, 512, 512, 64, BIAS, "hq", 1),  # T5-XXL
    (8, 64, 512, 512, 64, BIAS, "hq", 1),
    (2, 64, 256, 256, 64, BIAS, "hq", 1),
    (1, 64, 77, 77, 64, BIAS, "hq", 1),
    (1, 12, 77, 77, 64, CAUSAL, "", 1),  # CLIP
    (2, 20, 77, 77, 64, CAUSAL, "", 1),
    (8, 20, 77, 77, 64, CAUSAL, "", 1),
    (1, 28, 512, 512, 128, CAUSAL, "", 7),  # Qwen2.5-VL
    (8, 28, 128, 128, 128, CAUSAL, "", 7),
    (8, 28, 128, 128, 128, CAUSAL, "", 1),
    (1, 28, 512, 512, 128, BOOL, "q", 1),
    (4, 12, 512, 512, 64, CAUSAL, "", 1),  # GPT-2
    (8, 12, 1, 513, 64, NONE, "", 1),
    (32, 12, 1, 513, 64, NONE, "", 1),
    (1, 12, 128, 128, 64, NONE, "", 1),  # BERT
    (8, 16, 384, 384, 64, NONE, "", 1),
    (8, 12, 128, 128, 64, BOOL, "bq", 1),
    (8, 16, 384, 384, 64, BOOL, "bq", 1),
    (2, 24, 1178, 1178, 64, BOOL, "bq", 1),  # a diffusion transformer with padded words
    (2, 24, 1536, 1536, 128, BOOL, "b", 1),
    (8, 16, 197, 197, 64, NONE, "", 1),  # ViT-L
    (1, 16, 197, 197, 64, NONE, "", 1),
    (8, 16, 729, 729, 72, NONE, "", 1),  # SigLIP
    (512, 4, 49, 49, 32, BIAS, "hq", 1),  # Swin-B: its first and third stage
    (32, 16, 49, 49, 32, BIAS, "hq", 1),
    (512, 4, 49, 49, 32, BIAS, "bhq", 1),  # its shifted windows
)
SHORT_KEYS = 1024  # beyond, short_attention is not tried
KINDS = (attention.WGMMA, attention.CROSS, attention.TMA)
ONE_QUERY = (MaskedTile(16, 64, 4, 4),)
FEW = (MaskedTile(64, 64, 3, 4), MaskedTile(32, 64, 3, 4), MaskedTile(16, 64, 4, 4))
MORE = (MaskedTile(64, 64, 3, 4), MaskedTile(32, 64, 3, 4), MaskedTile(128, 64, 3, 8))
# Of these registers, heads of 64 are the largest.
OF_SHORT_HEADS = (MaskedTile(64, 128, 2, 8), MaskedTile(64, 64, 3, 4, batch=2))
DEAD, SAMPLED = (
    1,
    64,
)  # the query without keys; queries at the beginning and the end that are judged


def case(shape: tuple[Any, ...]) -> AttentionCase:
    *sizes, masking, spread, groups = shape
    return AttentionCase(*sizes, Masking(masking), spread, groups, DTYPE)


def problem_of(of: AttentionCase) -> Problem:
    """Return the call of a case, as a program asks the library of kernels about it."""
    few = (of.batch, of.heads // of.groups, of.keys, of.head)
    shapes = [(of.batch, of.heads, of.queries, of.head), few, few]
    mask = None
    if of.masking in (Masking.BIAS, Masking.BOOL):
        shapes.append((*_mask_sizes(of), of.keys))
        mask = torch.bool if of.masking is Masking.BOOL else of.dtype
    attrs = (("causal", of.masking is Masking.CAUSAL), ("scale", of.head**-0.5))
    return Problem("attention", attrs, tuple(shapes), of.dtype, mask)


def _mask_sizes(of: AttentionCase) -> list[int]:
    sizes = zip("bhq", (of.batch, of.heads, of.queries), strict=True)
    return [size if letter in of.spread else 1 for letter, size in sizes]


def tiles(of: AttentionCase) -> tuple[MaskedTile, ...]:
    """Return the tiles of ``short_attention`` that are tried."""
    if of.keys > SHORT_KEYS:
        return ()
    if of.queries == 1:
        return ONE_QUERY
    found = FEW if of.queries <= 128 else MORE
    if of.head <= 64 and of.masking is Masking.BIAS and of.keys > 128:
        shared = of.batch > 1 and "b" not in of.spread
        found += tuple(tile for tile in OF_SHORT_HEADS if tile.batch == 1 or shared)
    return found


def ours(of: AttentionCase, device: Device) -> Iterator[tuple[str, Launches]]:
    """Yield the launches of the kernels of ours that can do a case, by the names of contenders."""
    problem = problem_of(of)
    for row, kind in zip(KINDS, (WgmmaTile, CrossTile, TmaTile), strict=True):
        if not row.supports(problem.call, device) and attention.match(*problem.shapes):
            for tile in tuned(device).attention.tiles(of.head):
                if isinstance(tile, kind) and is_tried(tile, of.keys):
                    yield named(row.name, tile), attention.launches(problem, tile, device)
    for tile in tiles(of):
        yield named(short_rows.NAME, tile), short_rows.launches(problem, tile)


def named(row: str, tile: Any) -> str:
    return f"({row}, {', '.join(map(str, astuple(tile)))})"


def is_tried(tile: AnyTile, keys: int) -> bool:
    """Tell whether a tile can do so many keys; Triton's are for few."""
    return attention.takes(tile, keys) and (keys <= SHORT_KEYS or not isinstance(tile, TmaTile))


def operands(of: AttentionCase) -> list[Tensor]:
    """Return queries, keys and values as linears leave them, and the mask."""
    torch.manual_seed(0)
    new: dict[str, Any] = {"device": "cuda", "dtype": of.dtype}
    few = of.heads // of.groups
    sizes = ((of.queries, of.heads), (of.keys, few), (of.keys, few))
    given = [torch.randn(of.batch, n, heads, of.head, **new).transpose(1, 2) for n, heads in sizes]
    if of.masking not in (Masking.BIAS, Masking.BOOL):
        return given
    mask = torch.randn(*_mask_sizes(of), of.keys, **new)
    if of.masking is Masking.BOOL:
        mask = torch.arange(of.keys, device="cuda").expand(mask.shape) < of.keys - of.keys // 8
        mask = mask.contiguous()
    if "q" in of.spread:
        mask[:, :, DEAD] = False if of.masking is Masking.BOOL else -math.inf
    return [*given, mask]


def calls_of(
    of: AttentionCase, given: list[Tensor], kernels: KernelLoader, stream: int
) -> dict[str, Callable[[], Tensor]]:
    problem, device = problem_of(of), kernels.device
    attrs, found = dict(problem.attrs), dict[str, Callable[[], Tensor]]()
    refused: list[str] = []

    def usual(inputs: Sequence[Tensor]) -> Tensor:
        raise RuntimeError("it does not take such operands")

    libraries = {SDPA_NAME: allocating_on(device)["attention"](attrs)}
    for name in ATTENTION_LIBRARIES:
        libraries[name] = attention_calls.call_of(name, attrs, widest_of_cudnn(device), usual)
    for name, call in libraries.items():
        try:
            call(given)
        except RuntimeError as error:  # torch says that no kernel takes these
            refused.append(f"{name}: {str(error).splitlines()[0][:90]}")
            continue
        found[name] = lambda call=call: call(given)
    for name, launches in ours(of, device):
        site = CallSite(kernels, stream, is_early=False, is_steady=True)
        call = Launched(launches, site, None).allocating(usual)
        found[name] = lambda call=call: call(given)
    print("\n".join(refused), flush=True)
    return found


def picked(of: AttentionCase, x: Tensor) -> Tensor:
    """Return some queries (B, H, S, ...) of the first and the last head and batch element."""
    last = range(max(of.queries - SAMPLED, 0), of.queries)
    rows = sorted({*range(min(SAMPLED, of.queries)), *last})
    return of_ends(of, x).index_select(2, torch.tensor(rows, device=x.device))


def of_ends(of: AttentionCase, x: Tensor) -> Tensor:
    return x[:: max(of.batch - 1, 1), :: max(of.heads - 1, 1)]


def truth(of: AttentionCase, given: list[Tensor]) -> Tensor:
    """Return what the picked queries should give, in fp64: 0 where no key counts."""
    q, *rest = given[:3]
    k, v = (of_ends(of, x.repeat_interleave(of.groups, 1)).double() for x in rest)
    scores = picked(of, q).double() @ k.mT * of.head**-0.5
    whole = (of.batch, of.heads, of.queries, of.keys)
    if of.masking is Masking.BIAS:
        scores = scores + picked(of, given[3].expand(whole)).double()
    elif of.masking is not Masking.NONE:
        places = torch.arange(of.queries, device=q.device)[:, None]
        order = places >= torch.arange(of.keys, device=q.device)
        marks = given[3] if of.masking is Masking.BOOL else order
        scores = scores.masked_fill(~picked(of, marks.expand(whole)), -math.inf)
    has_none = (scores == -math.inf).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(has_none, 0.0) @ v


def measure(shape: tuple[Any, ...], kernels: KernelLoader) -> dict[str, Any]:
    of, stream = case(shape), torch.cuda.Stream()
    assert case_of(problem_of(of)) == of, "the sweep and the library name a case alike"
    with torch.cuda.stream(stream), torch.no_grad():
        given = operands(of)
        exact = truth(of, given)
        calls, errors, dead = calls_of(of, given, kernels, stream.cuda_stream), {}, {}
        for name, call in calls.items():
            found = picked(of, call()).double()
            if "q" in of.spread:
                dead[name] = float(found[:, :, DEAD].abs().max())
                found[:, :, DEAD] = 0
            errors[name] = contest.error(found, exact)
        del exact
        torch.cuda.empty_cache()
        found = contest.us_in_turns(calls, stream)
        return {**found, "errors": errors, "dead": {n: str(each) for n, each in dead.items()}}


def run(args: argparse.Namespace) -> None:
    every = (ours(case(shape), h100.DEVICE) for shape in SHAPES)
    sources = [source for found in every for _, each in found for source in each.sources]
    contest.hold("attn_libraries", args, sources, SHAPES, measure)
