"""No kernel leaves an H100 empty while it moves more than a MB, whatever follows a reduction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from strop.backend import Compiled, compile_graph
from strop.codegen.assemble import Signature
from strop.debug.costs import bytes_moved, num_programs
from strop.fusion.parallelism import CPU, GPU, LAUNCH_BYTES, Workers, is_cut
from strop.ir.dims import parse
from strop.ir.program import KernelStep
from strop.lowering.lower import domain_of, lower
from strop.options import Options
from tests.frontend.tracing import trace
from tests.gpus import H100

LEAST_PROGRAMS = H100.sms // 4  # with all their warps these move half of what memory can
SLAB_BYTES = 64 << 10  # of a column kernel's program; shorter slabs lost more in the merge

Function = Callable[..., Any]


def clamped(x: Tensor, y: Tensor) -> Tensor:
    """As transformers' T5Block keeps fp16 finite."""
    x = x + y
    largest = torch.finfo(torch.float16).max
    limit = torch.where(torch.isinf(x).any(), largest - 1000, largest)
    return torch.clamp(x, min=-limit, max=limit)


def normed_after_clamping(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x = clamped(x, y)
    return x, x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)


# Of tensors (b, s, 64) and, where a second one is read, of the same size.
WHOLE: dict[str, Function] = {
    "sum": lambda x, y: x.sum(),
    "mean_and_var": lambda x, y: (x.mean(), x.var()),
    "scaled_by_norm": lambda x, y: x / x.norm(),
    "scaled_by_norm_of_sum": lambda x, y: (x + y) / (x + y).norm(),
    "standardised": lambda x, y: (x - x.mean()) / x.std(),
    "clamped_at_amax": lambda x, y: y.clamp(max=x.amax()),
    "all_finite": lambda x, y: torch.where(torch.isfinite(x).all(), x, y),
    "clamped": clamped,
    "normed_after_clamping": normed_after_clamping,
    "softmax_of_all": lambda x, y: x.flatten().softmax(0),
    "argmax": lambda x, y: x.argmax(),
    "largest_marked": lambda x, y: (x == x.max()) * y,
    "mse": lambda x, y: (x - y).square().mean(),
    "clipped": lambda x, y: (
        x * (1.0 / (x.norm() + 1e-6)).clamp(max=1.0),
        y * (1.0 / (x.norm() + 1e-6)).clamp(max=1.0),
    ),
}
# Of tensors (b, s, 64): rows of 64 are many and short.
ROWS: dict[str, Function] = {
    "times_mean_of_another": lambda x, y: y * x.mean(-1, keepdim=True),
    "softmax_times": lambda x, y: x.softmax(-1) * y,
    "rms_norm_of_square": lambda x, y: y * torch.rsqrt(x.square().mean(-1, keepdim=True)),
    "norm_of_slice": lambda x, y: F.layer_norm(x[:, 4:], (64,)) * y[:, 4:],
    "mean_of_each": lambda x, y: x - x.mean((1, 2), keepdim=True),
    "norm_over_both": lambda x, y: F.layer_norm(x, x.shape[1:]) + y,
    "sum_of_each": lambda x, y: (x * y).sum((1, 2)),
    "columns": lambda x, y: x / x.sum((0, 1)),
    "normalised_columns": lambda x, y: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True),
}
SHAPES = ({"b": 1, "s": 9000}, {"b": 2, "s": 40_000}, {"b": 3, "s": 160_000}, {"b": 100, "s": 300})
LONG: dict[str, tuple[Function, str]] = {
    "var": (lambda x: x.var(1), "2 10000000"),
    "centred": (lambda x: x - x.mean(1, keepdim=True), "2 10000000"),
    "softmax": (lambda x: x.softmax(1), "7 200000"),
    "layer_norm": (lambda x: F.layer_norm(x, (300_000,)), "b 300000"),
    "group_norm": (lambda x: F.group_norm(x, 4), "b 16 256 256"),
    "of_a_known_number": (lambda x: x - x.mean(1, keepdim=True), "2 s"),
    "of_one_row": (lambda x: x.softmax(1), "1 50257"),
}


def compiled(
    function: Function, *shapes: str, dtype: torch.dtype, device: str = "cuda", **hints: int
) -> Compiled:
    traced = trace(function, *shapes, dtype=dtype, **hints)
    signature = Signature(traced.returned, traced.captured.guards)
    return compile_graph(traced.graph, signature, device, Options())


def launches(found: Compiled, sizes: dict[str, int]) -> Iterator[tuple[str, int, int]]:
    """The name of each kernel at these sizes, its programs on an H100, and the bytes it moves."""
    program = found.program
    for step in program.at(sizes):
        if isinstance(step, KernelStep):
            name = program.sources[step.kernel].name
            yield (
                name,
                num_programs(program, step, sizes, H100.sms),
                bytes_moved(program, step, sizes),
            )


def check(found: Compiled, sizes: dict[str, int]) -> None:
    for name, programs, moved in launches(found, sizes):
        least = min(LEAST_PROGRAMS, moved // SLAB_BYTES) if moved > LAUNCH_BYTES else 1
        assert programs >= least, (name, programs, moved, sizes)
    stored = {node for group in found.plan.groups for node in group.stores}
    for group in found.plan.groups:  # no element is computed again for each of its row
        kernel = lower(group, stored, found.graph.hints).kernel
        steps = (kernel.num_rows * kernel.num_cols).eval(sizes)
        assert steps <= domain_of(group).eval(sizes), kernel.name


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", WHOLE)
def test_reductions_of_a_whole_tensor(name: str, dtype: torch.dtype) -> None:
    """Traced at a small size, they are cut all the same: one plan serves all sizes."""
    found = compiled(WHOLE[name], "b s 64", "b s 64", dtype=dtype, b=2, s=16)
    for sizes in SHAPES:
        check(found, sizes)


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_reductions_of_rows(name: str, sizes: dict[str, int]) -> None:
    check(compiled(ROWS[name], "b s 64", "b s 64", dtype=torch.float16, **sizes), sizes)


@pytest.mark.parametrize("name", LONG)
def test_long_rows(name: str) -> None:
    function, shape = LONG[name]
    sizes = {"b": 2, "s": 1_000_000}
    used = {size: n for size, n in sizes.items() if size in shape.split()}
    check(compiled(function, shape, dtype=torch.float32, **used), used)


def test_short_tensors_are_one_launch() -> None:
    found = compiled(WHOLE["scaled_by_norm"], "b s 64", "b s 64", dtype=torch.float32, b=2, s=16)
    assert [n for _, n, _ in launches(found, {"b": 2, "s": 64})] == [1]
    assert len(list(launches(found, {"b": 2, "s": 65}))) == 2


def test_many_rows_stay_one_kernel() -> None:
    found = compiled(lambda x: x.softmax(-1), "b 40960", dtype=torch.float16, b=32)
    assert [name.partition("_")[0] for name, _, _ in launches(found, {"b": 32})] == ["row"]


@pytest.mark.parametrize(
    ("shape", "kinds"),
    [("1000 1000", ["column", "pointwise"]), ("100 100", ["row"]), ("64 64 1000", ["row"])],
)
def test_threads_of_a_cpu_share_a_long_row(shape: str, kinds: list[str]) -> None:
    """A thread has a row of its own: a whole tensor would be one thread's work."""
    dims = (0, 1) if shape.count(" ") == 1 else (1, 2)
    found = compiled(
        lambda x: x - x.mean(dims, keepdim=True), shape, dtype=torch.float32, device="cpu"
    )
    sources = [found.program.sources[step.kernel] for step in found.program.kernel_steps]
    assert [source.name.partition("_")[0] for source in sources] == kinds
    assert all("#pragma omp parallel for" in source.text for source in sources)


@pytest.mark.parametrize(
    ("rows", "length", "workers", "cut"),
    [
        ("1", "s", GPU, True),
        ("1", "8192", GPU, False),
        ("1", "8193", GPU, True),
        ("2", "s", GPU, True),
        ("40", "s", GPU, False),  # of 1,000 as traced
        ("b", "10000000", GPU, True),
        ("b", "2048", GPU, False),
        ("100", "50000", GPU, True),  # too long to be held
        ("128", "50000", GPU, False),
        ("31", "40960", GPU, True),
        ("32", "40960", GPU, False),
        ("1", "s", CPU, False),
        ("1", "1000000", CPU, True),
        ("3", "1000000", CPU, True),
        ("4", "1000000", CPU, False),
        ("3", "20000", CPU, False),
    ],
)
def test_the_rule(rows: str, length: str, workers: Workers, cut: bool) -> None:
    assert is_cut(parse(rows), parse(length), 4, {"b": 2, "s": 1000}, workers) is cut


def test_encoder_of_t5() -> None:
    """Two kernels follow each product that adds to the hidden states: one looks for infinities and
    stores the sum, the other clamps and normalises."""
    transformers = pytest.importorskip("transformers")
    from strop.diffusion.components import adapter_for
    from strop.frontend.capture import capture
    from strop.frontend.importer import import_graph

    config = transformers.T5Config(
        vocab_size=50, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4
    )
    module = transformers.T5EncoderModel(config).half().eval()
    shapes = adapter_for(module).shapes((torch.zeros(2, 8, dtype=torch.int64),))
    seen = capture(module, lambda ids: module(ids)[0], shapes.specs, shapes.hints)
    imported = import_graph(seen.gm, seen.symbols, seen.hints, seen.origins, len(seen.state_names))
    signature = Signature(imported.returned, seen.guards)
    found = compile_graph(imported.graph, signature, "cuda", Options())
    batch, length = seen.hints
    check(found, {batch: 32, length: 512})
    kernels = [name for name, _, _ in launches(found, {batch: 32, length: 512})]
    assert sum("isinf" in name for name in kernels) == 4
    assert sum("rsqrt" in name for name in kernels) == 5
    assert len(kernels) == 4 + 5 + 2 + 2  # and two activations, and the bias of all attention
