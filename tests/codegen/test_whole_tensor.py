"""Reductions of whole tensors read whole vectors, and enough of them at once, wherever slabs of a
size that nobody knew begin. One that read T5's words element by element took five times its
bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.debug.costs import num_programs
from strop.ir.program import KernelStep
from strop.ir.source import KernelSource
from strop.ir.tensor_spec import TensorSpec
from strop.options import Options
from tests.codegen.test_ptx import accesses
from tests.frontend.tracing import Function, trace_specs
from tests.fusion.test_parallelism import clamped
from tests.gpus import H100

pytest.importorskip("triton")

F16, I64 = torch.float16, torch.int64
VECTOR = 16  # bytes
# An H100 has 23 GB/s for each byte that a multiprocessor has on its way, so its memory is busy with
# 16 KB of them after 0.7 us.
BYTES_ON_THEIR_WAY = 16 << 10


def looked_up(ids: Tensor, table: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x = clamped(F.embedding(ids, table), y)
    return x.amax(), x


@dataclass(frozen=True)
class Case:
    function: Callable[..., Any]
    shapes: tuple[str, ...]  # the first is of numbers of words where there are three
    loads: int  # of a vector each, at least, in one step,
    stores: int = 0  # and stores


CASES = {
    "clamped": Case(clamped, ("b s 1024", "b s 1024"), 2, 1),
    "clamped_narrow": Case(clamped, ("b h w 24", "b h w 24"), 2, 1),
    "pictures": Case(lambda x, y: (x - y).square().mean(), ("b 4 h w", "b 4 h w"), 2),
    "of_any_length": Case(lambda x: x.norm(), ("n",), 1),
    "with_bias": Case(lambda x, w: (x + w).var(), ("b s 768", "768"), 1),
    "wide_with_bias": Case(lambda x, w: (x + w).var(), ("b s 5120", "5120"), 1),
    "looked_up": Case(looked_up, ("b s", "99 1024", "b s 1024"), 2),
    "looked_up_wide": Case(looked_up, ("b s", "99 4096", "b s 4096"), 2),
    "two_rows": Case(lambda x: x.softmax(1), ("2 1000000",), 1),
}
SIZES = {"b": 8, "s": 300, "h": 500, "w": 130, "n": 2_000_008}


def reductions(case: Case) -> Iterator[tuple[KernelSource, int]]:
    """The kernels by several programs that read or write much, and the programs of each."""
    dtypes = [I64, F16, F16] if len(case.shapes) == 3 else [F16] * len(case.shapes)
    device = torch.device("cpu")
    specs = [
        TensorSpec(tuple(shape.split()), dtype, device)
        for shape, dtype in zip(case.shapes, dtypes, strict=True)
    ]
    used = {name: n for name, n in SIZES.items() if any(name in s.split() for s in case.shapes)}
    module = Function(case.function)
    traced = trace_specs(module, module, specs, used)
    signature = Signature(traced.returned, traced.captured.guards)
    program = compile_graph(traced.graph, signature, "cuda", Options()).program
    for step in program.at(used):
        if isinstance(step, KernelStep) and program.sources[step.kernel].split:
            programs = num_programs(program, step, used, H100.sms)
            yield program.sources[step.kernel], programs


@pytest.mark.parametrize("name", CASES)
def test_whole_vectors_are_read(name: str) -> None:
    case = CASES[name]
    found = list(reductions(case))
    assert found
    for source, programs in found:
        moved = accesses(source)
        assert moved["ld"][VECTOR] >= case.loads, (moved, source.text)
        assert 2 not in moved["ld"], (moved, source.text)
        assert moved["st"][VECTOR] >= case.stores, (moved, source.text)
        at_once = VECTOR * moved["ld"][VECTOR] * 32 * source.num_warps
        assert at_once * programs / H100.sms >= BYTES_ON_THEIR_WAY, (moved, programs, source.text)
