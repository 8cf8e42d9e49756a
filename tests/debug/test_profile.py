"""Measured times of steps: what is timed, what a kernel is attributed to, and what is drawn."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

import strop
from strop.api import dispatchers_of
from strop.debug import ceilings, profile, roofline, step_times, trace
from strop.debug.ceilings import Ceilings
from strop.debug.profile import measured, profiled, watched
from strop.debug.roofline import EVENTS, HOST, PROFILER, ProfileRow, StepCost, Times, profile_row
from strop.debug.roofline_page import plot, profile_section
from strop.debug.trace import Traced, attribute, label, own_times
from strop.errors import OptionError
from strop.ir.dims import const
from strop.ir.program import Buffer, CallStep, Program, TensorRef
from tests.debug.test_explain import Block, _Tags

X = (2, 4, 32, 32)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ceilings, few runs."""
    monkeypatch.setattr(ceilings, "COPY_BYTES", {"cuda": 1 << 28, "cpu": 1 << 24})
    monkeypatch.setattr(ceilings, "SIDE", {"cuda": 2048, "cpu": 256})
    monkeypatch.setattr(ceilings, "SECONDS", 0.02)
    monkeypatch.setattr(step_times, "CPU_S", 0.2)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def optimized(cache_dir: str, **changes: Any) -> Block:
    torch.manual_seed(0)
    module = Block().eval().requires_grad_(False)
    return strop.optimize(module, options=strop.Options(cache_dir=cache_dir, **changes))


def only(report: Any) -> ProfileRow:
    (component,) = report.components
    assert component.profile is not None
    return component.profile


# on a CPU, from the call to the page


def test_each_step_of_a_module_is_timed(cache_dir: str) -> None:
    module = optimized(cache_dir)
    report = profiled(module, torch.randn(X))
    row, program = only(report), dispatchers_of(module)["Block"].variants.all[0].program
    assert row.method == HOST
    assert not row.is_replayed
    assert [s.number for s in row.steps] == list(range(len(program.steps)))
    assert (row.num_not_run, row.rest, row.unseen) == (0, (), ())
    for step in row.steps:
        assert step.us is not None
        assert min(step.us, step.bytes_moved, step.bound_us, step.share or 0) > 0, step
        assert step.lost_us == pytest.approx(step.us - step.bound_us, abs=0.01)
    assert 0.2 * row.call_us < row.steps_us < 1.2 * row.call_us
    assert row.gaps_us == pytest.approx(row.call_us - row.steps_us, abs=0.01)
    kinds = {k.kind: k.num_steps for k in row.kinds}
    assert kinds.pop("pointwise kernel") + kinds.pop("column kernel", 0) == len(row.steps) - 4
    assert kinds == {"convolution": 1, "GEMM": 2, "attention": 1}
    assert sum(k.us for k in row.kinds) == pytest.approx(row.steps_us, abs=0.1)
    losses = [s.lost_us for s in row.by_loss]
    assert losses == sorted(losses, reverse=True)


def test_nothing_is_left_behind(cache_dir: str) -> None:
    module, x = optimized(cache_dir), torch.randn(X)
    report = profiled(module, x)
    entry = dispatchers_of(module)["Block"].latest
    assert not module._forward_pre_hooks
    assert entry is not None
    assert entry.has_graph
    assert all(bound.around is None for bound in entry.bounds.values())
    assert report.components[0].num_calls == 1, "the report is of before it was measured"
    assert torch.equal(module(x), module(x))
    plain = Block().eval().requires_grad_(False)
    profiled(plain, x)
    assert not dispatchers_of(plain)


def test_text_page_and_numbers(cache_dir: str) -> None:
    report = profiled(optimized(cache_dir), torch.randn(X))
    row, text, page = only(report), str(report), report.html
    assert re.search(r"one call [\d.]+ us: \d+ steps [\d.]+ us \(bound .*gaps -?[\d.]+ us", text)
    losing = [step for step in row.steps if (step.lost_us or 0.0) > 0]
    assert text.count(" us  step ") == min(roofline.TOP, len(losing))
    found = json.loads(json.dumps(report.to_dict()))["components"][0]["profile"]
    assert found["ceilings"]["flops"].keys() == {"float32"}
    assert len(found["steps"]) == len(row.steps)
    assert {
        "us",
        "bytes_moved",
        "flops",
        "bound_us",
        "bound_by",
        "share",
        "lost_us",
        "gb_per_s",
        "tflop_per_s",
        "kind",
        "origin",
        "num_kernels",
    } <= found["steps"][0].keys()
    assert {"call_us", "steps_us", "rest_us", "gaps_us", "method", "kinds"} <= found.keys()
    parser = _Tags()
    parser.feed(page)
    assert not parser.open
    assert page.count('<svg class="roof"') == 1
    assert page.count("<circle ") == len(row.steps) + len(row.kinds)
    assert page.count('class="ceiling memory"') == page.count('class="ceiling arithmetic"') == 1
    assert "http" not in page


def test_what_cannot_be_timed_is_said(cache_dir: str) -> None:
    module = optimized(cache_dir)
    module.train()
    report = profiled(module, torch.randn(X))
    assert report.components[0].profile is None
    assert "Block has no times: no inference program serves its call" in str(report)
    module.eval()
    with watched(module) as calls:
        pass
    assert "Block has no times: it was not called" in str(measured(report, module, calls))
    with pytest.raises(OptionError, match="of a module or a pipeline"):
        profiled(torch.relu, torch.randn(3))


def test_arguments_are_those_before_the_call(cache_dir: str) -> None:
    module = optimized(cache_dir)
    with watched(module) as calls:
        module(torch.zeros(X))
        x = torch.randn(X)
        module(x, scale=0.5)
    args, kwargs = calls["Block"].arguments()
    assert args[0] is x
    assert kwargs == {"scale": 0.5}
    assert not module._forward_pre_hooks


def test_steps_with_nothing_to_do_are_counted() -> None:
    class Empty(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.relu(x), y.sum(1)

    row = only(profiled(Empty().eval(), torch.randn(0, 7), torch.randn(64, 9)))
    assert row.num_not_run == 1
    assert len(row.steps) == 1


def test_a_module_without_steps() -> None:
    class Same(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    row = only(profiled(Same().eval(), torch.randn(3)))
    assert (row.steps, row.steps_us, row.bound_us) == ((), 0, 0)
    assert row.gaps_us == row.call_us > 0


# numbers


LIMITS = Ceilings(1e12, {"float16": 1e14, "float32": 1e13})


def cost(
    number: int, num_bytes: int, flops: int, unit: str = "float32", kind: str = "row kernel"
) -> StepCost:
    return StepCost(number, f"step_{number}", kind, "", num_bytes, flops, unit, False, 0, 1.0)


COSTS = [
    cost(0, 10**7, 10**6),
    cost(1, 10**6, 10**10, "float16", "GEMM"),
    cost(3, 10**7, 0),
    cost(4, 10, 10),
]
TIMES = Times(PROFILER, 5, 150.0, {0: (20.0, 1), 1: (100.0, 3), 3: (10.0, 1)}, (("Memcpy", 4.0),))


def test_time_over_bound() -> None:
    row = profile_row({"b": 2}, [replace(COSTS[0], is_hoisted=True), *COSTS[1:]], TIMES, LIMITS, 1)
    memory, product, copy, unseen = row.steps
    assert (memory.bound_us, memory.bound_by, memory.share) == (10.0, "memory", 0.5)
    assert (memory.gb_per_s, memory.lost_us) == (500.0, 10.0)
    assert (product.bound_us, product.bound_by) == (100.0, "arithmetic")
    assert (product.tflop_per_s, product.share, product.num_kernels) == (100.0, 1.0, 3)
    assert (copy.tflop_per_s, copy.share) == (0.0, 1.0)
    assert (unseen.us, unseen.share) == (None, None)
    assert row.unseen == (unseen,)
    assert (row.steps_us, row.rest_us, row.gaps_us) == (130.0, 4.0, 16.0)
    assert {k.kind: (k.num_steps, k.us, k.share) for k in row.kinds} == {
        "row kernel": (2, 30.0, 0.6667),
        "GEMM": (1, 100.0, 1.0),
    }
    text = "\n".join(roofline.profile_lines(row))
    for part in (
        "not attributed to a step: Memcpy",
        "no kernel was attributed to 1 step: 4",
        "gaps 16.0 us (10.7%)",
        "1 step of these only once a denoise loop",
        "1 step more with nothing to do",
    ):
        assert part in text


def test_what_is_far_above_its_bound_has_a_line() -> None:
    """A whole tensor of 5 MB by one program, as T5's encoder once had it, beside kernels that take
    what they have to, and one that is too short to be judged."""
    alone = replace(cost(7, 5 * 10**6, 0), title="row_isinf", num_programs=1, occupied=1 / 132)
    costs = [alone, replace(alone, number=8), cost(1, 10**7, 0), cost(2, 10, 10)]
    times = replace(TIMES, steps={7: (280.0, 1), 8: (290.0, 1), 1: (29.0, 1), 2: (5.9, 1)})
    row = profile_row({}, costs, times, LIMITS, 0)
    assert [s.is_too_slow for s in row.steps] == [True, True, False, False]
    assert (row.steps[0].bound_us, row.steps[0].estimated_us) == (5.0, 660.0)
    (line,) = (text for text in roofline.profile_lines(row) if "more than" in text)
    assert line.strip() == (
        "more than 3 x its bound: 2x row_isinf, up to 290.0 us:"
        " bound 5.0, estimated 660.0 by 1 program, 5.00 MB"
    )


def test_points_on_the_roof() -> None:
    """What takes exactly its bound lies on the line that bounds it; twice the time is below."""
    row = profile_row({}, COSTS[:3], TIMES, LIMITS, 0)
    drawn = plot(row)
    (line,) = re.findall(r'memory" x1="(\S+)" y1="(\S+)" x2="(\S+)" y2="(\S+)"', drawn)
    x1, y1, x2, y2 = map(float, line)
    points = re.findall(
        r'<circle cx="(\S+)" cy="(\S+)" r="\S+" fill="\S+" stroke.*?<title>(\d)', drawn
    )
    place = {int(number): (float(x), float(y)) for x, y, number in points}
    assert place.keys() == {0, 1, 3}

    def roof(x: float) -> float:
        return y1 + (x - x1) / (x2 - x1) * (y2 - y1)

    assert place[3][1] == pytest.approx(roof(place[3][0]), abs=0.5)
    assert place[3][0] < place[0][0]
    assert place[0][1] > roof(place[0][0]) + 5
    level = re.search(r'arithmetic" x1="\S+" y1="(\S+)" x2="\S+" y2="\S+"><title>float16', drawn)
    assert level is not None
    assert place[1][1] == pytest.approx(float(level[1]), abs=0.2)


def test_a_profile_without_times_draws_nothing() -> None:
    row = profile_row({}, COSTS, replace(TIMES, steps={}), LIMITS, 0)
    assert plot(row) == ""
    assert "Roofline" in profile_section(row, lambda head, rows: "")


def test_ceilings_of_this_machine() -> None:
    found = ceilings.measure(torch.device("cpu"), ["float32", "float32"])
    assert 1e8 < found.bandwidth < 1e13
    assert found.flops.keys() == {"float32"}
    assert 1e8 < found.flops["float32"] < 1e15


@pytest.mark.parametrize(
    ("op", "dtype", "setting", "unit"),
    [
        ("linear", torch.float16, "tf32", "float16"),
        ("conv2d", torch.bfloat16, "ieee", "bfloat16"),
        ("linear", torch.float32, "tf32", "tf32"),
        ("linear", torch.float32, "ieee", "float32"),
        ("conv2d", torch.float32, "ieee", "tf32"),  # cuDNN's default
    ],
)
def test_what_a_call_multiplies_with(
    op: str, dtype: torch.dtype, setting: str, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=setting))
    size = const(4)
    buffer = Buffer("arena", (size,), (size,), dtype)
    program = Program("cuda", (), (buffer,), (), (), (), (), ())
    call = CallStep(op, (TensorRef(0, size, (size,), (size,)),), (), (), "")
    assert ceilings.unit_of(program, call) == unit
    assert ceilings.unit_of(replace(program, device="cpu"), call) in (unit, "float32")


# kernels of a trace


def step(run: int, number: int, start: int) -> Traced:
    return Traced("step", label(run, number), start, start + 80, correlation=900 + start)


def kernel(name: str, start: int, us: int, correlation: int = 0, linked: int = 0) -> Traced:
    return Traced("kernel", name, start * 1000, (start + us) * 1000, correlation, linked)


def test_by_the_launch() -> None:
    """Kernels come long after the host has gone on; numbers of operators mean nothing here."""
    events = [
        step(0, 0, 100),
        step(0, 2, 200),
        Traced("operator", "aten::mm", 205, 250, correlation=1),
        Traced("launch", "cuLaunchKernelEx", 120, 121, correlation=1),
        Traced("launch", "cudaLaunchKernel", 230, 231, correlation=2, linked=1),
        Traced("launch", "cudaLaunchKernel", 240, 241, correlation=3, linked=1),
        Traced("launch", "cudaMemcpyAsync", 20, 21, correlation=4),
        kernel("Memcpy HtoD", 5, 1, 4),
        kernel("ours", 10, 3, 1),
        kernel("split", 13, 7, 2),
        kernel("reduce", 20, 2, 3),
    ]
    found = attribute(events, {})
    assert found.steps == {0: (3.0, 1), 2: (9.0, 2)}
    assert found.rest == (("Memcpy HtoD", 1.0),)


def test_by_the_operator_where_the_launch_is_missing() -> None:
    events = [
        step(0, 0, 100),
        step(0, 1, 200),
        Traced("operator", "aten::mm", 205, 250, correlation=7),
        Traced("operator", "without a number", 110, 120),
        kernel("nvjet", 1, 4, correlation=55, linked=7),
        kernel("stray", 6, 2),
    ]
    found = attribute(events, {})
    assert found.steps == {1: (4.0, 1)}
    assert found.rest == (("stray", 2.0),)


def test_by_what_lies_around_it() -> None:
    """A kernel of ours inside a call that also makes products; the last one may be anybody's."""
    events = [
        step(0, 0, 100),
        step(0, 1, 200),
        Traced("launch", "cudaLaunchKernel", 110, 111, correlation=1),
        Traced("launch", "cudaLaunchKernel", 140, 141, correlation=2),
        Traced("launch", "cudaLaunchKernel", 250, 251, correlation=3),
        kernel("product", 0, 4, 1),
        kernel("rows", 4, 2, 70),
        kernel("product", 6, 4, 2),
        kernel("lost", 10, 1, 71),
        kernel("other", 11, 3, 3),
    ]
    found = attribute(events, {})
    assert found.steps == {0: (10.0, 3), 1: (3.0, 1)}
    assert found.rest == (("lost", 1.0),)


def test_by_name_where_the_host_saw_no_launch() -> None:
    """Three steps of one kernel in two runs; medians over the runs."""
    names = {0: "row_add", 1: "pointwise_mul", 2: "row_add", 3: "row_add"}
    events, at = [], 0
    for run in range(2):
        for number, name in names.items():
            events.append(step(run, number, 1000 * run + 100 * number))
            events.append(kernel(name, at, (number + 1) * (1 + 2 * run)))
            at += 50
    found = attribute(events, names)
    assert found.steps == {n: (2.0 * (n + 1), 1) for n in names}
    assert found.rest == ()
    # one kernel more than steps: which one is whose is anybody's guess, and none is guessed
    found = attribute([*events, kernel("row_add", at, 5)], names)
    assert found.steps == {1: (4.0, 1)}
    assert found.rest == (("row_add", (4 * (1 + 3 + 4) + 5) / 2),)


def test_an_early_launch_counts_from_the_end_of_the_one_before() -> None:
    first, early, inside = kernel("a", 0, 10), kernel("b", 2, 12), kernel("c", 3, 4)
    assert own_times([first, early, inside]) == [10_000, 4_000, 0]


def event(name: str, device: DeviceType, start: int = 0) -> Any:
    values = {
        "name": name,
        "device_type": device,
        "start_ns": start,
        "duration_ns": 5,
        "correlation_id": 3,
        "linked_correlation_id": 0,
    }
    return SimpleNamespace(**{key: lambda value=value: value for key, value in values.items()})


@pytest.mark.parametrize(
    ("name", "device", "what"),
    [
        (label(3, 14), DeviceType.CPU, "step"),
        (label(3, 14), DeviceType.CUDA, None),
        ("cudaLaunchKernelExC", DeviceType.CPU, "launch"),
        ("cuLaunchKernelEx", DeviceType.CPU, "launch"),
        ("cudnn_convolution", DeviceType.CPU, "operator"),
        ("aten::mm", DeviceType.CPU, "operator"),
        ("row_add", DeviceType.CUDA, "kernel"),
    ],
)
def test_kinds_of_events(name: str, device: DeviceType, what: str | None) -> None:
    found = trace.traced(event(name, device))
    assert (found and found.what) == what


def test_ranges_of_a_real_trace() -> None:
    """Operators lie in the ranges of their steps, by the profiler's own numbers."""
    x = torch.randn(8, 8)

    def run(around: Callable[[int, Callable[[], Any]], None]) -> None:
        around(0, lambda: x @ x)
        around(5, lambda: torch.relu(x))

    events = trace.trace(run, 3, [ProfilerActivity.CPU])
    operators = [e for e in events if e.name in ("aten::mm", "aten::relu")]
    kernels = [kernel(e.name, 10 * n, 2, linked=e.correlation) for n, e in enumerate(operators)]
    assert attribute([*events, *kernels], {}).steps == {0: (2.0, 1), 5: (2.0, 1)}


# the way of a GPU, over a made-up one


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.seconds = 0.0

        def record(self) -> None:
            self.seconds = time.perf_counter()

        def elapsed_time(self, end: Event) -> float:
            return 1e3 * (end.seconds - self.seconds)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))


def subject(module: Block) -> Any:
    with watched(module) as calls, torch.no_grad():
        module(torch.randn(X))
    found = profile._subject(dispatchers_of(module)["Block"], calls["Block"])
    assert not isinstance(found, str)
    return found


def test_traced_steps(cache_dir: str, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each range gets a launch and a kernel of 7 us."""
    found, usual = subject(optimized(cache_dir)), trace.trace

    def with_kernels(run: Any, num_runs: int) -> list[Traced]:
        assert not found.entry.has_graph
        events = usual(run, num_runs, [ProfilerActivity.CPU])
        ranges = [e for e in events if e.what == "step"]
        for number, own in enumerate(ranges, 1_000_000):
            at = (own.start_ns + own.end_ns) // 2
            events += [
                Traced("launch", "cuLaunchKernelEx", at, at, number),
                kernel("some", 10 * number, 7, number),
            ]
        return events

    monkeypatch.setattr(trace, "trace", with_kernels)
    times = step_times.gpu_times(found, 1000.0, True)
    assert times.method == PROFILER
    assert times.steps == dict.fromkeys(found.running(), (7.0, 1))
    assert found.entry.has_graph


def test_events_where_the_profiler_sees_nothing(
    cache_dir: str, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = subject(optimized(cache_dir))
    monkeypatch.setattr(trace, "trace", lambda run, num_runs: [])
    times = step_times.gpu_times(found, 1000.0, False)
    assert times.method == EVENTS
    assert times.steps.keys() == found.running().keys()
    assert all(us > 0 for us, _ in times.steps.values())
    row = profile._row(found, times, LIMITS)
    assert "device waits for the host" in "\n".join(roofline.profile_lines(row))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_module_on_a_gpu(cache_dir: str) -> None:
    module = optimized(cache_dir).half().cuda()
    x = torch.randn(8, 4, 64, 64, device="cuda", dtype=torch.float16)
    row = only(profiled(module, x))
    assert row.method == PROFILER
    assert row.is_replayed
    assert row.unseen == ()
    for found in row.steps:
        assert found.us, found
        if found.kind.endswith("kernel"):
            assert found.num_kernels == 1, found
    assert row.steps_us + row.rest_us < 1.5 * row.call_us
    assert row.ceilings.flops["float16"] > row.ceilings.flops["float32"]
