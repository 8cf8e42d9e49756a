"""Products in PTX in the place of library calls: operands as programs have them, run by the machine
for PTX; which weights are fetched before the wait; which step may begin early."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.ir.program import CallStep
from strop.ir.source import KernelSource, Split
from strop.kernels.gemm import rows as products
from strop.kernels.gemm.implicit import ConvShape, picture_of
from strop.kernels.gemm.rows import GemmForm, form
from strop.kernels.gemm.tile import GemmTile
from strop.kernels.gemm.wgmma_gemm import wgmma_gemm
from strop.kernels.kernel import Launches, Problem
from strop.kernels.ptx import KINDS
from strop.kernels.tuned import tuned
from strop.options import Options
from strop.runtime.build.loader import kernel_loader
from strop.runtime.loop.hoisting import Hoist, Kept, Tally
from strop.runtime.run.choices import steady_weights
from strop.runtime.run.executor import Bound
from strop.runtime.run.library_calls import upsampled
from strop.runtime.run.workspace import Workspace
from strop.testing import assert_as_accurate_as_eager
from tests.frontend.tracing import trace
from tests.gpus import H100
from tests.kernels.launching import SAME, by_form, launched, problem, refuse
from tests.kernels.ptx_machine import launch

HALF = torch.float16
BOUND = 3e-4  # of the error of a result that is rounded once
SMALL = GemmTile(1, 80, 3)


class Machine:
    """Stands where a GPU's kernels are bound: a call runs the kernel on the CPU."""

    device = H100

    def __init__(self, *tensors: Tensor) -> None:
        self.known = {tensor.data_ptr(): tensor for tensor in tensors}
        self.launched = list[tuple[KernelSource, tuple[int, ...], bool]]()

    def build(self, sources: Sequence[KernelSource]) -> None:
        pass

    def bind(
        self,
        source: KernelSource,
        pointers: Sequence[int],
        scalars: Sequence[int],
        stream: int,
        early: bool = False,
        views: Any = (),
    ) -> Any:
        return _Kernel(self, source, [*pointers], scalars, early, views)


class _Kernel:
    def __init__(
        self,
        machine: Machine,
        source: KernelSource,
        pointers: list[int],
        scalars: Sequence[int],
        early: bool,
        views: Any,
    ) -> None:
        self.machine, self.source, self.pointers = machine, source, pointers
        self.scalars, self.early, self.views = tuple(scalars), early, views

    def set_pointer(self, place: int, pointer: int) -> None:
        self.pointers[place] = pointer

    def __call__(self) -> None:
        tensors = [self.machine.known[pointer] for pointer in self.pointers]
        launch(self.source, tensors, self.scalars, views=self.views, allow_rewrites=True)
        self.machine.launched.append((self.source, self.scalars, self.early))


STRIDED = "conv2d of every second pixel"
WINDOWS = "upsampled_conv2d"
STRIDES = {"conv2d": 1, STRIDED: 2, WINDOWS: 1}


def asked(what: str, inputs: Sequence[Tensor]) -> Problem:
    shapes, dtype = [x.shape for x in inputs], inputs[0].dtype
    if what in STRIDES and what != WINDOWS:
        attrs = {**SAME, "stride": (STRIDES[what],) * 2}
        return problem("conv2d", *shapes, dtype=dtype, **attrs)
    return problem(what, *shapes, dtype=dtype)


def small(given: Problem) -> GemmForm:
    return form(SMALL, products.picture_of(given), products.OPS[given.op], sms=H100.sms)


def launches_of(what: str, inputs: Sequence[Tensor], found: GemmForm | None = None) -> Launches:
    """By a form, or by that of the small tile."""
    given = asked(what, inputs)
    launches = by_form(found or small(given), given)
    assert launches is not None
    return launches


def error(out: Tensor, truth: Tensor) -> float:
    return float((out.double() - truth).norm() / truth.norm())


def call(what: str, inputs: Sequence[Tensor], out: Tensor, *, is_steady: bool = True) -> Machine:
    machine = Machine(*inputs, out)
    launches = launches_of(what, inputs)
    found = launched(launches, machine, is_early=True, is_steady=is_steady)
    found.writing(refuse)(inputs, out)
    assert len(machine.launched) == 1
    assert machine.launched[0][2]
    return machine


def weights(*sizes: int) -> Tensor:
    return (torch.randn(*sizes) * math.prod(sizes[1:]) ** -0.5).to(HALF)


@pytest.mark.parametrize("gap", [0, 24])
def test_a_linear_whose_rows_have_gaps(gap: int) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(150, 136 + gap).to(HALF)[:, :136], weights(88, 136)
    out = torch.full((150, 88), math.nan, dtype=HALF)
    call("linear", (x, w), out)
    assert error(out, F.linear(x.double(), w.double())) < BOUND


def test_gates() -> None:
    torch.manual_seed(1)
    x, w, bias = torch.randn(70, 128).to(HALF), weights(160, 128), torch.randn(160).to(HALF)
    out = torch.full((70, 80), math.nan, dtype=HALF)
    call("geglu", (x, w, bias), out)
    value, gate = F.linear(x.double(), w.double(), bias.double()).chunk(2, -1)
    assert error(out, value * F.gelu(gate)) < BOUND


@pytest.mark.parametrize("is_there", [True, False])
def test_a_sum(is_there: bool) -> None:
    """Over the other operand, or beside it, which then stays."""
    torch.manual_seed(2)
    x, w, bias = torch.randn(70, 128).to(HALF), weights(160, 128), torch.randn(160).to(HALF)
    addend = torch.randn(70, 160).to(HALF)
    before = addend.clone()
    out = addend if is_there else torch.full_like(addend, math.nan)
    call("linear_add", (x, w, addend, bias), out)
    assert error(out, F.linear(x.double(), w.double(), bias.double()) + before) < BOUND
    assert is_there or torch.equal(addend, before)


@pytest.mark.parametrize("channels", [64, 96])
def test_a_convolution_of_a_slice(channels: int) -> None:
    """The picture may be some channels of a wider one; weights and result lie channels last."""
    torch.manual_seed(channels)
    wide = torch.randn(2, channels, 9, 8).to(HALF).to(memory_format=torch.channels_last)
    x, w = wide[:, :64], weights(88, 64, 3, 3).to(memory_format=torch.channels_last)
    out = torch.full((2, 88, 9, 8), math.nan, dtype=HALF).to(memory_format=torch.channels_last)
    call("conv2d", (x, w), out)
    assert error(out, F.conv2d(x.double(), w.double(), padding=1)) < BOUND


@pytest.mark.parametrize("sides", [(18, 16), (17, 15), (5, 1)])
def test_a_convolution_of_every_second_pixel(sides: tuple[int, int]) -> None:
    torch.manual_seed(sides[0])
    x = torch.randn(2, 64, *sides).to(HALF).to(memory_format=torch.channels_last)
    w = weights(88, 64, 3, 3).to(memory_format=torch.channels_last)
    wanted = F.conv2d(x.double(), w.double(), padding=1, stride=2)
    out = torch.full_like(wanted, math.nan, dtype=HALF, memory_format=torch.channels_last)
    call(STRIDED, (x, w), out)
    assert error(out, wanted) < BOUND


@pytest.mark.parametrize("sides", [(9, 8), (1, 1), (2, 13)])
def test_a_convolution_of_a_picture_twice_as_large(sides: tuple[int, int]) -> None:
    torch.manual_seed(sides[0])
    x = torch.randn(2, 64, *sides).to(HALF).to(memory_format=torch.channels_last)
    taps = weights(4 * 88, 64, 2, 2).to(memory_format=torch.channels_last)
    wanted = upsampled(x.double(), taps.double())
    out = torch.full_like(wanted, math.nan, dtype=HALF, memory_format=torch.channels_last)
    call(WINDOWS, (x, taps), out)
    assert error(out, wanted) < BOUND


@pytest.mark.parametrize("why", ["columns", "odd rows", "odd place", "weights", "result", "shared"])
def test_what_lies_otherwise_is_left_to_the_library(why: str) -> None:
    x, w, out = torch.zeros(16, 64, dtype=HALF), weights(80, 64), torch.zeros(16, 80, dtype=HALF)
    x = {
        "columns": torch.zeros(64, 16, dtype=HALF).t(),
        "odd rows": torch.zeros(16, 68, dtype=HALF)[:, :64],
        "odd place": torch.zeros(16, 80, dtype=HALF)[:, 4:68],
        "shared": x[:1].expand(16, 64),
    }.get(why, x)
    w = weights(64, 80).t() if why == "weights" else w
    out = torch.zeros(80, 16, dtype=HALF).t() if why == "result" else out
    machine = Machine(x, w, out)
    left = list[Sequence[Tensor]]()
    found = launched(launches_of("linear", (x, w)), machine)
    found.writing(lambda inputs, out: left.append(inputs))((x, w), out)
    assert len(left) == 1
    assert not machine.launched


def test_no_form_is_no_launch() -> None:
    x, w = torch.zeros(16, 64, dtype=HALF), weights(80, 64)
    assert by_form(None, asked("linear", (x, w))) is None
    for rows in (0, 2):  # none, and fewer than any tile was measured for
        assert products.ROW.launch(asked("linear", (x[:rows], w)), H100) is None


@pytest.mark.parametrize("why", ["addend", "place", "biases"])
def test_a_sum_that_lies_otherwise_is_left_to_the_library(why: str) -> None:
    """One that begins where the result does must lie as the result does."""
    x, w, out = torch.zeros(80, 64, dtype=HALF), weights(80, 64), torch.zeros(80, 80, dtype=HALF)
    addend = {"addend": torch.zeros_like(out).t(), "place": out.t()}.get(why, out)
    bias = torch.zeros(160, dtype=HALF)[::2] if why == "biases" else torch.zeros(80, dtype=HALF)
    inputs = (x, w, addend, bias)
    machine, left = Machine(*inputs, out), list[Sequence[Tensor]]()
    found = launched(launches_of("linear_add", inputs), machine)
    found.writing(lambda inputs, out: left.append(inputs))(inputs, out)
    assert len(left) == 1
    assert not machine.launched


@pytest.mark.parametrize("is_steady", [True, False])
def test_weights_that_a_kernel_computes_are_waited_for(is_steady: bool) -> None:
    x, w, out = torch.ones(16, 64, dtype=HALF), weights(80, 64), torch.zeros(16, 80, dtype=HALF)
    machine = call("linear", (x, w), out, is_steady=is_steady)
    ((_, scalars, _),) = machine.launched
    assert scalars[6] == (not is_steady)


class Linears(nn.Module):
    """Of a weight, of one that is computed, and of one that the module writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(1280, 1280))
        self.scale = nn.Parameter(torch.ones(1280, 1))
        self.register_buffer("kept", torch.zeros(1280, 1280))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = F.linear(x, self.first)
        z = F.linear(y, self.first * self.scale)
        return y, z, F.linear(z, self.kept)


class Nothing:
    """A kernel that does nothing."""

    def set_pointer(self, place: int, pointer: int) -> None:
        assert pointer

    def __call__(self) -> None: ...


class NoKernels(Machine):
    """Kernels that do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bound = list[tuple[KernelSource, tuple[int, ...]]]()

    def bind(
        self,
        source: KernelSource,
        pointers: Sequence[int],
        scalars: Sequence[int],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self.bound.append((source, tuple(scalars)))
        return Nothing()

    def splits(self, split: Split, sizes: Mapping[str, int]) -> int:
        return 1


def linked(options: Options, rows: int = 2048, kernels: Any = None) -> Bound:
    sizes = {"r": rows}
    traced = trace(Linears().half(), "r 1280", dtype=HALF, **sizes)
    program = compile_graph(traced.graph, Signature(traced.returned, ()), "cuda", options).program
    state = [
        torch.empty([s.eval(sizes) for s in spec.shape], dtype=spec.dtype)
        if spec.is_state
        else None
        for spec in program.inputs
    ]
    kernels = kernels or NoKernels()
    bound = Bound(program, sizes, state, kernels, Workspace(torch.device("cpu")), 0)
    bound._link(torch.empty(bound.arena_bytes, dtype=torch.uint8))
    return bound


def test_only_weights_that_nothing_writes_are_steady() -> None:
    bound = linked(Options())
    calls = {n: s for n, s in enumerate(bound.steps) if isinstance(s, CallStep)}
    assert [bound.plan.choices[n].kernel for n in calls] == ["wgmma_gemm"] * 3
    weights = [step.inputs[1].buffer for step in calls.values()]
    steady = steady_weights(bound.program)
    assert [number in steady for number in weights] == [True, False, True]
    first, _, kept = (step.inputs[1] for step in calls.values())
    written = CallStep("write", (kept, first), (), (), "")
    program = replace(bound.program, steps=(*bound.program.steps, written))
    steady = steady_weights(program)
    assert [number in steady for number in weights] == [True, False, False]


def test_each_launch_says_whether_its_weights_are_steady() -> None:
    kernels = NoKernels()
    bound = linked(Options(), kernels=kernels)
    late = [scalars[6] for source, scalars in kernels.bound if source.name == "wgmma_gemm"]
    assert not late  # a kernel is bound where its operands are seen first
    memory = torch.empty(bound.arena_bytes, dtype=torch.uint8)
    found = bound._link(memory)
    x = torch.empty(2048, 1280, dtype=HALF)
    for number in bound.plan.arguments:
        found.put(number, x)
    for number, (shape, strides, dtype) in bound.plan.results:
        found.put(number, torch.empty_strided(shape, strides, dtype=dtype))
    for run in found.steps:
        run()
    late = [scalars[6] for source, scalars in kernels.bound if source.name == "wgmma_gemm"]
    assert late == [0, 1, 0]


def test_few_rows_and_other_options_are_the_librarys() -> None:
    for bound in (
        linked(Options(kernels_off=("wgmma_gemm",))),
        linked(Options().in_training),
        linked(Options(), rows=16),
    ):
        assert len(bound.plan.choices) == 3
        assert {choice.kernel for choice in bound.plan.choices.values()} == {"cublas"}


def test_the_first_launch_of_a_run_waits_for_the_caller() -> None:
    """Who may have written the weights; a product behind it begins early and does not ask."""
    bound = linked(Options())
    assert 0 not in bound.plan.early
    assert 1 in bound.plan.early


class Loop(nn.Module):
    """One branch of a prompt alone, one of both."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rows = nn.Linear(1280, 1280), nn.Linear(1280, 1280)

    def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
        return F.silu(self.rows(x)) + F.silu(self.words(F.gelu(prompt)))


def test_the_first_launch_of_each_half_waits_for_the_caller() -> None:
    """What is hoisted runs by itself, before the rest or not at all."""
    sizes = {"r": 2048}
    traced = trace(Loop().half(), "r 1280", "r 1280", dtype=HALF, **sizes)
    program = compile_graph(traced.graph, Signature(traced.returned, ()), "cuda", Options()).program
    prompt = max(n for n, spec in enumerate(program.inputs) if not spec.is_state)
    state = [
        torch.empty([s.eval(sizes) for s in spec.shape], dtype=spec.dtype)
        if spec.is_state
        else None
        for spec in program.inputs
    ]
    kernels: Any = NoKernels()
    place = Kept(torch.device("cpu"))
    hoist = Hoist((prompt,), place, [t for t in state if t is not None], Tally())
    bound = Bound(program, sizes, state, kernels, Workspace(torch.device("cpu")), 0, hoist)
    halves = (bound.hoisted.steps, bound.plan.order.late)
    assert all(len(half) > 1 for half in halves)
    for half in halves:
        assert [p in bound.plan.early for p in half] == [False, *[True] * (len(half) - 1)]


needs_a_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs an NVIDIA GPU of sm_90",
)
EXACT = {
    "linear": F.linear,
    "geglu": lambda x, w, bias: _gated(F.linear(x, w, bias)),
    "linear_add": lambda x, w, addend, bias: F.linear(x, w, bias) + addend,
    "conv2d": lambda x, w: F.conv2d(x, w, padding=1),
    STRIDED: lambda x, w: F.conv2d(x, w, padding=1, stride=2),
    WINDOWS: upsampled,
}
SIZES = {  # rows or a picture, channels in and out
    "linear": ((2048, 640, 640), (300, 200, 328), (1, 64, 8)),
    "geglu": ((2048, 320, 1280), (300, 200, 640)),
    "linear_add": ((2048, 640, 1280), (300, 200, 640), (1, 320, 320)),
    "conv2d": ((2, 64, 64, 320, 320), (3, 9, 8, 192, 1288), (1, 13, 37, 64, 648)),
    STRIDED: ((2, 64, 64, 320, 320), (3, 17, 15, 192, 1288), (1, 26, 73, 64, 648)),
    WINDOWS: ((2, 32, 32, 320, 320), (3, 9, 8, 192, 1288), (1, 13, 37, 64, 648)),
}


def _gated(product: Tensor) -> Tensor:
    value, gate = product.chunk(2, -1)
    return value * F.gelu(gate)


def window_of(op: str, outs: int, ins: int) -> tuple[int, int, int, int]:
    return (4 * outs, ins, 2, 2) if op == WINDOWS else (outs, ins, 3, 3)


def given(op: str, sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """On the GPU."""
    torch.manual_seed(sum(sizes))
    *rows, ins, outs = sizes
    last = torch.channels_last
    if op in STRIDES:
        batch, height, width = rows
        pair = [torch.randn(batch, ins, height, width), weights(*window_of(op, outs, ins))]
        return [t.to("cuda", dtype).to(memory_format=last) for t in pair]
    columns = 2 * outs if op == "geglu" else outs
    more = {"geglu": ((columns,),), "linear_add": ((*rows, outs), (outs,))}.get(op, ())
    found = [torch.randn(*rows, ins), weights(columns, ins), *(torch.randn(size) for size in more)]
    return [t.to("cuda", dtype) for t in found]


@pytest.mark.gpu
@needs_a_gpu
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("op", EXACT)
def test_each_tile_is_as_accurate_as_torch(op: str, dtype: torch.dtype) -> None:
    """At sizes that its boxes and columns leave, too; with weights that come early and late."""
    kernels = kernel_loader("cuda", torch.cuda.current_device(), "", 0)
    stream = torch.cuda.current_stream().cuda_stream
    work = [(sizes, found) for sizes in SIZES[op] for found in forms(op, sizes)]
    kernels.build([wgmma_gemm(found.product, dtype) for _, found in work])
    for sizes in SIZES[op]:
        inputs = given(op, sizes, dtype)
        wanted, truth = EXACT[op](*inputs), EXACT[op](*(t.double() for t in inputs))
        for found, is_steady in itertools.product(forms(op, sizes), (True, False)):
            order = torch.channels_last if op in STRIDES else torch.preserve_format
            out = torch.full_like(wanted, math.nan, memory_format=order)
            launches = launches_of(op, inputs, found)
            ready = launched(launches, kernels, stream, is_early=True, is_steady=is_steady)
            ready.writing(refuse)(inputs, out)
            assert_as_accurate_as_eager(out, wanted, truth)


APART = (
    GemmTile(2, 160, 4, 1, True, True),
    GemmTile(2, 128, 5, 1, True, True),
    GemmTile(2, 192, 3, 1, True, True),
)


def forms(op: str, sizes: Sequence[int]) -> list[GemmForm]:
    """Of all tiles that can do it, those among them that no rule has."""
    of = ConvShape(1, sizes[1], sizes[2], 1, 1, sizes[0])
    if op in STRIDES:
        batch, *sides, ins, outs = sizes
        of = picture_of((batch, ins, *sides), window_of(op, outs, ins), STRIDES[op])
    end = products.OPS["conv2d" if op == STRIDED else op]
    tiles = (*tuned(H100).gemm.tiles[products.kind_of(of, end)], *APART)
    found = [form(tile, of, end, sms=H100.sms) for tile in tiles]
    return [each for each in found if products.is_able(each.product, of)]


@pytest.mark.gpu
@needs_a_gpu
def test_new_weights_are_seen_at_once() -> None:
    """Written right before a call, by the caller, and by a kernel of the program."""
    torch.manual_seed(0)
    plain, module = (Linears().to("cuda", HALF).eval() for _ in range(2))
    strop.optimize(module, options=Options(strict=True))
    x = torch.randn(2048, 1280, device="cuda", dtype=HALF)
    with torch.no_grad():
        for turn in range(40):
            new = [torch.randn(1280, 1280, device="cuda", dtype=HALF) / 40 for _ in range(2)]
            results = []
            for each in (plain, module):
                torch.cuda.synchronize()
                each.first.copy_(new[0])
                each.kept.copy_(new[1])
                each.scale.fill_(1 + turn % 8)
                results.append([t.clone() for t in each(x)])
            for mine, theirs in zip(*reversed(results), strict=True):
                assert error(mine, theirs.double()) < 2e-3
    assert strop.explain(module).num_recompiles == 0
