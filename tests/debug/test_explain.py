"""The Report against what torch itself sees."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import strop
from strop.api import dispatchers_of
from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.debug.costs import TRIP_US, machine
from strop.debug.explain import _graph_row, explain, num_recompiles, operator_of
from strop.debug.listing import graph_text
from strop.debug.report import _graph_lines
from strop.debug.steps import step_rows
from strop.errors import OptionError
from strop.ir.device import CPU
from strop.ir.graph import Ref
from strop.kernels.library import OURS
from strop.options import Options
from strop.runtime.run.link import KINDS, Linking
from tests.frontend.tracing import Function, trace
from tests.gpus import H100

# Operators that move no data or only allocate: the report lists work, not bookkeeping.
BOOKKEEPING = {
    "as_strided",
    "empty_strided",
    "empty",
    "view",
    "t",
    "detach",
    "transpose",
    "select",
    "_unsafe_view",
    "_reshape_alias",
    "expand",
    "permute",
    "slice",
    "alias",
    "unsqueeze",
}
FAMILIES = {
    "addmm": "linear",
    "mm": "linear",
    "convolution": "conv2d",
    "bmm": "matmul",
    "_scaled_dot_product_flash_attention_for_cpu": "attention",
}


class Block(nn.Module):
    """One of each: convolution, norms, GEMMs, attention, activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        h = nn.functional.silu(self.norm(self.conv(x))) * scale
        rows = h.flatten(2).transpose(1, 2)
        q, k, v = (part.unsqueeze(1) for part in self.qkv(rows).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v).squeeze(1)
        return self.out(attended) + rows


class Seen(TorchDispatchMode):
    """Counts ATen calls."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name not in BOOKKEEPING:
            self.counts[FAMILIES.get(name, name)] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def block(cache_dir: str) -> Block:
    torch.manual_seed(0)
    module = Block().eval().requires_grad_(False)
    return strop.optimize(module, options=strop.Options(cache_dir=cache_dir))


def count_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The origin of every generated kernel, appended whenever one is launched."""
    launched: list[str] = []
    link = KINDS["kernel"]

    def counting(at: Linking, position: int, step: Any) -> Callable[[], None]:
        kernel = link(at, position, step)

        def run() -> None:
            launched.append(step.origin)
            kernel()

        return run

    monkeypatch.setitem(KINDS, "kernel", counting)
    return launched


def test_report_lists_what_torch_sees(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = count_kernels(monkeypatch)
    x = torch.randn(2, 4, 8, 8)
    block(x)
    launched.clear()
    with Seen() as seen:
        block(x)
    report = explain(block)
    graph = report.components[0].graphs[0]
    ours = [row.op for row in graph.choices if row.kernel in OURS]
    # a kernel of ours that does a call is none of torch's
    calls = {op: count for op, count in report.calls.items() if op not in ours}
    assert calls == dict(seen.counts)
    assert report.calls == {"conv2d": 1, "linear": 2, "attention": 1}
    kernels = graph.kernels
    assert sum(k.num_launches for k in kernels) == len(launched) > 0
    assert {o for k in kernels for o in k.origins} == set(launched)
    assert report.num_launches == len(launched) + sum(seen.counts.values()) + len(ours)
    assert (report.num_graphs, report.num_recompiles, report.fallbacks) == (1, 0, {})


def test_report_of_other_sizes_and_values(block: Block) -> None:
    for batch, side in ((2, 8), (3, 16), (4, 8)):
        block(torch.randn(batch, 4, side, side))
    report = explain(block)
    assert (report.num_graphs, report.num_recompiles) == (1, 0)
    assert report.components[0].num_shapes == 3
    block(torch.randn(2, 4, 8, 8), scale=0.5)
    report = explain(block, torch.randn(2, 4, 8, 8), scale=0.25)
    # Without, with 0.5, with 0.25: the argument is another layout once, and then another value.
    assert (report.num_graphs, report.num_recompiles) == (3, 1)


def test_what_fixes_a_size_is_told(cache_dir: str) -> None:
    module = Function(lambda x: x * torch.logspace(0, 1, x.shape[1]))
    strop.optimize(module.eval(), options=Options(cache_dir=cache_dir))
    report = explain(module, torch.randn(2, 5))
    assert "its code fixes the size d0_1 at 5" in str(report)


def test_fallbacks_are_counted(block: Block) -> None:
    block.train()
    report = explain(block, torch.randn(2, 4, 8, 8))
    ((reason, count),) = report.fallbacks.items()
    assert count == 1
    assert reason.startswith("Block: ")
    assert reason.endswith("in training mode: call .eval()")
    assert report.components[0].num_eager_calls == report.components[0].num_calls == 1
    assert "in training mode" in str(report)


def test_plain_module_is_restored() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.SiLU()).eval().requires_grad_(False)
    report = explain(module, torch.randn(3, 4))
    assert report.num_graphs == 1
    assert not dispatchers_of(module)
    assert "forward" not in vars(module)


def test_function_bytes() -> None:
    def scaled(x: Tensor) -> Tensor:
        return torch.relu(x) * 2

    report = explain(scaled, torch.randn(8, 16))
    (kernel,) = report.graphs[0].kernels
    assert report.components[0].name == "scaled"
    assert kernel.bytes_moved == 2 * 8 * 16 * 4
    assert kernel.estimated_us == pytest.approx(
        kernel.bytes_moved / machine(CPU).bandwidth * 1e6, 0.01
    )
    assert kernel.name in kernel.source
    assert (report.num_launches, report.num_opaque_calls, report.calls) == (1, 0, {})
    assert report.compiled_node_share == 1.0


def test_two_functions_of_one_shape_are_told_apart() -> None:
    x = torch.randn(8, 16)
    sources = {explain(f, x).graphs[0].kernels[0].source for f in (torch.relu, torch.exp)}
    assert len(sources) == 2


@pytest.mark.parametrize("what", [nn.Linear(2, 2), torch.relu, 3])
def test_nothing_to_report(what: object) -> None:
    with pytest.raises(OptionError, match=r"strop\.explain"):
        explain(what)


def test_stored_plan_says_so(block: Block) -> None:
    report = explain(block, torch.randn(2, 4, 8, 8))
    other = strop.optimize(
        Block().eval().requires_grad_(False), options=dispatchers_of(block)["Block"].options
    )
    stored = explain(other, torch.randn(2, 4, 8, 8))
    assert stored.graphs[0].from_disk
    assert stored.components[0].num_captures == 0
    assert stored.graphs[0].plan == report.graphs[0].plan
    assert stored.summary()["num_launches"] == report.summary()["num_launches"]


def test_ragged_graph_is_no_recompile() -> None:
    def graphs(*ragged: bool) -> list[Any]:
        return [SimpleNamespace(is_ragged=r) for r in ragged]

    tensors = ((torch.float32, "cpu", 4),)
    layout = ("tuple", ("tuple", Ref(0)), ("dict", ("return_dict", False)))
    other = ("tuple", ("tuple", Ref(0)), ("dict", ("return_dict", True)))
    assert num_recompiles({("s", layout, tensors): graphs(False, True)}) == 0
    assert num_recompiles({("s", layout, tensors): graphs(False, False, True)}) == 1
    assert (
        num_recompiles(
            {("s", layout, tensors): graphs(False), ("s", other, tensors): graphs(False)}
        )
        == 1
    )
    assert (
        num_recompiles(
            {("s", layout, tensors): graphs(False), ("lora", layout, tensors): graphs(False)}
        )
        == 0
    )


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


# "1 graphs", "1 opaque calls"; not "2.1 us".
WRONG_NUMBER = re.compile(r"(?<![\w.,])1 (?!us\b|ms\b)(?:[a-z]+ )?[a-z]+s\b")


def test_the_pattern_of_wrong_numbers() -> None:
    for text in ("1 graphs", "a: 1 calls (", "0/1 nodes", " 1 opaque calls,", "(1 replays)"):
        assert WRONG_NUMBER.search(text), text
    for text in ("1 graph", "11 graphs", "2.1 us", "1 us", "1 launch a call", "1 edge not fused"):
        assert not WRONG_NUMBER.search(text), text


@pytest.mark.parametrize("make", [nn.GELU, Block, partial(nn.Linear, 4, 4)])
def test_counts_agree_with_their_nouns(cache_dir: str, make: Callable[[], nn.Module]) -> None:
    module = make().eval().requires_grad_(False)
    strop.optimize(module, options=strop.Options(cache_dir=cache_dir, record=True))
    module(torch.randn(2, 4, 8, 4))
    report = explain(module)
    found = str(report)
    assert "1 graph, 0 recompiles" in found
    assert "1 call (0 eager, 0 replays), 1 graph, 0 recompiles, 1 shape" in found
    assert not WRONG_NUMBER.findall(found)
    page = re.sub(r"<pre>.*?</pre>|<style>.*?</style>", "", report.html, flags=re.DOTALL)
    assert "1 call, 0 of them eager" in page
    assert not WRONG_NUMBER.findall(re.sub(r"<[^>]*>", "\n", page))


def test_html_is_one_sound_page(block: Block) -> None:
    report = explain(block, torch.randn(2, 4, 8, 8))
    parser = _Tags()
    parser.feed(report.html)
    assert not parser.open
    assert "http" not in report.html
    for kernel in report.graphs[0].kernels:
        assert f"<summary>{kernel.name}</summary>" in report.html


def test_page_draws_the_plan(cache_dir: str) -> None:
    module = Block().eval().requires_grad_(False)
    strop.optimize(module, options=strop.Options(cache_dir=cache_dir, record=True))
    report = explain(module, torch.randn(2, 4, 8, 8))
    (graph,) = report.graphs
    (variant,) = dispatchers_of(module)["Block"].variants.all
    assert variant.compiled is not None
    steps, page = variant.program.steps, report.html
    assert page.count("<rect ") == len(steps) == len(graph.steps)
    assert page.count("<path ") == sum(len(step.reads) for step in graph.steps) > 0
    assert len(graph.edges) == len(variant.compiled.plan.refusals) > 0
    for edge in graph.edges:
        assert edge.reason in page
    names = [name for name, _ in graph.texts]
    assert names == ["imported", *(record.name for record in variant.compiled.passes)]
    assert graph.texts[-1][1] == graph_text(variant.compiled.graph)
    assert "after channels_last" in page
    assert '<span class="add">' in page
    assert {"local", "regional", "global"} == {v.scheme for s in graph.steps for v in s.values}


def test_graphs_are_kept_only_where_asked(block: Block) -> None:
    report = explain(block, torch.randn(2, 4, 8, 8))
    (variant,) = dispatchers_of(block)["Block"].variants.all
    assert variant.compiled is None or variant.compiled.imported is None
    assert report.graphs[0].texts == ()
    assert "STROP_RECORD=1" in str(report)
    assert "STROP_RECORD" not in str(explain(torch.relu, torch.randn(8)))


def test_costs_of_each_kind_of_call() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.conv = nn.Linear(8, 24), nn.Conv2d(4, 6, 3, stride=2, padding=1)

        def forward(self, x: Tensor, image: Tensor) -> tuple[Tensor, ...]:
            q, k, v = (part.unsqueeze(1) for part in self.linear(x).chunk(3, -1))
            attended = nn.functional.scaled_dot_product_attention(q, k, v)
            return attended, self.conv(image)

    (graph,) = explain(
        Calls().eval().requires_grad_(False), torch.randn(2, 5, 8), torch.randn(2, 4, 7, 9)
    ).graphs
    flops = {s.title: s.flops for s in graph.steps if s.kind == "call"}
    moved = {s.title: s.bytes_moved for s in graph.steps if s.kind == "call"}
    assert flops == {
        "linear": 2 * 10 * 8 * 24,
        "attention": 4 * 2 * 5 * 5 * 8,
        "conv2d": 2 * (2 * 6 * 4 * 5) * (4 * 9),
    }
    assert moved["attention"] == 4 * (4 * 2 * 5 * 8)
    assert moved["linear"] in (4 * (80 + 192 + 240), 4 * (80 + 192 + 24 + 240)), "bias or not"


def test_a_kernel_of_few_programs_is_estimated_by_them() -> None:
    """Two rows that two programs hold, beside as many bytes in many rows."""
    able = machine(H100)
    texts = {}
    for shape, num_programs in (("2 40000", 2), ("2000 40", 125)):
        traced = trace(lambda x: x.softmax(1), shape)
        signature = Signature(traced.returned, traced.captured.guards)
        compiled = compile_graph(traced.graph, signature, "cuda", Options())
        graph = _graph_row(compiled.program, compiled, {}, able)
        (kernel,), (step,) = graph.kernels, graph.steps
        assert kernel.num_programs == step.num_programs == num_programs
        assert kernel.bytes_moved == 640_000
        whole_us = 640_000 / able.bandwidth * 1e6
        assert step.bound_us == pytest.approx(whole_us, abs=0.001)
        moving_us = max(whole_us * 132 / num_programs, TRIP_US)
        assert kernel.estimated_us == pytest.approx(moving_us, abs=0.001)
        assert step.estimated_us == pytest.approx(kernel.estimated_us, abs=0.001)
        texts[num_programs] = "\n".join(_graph_lines(graph))
    assert "leaves the GPU empty: 2 programs a launch, together ~14.2 us, 0.2 us by" in texts[2]
    assert "leaves the GPU empty" not in texts[125]


def test_programs_that_share_a_reduction_are_counted() -> None:
    traced = trace(lambda x: x.sum(), "n", n=1 << 20)
    signature = Signature(traced.returned, traced.captured.guards)
    compiled = compile_graph(traced.graph, signature, "cuda", Options())
    for length, programs in ((1000, 1), (1 << 20, 256), (1 << 26, 4 * 132)):
        (step,) = step_rows(compiled.program, compiled, {"n": length}, machine(H100))
        assert step.num_programs == programs


def test_what_bounds_a_step() -> None:
    gpu = machine(H100)
    assert gpu.bound_us(2_980_000, 10, torch.float32) == (1.0, "bandwidth")
    assert gpu.bound_us(10, 1_070_000_000, torch.float16) == (1.0, "compute")
    assert gpu.bound_us(10, 66_900_000, torch.float32) == (1.0, "compute")


def test_to_dict_is_json(block: Block) -> None:
    report = explain(block, torch.randn(2, 4, 8, 8))
    found = json.loads(json.dumps(report.to_dict()))
    assert found["num_kernels"] == len(found["components"][0]["graphs"][0]["kernels"])
    steps = dispatchers_of(block)["Block"].variants.all[0].program.steps
    assert found["num_launches"] == len(steps)
    lines = found["components"][0]["graphs"][0]["plan"].splitlines()
    assert len(lines) == len(steps)
    calls = Counter(operator_of(s) for s in steps if hasattr(s, "op"))
    assert found["calls"] == dict(calls)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_launches_against_the_profiler(cache_dir: str) -> None:
    from torch.profiler import ProfilerActivity, profile

    module = Block().eval().requires_grad_(False).half().cuda()
    strop.optimize(module, options=strop.Options(cache_dir=cache_dir))
    x = torch.randn(2, 4, 32, 32, device="cuda", dtype=torch.float16)
    for _ in range(3):
        module(x)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        module(x)
        torch.cuda.synchronize()
    names = [e.name for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [n for n in names if not n.startswith(("Memcpy", "Memset"))]
    report = explain(module)
    # the argument is copied to where the graph reads it, by a copy engine or a kernel of torch
    kernels = [n for n in kernels if not ("at::native" in n and "copy" in n.lower())]
    assert len(kernels) == report.num_launches
    generated = {k.name: k.num_launches for k in report.graphs[0].kernels}
    assert sum(n in generated for n in kernels) == sum(generated.values())


def test_a_kernel_that_waits_in_turn_says_so() -> None:
    """Enough programs for all multiprocessors may still have far more to do than to move."""
    traced = trace(lambda x: x.softmax(1), "b 300000", b=150)
    signature = Signature(traced.returned, traced.captured.guards)
    compiled = compile_graph(traced.graph, signature, "cuda", Options())
    graph = _graph_row(compiled.program, compiled, {"b": 150}, machine(H100))
    (kernel,) = graph.kernels
    assert (kernel.num_programs, kernel.is_slow) == (150, False)
    slow = replace(graph, kernels=(replace(kernel, estimated_us=4 * kernel.whole_us),))
    found = "has more to do than to move: 150 programs a launch"
    assert found in "\n".join(_graph_lines(slow))
    assert found not in "\n".join(_graph_lines(graph))
