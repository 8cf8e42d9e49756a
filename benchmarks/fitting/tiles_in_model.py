"""The tile of each product of a model, by what the whole step takes with it.

One H100, fp16: a row of steps of ``strop bench infer`` (P1, P2, P2b, P3). A product alone, in a row
of its own launches, takes less than among others, whose operands lie elsewhere and which end when
they end. So the model itself is bound again with another tile for all products of one size, and
timed in turns with itself as it was: microseconds saved of a step, for each such product and each
tile that a guess says might do; sizes that take longest first. At the end all that have saved
something together. The library is one of the tiles. ``--ins``: products of so many inputs alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

import torch

import strop
from benchmarks.fitting import contest
from benchmarks.fitting.conv_wgmma import TILES as CONVS
from benchmarks.fitting.conv_wgmma import forms
from benchmarks.fitting.linear_wgmma import OF_ENDS
from strop.bench import timer
from strop.bench.infer_contenders import Field
from strop.bench.infer_rows import Row, chosen_rows
from strop.dispatch.dispatcher import Dispatcher
from strop.ir.program import CallStep
from strop.kernels.gemm import choice as products
from strop.kernels.gemm.implicit import Picture
from strop.kernels.gemm.tile import Tile
from strop.wording import counted

SECONDS = 240
DEVICE, SAMPLE_MS, WORST = torch.device("cuda"), 120.0, 1.4
LEAST_US = 5.0  # saved by a tile that is taken at the end
Size = tuple[Picture, str]  # and what happens at the end
Choice = Tile | None  # None: the library


@contextmanager
def chosen(tiles: Mapping[Size, Choice]) -> Iterator[None]:
    """Products of these sizes have these tiles, whatever the rule says."""
    rules: Any = products
    before = rules._forms, rules.us_of

    def some(of: Picture, end: str) -> Iterator[products.Form]:
        if (of, end) not in tiles:
            yield from before[0](of, end)
        elif (tile := tiles[of, end]) is not None:
            yield products.form(tile, of, end)

    def us_of(found: products.Form, of: Picture) -> float:
        return 0.0 if (of, found.product.end) in tiles else float(before[1](found, of))

    rules._forms, rules.us_of = some, us_of
    products.form_of.cache_clear()
    try:
        yield
    finally:
        rules._forms, rules.us_of = before
        products.form_of.cache_clear()


class Model:
    """One copy of the row's model, bound by some choice."""

    def __init__(self, row: Row) -> None:
        self.field = Field(row.case(torch.float16), DEVICE, strop.Options(strict=True))
        self.call, *_ = self.field.start("strop", row.size, row.batch)
        self.dispatcher: Dispatcher = self.field.target.forward
        self.field.wait()
        self.calls = max(2, round(SAMPLE_MS / timer.elapsed_ms(self.call, DEVICE, 4)))

    def bind(self, tiles: Mapping[Size, Choice]) -> torch.Tensor:
        """Anew, with a graph; a result."""
        self.dispatcher.forget_shapes()
        with chosen(tiles):
            for _ in range(3):
                result: torch.Tensor = self.call()
        self.field.wait()
        return result

    def sizes(self) -> Counter[Size]:
        """Of all products, and how many there are of each."""
        entry = next(reversed(self.dispatcher._entries.values()))
        program, env, found = entry.variant.program, entry.env, Counter[Size]()
        for step in program.at(env):
            if isinstance(step, CallStep) and "wgmma_gemm" in step.families:
                shapes = [[size.eval(env) for size in ref.shape] for ref in step.inputs]
                of = products.picture_of(step.op, dict(step.attrs), shapes)
                found[of, products.OPS[step.op]] += 1
        return found


def candidates(size: Size) -> list[Choice]:
    """Other tiles than the rule's, and the library, if that does such a thing."""
    of, end = size
    now = products.form_of(of, end)
    tiles = CONVS if of.size > 1 else OF_ENDS[end]
    found: list[Choice] = [each.product.tile for each in forms(of, end, tiles, WORST)]
    found += [None] if of.windows == 1 else []
    return [tile for tile in found if tile != (now.product.tile if now else None)]


def name(tile: Choice) -> str:
    return str(astuple(tile)) if tile else "library"


def name_of(size: Size) -> str:
    of, end = size
    rows = f"{of.batch}x{of.height}x{of.width}" if of.size > 1 else str(of.width)
    return f"{rows} {of.ins}>{of.outs} {end if of.size == 1 else f'window {of.size}'}"


def saved(base: Model, trial: Model, rounds: int) -> float:
    """Microseconds of a step, median of pairs."""
    pairs = []
    for turn in range(rounds):
        both = (base, trial) if turn % 2 else (trial, base)
        ms = {model: timer.elapsed_ms(model.call, DEVICE, base.calls) for model in both}
        pairs.append((ms[base] - ms[trial]) * 1e3)
    return statistics.median(pairs)


@torch.no_grad()
def measure(row: Row, seconds: float, rounds: int, ins: int) -> dict[str, Any]:
    end = time.monotonic() + seconds
    base, trial = Model(row), Model(row)
    sizes, best, rows = trial.sizes(), dict[Size, Choice](), []
    sizes = Counter({size: n for size, n in sizes.items() if ins in (0, size[0].ins)})
    right = base.call()

    def weight(size: Size) -> float:
        found = products.form_of(*size)
        us = products.us_of(found, size[0]) if found else products.others_us(*size)
        return sizes[size] * us

    noise = saved(base, trial, rounds)
    print(
        f"{row.name}: {counted(len(sizes), 'size')}; the same twice differs by {noise:.1f} us",
        flush=True,
    )
    for size in sorted(sizes, key=weight, reverse=True):
        found: dict[str, float] = {}
        for tile in candidates(size):
            if time.monotonic() > end:
                break
            result = trial.bind({size: tile})
            found[name(tile)] = round(saved(base, trial, rounds), 1)
            assert (result - right).norm() < 3e-2 * right.norm(), (size, tile)
            if found[name(tile)] >= max(LEAST_US, *found.values()):
                best[size] = tile
        now = products.form_of(*size)
        who = name(now.product.tile if now else None)
        rows.append({"size": name_of(size), "count": sizes[size], "now": who, "saved_us": found})
        shown = sorted(found.items(), key=lambda each: -each[1])[:3]
        print(f"{name_of(size)}, {counted(sizes[size], 'time')}, now {who}: {shown}", flush=True)
        if time.monotonic() > end:
            print("out of time")
            break
    trial.bind(best)
    together = saved(base, trial, 2 * rounds)
    whole = timer.elapsed_ms(base.call, DEVICE, base.calls)
    print(f"all {len(best)} together: {together:.1f} us of {whole:.3f} ms")
    return {"row": row.name, "noise_us": noise, "sizes": rows, "together_us": together}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("row", help="a row of steps of strop bench infer: P1, P2, P2b, P3")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--ins", type=int, default=0, help="products of so many inputs alone")


def run(args: argparse.Namespace) -> None:
    (row,) = chosen_rows([args.row])
    found = measure(row, args.seconds, args.rounds, args.ins)
    contest.write(f"tiles_in_model-{row.name}", args, found)
