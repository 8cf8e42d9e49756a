"""Judge whether the kernels that rules choose are the fastest ones, by sweeps that an earlier run
left.

A sweep is a JSON file of ``benchmarks/fit_kernels.py`` for ``attn_tma``, ``attn_wgmma``,
``conv_wgmma``, ``linear_wgmma``, ``linear_paired`` or ``linear_normed``: at each shape the
microseconds of the library and of every tile.
"""

from __future__ import annotations

import ast
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from strop.errors import StropError
from strop.kernels.attention import rows as attention
from strop.kernels.attention.cross import CrossTile
from strop.kernels.attention.wgmma_tiles import WgmmaTile
from strop.kernels.gemm import rows as products
from strop.kernels.gemm.implicit import ConvShape, picture_of
from strop.kernels.gemm.tile import ENDS, NORMED, GemmTile
from strop.kernels.kernel import Problem
from strop.kernels.library import select
from strop.kernels.tuned import h100

LIBRARY, BLAS = LIBRARIES = ("cudnn", "cublas")
KEEPS = "keeps"  # before the numbers of a tile that keeps keys and values
MUST_MEAN, MUST_WORST = 0.97, 0.90  # of the speed of the fastest
Shape = tuple[Any, ...]
Name = tuple[Any, ...] | str  # the numbers of a tile, or one of LIBRARIES


@dataclass(frozen=True, slots=True)
class RuleChoice:
    """Hold what a rule has chosen at a shape of a sweep. ``was_fitted``: the rule's numbers are
    from this very shape."""

    kind: str
    shape: Shape
    chosen: Name
    us: float
    fastest: Name
    fastest_us: float
    was_fitted: bool

    @property
    def share(self) -> float:
        return self.fastest_us / self.us


@dataclass(frozen=True, slots=True)
class Verdict:
    """Hold the geometric mean and the least of the shares, of shapes that nothing was fitted to, or
    of all."""

    count: int
    mean: float
    worst: RuleChoice

    @property
    def holds(self) -> bool:
        return self.mean >= MUST_MEAN and self.worst.share >= MUST_WORST


def picture(shape: Shape) -> ConvShape:
    """Return the picture of a shape of a sweep: batch, height = width, channels in and out, window
    and stride."""
    batch, side, ins, outs, size, stride = shape
    return picture_of((batch, ins, side, side), (outs, ins, size, size), stride)


def _attention(shape: Shape) -> Name:
    batch, heads, queries, keys, head = shape
    tile = attention.tile_of(head, batch * heads, queries, keys, h100.DEVICE)
    if tile is None:
        return LIBRARY
    return (KEEPS, *astuple(tile)) if isinstance(tile, CrossTile) else astuple(tile)


def _product(shape: Shape) -> Name:
    return _gemm(_convolution(shape), LIBRARY)


def _convolution(shape: Shape) -> Problem:
    batch, side, ins, outs, size, stride = shape
    around = {"padding": (1, 1), "dilation": (1, 1), "groups": 1, "stride": (stride, stride)}
    shapes = (batch, ins, side, side), (outs, ins, size, size)
    return Problem("conv2d", tuple(sorted(around.items())), shapes, torch.float16)


def _linear(shape: Shape) -> Name:
    rows, columns, depth, end = shape
    return _paired((rows, columns, depth, 0, end)) if end in ENDS else BLAS


def _paired(shape: Shape) -> Name:
    """Return the choice for a linear whose sum goes on over ``rank`` channels, if there are any."""
    rows, columns, depth, rank, end = shape
    plain, paired = (op for op in products.LINEARS if products.OPS[op] == end)
    pair = ((rows, rank), (columns, rank)) if rank else ()
    more: dict[str, tuple[tuple[int, ...], ...]] = {  # gates want biases, a sum its addend too
        "geglu": ((columns,),),
        "linear_add": ((rows, columns), (columns,)),
    }
    shapes = ((rows, depth), (columns, depth), *pair, *more.get(plain, ()))
    return _gemm(Problem(paired if rank else plain, (), shapes, torch.float16), BLAS)


def _normed(shape: Shape) -> Name:
    """Return the choice for a linear that normalises its columns, to which a value may be added."""
    rows, columns, depth, adds = shape
    alone, summed = (op for op in products.LINEARS if products.OPS[op] == NORMED)
    added = ((rows, columns),) if adds else ()
    shapes = (rows, depth), (columns, depth), *added, *((columns,),) * products.MORE[NORMED]
    how = ("activation", "relu"), ("eps", 1e-5)  # no choice depends on these
    return _gemm(Problem(summed if adds else alone, how, shapes, torch.float16), BLAS)


def _gemm(problem: Problem, library: str) -> Name:
    """The tile where the library of kernels chooses the WGMMA GEMM, else a library's name."""
    if select(problem.call, problem, h100.DEVICE).kernel != products.ROW.name:
        return library
    form, _ = products.form_of(products.picture_of(problem), products.OPS[problem.op], h100.DEVICE)
    return library if form is None else astuple(form.product.tile)


RULES: Mapping[str, Callable[[Shape], Name]] = {
    "attn_tma": _attention,
    "attn_wgmma": _attention,
    "conv_wgmma": _product,
    "linear_wgmma": _linear,
    "linear_paired": _paired,
    "linear_normed": _normed,
}
FITTED: Mapping[str, frozenset[Shape]] = {
    "attn_tma": frozenset(h100.ATTENTION_SHAPES),
    "attn_wgmma": frozenset(h100.ATTENTION_SHAPES),
}
# The rules for products are fitted to all other shapes that were measured. These are layers of
# Stable Diffusion at batches and pictures that were drawn by lot.
HELD_OUT: Mapping[str, frozenset[Shape]] = {
    "conv_wgmma": frozenset(
        (*each, 3, 1)
        for each in (
            (1, 124, 1920, 640),
            (2, 28, 1280, 1280),
            (2, 47, 640, 320),
            (2, 57, 1920, 320),
            (3, 55, 1920, 320),
            (3, 56, 640, 640),
            (3, 60, 1280, 1280),
            (3, 123, 320, 1280),
            (4, 12, 960, 1280),
            (4, 13, 1280, 1280),
            (4, 15, 1920, 1280),
            (4, 80, 320, 640),
            (4, 109, 640, 640),
            (5, 51, 1920, 640),
            (5, 56, 1920, 640),
            (5, 58, 960, 320),
            (6, 11, 960, 640),
            (6, 28, 320, 1280),
            (6, 60, 320, 320),
            (6, 117, 640, 320),
        )
    ),
    "linear_wgmma": frozenset(
        (
            (1296, 1920, 640, ""),
            (1452, 1280, 1280, ""),
            (2028, 3840, 1280, ""),
            (2450, 640, 640, ""),
            (2500, 3840, 1280, ""),
            (2916, 960, 320, ""),
            (3136, 1920, 640, ""),
            (3645, 1280, 5120, ""),
            (4356, 320, 320, ""),
            (5400, 3840, 1280, ""),
            (7569, 960, 320, ""),
            (7938, 1920, 640, ""),
            (11858, 960, 320, ""),
            (21632, 320, 1280, ""),
            (22707, 320, 320, ""),
            (2916, 5120, 640, "gated"),
            (8112, 5120, 640, "gated"),
            (16854, 5120, 640, "gated"),
        )
    ),
}


def choices(sweep: Path) -> Iterator[RuleChoice]:
    """Yield a choice for each shape at which the tile that the rule chooses was timed.

    Raises StropError for a file that is no sweep of a kind that has a rule.
    """
    for kind, shape, us in _swept(sweep):
        chosen = RULES[kind](shape)
        fastest = min(us, key=lambda name: us[name])
        if chosen in us:
            yield RuleChoice(
                kind, shape, chosen, us[chosen], fastest, us[fastest], _was_fitted(kind, shape)
            )


def _was_fitted(kind: str, shape: Shape) -> bool:
    return shape in FITTED[kind] if kind in FITTED else shape not in HELD_OUT.get(kind, ())


def _swept(sweep: Path) -> Iterator[tuple[str, Shape, dict[Name, float]]]:
    try:
        report = json.loads(sweep.read_text())
        kind, rows = report["kind"], report["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StropError(f"{sweep} is no sweep of kernels: {error}") from error
    if kind not in RULES:
        raise StropError(
            f"{sweep} is of {kind}, for which there is no rule; there are {', '.join(RULES)}"
        )
    for row in rows:
        us = {
            _name(who, kind): each
            for who, each in row["us"].items()
            if who.startswith(("(", KEEPS)) or who in LIBRARIES
        }
        yield kind, tuple(row["shape"]), us


def _name(who: str, kind: str) -> Name:
    """Return a tile's name as it is today: with numbers that tiles did not have when a sweep was
    made, and without those that tiles of attention had (polynomials and registers) where they were
    what they are now."""
    if who in LIBRARIES:
        return who
    if who.startswith(KEEPS):
        return (KEEPS, *astuple(CrossTile(*ast.literal_eval(who.removeprefix(KEEPS).strip()))))
    numbers: tuple[Any, ...] = ast.literal_eval(who)
    if len(numbers) == 9 and numbers[6:8] == (0, None):
        return (*numbers[:6], numbers[8])
    if kind not in FITTED:
        return astuple(GemmTile(*numbers))
    return astuple(WgmmaTile(*numbers)) if len(numbers) <= len(fields(WgmmaTile)) else numbers


def judged(found: Sequence[RuleChoice], *, held_out: bool) -> Verdict:
    """Raises StropError where there is nothing to judge."""
    some = [choice for choice in found if not (held_out and choice.was_fitted)]
    if not some:
        raise StropError("no shape of these sweeps is one that the rules were not fitted to")
    mean = math.exp(sum(math.log(choice.share) for choice in some) / len(some))
    return Verdict(len(some), mean, min(some, key=lambda choice: choice.share))


def decision_us(shapes: Iterable[Shape]) -> tuple[float, float]:
    """Measure the median microseconds of a choice for a convolution, at sizes that the library of
    kernels has not seen and again."""
    for known in (select, products.form_of):
        known.cache_clear()
    taken: tuple[list[float], list[float]] = ([], [])
    for shape in shapes:
        problem = _convolution(shape)
        call = problem.call
        for times in taken:
            start = time.perf_counter()
            select(call, problem, h100.DEVICE)
            times.append((time.perf_counter() - start) * 1e6)
    first, again = (sorted(times)[len(times) // 2] for times in taken)
    return first, again
