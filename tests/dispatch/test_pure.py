"""Which programs may be run once more: those that leave nothing behind but their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import strop
from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.ir.graph import Ref
from strop.ir.program import Program
from strop.ir.pure_calls import is_pure_call
from strop.options import Options
from tests.frontend.tracing import trace


def compiled(function: Callable[..., Any]) -> Program:
    traced = trace(function, "b 16", "b 16", b=3)
    signature = Signature(traced.returned, traced.captured.guards)
    return compile_graph(traced.graph, signature, "cuda", Options()).program


def test_what_writes_into_an_argument_may_not() -> None:
    """By a kernel, or by a copy, as graphs of ``torch.compile`` do."""
    program = compiled(lambda x, y: F.softmax(x, -1) @ y.T)
    (kernel,), (call,) = program.kernel_steps, program.call_steps
    read = next(n for n in kernel.buffers if program.buffers[n].kind == "input")
    index = program.buffers[read].index
    written = replace(program, steps=(replace(kernel, writes=(read,)), call))
    copied = replace(program, steps=(kernel, replace(call, op="write", inputs=call.inputs[1:])))
    assert program.is_pure
    assert written.written_arguments == (index,)
    assert copied.written_arguments == (1 - index,)
    assert not written.is_pure
    assert not copied.is_pure


def test_what_draws_numbers_may_not() -> None:
    program = compiled(lambda x, y: x + torch.rand(16) * y)
    assert not program.written_arguments
    assert not program.is_pure


def test_what_calls_code_of_a_user_may_not() -> None:
    example = [torch.empty(3, 16)]
    with strop.pattern(F.silu, lambda x: x * torch.sigmoid(x), example=example):
        program = compiled(lambda x, y: F.silu(x) + y)
    assert [step.op for step in program.call_steps] == ["pattern"]
    assert not program.is_pure


def test_kernels_and_products_may() -> None:
    program = compiled(lambda x, y: F.softmax(x @ y.T, -1) @ y)
    assert program.call_steps
    assert program.kernel_steps
    assert program.is_pure


def test_torchs_functions_may() -> None:
    program = compiled(lambda x, y: torch.cumsum(x, 0) + F.avg_pool1d(y, 1))
    assert "aten.cumsum.default" in program.foreign_calls or program.call_steps
    assert program.is_pure


def called(target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"target": target, "args": args, "kwargs": tuple(kwargs.items())}


LSTM = (Ref(0), (Ref(1), Ref(2)), (Ref(3), Ref(4)), True, 1, 0.5)
NORM = (Ref(0), Ref(1), Ref(2), Ref(3), Ref(4))


@pytest.mark.parametrize(
    ("call", "is_pure"),
    [
        (called("aten.convolution.default", Ref(0), Ref(1)), True),
        (called("aten.lstm.input", *LSTM, False, False, True), True),
        (called("aten.lstm.input", *LSTM, True, False, True), False),
        (called("aten.native_batch_norm.default", *NORM, False, 0.1, 1e-5), True),
        (called("aten.native_batch_norm.default", *NORM, True, 0.1, 1e-5), False),
        (called("aten._scaled_dot_product_flash_attention.default", *NORM[:3], 0.1), False),
        (called("aten._scaled_dot_product_flash_attention.default", *NORM[:3], 0.0), True),
        (called("aten.topk.default", Ref(0), 2), True),
        (called("aten._scaled_mm.default", Ref(0), Ref(1), Ref(2), Ref(3)), True),
        (called("aten.index_copy.default", Ref(0), 0, Ref(1), Ref(2)), False),
        (called("aten.gather.default", Ref(0), 0, Ref(1)), False),
        (called("aten.embedding.default", Ref(0), Ref(1)), False),
        (called("aten._assert_async.msg", Ref(0), "no"), False),
        (called("aten.fractional_max_pool2d.default", Ref(0), (2, 2), (2, 2), Ref(1)), True),
        (called("aten.index_copy_.default", Ref(0), 0, Ref(1), Ref(2)), False),
        (called("aten.rand.default", (3,)), False),
        (called("aten.bernoulli.p", Ref(0), 0.5), False),
        (called("aten.native_dropout.default", Ref(0), 0.5, True), False),
        (called("aten.rrelu_with_noise.default", Ref(0), Ref(1)), False),
        (called("mine.written.default", Ref(0)), False),
        (called("aten.no_such.default", Ref(0)), False),
    ],
)
def test_schemas_and_arguments_decide(call: dict[str, Any], is_pure: bool) -> None:
    assert is_pure_call(call) is is_pure
