"""Products of a few rows with a quantised weight, in the kernel that decodes it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.codegen.triton_interpreter import interpret
from strop.fusion.coded_products import MOST_ROWS
from strop.ir.program import CallStep, KernelStep, Program
from strop.ir.serialize import from_json, to_json
from strop.options import Options
from strop.testing import assert_as_accurate_as_eager
from tests.frontend.tracing import trace

DEPTH, COLUMNS = 64, 48


class Coded(nn.Module):
    """A linear whose weight is decoded first: int8 or e4m3 by a scale of rows, int8 that is turned,
    blocks as GGUF has them, or two codes a byte."""

    def __init__(self, kind, *, has_bias=True, dtype=torch.float16):
        super().__init__()
        made = torch.Generator().manual_seed(0)
        self.kind, count = kind, COLUMNS * DEPTH
        weight = torch.randn(COLUMNS, DEPTH, generator=made)
        codes = torch.randint(-127, 128, (COLUMNS, DEPTH), generator=made)
        bias = torch.randn(COLUMNS, generator=made).to(dtype) if has_bias else None
        self.register_buffer("bias", bias)
        if kind == "blocks":
            scales = torch.rand(count // 32, 1, generator=made).half().view(torch.uint8)
            numbers = codes.to(torch.int8).view(torch.uint8).reshape(-1, 32)
            self.register_buffer("codes", torch.cat([scales, numbers], 1))
        elif kind == "halves":
            self.register_buffer("codes", codes[:, : DEPTH // 2].to(torch.int8).view(torch.uint8))
        elif kind == "turned":
            self.register_buffer("codes", codes.t().contiguous().to(torch.int8))
        else:
            dtype_of = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}[kind]
            values = codes if kind == "int8" else weight
            self.register_buffer("codes", values.to(dtype_of))
        self.register_buffer("scale", torch.rand(COLUMNS, 1, generator=made).to(dtype))

    def weight(self, dtype):
        if self.kind == "blocks":
            scale = self.codes[:, :2].view(torch.float16).to(dtype)
            return (scale * self.codes[:, 2:].view(torch.int8).to(dtype)).reshape(COLUMNS, DEPTH)
        if self.kind == "halves":
            both = torch.cat([self.codes & 0x0F, self.codes >> 4], 1).to(torch.int8) - 8
            return both.to(dtype) * self.scale.to(dtype)
        if self.kind == "turned":
            return (self.codes.to(dtype) * self.scale.flatten().to(dtype)).t()
        return self.codes.to(dtype) * self.scale.to(dtype)

    def forward(self, x):
        return F.linear(x.sin(), self.weight(x.dtype), self.bias)


def compiled(module, dtype=torch.float16, shape=f"b {DEPTH}", **hints) -> Program:
    traced = trace(module.eval(), shape, dtype=dtype, **hints or {"b": 4})
    signature = Signature(traced.returned, ())
    return compile_graph(traced.graph, signature, "cuda", Options()).program


def run(program: Program, given, env):
    """Run a program of kernels and linears, kernels by Triton's interpreter."""
    memory = {}
    for number, buffer in enumerate(program.buffers):
        sizes = [size.eval(env) for size in buffer.shape]
        found = given[buffer.index] if buffer.kind == "input" else None
        memory[number] = torch.zeros(sizes, dtype=buffer.dtype) if found is None else found

    def piece(ref):
        sizes, steps = ([n.eval(env) for n in of] for of in (ref.shape, ref.strides))
        return memory[ref.buffer].as_strided(sizes, steps, ref.offset.eval(env))

    for step in program.at(env):
        if isinstance(step, KernelStep):
            source = program.sources[step.kernel]
            flat = [
                memory[n].reshape(-1)[offset.eval(env) :]
                for n, offset in zip(step.buffers, step.offsets, strict=True)
            ]
            interpret(source, flat, {f"s{i}": s.eval(env) for i, s in enumerate(step.scalars)})
        elif isinstance(step, CallStep):
            assert step.op == "linear"
            x, weight, *bias = map(piece, step.inputs)
            memory[step.outputs[0]].view(-1, weight.shape[0]).copy_(F.linear(x, weight, *bias))
    return piece(program.returned[0].tensor)


@pytest.mark.parametrize("has_bias", [False, True], ids=["bare", "biased"])
@pytest.mark.parametrize("kind", ["int8", "turned", "e4m3", "blocks", "halves"])
def test_values(kind, has_bias):
    module = Coded(kind, has_bias=has_bias).eval()
    traced = trace(module, f"b {DEPTH}", dtype=torch.float16, b=4)
    program = compile_graph(traced.graph, Signature(traced.returned, ()), "cuda", Options()).program
    names = traced.captured.state_names
    for rows in (1, MOST_ROWS, MOST_ROWS + 1):
        x = torch.randn(rows, DEPTH, generator=torch.Generator().manual_seed(rows)).half()
        states = [module.get_buffer(name) for name in names]
        states = [s.view(torch.uint8) if s.dtype is torch.float8_e4m3fn else s for s in states]
        found = run(program, [*states, x], {"b": rows})
        with torch.no_grad():
            exact = F.linear(x.double().sin(), module.weight(torch.float64))
            exact = exact + module.bias.double() if has_bias else exact
            assert_as_accurate_as_eager(found, module(x), exact)
        calls = [step for step in program.at({"b": rows}) if isinstance(step, CallStep)]
        assert len(calls) == (rows > MOST_ROWS)
    assert from_json(to_json(program)) == program


def num_products(program):
    return sum(bool(step.absorbed) for step in program.call_steps)


def test_one_kernel_or_two():
    program = compiled(Coded("int8"))
    (call,) = program.call_steps
    host = next(step for step in program.kernel_steps if step.variants == call.absorbed)
    assert len(program.at({"b": 2})) == len(program.at({"b": 3}))
    decoded = call.inputs[1].buffer
    few = [step for step in program.at({"b": 1}) if step is not None]
    assert all(decoded not in step.touched for step in few)  # no weight in full has memory
    assert host.writes == (decoded,)


def test_three_dims():
    program = compiled(Coded("int8"), shape=f"b s {DEPTH}", b=2, s=3)
    (call,) = program.call_steps
    rows = call.absorbed[0].size
    assert rows.eval({"b": 2, "s": 5}) == 10


class Others(Coded):
    """A weight that something else reads too, is a result, or comes of x."""

    def __init__(self, how):
        super().__init__("int8")
        self.how = how

    def forward(self, x):
        weight = self.weight(x.dtype)
        if self.how == "of x":
            weight = weight * x.mean()
        y = F.linear(x, weight)
        if self.how == "twice":
            return y + F.linear(x.cos(), weight)
        return (y, weight) if self.how == "result" else y


@pytest.mark.parametrize("how", ["twice", "result", "of x"])
def test_where_a_weight_is_wanted_in_full(how):
    assert num_products(compiled(Others(how))) == 0


def test_many_rows_never():
    class Many(Coded):
        def forward(self, x):
            return super().forward(x.expand(-1, 32, -1))

    assert num_products(compiled(Many("int8"), shape=f"b 1 {DEPTH}", b=2)) == 0


def test_plain_weights_never():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("numbers", torch.zeros(COLUMNS, DEPTH, dtype=torch.float16))

        def forward(self, x):
            return F.linear(x, self.numbers * 2)

    assert num_products(compiled(Plain())) == 0


class SideBySide(nn.Module):
    def __init__(self):
        super().__init__()
        self.pieces = nn.ModuleList(Coded("int8", has_bias=False) for _ in range(2))
        self.out = nn.Linear(2 * COLUMNS, 8, bias=False)

    def forward(self, x):
        return self.out(torch.cat([piece(x + n) for n, piece in enumerate(self.pieces)], 1))


def test_products_that_write_into_a_cat_stay_calls():
    """A kernel that decodes and multiplies has a dense result."""
    program = compiled(SideBySide().half(), b=256)
    assert num_products(program) == 0
    assert [step.place is not None for step in program.call_steps] == [True, True, False]
