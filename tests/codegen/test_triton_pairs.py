"""Kernels that turn pairs of cols, as rotary embedding does, read each pair with one wide load."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.codegen.triton import emit
from strop.codegen.triton_halves import halves as of_pairs
from strop.codegen.triton_interpreter import interpret
from strop.codegen.triton_pairs import with_pairs
from strop.ir import interpret as judge
from strop.ir.dims import const, symbol
from strop.ir.loops import (
    Apply,
    Axis,
    CheckIndex,
    Index,
    Literal,
    Load,
    LoopKernel,
    Param,
    Position,
    Schedule,
    Stmt,
    Store,
    spaces,
)
from strop.ir.tensor_spec import TensorSpec
from strop.options import Options
from strop.runtime.build.cubin import compile_cubin
from tests.codegen.kernels import Sample
from tests.codegen.test_model_kernels import Model, check, model_of
from tests.codegen.test_triton_compile import disassemble, resources
from tests.frontend.tracing import Function, trace_specs

CPU = torch.device("cpu")
F32 = torch.float32
SIZES = {"b": 2, "t": 6}


def turned(x: Tensor) -> Tensor:
    """Return each pair (a, c) as (-c, a): what diffusers does for Flux.1."""
    real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([-imaginary, real], -1).flatten(-2)


def flux(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = F.rms_norm(x, x.shape[-1:], weight, 1e-6)
    return y * cos + turned(y) * sin


def strided_writes(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As Wan turns: cosines of even, sines of odd cols alone are read."""
    y = F.rms_norm(x, x.shape[-1:], weight, 1e-6)
    even, odd = y.unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cos[..., 0::2], sin[..., 1::2]
    out = torch.empty_like(y)
    out[..., 0::2] = even * c - odd * s
    out[..., 1::2] = even * s + odd * c
    return out


def complex_product(x: Tensor, table: Tensor) -> Tensor:
    """As Qwen-Image turns."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    angles = torch.view_as_complex(table.float().reshape(*table.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles).flatten(-2).type_as(x)


def two_tables(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As Z-Image turns: tables have one number for each pair."""
    y = F.rms_norm(x, x.shape[-1:], weight, 1e-6)
    return turned_by_two_tables(y, cos, sin)


def turned_by_two_tables(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def tables_by_place(x: Tensor, weight: Tensor, places: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same, where half of each table is looked up by one of the token's places."""
    half = cos.shape[-1] // 2
    found = [
        torch.cat([table[places[:, 0], :half], table[places[:, 1], half:]], -1)[:, None]
        for table in (cos, sin)
    ]
    return two_tables(x, weight, *found)


def without_norm(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + turned(x) * sin


def looked_up(x: Tensor, places: Tensor, table: Tensor) -> Tensor:
    """Look the angles up by the token's place, which each of both cols does for itself."""
    return complex_product(x, table[places])


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As T5's successors turn: the partner is half a row away, so no pair is read."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


@dataclass(frozen=True)
class Turn:
    function: Callable[..., Any]
    arguments: tuple[str, ...]
    of_places: int = -1  # this argument has integers


TURNS = {
    "flux": Turn(flux, ("b t 3 8", "8", "t 1 8", "t 1 8")),
    "strided writes": Turn(strided_writes, ("b t 3 8", "8", "t 1 8", "t 1 8")),
    "complex": Turn(complex_product, ("b t 3 8", "t 1 8")),
    "two tables": Turn(two_tables, ("b t 3 8", "8", "t 1 4", "t 1 4")),
    "tables by place": Turn(tables_by_place, ("b t 3 8", "8", "t 2", "4 4", "4 4"), of_places=2),
    "two tables without norm": Turn(turned_by_two_tables, ("b t 3 8", "t 1 4", "t 1 4")),
    "without norm": Turn(without_norm, ("b t 3 8", "t 1 8", "t 1 8")),
    "looked up": Turn(looked_up, ("b t 3 8", "b t 1", "4 8"), of_places=1),
}


def compiled(turn: Turn, dtype: torch.dtype = torch.float32) -> Model:
    specs = [
        TensorSpec(
            tuple(text.split()),
            torch.int64 if place == turn.of_places else dtype,
            torch.device("cpu"),
        )
        for place, text in enumerate(turn.arguments)
    ]
    function = Function(turn.function)
    traced = trace_specs(function, function, specs, SIZES)
    signature = Signature(traced.returned, traced.captured.guards)
    return model_of(compile_graph(traced.graph, signature, "cuda", Options()))


def samples_with_pairs(model: Model) -> list[Sample]:
    found = {id(sample): sample for sample, _ in model.samples.values()}
    return [each for each in found.values() if with_pairs(each.kernel) is not each.kernel]


@pytest.mark.parametrize("name", TURNS)
def test_values_stay(name: str) -> None:
    """In the judge before and after, and as Triton's interpreter runs them."""
    model = compiled(TURNS[name])
    samples = samples_with_pairs(model)
    assert samples
    for sample in samples:
        before, after = sample.tensors(model.env), sample.tensors(model.env)
        judge.run(sample.kernel, before, model.env)
        judge.run(with_pairs(sample.kernel), after, model.env)
        for found, wanted in zip(after, before, strict=True):
            assert torch.equal(found, wanted)
    for sample, form in model.samples.values():
        for sizes in (SIZES, {"b": 1, "t": 17}, {"b": 3, "t": 4}):
            check(sample, sizes, 1, form)


@pytest.mark.parametrize("name", TURNS)
def test_each_pair_is_read_once(name: str) -> None:
    """No load is left whose index does not walk the pair, unless it is for all of it, and none is
    there twice."""
    for sample in samples_with_pairs(compiled(TURNS[name])):
        kernel = with_pairs(sample.kernel)
        pair, inner = kernel.cols[-1].name, kernel.cols[-2].name
        loads = [stmt for stmt in kernel.body if isinstance(stmt, Load)]
        assert len({(load.param, load.index, load.lookups) for load in loads}) == len(loads)
        walked = [load for load in loads if inner in load.index.axes]
        assert all(pair in load.index.axes or load.out in of_pairs(kernel) for load in walked)


def test_what_follows_is_computed_once() -> None:
    """The norm of a partner is the partner of the norm: of each pair only results are taken."""
    (sample,) = samples_with_pairs(compiled(TURNS["flux"]))
    kernel = with_pairs(sample.kernel)
    count = Counter(type(stmt).__name__ for stmt in kernel.body)
    assert count["OfPair"] == 2
    assert count["Load"] == 4
    assert count["Apply"] < sum(type(stmt).__name__ == "Apply" for stmt in sample.kernel.body)


def test_rows_that_are_turned_by_halves_have_no_pairs() -> None:
    turn = Turn(halves, ("b t 3 8", "t 1 8", "t 1 8"))
    assert not samples_with_pairs(compiled(turn))


def by_tables(*, is_symmetric: bool) -> Sample:
    """Return x * t + partner of x * partner of t, by hand: t is of one table for the first rows and
    of another one for the rest. Without symmetry, even cols read the first table in all rows."""
    row, pair, half = Axis("r0", symbol("n")), Axis("c1", const(2)), Axis("c0", const(4))
    eight, two, one = const(8), const(2), const(1)
    body: list[Stmt] = [
        Position("n_col", Index(const(0), (("c1", one),))),
        Literal("one", 1, torch.int64),
        Apply("odd", "ge", ("n_col", "one"), torch.bool),
        Apply("even", "lt", ("n_col", "one"), torch.bool),
        Position("n_row", Index(const(0), (("r0", one),))),
        Literal("two", 2, torch.int64),
        Apply("first", "lt", ("n_row", "two"), torch.bool),
        Apply("rest", "ge", ("n_row", "two"), torch.bool),
        Apply("a", "logical_and", ("first", "odd"), torch.bool),
        Apply("b", "logical_and", ("rest", "odd"), torch.bool),
        Apply("c", "logical_and", ("even", "first" if is_symmetric else "even"), torch.bool),
        Apply("d", "logical_and", ("even", "rest"), torch.bool),
    ]
    for name, param, offset, guard in (
        ("x", 0, 0, "odd"),
        ("y", 0, 1, "even"),
        ("t0", 1, 0, "a"),
        ("t1", 2, 0, "b"),
        ("t2", 1, 1, "c"),
        ("t3", 2, 1, "d"),
    ):
        index = Index(const(offset), (("r0", eight), ("c0", two)))
        body.append(Load(name, param, index, torch.float32, guard))
    body += [
        Apply("s0", "where", ("first", "t0", "t1"), torch.float32),
        Apply("s1", "where", ("first", "t2", "t3"), torch.float32),
        Apply("p", "mul", ("x", "s0"), torch.float32),
        Apply("q", "mul", ("y", "s1"), torch.float32),
        Apply("z", "where", ("odd", "p", "q"), torch.float32),
        Store(3, Index(const(0), (("r0", eight), ("c0", two), ("c1", one))), "z"),
    ]
    params = (*(Param(torch.float32, False) for _ in range(3)), Param(torch.float32, True))
    kernel = LoopKernel("by_tables", Schedule.POINTWISE, (row,), (half, pair), params, tuple(body))
    return Sample(kernel, (symbol("n") * 8,) * 4, ({"n": 5}, {"n": 1}))


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_guards_of_both_cols_become_one(is_symmetric: bool) -> None:
    """Which table is read depends on the row, and no longer on the col."""
    sample = by_tables(is_symmetric=is_symmetric)
    kernel = with_pairs(sample.kernel)
    loads = {stmt.param: stmt for stmt in kernel.body if isinstance(stmt, Load)}
    assert [load.param for load in kernel.body if isinstance(load, Load)] == [0, 1, 2]
    assert loads[0].guard is None
    assert (loads[1].guard is None) is not is_symmetric
    assert spaces(kernel)[loads[2].guard or ""] == {"r0"}
    for env in sample.envs:
        before, after = sample.tensors(env), sample.tensors(env)
        judge.run(sample.kernel, before, env)
        judge.run(kernel, after, env)
        assert torch.equal(before[3], after[3])
        check(sample, env, 1)


def by_places(most: int, *, is_of_first_rows: bool) -> Sample:
    """Return a table's rows in the cols up to ``most`` pairs, by hand, and elsewhere numbers that
    each row has: even and odd cols read them for themselves, as pieces of a cat."""
    row, half, pair = Axis("r0", symbol("n")), Axis("c0", const(4)), Axis("c1", const(2))
    four, one = const(4), const(1)
    of_pairs = Index(const(0), (("c0", one),))
    body: list[Stmt] = [
        Position("n_col", Index(const(0), (("c1", one),))),
        Literal("one", 1, torch.int64),
        Position("n_pair", of_pairs),
        Literal("most", most, torch.int64),
        Apply("near", "lt", ("n_pair", "most"), torch.bool),
        Apply("far", "ge", ("n_pair", "most"), torch.bool),
        Position("n_row", Index(const(0), (("r0", one),))),
        Literal("two", 2, torch.int64),
        Apply("first", "lt", ("n_row", "two"), torch.bool),
        Load("id", 1, Index(const(0), (("r0", one),)), torch.int64),
    ]
    for side, op in (("even", "lt"), ("odd", "ge")):
        body += [
            Apply(side, op, ("n_col", "one"), torch.bool),
            Apply(f"{side}_near", "logical_and", (side, "near"), torch.bool),
            Apply(f"{side}_far", "logical_and", (side, "far"), torch.bool),
            Apply(f"{side}_first", "logical_and", (f"{side}_near", "first"), torch.bool),
            CheckIndex(
                f"{side}_at",
                "id",
                const(5),
                wraps=True,
                guard=f"{side}_first" if is_of_first_rows else f"{side}_near",
            ),
            Load(f"{side}_a", 0, of_pairs, F32, f"{side}_near", ((f"{side}_at", four),)),
            Load(f"{side}_b", 3, Index(const(0), (("r0", four), ("c0", one))), F32, f"{side}_far"),
            Apply(f"{side}_c", "where", ("near", f"{side}_a", f"{side}_b"), F32),
        ]
    body += [
        Apply("turned", "neg", ("odd_c",), F32),
        Apply("z", "where", ("even", "even_c", "turned"), F32),
        Store(2, Index(const(0), (("r0", const(8)), ("c0", const(2)), ("c1", one))), "z"),
    ]
    params = (
        Param(F32, False),
        Param(torch.int64, False),
        Param(F32, True),
        Param(F32, False),
    )
    kernel = LoopKernel("by_places", Schedule.POINTWISE, (row,), (half, pair), params, tuple(body))
    sizes = (const(20), symbol("n"), symbol("n") * 8, symbol("n") * 4)
    return Sample(kernel, sizes, ({"n": 5},))


@pytest.mark.parametrize("is_of_first_rows", [False, True])
@pytest.mark.parametrize("most", [0, 2, 4])
@pytest.mark.parametrize(("outside", "row"), [(None, 0), (5, 1), (-6, 3)])
def test_places_are_checked_once(
    most: int, is_of_first_rows: bool, outside: int | None, row: int
) -> None:
    """A fault is one wherever it was: if the rows are asked for, in any col, of the table."""
    sample = by_places(most, is_of_first_rows=is_of_first_rows)
    kernel = with_pairs(sample.kernel)
    assert sum(isinstance(stmt, CheckIndex) for stmt in kernel.body) == 1
    assert sum(isinstance(stmt, Load) for stmt in kernel.body) == 3
    tensors = sample.tensors({"n": 5})
    tensors[1] = torch.arange(5)
    if outside is not None:
        tensors[1][row] = outside
    is_fault = outside is not None and most > 0 and (row < 2 or not is_of_first_rows)
    others = [tensor.clone() for tensor in tensors]
    for each, given in ((sample.kernel, tensors), (kernel, others)):
        with pytest.raises(IndexError) if is_fault else nullcontext():
            judge.run(each, given, {"n": 5})
    emitted = emit(sample.kernel)
    sizes = {f"s{i}": size.eval({"n": 5}) for i, size in enumerate(emitted.scalars)}
    found = [torch.zeros_like(tensor) if n == 2 else tensor for n, tensor in enumerate(tensors)]
    (faults,) = interpret(emitted.source, found, sizes)
    assert bool(faults.any()) == is_fault
    if not is_fault:
        assert torch.equal(others[2], tensors[2])
        assert torch.equal(found[2], tensors[2])


@pytest.mark.parametrize(
    "name", ["flux", "complex", "strided writes", "two tables", "tables by place", "without norm"]
)
def test_pairs_stay_in_their_thread(name: str, tmp_path: Path) -> None:
    """Loads are wide: none of two bytes is left, and nothing goes through shared memory."""
    model = compiled(wide(TURNS[name]), torch.bfloat16)
    for sample in samples_with_pairs(model):
        for source in {form.source: 0 for each, form in model.samples.values() if each is sample}:
            cubin = compile_cubin(source, 90)
            instructions = disassemble(cubin, tmp_path)
            narrow = [text for text in instructions if re.match(r"LDG\..*(U16|U8)", text)]
            assert not narrow, source.name
            assert not [text for text in instructions if text.startswith(("LDS", "STS"))]
            assert resources(cubin, tmp_path)[1] == 0


def wide(turn: Turn) -> Turn:
    """Return it at the width of a head of Flux.1, of which there are 24."""
    widths = {"8": "128", "4": "64", "3": "24"}
    arguments = (" ".join(widths.get(size, size) for size in t.split()) for t in turn.arguments)
    return replace(turn, arguments=tuple(arguments))
