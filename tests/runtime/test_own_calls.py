"""Programs for a GPU, linked without one: which calls kernels written by hand take over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from strop.runtime.run.narrow_convolution import NarrowConvolution
from strop.runtime.run.tma_attention import TmaAttention
from strop.runtime.run.wgmma_gemm import WgmmaGemm
from strop.runtime.run.wide_attention import WideAttention, working_bytes
from torch import Tensor, nn

from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.ir.device import Device
from strop.ir.program import CallStep, Program
from strop.ir.source import KernelSource, Split
from strop.kernels.attention.exp_rows import exp_rows
from strop.options import Options
from strop.runtime.run import own_calls
from strop.runtime.run.executor import Bound
from strop.runtime.run.workspace import Workspace
from tests.frontend.tracing import trace
from tests.gpus import A100, H100, RTX_5090

OURS = Options(tma_geglu=True)
PLAIN = Options(tma_attention=False, wgmma_gemm=False)
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


def linked(
    program: Program, state: Sequence[Tensor | None], device: Device
) -> tuple[Kernels, list[str]]:
    """The library of kernels, and what calls the steps of the program make."""
    kernels: Any = Kernels(device)
    bound = Bound(program, SIZES, state, kernels, Workspace(torch.device("cpu")), 0)
    linked = bound._link(torch.empty(bound.arena_bytes, dtype=torch.uint8))
    found = []
    for step, run in zip(bound.steps, linked.steps, strict=True):
        if isinstance(step, CallStep):
            cells = [cell.cell_contents for cell in run.__closure__ or ()]
            ours = [type(c).__name__ for c in cells if isinstance(c, OWN)]
            found += [f"{step.op} {ours[0] if ours else 'library'}"]
    return kernels, found


OWN = (TmaAttention, WgmmaGemm, NarrowConvolution, WideAttention)


@pytest.mark.parametrize(
    ("options", "device"), [(PLAIN, H100), (OURS, A100), (OURS, RTX_5090), (PLAIN, A100)]
)
def test_the_library_has_what_nobody_asked_for_or_no_gpu_can(
    options: Options, device: Device
) -> None:
    """Calls without an operand among them."""
    kernels, found = linked(*compiled(options), device)
    assert "aten library" in found
    assert found.count("conv2d NarrowConvolution") == 1
    assert found.count("conv2d library") == 1
    assert found.count("attention library") == 1
    assert not any(name.startswith(("box_", "group_")) for name in kernels.built)


def test_ours_take_over() -> None:
    kernels, found = linked(*compiled(OURS), H100)
    assert "aten library" in found
    assert found.count("conv2d NarrowConvolution") == 1
    assert found.count("conv2d WgmmaGemm") == 1
    assert found.count("attention TmaAttention") == 1
    assert {"wgmma_gemm", "tma_attention"} <= kernels.built


def test_wide_heads_stay_ours() -> None:
    _, found = linked(*compiled(OURS, head=512), H100)
    assert found.count("attention WideAttention") == 1


def test_scores_lie_in_the_arena() -> None:
    """1024 queries and as many keys, twice: 4 bytes and 2 for each pair, 4 for a sum and for each
    number of the result. They lie where nothing is that the step reads, or that is read later."""
    program, state = compiled(OURS, head=512)
    kernels: Any = Kernels(H100)
    bound = Bound(program, SIZES, state, kernels, Workspace(torch.device("cpu")), 0)
    ((position, size),) = bound.plan.own.wide.items()
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
    assert working_bytes(program, bound.steps, {position}, bound.plan.sizes.all) == {}
    assert working_bytes(program, bound.steps, (), lambda _: (0, 1, 2, 512)) == {}


@pytest.mark.parametrize("device", [H100, A100])
def test_rows_of_wide_attention_are_known_before_a_call_wants_them(device: Device) -> None:
    """Their kernel has two forms, by the length of a row; a first call at other sizes waited for
    one of them, for most of a second."""
    program, _ = compiled(OURS, head=512)
    needed = own_calls.sources_at(program, SIZES, device)
    others = own_calls.sources_elsewhere(program, needed, device)
    here, elsewhere = ([s for s in some if s.name == "exp_rows"] for some in (needed, others))
    dtype, scale = torch.float16, 512**-0.5
    assert here == [exp_rows(dtype, scale, 32 * 32)]
    assert elsewhere == [exp_rows(dtype, scale, 1)]
    narrow, _ = compiled(OURS)
    assert not any(s.name == "exp_rows" for s in own_calls.sources_anywhere(narrow, device))


def test_what_follows_a_kernel_of_ours_may_begin_early() -> None:
    """The kernel behind a convolution of ours; behind a library's it waits for its end."""
    behind = {}
    for options in (OURS, PLAIN):
        program, state = compiled(options)
        bound = Bound(program, SIZES, state, Kernels(H100), Workspace(torch.device("cpu")), 0)  # type: ignore[arg-type]
        convs = [
            n for n, s in enumerate(bound.steps) if isinstance(s, CallStep) and s.op == "conv2d"
        ]
        behind[options] = convs[1] + 1 in bound.plan.early
    assert behind == {OURS: True, PLAIN: False}


def test_what_sizes_nearby_need_is_built_first() -> None:
    """Every kernel that one of them runs comes before those that none does; the most wanted is the
    first."""
    program, _ = compiled(OURS)
    needed = own_calls.sources_at(program, SIZES, H100)
    others = own_calls.sources_elsewhere(program, needed, H100)
    found = own_calls.likely_first(program, SIZES, H100)(others)
    assert sorted(map(hash, found)) == sorted(map(hash, others))
    sizes = [some for some in own_calls.near(SIZES) if all(g.holds(some) for g in program.guards)]
    assert len(sizes) > 10
    uses = [sum(s in own_calls.sources_at(program, some, H100) for some in sizes) for s in found]
    assert uses == sorted(uses, reverse=True)
    assert uses[0] > 1
    assert uses[-1] == 0


def test_sizes_nearby() -> None:
    found = [tuple(some.values()) for some in own_calls.near({"b": 1, "h": 64})]
    assert {(2, 64), (1, 128), (2, 128), (1, 48), (2, 65), (1, 65)} <= set(found)
    assert all(size > 0 for some in found for size in some)
