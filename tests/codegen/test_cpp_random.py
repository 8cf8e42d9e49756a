"""Random kernels: axes of all kinds, layouts in any order, broadcasts, guards, side stores."""

from __future__ import annotations

import random

import pytest
import torch

from strop.codegen.cpp import emit
from strop.ir.dims import Expr, const, product, symbol
from strop.ir.interpret import run
from strop.ir.loops import Axis, Index, LoopKernel, Param, Schedule
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.native import NativeKernels
from tests.codegen import kernels
from tests.codegen.cpp_launch import exact_copies, launch

NUM_KERNELS = 60
F64 = torch.float64  # rounding is the parity tests' concern, so errors here are mistakes
ENVS = ({"x": 1, "y": 1, "z": 1}, {"x": 3, "y": 37, "z": 5}, {"x": 40, "y": 2, "z": 19})


class Builder:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.schedule = list(Schedule)[seed % 3]
        self.roots = [symbol(name) for name in "xyz"]
        self.writer = kernels.Writer(F64)
        self.params: list[Param] = []
        self.numels: list[Expr] = []

    def axes(self, prefix: str, least: int, reduced: tuple[bool, ...]) -> tuple[Axis, ...]:
        found = []
        for i in range(self.random.randint(least, 3)):
            is_symbolic = self.roots and self.random.random() < 0.4
            size = self.roots.pop() if is_symbolic else const(self.random.choice((1, 2, 3, 10, 16)))
            found.append(Axis(f"{prefix}{i}", size, self.random.choice(reduced)))
        return tuple(found)

    def param(self, axes: list[Axis], is_output: bool, order: bool) -> tuple[int, Index]:
        """A dense buffer over these axes, in given or in random order, after some padding."""
        axes = axes if order else self.random.sample(axes, len(axes))
        padding = const(self.random.choice((0, 0, 3)))
        strides = [product(a.size for a in axes[i + 1 :]) for i in range(len(axes))]
        terms = tuple((axis.name, stride) for axis, stride in zip(axes, strides, strict=True))
        self.params.append(Param(F64, is_output))
        self.numels.append(product(axis.size for axis in axes) + padding)
        return len(self.params) - 1, Index(padding, terms)

    def load(self, axes: list[Axis]) -> str:
        some = [axis for axis in axes if self.random.random() < 0.7]
        param, index = self.param(some, False, order=self.random.random() < 0.6)
        guard = None
        if some and self.random.random() < 0.2:
            place = self.writer.position(Index(const(0), ((some[-1].name, const(1)),)))
            half = self.writer.literal(some[-1].size // 2, torch.int64)
            guard = self.writer.apply("lt", place, half, dtype=torch.bool)
        lookups = ()
        if self.random.random() < 0.3:  # at a place inside, by a number in memory
            numbers, at = self.param([a for a in axes if self.random.random() < 0.5], False, True)
            self.params[numbers] = Param(torch.int64, False)
            size = self.roots_size()
            value = self.writer.load(numbers, at, torch.int64)
            wraps = self.random.random() < 0.5
            if wraps:
                value = self.writer.apply(
                    "sub", value, self.writer.literal(4, torch.int64), dtype=torch.int64
                )
            place = self.writer.place(value, size, wraps, guard)
            lookups = ((place, self.numels[param]),)
            self.numels[param] = self.numels[param] * size
        return self.writer.load(param, index, guard=guard, lookups=lookups)

    def roots_size(self) -> Expr:
        """Of a dim that is looked up: at least the 4 that indices are made for."""
        return self.random.choice((const(4), symbol("y") + 3))

    def value(self, values: list[str]) -> str:
        op = self.random.choice(("add", "mul", "sub", "maximum", "exp", "add"))
        args = self.random.sample(values, 1) if op == "exp" else self.random.choices(values, k=2)
        if op == "exp":
            args = [self.writer.apply("minimum", args[0], self.writer.literal(1.0))]
        return self.writer.apply(op, *args)

    def values(self, axes: list[Axis], start: list[str]) -> list[str]:
        found = start + [self.load(axes) for _ in range(self.random.randint(1, 3))]
        for _ in range(self.random.randint(1, 4)):
            found.append(self.value(found))
        return found

    def store(self, axes: list[Axis], value: str) -> None:
        param, index = self.param(axes, True, order=self.random.random() < 0.7)
        self.writer.store(param, index, value)

    def reduce(self, arg: str) -> list[str]:
        return list(self.writer.reduce(self.random.choice(("sum", "amax", "moments")), arg))

    def build(self, name: str) -> kernels.Sample:
        rows, cols, body, tail = getattr(self, self.schedule.value)()
        kernel = LoopKernel(name, self.schedule, rows, cols, tuple(self.params), body, tail)
        return kernels.Sample(kernel, tuple(self.numels), ENVS)

    def pointwise(self):
        rows, cols = self.axes("r", 0, (False,)), self.axes("c", 1, (False,))
        axes = [*rows, *cols]
        values = self.values(axes, [])
        self.store(axes, values[-1])
        if self.random.random() < 0.3:
            self.store(axes, values[-2])
        return rows, cols, self.writer.take(), ()

    def row(self):
        rows, cols = self.axes("r", 0, (False,)), self.axes("c", 1, (True,))
        axes, values = [*rows, *cols], []
        for _ in range(self.random.randint(1, 2)):
            values = self.values(axes, values)
            values += self.reduce(values[-1])
            if self.random.random() < 0.4:
                self.store(list(rows), values[-1])
        self.store(axes, self.values(axes, values)[-1])
        return rows, cols, self.writer.take(), ()

    def column(self):
        rows = self.axes("n", 0, (False,)) + self.axes("r", 1, (True,))
        cols = self.axes("c", 1, (False, True))
        axes = [*rows, *cols]
        values = self.values(axes, [])
        if self.random.random() < 0.5:
            self.store(axes, values[-2])
        results = self.reduce(values[-1])
        if self.random.random() < 0.5:
            results += self.reduce(values[-2])
        body = self.writer.take()
        kept = [axis for axis in axes if not axis.reduced]
        self.store(kept, self.values(kept, results)[-1])
        self.store(kept, results[-1])
        return rows, cols, body, self.writer.take()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory):
    native = NativeKernels(DiskCache(tmp_path_factory.mktemp("cache")))
    samples = [Builder(seed).build(f"random_{seed}") for seed in range(NUM_KERNELS)]
    emitted = [emit(sample.kernel) for sample in samples]
    functions = native.build([e.source for e in emitted])
    return [(s, e, functions[e.source]) for s, e in zip(samples, emitted, strict=True)]


@pytest.mark.parametrize("seed", range(NUM_KERNELS))
def test_random_kernel(built, seed: int):
    sample, emitted, function = built[seed]
    for env in ENVS:
        tensors = sample.tensors(env)
        exact = exact_copies(sample, tensors)
        run(sample.kernel, exact, env)
        launch(function, emitted, tensors, env)
        for got, want in zip(tensors, exact, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, equal_nan=True)


def test_text_depends_on_what_is_computed_alone():
    for seed in range(10):
        first, second = (emit(Builder(seed).build("same").kernel) for _ in range(2))
        assert first == second
