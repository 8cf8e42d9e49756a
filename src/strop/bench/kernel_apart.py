"""Compile families of kernels in a process each, all at once, and then time them in turn."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from multiprocessing.synchronize import Lock
from typing import Any

import torch
import torch._inductor.config

from strop.bench.kernel import Found, Setting
from strop.bench.kernel_cases import GROUP_NORM, ROW_FAMILIES, KernelCase, case_of
from strop.bench.turns import in_turns

LARGE_BYTES = 2 << 30  # moved by a case whose first calls wait for each other's
PREPARING = 0.6  # of the time that there is


def families(cases: Sequence[KernelCase], setting: Setting) -> Iterator[Found]:
    """Measure one family after the other."""
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for case in cases:
        shapes.setdefault(case.family, []).append(case.shape)
    large = multiprocessing.get_context("spawn").Lock()
    now = time.time()
    ready = now + PREPARING * (setting.until - now)
    yield from in_turns(
        [partial(_family, name, found, setting, ready, large) for name, found in shapes.items()]
    )


def _family(
    name: str, shapes: Sequence[tuple[int, ...]], setting: Setting, ready: float, large: Lock
) -> Iterator[Any]:
    """Yield the cases of one family, for ``in_turns``; no first call after ``ready``. First calls
    of large cases hold ``large``: all families at once would not fit on the device."""
    (family,) = (f for f in (*ROW_FAMILIES, GROUP_NORM) if f.name == name)
    cases = [case_of(family, shape) for shape in shapes]
    # all families together have the cores: a pool of compilers for each would be mostly starting
    bench = setting.bench(build_workers=1)
    torch._inductor.config.compile_threads = 1
    prepared = []
    for case in cases:
        if time.time() > ready:
            break
        is_large = case.bytes_moved(setting.dtype) > LARGE_BYTES
        with large if is_large else nullcontext():
            prepared.append(bench.first(case, bench.arguments(case)))
            if is_large:
                _give_back(setting.device)
    _give_back(setting.device)
    yield None
    rows: list[dict[str, Any]] = []
    for case, first in zip(cases, prepared, strict=False):
        if time.time() > setting.until:
            break
        rows.append(bench.timed(case, bench.arguments(case), *first, setting.bandwidth))
        _give_back(setting.device)
    yield Found(rows, [case.name for case in cases[len(rows) :]], bench.seconds)


def _give_back(device: torch.device) -> None:
    """Give memory that this process only keeps in reserve to the others that wait beside it.
    Compilers leave tensors in cycles."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
