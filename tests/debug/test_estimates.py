"""Estimates of kernels: what programs wait and compute, beside what an H100 has taken."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strop.backend import Compiled, compile_graph
from strop.codegen.assemble import Signature
from strop.codegen.effort import trips_of
from strop.debug.costs import bytes_moved, is_too_slow, machine, working_us
from strop.debug.steps import step_rows
from strop.diffusion.components import adapter_for
from strop.frontend.capture import capture
from strop.frontend.importer import import_graph
from strop.ir.dims import const, symbol
from strop.ir.program import KernelStep
from strop.ir.source import Effort
from strop.kernels.attention.cases import AttentionCase, MeasuredCase
from strop.kernels.attention.short import Masking
from strop.options import Options
from tests.codegen import kernels
from tests.frontend.tracing import trace
from tests.gpus import H100
from tests.kernels.launching import measured

# Microseconds of T5-large's kernels on an H100, 2 x 256 words in fp16, torch 2.11.
T5_LARGE_US = {
    "row_take_cast_square_mean_add_rsqrt": 2.688,
    "pointwise_sub_gt_cast_mul_add_abs": 1.44,
    "row_clamp_cast_square_mean_add_rsqrt": 2.171,
    "pointwise_relu": 2.632,
}


def t5_large() -> tuple[Compiled, dict[str, int]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(d_model=1024, d_kv=64, d_ff=4096, num_layers=1, num_heads=16)
    with torch.device("meta"):
        module = transformers.T5EncoderModel(config)
    module = module.half().eval().requires_grad_(False)
    ids = torch.empty(2, 256, dtype=torch.int64, device="meta")
    shapes = adapter_for(module).shapes((ids, ids))

    def call(words: Tensor, mask: Tensor) -> Tensor:
        return module(input_ids=words, attention_mask=mask)[0]

    with torch.no_grad():
        seen = capture(module, call, shapes.specs, shapes.hints)
    imported = import_graph(seen.gm, seen.symbols, seen.hints, seen.origins, len(seen.state_names))
    signature = Signature(imported.returned, seen.guards)
    return compile_graph(imported.graph, signature, "cuda", Options()), dict(seen.hints)


def test_no_kernel_took_three_times_its_estimate() -> None:
    """Of those whose code has not changed since. The bias of attention took 8.9 us with 92
    instructions for each element; it has 56 now."""
    found, sizes = t5_large()
    estimates = {}
    for step, row in zip(
        found.program.at(sizes), step_rows(found.program, found, sizes, machine(H100)), strict=True
    ):
        if isinstance(step, KernelStep):
            estimates[found.program.sources[step.kernel].name] = row.estimated_us
    for name, us in T5_LARGE_US.items():
        assert not is_too_slow(us, estimates[name]), (name, us, estimates[name])
        assert estimates[name] < 1.1 * us, (name, us, estimates[name])
    assert 2.5 < estimates["pointwise_where"] < 8.9


def test_attention_is_estimated_by_what_was_measured() -> None:
    """T5's attention with its bias, by its case where there is one, else by the model of cuDNN's
    without a mask."""
    found, sizes = t5_large()
    case = AttentionCase(2, 16, 256, 256, 64, Masking.BIAS, "bhq", dtype=torch.float16)
    rows = []
    for cases in ((), (MeasuredCase(case, {"sdpa": 9.4, "cudnn_attention": 9.0}),)):
        with measured(*cases):
            steps = step_rows(found.program, found, sizes, machine(H100))
            rows.append(next(row for row in steps if row.title.startswith("attention")))
    assert 2.0 < rows[0].bound_us < 3.0
    assert rows[0].bound_us <= rows[0].estimated_us < 6.0
    assert rows[1].estimated_us == 9.0


def test_steps_of_programs_that_share_a_sweep() -> None:
    effort = Effort(10, 512, 2, symbol("s0"), 512, 1)
    assert effort.steps({"s0": 2097152, "splits": 528}) == 8
    assert effort.steps({"s0": 5}) == 1
    assert Effort(10, 512, 1, const(1), 1, 1).steps({}) == 1


@pytest.mark.parametrize(("name", "trips"), [("silu_flat", 1), ("gather_wrapped", 2)])
def test_a_looked_up_place_is_a_trip_more(name: str, trips: int) -> None:
    assert trips_of(kernels.SAMPLES[name](torch.float16).kernel) == trips


def test_a_long_row_by_one_program_waits_step_by_step() -> None:
    """A thousand bytes of each of many rows are nothing; 2,048 elements a step are a trip each."""
    traced = trace(lambda x: x.softmax(1), "b 300000", b=128)
    signature = Signature(traced.returned, traced.captured.guards)
    found = compile_graph(traced.graph, signature, "cuda", Options())
    sizes = {"b": 128}
    (step,) = found.program.at(sizes)
    assert isinstance(step, KernelStep)
    working = working_us(found.program, step, sizes, H100)
    assert working == pytest.approx(0.7 * 3 * 147 / 2, rel=0.02)
    assert 300_000 * 4 * 3 / working == pytest.approx(25_000, rel=0.1), "MB/s"
    assert working > machine(H100).moving_us(bytes_moved(found.program, step, sizes), 128)
