"""Programs for a GPU, linked without one: which calls kernels written by hand take over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.frontend.library_operators import INT_MM, MIXED_PRODUCT
from strop.ir.device import CPU, Device
from strop.ir.dims import Expr
from strop.ir.program import CallStep, Program
from strop.ir.source import KernelSource, Split
from strop.kernels.attention.exp_rows import exp_rows
from strop.kernels.gemm import geglu
from strop.kernels.kernel import Call
from strop.kernels.library import BY_OP, select
from strop.options import Options
from strop.runtime.run import choices
from strop.runtime.run.choices import call_of
from strop.runtime.run.executor import Bound
from strop.runtime.run.launched_calls import scratch_bytes
from strop.runtime.run.workspace import Workspace
from tests.frontend.tracing import trace
from tests.gpus import A100, H100, RTX_5090
from tests.kernels.launching import problem

OURS = Options()
ATTENTION = ("wgmma_attention", "cross_attention", "tma_attention")
PLAIN = Options(kernels_off=("wgmma_gemm", *ATTENTION))
SIZES = {"b": 2, "h": 64, "w": 64}


class Kernels:
    """Stands where a GPU's kernels are built and bound."""

    def __init__(self, device: Device) -> None:
        self.device, self.built, self.early = device, set[str](), dict[str, bool]()

    def build(self, sources: Sequence[KernelSource]) -> None:
        self.built |= {source.name for source in sources}

    def bind(self, source: KernelSource, *args: Any, early: bool = False, **kwargs: Any) -> Any:
        self.early[source.name] = early
        return lambda: None

    def splits(self, split: Split, sizes: Mapping[str, int]) -> int:
        return 1


class Everything(nn.Module):
    """All kinds of calls: convolutions, attention, GEGLU, and one without an operand."""

    def __init__(self, head: int = 64) -> None:
        super().__init__()
        self.head = head
        self.first, self.conv = nn.Conv2d(4, 320, 3, padding=1), nn.Conv2d(320, 320, 3, padding=1)
        self.qkv = nn.Linear(320, 3 * head)
        self.up = nn.Linear(head, 2 * 2560)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(F.silu(self.first(x)))
        x = x + torch.rand(320, 1, 1, dtype=x.dtype)
        rows = F.dropout(x[:, :, :32, :32].flatten(2).transpose(1, 2), training=True)
        q, k, v = self.qkv(rows).unflatten(-1, (3, 1, self.head)).permute(2, 0, 3, 1, 4)
        value, gate = self.up(F.scaled_dot_product_attention(q, k, v)).chunk(2, -1)
        return value * F.gelu(gate)


def compiled(options: Options, head: int = 64) -> tuple[Program, list[Tensor | None]]:
    module = Everything(head).half()
    traced = trace(module, "b 4 h w", dtype=torch.float16, **SIZES)
    program = compile_graph(traced.graph, Signature(traced.returned, ()), "cuda", options).program
    state = [
        torch.empty([s.eval(SIZES) for s in spec.shape], dtype=spec.dtype)
        if spec.is_state
        else None
        for spec in program.inputs
    ]
    return program, state


def bound_on(device: Device, program: Program, state: Sequence[Tensor | None]) -> Bound:
    kernels: Any = Kernels(device)
    return Bound(program, SIZES, state, kernels, Workspace(torch.device("cpu")), 0)


def is_launched(run: Any) -> bool:
    """Whether what runs a step has launches of the library's choice."""
    if "Launched." in getattr(run, "__qualname__", ""):
        return True
    return any(is_launched(cell.cell_contents) for cell in getattr(run, "__closure__", None) or ())


def linked(
    program: Program, state: Sequence[Tensor | None], device: Device
) -> tuple[set[str], list[str]]:
    """The kernels that are built, and what does each call of the program."""
    bound = bound_on(device, program, state)
    linked = bound._link(torch.empty(bound.arena_bytes, dtype=torch.uint8))
    found = []
    for position, (step, run) in enumerate(zip(bound.steps, linked.steps, strict=True)):
        if isinstance(step, CallStep):
            is_ours = is_launched(run)
            choice = bound.plan.choices.get(position)
            assert is_ours == (choice is not None and choice.launches is not None)
            found += [f"{step.op} {choice.kernel if choice and is_ours else 'library'}"]
    kernels: Any = bound._resources.kernels
    return kernels.built, found


@pytest.mark.parametrize(
    ("options", "device"), [(PLAIN, H100), (OURS, A100), (OURS, RTX_5090), (PLAIN, A100)]
)
def test_the_library_has_what_nobody_asked_for_or_no_gpu_can(
    options: Options, device: Device
) -> None:
    """Calls without an operand among them."""
    built, found = linked(*compiled(options), device)
    assert "aten library" in found
    assert found.count("conv2d narrow_conv") == 1
    assert found.count("conv2d library") == 1
    assert found.count("attention library") == 1
    assert found.count("linear library") >= 1
    assert not any(name.startswith(("wgmma_", "tma_", "cross_")) for name in built)


def test_ours_take_over() -> None:
    built, found = linked(*compiled(OURS), H100)
    assert "aten library" in found
    assert found.count("conv2d narrow_conv") == 1
    assert found.count("conv2d wgmma_gemm") == 1
    assert found.count("attention tma_attention") == 1
    assert found.count("geglu wgmma_gemm") == 1
    assert {"wgmma_gemm", "tma_attention", "narrow_conv"} <= built


@pytest.mark.parametrize("device", [A100, RTX_5090], ids=lambda device: device.name)
def test_gates_are_ours_on_any_gpu(device: Device) -> None:
    built, found = linked(*compiled(OURS), device)
    assert found.count("geglu geglu") == 1
    assert "geglu" in built


@pytest.mark.parametrize("name", ["wgmma_gemm", "tma_attention", "narrow_conv"])
def test_one_kernel_alone_is_switched_off(name: str) -> None:
    built, found = linked(*compiled(Options(kernels_off=(name,))), H100)
    assert name not in built
    assert not any(each.endswith(name) for each in found)
    assert {"wgmma_gemm", "tma_attention", "narrow_conv"} - {name} <= built


@pytest.mark.parametrize("device", [H100, A100, RTX_5090], ids=lambda device: device.name)
def test_wide_heads_stay_ours(device: Device) -> None:
    _, found = linked(*compiled(OURS, head=512), device)
    assert found.count("attention wide_attention") == 1


def test_on_a_cpu_there_is_nothing_to_choose() -> None:
    program, _ = compiled(OURS)
    assert not choices.choices_of(program, program.at(SIZES), sizes_of, CPU)
    assert not choices.sources_anywhere(program, CPU)


def sizes_of(exprs: tuple[Expr, ...]) -> tuple[int, ...]:
    return tuple(expr.eval(SIZES) for expr in exprs)


def test_each_call_is_asked_about_once() -> None:
    """Under its position; other steps have no choice."""
    program, _ = compiled(OURS)
    steps = program.at(SIZES)
    found = choices.choices_of(program, steps, sizes_of, H100)
    calls = {n: s for n, s in enumerate(steps) if isinstance(s, CallStep) and s.op in BY_OP}
    assert found.keys() == calls.keys()
    for position, step in calls.items():
        call = choices.call_of(program, step)
        assert found[position] is select(call, call.at(SIZES), H100, program.kernels_off)


def test_scores_lie_in_the_arena() -> None:
    """1024 queries and as many keys, twice: 4 bytes and 2 for each pair, 4 for a sum and for each
    number of the result. They lie where nothing is that the step reads, or that is read later."""
    bound = bound_on(H100, *compiled(OURS, head=512))
    kernels = {position: choice.kernel for position, choice in bound.plan.choices.items()}
    ((position, _),) = ((n, name) for n, name in kernels.items() if name == "wide_attention")
    launches = bound.plan.choices[position].launches
    assert launches is not None
    size = scratch_bytes(launches)
    assert size == 2 * 1024 * (1024 * (4 + 2) + 4 + 512 * 4)
    begin = bound.plan.memory.scratch[position, 0]
    assert begin + size <= bound.arena_bytes
    step = bound.steps[position]
    assert isinstance(step, CallStep)
    read = {ref.buffer for ref in step.inputs}
    assert read
    for number in read:
        place = bound.plan.memory.buffers[number]
        assert place >= begin + size or place + bound.plan.sizes.bytes_of(number) <= begin


def test_only_kernels_that_want_working_memory_have_some() -> None:
    for device, head in ((H100, 64), (A100, 64), (H100, 512)):
        bound = bound_on(device, *compiled(OURS, head))
        calls = {n for n, step in enumerate(bound.steps) if isinstance(step, CallStep)}
        wanted = {n for n, c in bound.plan.choices.items() if c.launches and c.launches.scratch}
        assert {n for n, _ in bound.plan.memory.scratch if n in calls} == wanted
        assert bool(wanted) == (device is A100 or head == 512)


@pytest.mark.parametrize("device", [H100, A100])
def test_rows_of_wide_attention_are_known_before_a_call_wants_them(device: Device) -> None:
    """Their kernel has two forms, by the length of a row; a first call at other sizes waited for
    one of them, for most of a second."""
    program, _ = compiled(OURS, head=512)
    needed = choices.sources_at(program, SIZES, device)
    others = choices.sources_elsewhere(program, needed, device)
    here, elsewhere = ([s for s in some if s.name == "exp_rows"] for some in (needed, others))
    dtype, scale = torch.float16, 512**-0.5
    assert here == [exp_rows(dtype, scale, 32 * 32)]
    assert elsewhere == [exp_rows(dtype, scale, 1)]
    narrow, _ = compiled(OURS)
    assert not any(s.name == "exp_rows" for s in choices.sources_anywhere(narrow, device))


def test_what_follows_a_kernel_of_ours_may_begin_early() -> None:
    """The kernel behind a convolution of ours; behind a library's it waits for its end."""
    behind = {}
    for options in (OURS, PLAIN):
        bound = bound_on(H100, *compiled(options))
        convs = [
            n for n, s in enumerate(bound.steps) if isinstance(s, CallStep) and s.op == "conv2d"
        ]
        behind[options] = convs[1] + 1 in bound.plan.early
    assert behind == {OURS: True, PLAIN: False}


def test_what_follows_several_launches_waits_where_torchs_is_the_last() -> None:
    """As wide attention ends; what stands behind a library's GEMM are gates of ours."""
    for head, is_early in ((512, False), (64, True)):
        bound = bound_on(H100, *compiled(OURS, head))
        (call,) = (n for n, choice in bound.plan.choices.items() if "attention" in choice.kernel)
        launches = bound.plan.choices[call].launches
        assert launches is not None
        assert launches.ends_ours == is_early
        behind = next(n for n in range(call + 1, len(bound.steps)) if bound.steps[n] is not None)
        assert (behind in bound.plan.early) == is_early
    gates = geglu.launch(problem("geglu", (64, 320), (2560, 320)), A100)
    assert gates.ends_ours


def test_what_sizes_nearby_need_is_built_first() -> None:
    """Every kernel that one of them runs comes before those that none does; the most wanted is the
    first."""
    program, _ = compiled(OURS)
    needed = choices.sources_at(program, SIZES, H100)
    others = choices.sources_elsewhere(program, needed, H100)
    found = choices.likely_first(program, SIZES, H100)(others)
    assert sorted(map(hash, found)) == sorted(map(hash, others))
    sizes = [some for some in choices.near(SIZES) if all(g.holds(some) for g in program.guards)]
    assert len(sizes) > 10
    uses = [sum(s in choices.sources_at(program, some, H100) for some in sizes) for s in found]
    assert uses == sorted(uses, reverse=True)
    assert uses[0] > 1
    assert uses[-1] == 0


def test_sizes_nearby() -> None:
    found = [tuple(some.values()) for some in choices.near({"b": 1, "h": 64})]
    assert {(2, 64), (1, 128), (2, 128), (1, 48), (2, 65), (1, 65)} <= set(found)
    assert all(size > 0 for some in found for size in some)


class Mixed(nn.Module):
    """Calls whose results have other types than their first operands."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.codes = nn.Buffer(torch.ones(64, 64, dtype=torch.int8))
        self.scales = nn.Buffer(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        larger = x.abs() >= 6
        most = x.abs().amax(1, keepdim=True).float()
        sums = INT_MM((x / most).round().to(torch.int8), self.codes.t())
        columns = larger.to(torch.int8).amax(0) > 0
        made: Tensor = MIXED_PRODUCT(sums, most, x, columns, self.codes, self.scales, None)
        return made


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_planned_for_is_what_runs(device: str) -> None:
    """The library is asked about a node while a program is planned, and about its step later."""
    for module, shape in ((Everything(), "b 4 h w"), (Mixed(), "b 64")):
        found = trace(module.half(), shape, dtype=torch.float16, b=2, h=64, w=64)
        given = compile_graph(found.graph, Signature(found.returned, ()), device, OURS)
        nodes = [n for n in given.graph.nodes if n.op in BY_OP]
        steps = [s for s in given.program.call_steps if s.op in BY_OP]
        asked = {(c.op, c.dtype, c.mask) for c in map(Call.of, nodes)}
        assert {
            (c.op, c.dtype, c.mask) for c in (call_of(given.program, s) for s in steps)
        } == asked
        assert asked


def test_a_mixed_product_is_ours() -> None:
    found = trace(Mixed().half(), "b 64", dtype=torch.float16, b=40)
    given = compile_graph(found.graph, Signature(found.returned, ()), "cuda", OURS)
    (step,) = (s for s in given.program.call_steps if s.op == "mixed_product")
    call = call_of(given.program, step)
    for device in (A100, H100, RTX_5090):
        assert select(call, call.at({"b": 40}), device).kernel == "mixed_product"
