"""Loads first, stores as soon as they can be; and functions that texts of kernels call."""

from __future__ import annotations

import math

import torch

from strop.codegen.triton import emit
from strop.codegen.triton_interpreter import interpret
from strop.codegen.triton_text import loads_first
from strop.ir.loops import Load, LoopKernel, Reduce, Schedule, Store, args_of, outs_of
from tests.codegen.kernels import Writer, axis, index, reads, writes
from tests.codegen.triton_samples import CONTIGUOUS

F16 = torch.float16


def test_loads_come_before_reductions_and_stores_behind_loads():
    body = CONTIGUOUS["layer_norm"](F16, 320).kernel.body
    ordered = loads_first(body)
    assert sorted(map(id, ordered)) == sorted(map(id, body))
    loads, reductions, stores = (
        [n for n, stmt in enumerate(ordered) if isinstance(stmt, kind)]
        for kind in (Load, Reduce, Store)
    )
    assert max(loads) < min(reductions)
    assert max(loads) < min(stores)
    known: set[str] = set()
    for stmt in ordered:
        assert known.issuperset(args_of(stmt))
        known.update(outs_of(stmt))


def gelu(dtype: torch.dtype, size: int) -> LoopKernel:
    w = Writer(torch.float32)
    w.store(1, index(i=1), w.apply("gelu", w.load(0, index(i=1)), dtype=dtype))
    params = reads(dtype) + writes(dtype)
    return LoopKernel("gelu", Schedule.POINTWISE, (), (axis("i", size),), params, w.take())


def gelu_backward(dtype: torch.dtype, size: int) -> LoopKernel:
    w = Writer(torch.float32)
    loads = [w.load(n, index(i=1)) for n in range(2)]
    w.store(2, index(i=1), w.apply("gelu_backward", *loads, dtype=dtype))
    params = reads(dtype) + reads(dtype) + writes(dtype)
    return LoopKernel("slope", Schedule.POINTWISE, (), (axis("i", size),), params, w.take())


def test_the_short_slope_of_gelu_is_as_accurate_as_eager_for_every_number():
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(F16)
    grad, found = torch.ones_like(x), torch.empty_like(x)
    source = emit(gelu_backward(F16, x.numel())).source
    assert "gelu_slope(" in source.text
    interpret(source, [grad, x, found], {})
    eager = torch.ops.aten.gelu_backward(grad, x)
    assert torch.equal(found.isnan(), eager.isnan())
    wide = x.double()
    exact = torch.special.erfc(-wide / math.sqrt(2)) / 2
    exact += wide * torch.exp(-wide.square() / 2) / math.sqrt(2 * math.pi)
    usual = wide.abs() < 8
    ours, theirs = ((y.double() - exact)[usual] for y in (found, eager))
    assert ours.abs().max() <= 1.001 * theirs.abs().max()
    assert ours.square().mean() <= 1.001 * theirs.square().mean()


def test_the_short_gelu_is_as_accurate_as_eager_for_every_number():
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(F16)
    found = torch.empty_like(x)
    source = emit(gelu(F16, x.numel())).source
    assert "half_gelu(" in source.text
    interpret(source, [x, found], {})
    eager = torch.nn.functional.gelu(x)
    assert torch.equal(found.isnan(), eager.isnan())
    wide = x.double()
    exact = wide / 2 * torch.special.erfc(-wide / math.sqrt(2))
    usual = wide.abs() < 8
    ours, theirs = ((y.double() - exact)[usual] for y in (found, eager))
    assert ours.abs().max() <= theirs.abs().max()
    assert ours.square().mean() <= 1.001 * theirs.square().mean()
