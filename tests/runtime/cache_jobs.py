"""What the processes of test_cache_robust do. Imported by a fork server, so that each starts warm
and has loaded no kernel yet."""

from __future__ import annotations

import logging
import os
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import strop
from strop.dispatch.variants import library_for
from strop.options import Options
from strop.runtime.build.cache import DiskCache

MEGABYTE = 1 << 20


class Net(nn.Module):
    """Four kernels and a GEMM."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = F.silu(self.lin(x.softmax(-1)))
        return y, (y * 2).sum(0), y.sort(0).values + 1


def run(folder: Path, answers: Connection) -> None:
    """A module's first call; sends if it was right, graphs traced, kernels built, log lines."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("strop").addHandler(handler)
    torch.set_num_threads(1)
    module = strop.optimize(Net().eval(), options=Options(cache_dir=str(folder), strict=True))
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, expected = module(x), module.forward.eager(x)
    is_right = all(map(torch.allclose, found, expected))
    built, _ = library_for(module.forward.latest.device, module.forward.options).counts
    answers.send((is_right, module.forward.variants.num_captures, built, lines))


def run_until_write(folder: Path, answers: Connection, number: int, when: str) -> None:
    """As ``run``, and be killed before or after entry ``number`` gets its name. Entries are written
    one after another here: a thread that is killed within its own write leaves one more file."""
    usual, count = Path.replace, 0
    usual_write, one_writer = DiskCache.write, threading.Lock()

    def write(self: DiskCache, *entry: Any) -> Path:
        with one_writer:
            return usual_write(self, *entry)

    def replace(self: Path, target: Any) -> Path:
        nonlocal count
        count += 1
        if count > number and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = usual(self, target)
        if count > number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    Path.replace = replace  # type: ignore[method-assign,assignment]
    DiskCache.write = write  # type: ignore[method-assign]
    run(folder, answers)


def write_for_ever(folder: Path, answers: Connection) -> None:
    """Entries of a megabyte each, under few keys."""
    store = DiskCache(folder)
    for n in range(10**9):
        store.write("so", f"e{n % 5}", bytes([n % 251]) * MEGABYTE)
        if n == 0:
            answers.send("writing")
