"""How many programs share a reduction over many rows, and how much of it is on its way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.ir.program import KernelStep, Program
from strop.options import Options
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.loader import CudaLoader
from tests.frontend.tracing import trace
from tests.gpus import H100

F16, SMS = torch.float16, 132


def compiled(pictures: int) -> Program:
    """Statistics of so many pictures of 640 channels, side by side, and what uses them."""

    def normed(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        *some, kernel = given
        x = torch.cat((some[0] + some[1], *some[2:]), 3) if pictures > 1 else some[0]
        y = torch.nn.functional.group_norm(x.permute(0, 3, 1, 2), 32)
        return torch.nn.functional.conv2d(y, kernel, padding=1), x

    channels = 640 // max(pictures - 1, 1)
    shapes = [f"b 8*h 8*w {channels}"] * pictures
    traced = trace(normed, *shapes, "8 640 3 3", b=2, h=8, w=8, dtype=F16)
    signature = Signature(traced.returned, traced.captured.guards)
    return compile_graph(traced.graph, signature, "cuda", Options()).program


def statistics(program: Program, side: int, folder: Path) -> tuple[str, int]:
    """Text of the kernel at this size, and its programs on an H100."""
    env = {"b": 2, "h": side // 8, "w": side // 8}
    kernels = CudaLoader(DiskCache(folder), 1, H100)
    for step in program.at(env):
        if isinstance(step, KernelStep) and (split := program.sources[step.kernel].split):
            sizes = {f"s{n}": size.eval(env) for n, size in enumerate(step.scalars)}
            return program.sources[step.kernel].text, 2 * kernels.splits(split, sizes)
    raise AssertionError("no statistics by several programs")


@pytest.mark.parametrize(
    ("pictures", "stages", "programs"),
    [
        (1, 3, {48: SMS, 96: SMS, 128: 2 * SMS}),  # eight rows a step: 31 of 132 programs at 128
        (3, 5, {32: SMS, 48: 2 * SMS, 64: 2 * SMS}),  # one row a step
    ],
)
def test_statistics_of_groups(
    pictures: int, stages: int, programs: dict[int, int], tmp_path: Path
) -> None:
    """Two programs share a multiprocessor where one would have many steps; where several pictures
    are read, a tile has few rows, and more of them are on their way."""
    program = compiled(pictures)
    for side, wanted in programs.items():
        text, found = statistics(program, side, tmp_path)
        assert f"num_stages={stages})" in text
        assert found == wanted, side
