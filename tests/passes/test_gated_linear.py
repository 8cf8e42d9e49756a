"""A linear whose halves are a value and its gate, as one node."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.debug.reference import evaluate, input_values
from strop.ir.contractions import GELU_TANH, SILU, Gate
from strop.ir.graph import Graph
from strop.kernels.kernel import Call
from strop.kernels.library import rows_for
from strop.options import Options
from strop.passes import run as run_passes
from tests.frontend.tracing import trace
from tests.gpus import H100

HALF = torch.float16


class Gated(nn.Module):
    """As in a transformer block of a UNet."""

    def __init__(self, depth: int = 64, width: int = 48, approximate: str = "none") -> None:
        super().__init__()
        self.up, self.approximate = nn.Linear(depth, 2 * width), approximate

    def halves(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.up(F.silu(x)).chunk(2, -1)

    def gelu(self, gate: Tensor) -> Tensor:
        return F.gelu(gate, approximate=self.approximate)

    def forward(self, x: Tensor) -> Any:
        value, gate = self.halves(x)
        return value * self.gelu(gate)


class GateFirst(Gated):
    """The factors the other way round."""

    def forward(self, x: Tensor) -> Any:
        value, gate = self.halves(x)
        return self.gelu(gate) * value


class Swapped(Gated):
    """The first half is the gate."""

    def forward(self, x: Tensor) -> Any:
        gate, value = self.halves(x)
        return value * self.gelu(gate)


class Pair(Gated):
    """As in T5 v1.1 and Qwen: two layers without biases, which become one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 320, bias=False)
        self.gate = nn.Linear(64, 320, bias=False)

    def forward(self, x: Tensor) -> Any:
        hidden = F.rms_norm(x, (64,))
        return F.silu(self.gate(hidden)) * self.up(hidden)


class ReadTwice(Gated):
    def forward(self, x: Tensor) -> Any:
        value, gate = self.halves(x)
        return value * self.gelu(gate) + value


class Result(Gated):
    def forward(self, x: Tensor) -> Any:
        value, gate = self.halves(x)
        return value * self.gelu(gate), gate


class Thirds(Gated):
    def halves(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.up(F.silu(x)).chunk(3, -1)[:2]


def traced(
    module: nn.Module, device: str = "cuda", dtype: torch.dtype = HALF, **options: Any
) -> Graph:
    depth = module.up.in_features  # type: ignore[union-attr]
    graph = trace(module.to(dtype), f"b s {depth}", dtype=dtype, b=2, s=6).graph
    return run_passes(graph, Options(**options), device)[0]


def found_in(graph: Graph) -> list[Any]:
    return [node for node in graph.nodes if node.op == "geglu"]


@pytest.mark.parametrize("module", [Gated(), GateFirst()], ids=["value first", "gate first"])
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
def test_what_is_twice_as_wide_is_never_written(module: nn.Module, dtype: torch.dtype) -> None:
    graph = traced(module, dtype=dtype)
    (found,) = found_in(graph)
    assert str(found.shape[-1]) == "48"
    assert [size.value for size in found.inputs[1].shape] == [96, 64]
    assert [size.value for size in found.inputs[2].shape] == [96]  # biases are the kernels' too
    assert not [node for node in graph.nodes if str(node.shape[-1:]) == "96"]


@pytest.mark.parametrize(
    ("module", "gate"),
    [
        (Gated(width=320), Gate()),
        (Swapped(width=320), Gate(is_first=True)),
        (Gated(width=320, approximate="tanh"), Gate(GELU_TANH)),
        (Swapped(width=320, approximate="tanh"), Gate(GELU_TANH, True)),
        (Pair(), Gate(SILU, True)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
def test_gates_are_told_apart(module: nn.Module, gate: Gate, dtype: torch.dtype) -> None:
    """By values too, and with any of them a kernel of ours may do it."""
    graph = traced(module, dtype=dtype)
    (found,) = found_in(graph)
    assert Gate.of(found.attrs) == gate
    wgmma = [row.name for row in rows_for(Call.of(found), H100)]
    assert wgmma[0] == "wgmma_gemm"
    x = torch.randn(2, 6, 64).to(dtype)
    numbers = [n.attrs["index"] for n in graph.inputs if not n.attrs["state"]]
    given = dict(enumerate(module.parameters())) | {numbers[0]: x}
    env = {"b": 2, "s": 6}
    (value,) = evaluate(graph.outputs, input_values(graph, given), env, exact=False).values()
    torch.testing.assert_close(value, module(x), rtol=0.02, atol=0.01)


@pytest.mark.parametrize(
    "module",
    [
        ReadTwice(),
        Result(),
        Thirds(),
        Gated(depth=72),
        Gated(width=40),
    ],
    ids=["read twice", "result", "thirds", "depth", "width"],
)
def test_other_gates_stay(module: nn.Module) -> None:
    assert not found_in(traced(module))


def test_where_kernels_of_ours_can_do_it() -> None:
    """On any GPU, as gates behind a library's GEMM are a kernel of ours on each."""
    assert found_in(traced(Gated()))
    assert not found_in(traced(Gated(), "cpu"))
    assert not found_in(traced(Gated(), dtype=torch.float32))
    assert not found_in(traced(Gated(), kernels_off=("wgmma_gemm",)))
    assert not found_in(traced(Gated(), disable=("gated_linear",)))
    assert Options().on(has_wgmma=False).disable == (
        "eight_bit_attention",
        "eight_bit_convs",
        "gated_codes",
        "joined_calls",
        "low_rank_pair",
        "normed_linear",
        "product_sum",
        "upsampled_conv",
    )
    graph = trace(Gated().to(HALF), "b s 64", dtype=HALF, b=2, s=6).graph
    assert not found_in(run_passes(graph, Options().in_training, "cuda")[0])
