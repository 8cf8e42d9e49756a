"""The library of kernels: what runs a call, why others do not, and by whose numbers."""

from __future__ import annotations

import itertools
import math
import timeit
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.errors import OptionError
from strop.ir.device import CPU, Device
from strop.ir.graph import Node
from strop.kernels import libraries, library
from strop.kernels.attention.times import NOT_MEASURED
from strop.kernels.gemm.tile import ENDS, GATED, PLAIN, SUM
from strop.kernels.kernel import NEVER, Call, Kernel, Problem
from strop.kernels.tuned import h100, tuned
from strop.options import INFERENCE_KERNELS, Options
from tests.frontend.tracing import trace
from tests.gpus import A100, H100, H200, RTX_5090
from tests.kernels.launching import PLAIN as ATTENTION
from tests.kernels.launching import SAME, call, problem

DEVICES = (A100, H100, H200, RTX_5090)
ANYWHERE = {
    *("skinny_gemm", "wide_attention", "narrow_conv", "folded_taps", "geglu", "mixed_product"),
    *("trimmed_linear", "linear_scan"),
}
ON_SM_90 = {"wgmma_gemm", "wgmma_codes", "wgmma_attention", "cross_attention", "tma_attention"}
STRIDED: dict[str, Any] = {**SAME, "stride": (2, 2)}
HEADS = (("b", 8, "n", 40), ("b", 8, "n", 64), ("b", 1, "n", 512), ("b", 2, "n", 128))
CALLS = (
    *(call("attention", *[shape] * 3, **ATTENTION) for shape in HEADS),
    *(call("attention", shape, *[(*shape[:2], 77, shape[3])] * 2, **ATTENTION) for shape in HEADS),
    call("attention", *[HEADS[0]] * 3, causal=True, scale=None),
    call("attention", *[HEADS[0]] * 4, **ATTENTION),
    call("attention", HEADS[0], ("n", 40), ("n", 40), **ATTENTION),
    *(call("attention", *[shape] * 3, **ATTENTION, format="fp8") for shape in HEADS),
    *(
        call("conv2d", ("b", ins, "h", "w"), (outs, ins, 3, 3), **attrs)
        for ins, outs in ((4, 320), (320, 4), (320, 320), (640, 1280), (96, 192))
        for attrs in (SAME, STRIDED)
    ),
    call("conv2d", ("b", 320, "h", "w"), (320, 320, 1, 1), (320,), **{**SAME, "padding": (0, 0)}),
    call("upsampled_conv2d", ("b", 640, "h", "w"), (4 * 640, 640, 2, 2)),
    call("folded_taps", (640, 640, 3, 3)),
    *(call("linear", ("n", ins), (outs, ins)) for ins, outs in ((320, 1280), (768, 768), (10, 7))),
    call("linear", ("n", 320), (1280, 320), (1280,)),
    call("linear", ("b", "n", 320), ("m", 320)),
    call("trimmed_linear", ("n", 320), (1280, 320), columns=1277),
    call("trimmed_linear", ("n", 320), ("m", 320), columns=635),
    call("linear_add", ("n", 640), (1280, 640), ("n", 1280), (1280,)),
    call("linear_add", ("n", 640), (1280, 640), ("n", 1280)),
    call("linear_gelu", ("n", 640), (1280, 640), (1280,)),
    *(
        call(op, ("n", 256), (outs, 256), *added, *[(outs,)] * 4, activation="relu", eps=1e-5)
        for outs in (64, 1024)
        for op, added in (("normed_linear", ()), ("normed_linear_add", (("n", outs),)))
    ),
    call("geglu", ("n", 320), (2560, 320), (2560,)),
    call("geglu", ("n", 320), (2560, 320)),
    call("matmul", ("b", "n", 64), ("b", 64, "m")),
    *(
        call("mixed_product", ("n", outs), ("n", 1), ("n", ins), (ins,), (outs, ins), (outs,))
        for ins, outs in ((320, 1280), (320, 12))
    ),
    call("linear_scan", ("b", 320, "n", 16), ("b", 320, "n", 16)),
    call(
        "recurrence",
        *(("n", "b", 64), (64, 16), ("b", 16), ("b", 16), (64,)),
        kind="lstm",
        has_bias=True,
        reversed=False,
    ),
    call("code_sums", ("n", 64), (32, 64)),
    call("scaled_product", ("n", 64), (32, 64), ("n", 1), (1, 32)),
    call("scaled_geglu", ("n", 640), (5120, 640), ("n", 1), (1, 5120), (5120,), is_fast=False),
    call("scaled_geglu", ("n", 64), (64, 64), ("n", 1), (1, 64), is_fast=False),
    *(
        call(
            "scaled_conv2d",
            ("b", 320, "h", "w"),
            (640, 320, 3, 3),
            ("b", 1, "h", "w"),
            (640,),
            **how,
        )
        for how in (SAME, STRIDED)
    ),
    *(
        call(
            "code_conv2d", ("b", 64, "h", "w"), (32, 64 // n, 3, 3), **{**SAME, "groups": n}, zero=0
        )
        for n in (1, 2)
    ),
)
SIZES = (
    {"b": 2, "n": 4096, "m": 77, "h": 64, "w": 64},
    {"b": 1, "n": 2, "m": 640, "h": 7, "w": 9},
    {"b": 8, "n": 1024, "m": 8, "h": 17, "w": 128},
    {"b": 1, "n": 512, "m": 77, "h": 8, "w": 8},
)


def asked() -> Iterator[tuple[Call, Problem, Device]]:
    for given, sizes, device in itertools.product(CALLS, SIZES, DEVICES):
        for dtype in (torch.float16, torch.float32):
            typed = replace(given, dtype=dtype)
            yield typed, typed.at(sizes), device


def test_the_cheapest_row_runs_and_the_others_are_named() -> None:
    """The first of them, where rows cost the same; the launches are the row's own."""
    ran = set()
    for given, at, device in asked():
        rows = library.rows_for(given, device)
        costs = {row.name: row.cost_us(at, device) for row in rows}
        choice = library.select(given, at, device)
        assert choice.kernel == min(costs, key=lambda name: costs[name])
        assert choice.cost_us == costs.pop(choice.kernel)
        assert dict(choice.beaten) == costs
        (row,) = (row for row in rows if row.name == choice.kernel)
        assert choice.launches == row.launch(at, device)
        assert (choice.launches is None) == (choice.kernel not in library.OURS)
        ran.add(choice.kernel)
    assert ran >= ANYWHERE | ON_SM_90


def test_whatever_runs_is_known_before() -> None:
    for given, at, device in asked():
        known = set(library.forms(given, device))
        assert set(library.select(given, at, device).sources) <= known


@pytest.mark.parametrize("row", library.KERNELS, ids=lambda row: f"{row.name}-{row.ops[0]}")
def test_each_no_has_a_reason(row: Kernel) -> None:
    """A clause that goes on from "it", for explain."""
    reasons = {
        row.supports(replace(given, dtype=dtype), device)
        for given in CALLS
        if given.op in row.ops
        for device in (*DEVICES, CPU, replace(CPU, isa="avx512"))
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int32)
    }
    assert "" in reasons or row.name not in ANYWHERE | ON_SM_90
    assert len(reasons) > (2 if row.name in library.OURS else 1)
    for reason in reasons - {""}:
        assert reason.split()[0] in CLAUSES, reason
        assert not reason.endswith(".")


CLAUSES = (
    *("runs", "computes", "multiplies", "wants", "takes", "adds"),
    *("is", "was", "has"),
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_reasons(dtype: torch.dtype) -> None:
    """Of the rows that cannot do a call; those that can have none."""
    for given, device in itertools.product(CALLS, DEVICES):
        typed = replace(given, dtype=dtype)
        found = library.reasons(typed, device)
        able = {row.name for row in library.rows_for(typed, device)}
        rows = {row.name for row in library.BY_OP[given.op]}
        assert found.keys() | able == rows
        assert not found.keys() & able
        assert all(found.values())
        ours = able & set(library.OURS) - {"mixed_product", "linear_scan"}
        assert not ours or dtype != torch.float32


def test_what_is_switched_off_does_not_run() -> None:
    for given, at, device in asked():
        first = library.select(given, at, device)
        if first.kernel not in library.OURS:
            continue
        second = library.select(given, at, device, (first.kernel,))
        rest = dict(first.beaten)
        assert second.kernel == min(rest, key=lambda name: rest[name])
        assert library.reasons(given, device, (first.kernel,))[first.kernel] == "is switched off"
        assert not set(first.sources) & set(second.sources)
        none = library.select(given, at, device, library.OURS)
        assert none.launches is None
        assert not none.sources
        assert not list(library.forms(given, device, library.OURS))


def test_names() -> None:
    """By which kernels are switched off."""
    assert len(set(library.OURS)) == len(library.OURS)
    assert set(library.OURS) >= ANYWHERE | ON_SM_90
    assert set(INFERENCE_KERNELS) <= set(library.MAY_BE_OFF)
    for op in library.BY_OP:
        names = [row.name for row in library.BY_OP[op]]
        assert len(set(names)) == len(names)
        assert any(row in libraries.ROWS for row in library.BY_OP[op])  # there is a choice


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_name_that_nobody_knows(device: str) -> None:
    """Nor is a library's a kernel that can be switched off."""
    traced = trace(torch.relu, "n 4", n=3)
    for name, hint in (("skiny_gemm", "did you mean skinny_gemm?"), ("cudnn", "there are skinny")):
        options = Options(kernels_off=("narrow_conv", name))
        with pytest.raises(OptionError, match=f"no kernel to switch off: {name}") as caught:
            compile_graph(traced.graph, Signature(traced.returned, ()), device, options)
        assert hint in str(caught.value)
    known = Options(kernels_off=library.OURS)
    assert compile_graph(traced.graph, Signature(traced.returned, ()), device, known)


@pytest.mark.parametrize("op", ["copy", "cat", "aten"])
def test_an_operator_without_rows_is_torchs(op: str) -> None:
    at = problem(op, (2, 3))
    assert library.select(at.call, at, H100) is library.TORCH
    assert library.TORCH.kernel == "torch"
    assert not library.TORCH.sources
    assert not library.reasons(at.call, H100)
    assert not list(library.forms(at.call, H100))


def test_on_a_cpu_without_vectors_torch_computes_what_it_can() -> None:
    for given in CALLS:
        if given.op == "linear_scan":  # torch has none
            assert library.select(given, given.at(SIZES[0]), CPU).kernel == "cpu_scan"
            continue
        assert library.select(given, given.at(SIZES[0]), CPU) is library.TORCH


def node_of(given: Call) -> Node:
    inputs = tuple(Node("input", (), {}, shape, given.dtype) for shape in given.shapes)
    return Node(given.op, inputs, dict(given.attrs), given.shapes[0], given.dtype)


def test_nodes_are_asked_about_as_calls_are() -> None:
    for given in CALLS:
        node = node_of(given)
        assert Call.of(node) == given
        for device in (A100, H100):
            wanted = library.select(given, given.at(SIZES[0]), device).sources
            assert library.sources_of(node, SIZES[0], device) == wanted
            assert not library.sources_of(node, SIZES[0], device, library.OURS)
        assert library.sources_of(node, {}, CPU) == ()  # whose sizes nobody need know
    other = replace_op(node_of(CALLS[0]), "cat")
    assert library.sources_of(other, {}, H100) == ()


def replace_op(node: Node, op: str) -> Node:
    return Node(op, node.inputs, node.attrs, node.shape, node.dtype)


def test_a_problem_is_a_call_without_symbols() -> None:
    at = CALLS[0].at(SIZES[0])
    assert at.shapes == ((2, 8, 4096, 40),) * 3
    assert at.call.at({}) == at
    assert at.call.known(0) == (2, 8, 4096, 40)
    assert CALLS[0].known(0) is None
    assert at.call.known(3) is None


def test_a_choice_is_made_once() -> None:
    for given in CALLS:
        at = given.at(SIZES[0])
        assert library.select(given, at, H100) is library.select(given, given.at(SIZES[0]), H100)


def test_a_known_choice_is_quick() -> None:
    """Two microseconds on a core that does nothing else."""
    for given in (CALLS[0], CALLS[-1]):
        at = given.at(SIZES[0])
        seconds = timeit.repeat(
            lambda given=given, at=at: library.select(given, at, H100), number=1000, repeat=5
        )
        assert min(seconds) < 10e-6 * 1000


# ---- by whose numbers --------------------------------------------------------------------------


def test_an_h100_has_its_own_numbers() -> None:
    assert h100.DEVICE == H100
    assert tuned(H100) is h100.TUNED
    # whatever clock its driver tells
    assert tuned(replace(H100, clock_hz=1.755e9)) is h100.TUNED


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_tiles_run_by_the_clock(factor: float) -> None:
    found = tuned(replace(H100, name="another", clock_hz=factor * H100.clock_hz)).gemm
    for kind, tiles in h100.GEMM.tiles.items():
        for tile, cost in tiles.items():
            other = found.tiles[kind][tile]
            assert (other.begin, other.again, other.step) == pytest.approx(
                (cost.begin / factor, cost.again / factor, cost.step / factor)
            )
            assert other.spared == cost.spared
    assert found.clusters == h100.GEMM.clusters
    assert found.library.conv_ops == pytest.approx(factor * h100.LIBRARY.conv_ops)
    assert found.library.linear_ops == pytest.approx(factor * h100.LIBRARY.linear_ops)
    assert found.library.linear_depth == pytest.approx(factor * h100.LIBRARY.linear_depth)
    assert found.library.row_bytes == pytest.approx(factor * h100.LIBRARY.row_bytes)
    assert found.library.weight_bytes == h100.LIBRARY.weight_bytes


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_weights_come_by_the_bandwidth(factor: float) -> None:
    bandwidth = factor * H100.memory_bandwidth
    found = tuned(replace(H100, name="another", memory_bandwidth=bandwidth)).gemm
    assert found.tiles == h100.GEMM.tiles
    for name in ("conv_bytes", "linear_bytes", "weight_bytes", "behind_bytes"):
        wanted = factor * getattr(h100.LIBRARY, name)
        assert getattr(found.library, name) == pytest.approx(wanted)
    assert found.library.conv_ops == h100.LIBRARY.conv_ops
    assert found.library.linear_begin_us == h100.LIBRARY.linear_begin_us


def test_clusters_are_as_many_as_there_is_room_for() -> None:
    found = tuned(replace(H100, name="another", sms=66)).gemm
    assert found.clusters == {1: 66, 2: 33, 3: 19, 4: 15, 6: 8, 8: 7}
    assert found.library.conv_ops == pytest.approx(h100.LIBRARY.conv_ops / 2)


def test_a_record_that_lacks_a_number_scales_by_none() -> None:
    assert tuned(Device("unknown", arch=90)).gemm == h100.GEMM
    assert tuned(Device("unknown", arch=90)).attention is h100.ATTENTION


@pytest.mark.parametrize("device", [A100, RTX_5090], ids=lambda device: device.name)
def test_attention_is_not_measured_on_other_architectures(device: Device) -> None:
    found = tuned(device)
    assert found.device == device
    assert found.attention is NOT_MEASURED
    ratio = device.half_flops / H100.half_flops
    assert found.gemm.library.linear_ops == pytest.approx(ratio * h100.LIBRARY.linear_ops)


LINEARS = [  # rows, columns, depth: as long as their products take
    (rows, columns, depth)
    for rows in (2048, 4096, 8192, 18432)
    for columns, depth in ((320, 320), (640, 640), (1280, 1280), (1280, 5120), (3840, 1280))
]
OPS = {PLAIN: "linear", GATED: "geglu", SUM: "linear_add"}


def linear_of(rows: int, columns: int, depth: int, end: str) -> Problem:
    columns = 2 * columns if end == GATED else columns
    more = {PLAIN: (), GATED: ((columns,),), SUM: ((rows, columns), (columns,))}[end]
    return problem(OPS[end], (rows, depth), (columns, depth), *more)


def test_an_h200_chooses_like_an_h100_where_memory_does_not_decide() -> None:
    """It has the same multiprocessors and the same clock."""
    assert tuned(H200).gemm.tiles == h100.GEMM.tiles
    assert tuned(H200).attention is h100.ATTENTION
    for head, side, keys in itertools.product(
        (40, 64, 80, 128, 160), (8, 16, 24, 32, 64, 96), (77, 154, None)
    ):
        for batch in (1, 2, 8):
            q, k = (batch, 8, side**2, head), (batch, 8, keys or side**2, head)
            at = problem("attention", q, k, k, **ATTENTION)
            ours, others = (library.select(at.call, at, device) for device in (H100, H200))
            assert (ours.kernel, ours.launches) == (others.kernel, others.launches)
    for batch, side, channels in itertools.product((2, 8), (32, 64, 96), (320, 640, 1280)):
        shapes = (batch, channels, side, side), (channels, channels, 3, 3)
        at = problem("conv2d", *shapes, **SAME)
        ours, others = (library.select(at.call, at, device) for device in (H100, H200))
        assert ours.kernel == others.kernel == "wgmma_gemm"
        assert ours.launches == others.launches


@pytest.mark.parametrize("end", ENDS)
def test_an_h200_launches_the_same_linears(end: str) -> None:
    """The tile is the same wherever both choose one; a library writes results faster there."""
    both = 0
    for shape in LINEARS:
        at = linear_of(*shape, end)
        ours, others = (library.select(at.call, at, device) for device in (H100, H200))
        if ours.kernel == others.kernel == "wgmma_gemm":
            assert ours.launches == others.launches
            both += 1
    assert both > 5


def test_weights_come_faster_on_an_h200() -> None:
    at = problem("linear", (2, 1280), (20160, 1280))
    slow, fast = (library.select(at.call, at, device) for device in (H100, H200))
    assert slow.kernel == fast.kernel == "skinny_gemm"
    assert slow.launches == fast.launches
    assert 1.3 < slow.cost_us / fast.cost_us < 4.8 / 3.35


@pytest.mark.parametrize("device", [A100, RTX_5090], ids=lambda device: device.name)
def test_other_gpus_run_what_runs_anywhere(device: Device) -> None:
    ran = set()
    for given, sizes in itertools.product(CALLS, SIZES):
        able = {row.name for row in library.rows_for(given, device)} & set(library.OURS)
        assert able <= ANYWHERE
        ran.add(library.select(given, given.at(sizes), device).kernel)
    assert ran & set(library.OURS) == ANYWHERE
    assert ran >= {"cublas", "cudnn", "sdpa", "cublas_batched"}


# ---- what libraries take -----------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_every_call_has_an_estimate(device: Device) -> None:
    """Which is finite, but for windows that no library has."""
    for given, sizes in itertools.product(CALLS, SIZES):
        at = given.at(sizes)
        rows = [row for row in library.rows_for(given, device) if row in libraries.ROWS]
        costs = [row.cost_us(at, device) for row in rows]
        assert min(costs) > 0
        assert math.isfinite(min(costs)) == (given.op != "upsampled_conv2d")
        assert len(rows) == 1 or given.op == "attention"


def test_estimates_of_libraries_grow_with_the_work() -> None:
    pairs = [
        (problem("linear", (rows, 640), (1280, 640)) for rows in (2048, 8192)),
        (problem("matmul", (n, 64, 64), (n, 64, 64)) for n in (64, 640)),
        (problem("geglu", (rows, 320), (2560, 320)) for rows in (2048, 8192)),
        (problem("folded_taps", (outs, 640, 3, 3)) for outs in (320, 1280)),
        (problem("attention", *[(n, 8, 4096, 128)] * 3, causal=True, scale=None) for n in (1, 4)),
        (problem("conv2d", (n, 128, 64, 64), (128, 128, 3, 3), **SAME) for n in (8, 64)),
    ]
    for small, large in pairs:
        of_libraries = [
            library.select(at.call, at, A100, library.OURS).cost_us for at in (small, large)
        ]
        assert of_libraries[0] < of_libraries[1] < NEVER
