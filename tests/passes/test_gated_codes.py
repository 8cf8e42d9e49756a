"""Products of e4m3 codes and the gates that follow them, as one node."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.backend import Compiled
from strop.debug.reference import evaluate
from strop.dispatch.coded_weights import CodedWeight
from strop.ir.contractions import GELU_TANH, SILU, Gate
from strop.ir.eight_bit import FORMATS, eight_bit_linear
from strop.kernels.kernel import Call
from strop.kernels.library import rows_for
from strop.options import Options
from strop.runtime.run import scaled_calls
from strop.runtime.run.library_calls import CUDA_PLANNED_OUT
from tests.gpus import A100, H100
from tests.passes.planning import planned_by

WIDTH, DEPTH = 96, 64
SIZES = {"x": ("b", "s", str(DEPTH))}


class Block(nn.Module):
    """The feed-forward layer of a UNet's transformer, between layers that stay exact."""

    def __init__(self, width: int = WIDTH, approximate: str = "none", bias: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DEPTH, DEPTH), nn.Linear(DEPTH, DEPTH)
        self.up = nn.Linear(DEPTH, 2 * width, bias=bias)
        self.down, self.norm = nn.Linear(width, DEPTH), nn.LayerNorm(DEPTH)
        self.approximate = approximate

    def gated(self, columns: Tensor) -> Tensor:
        value, gate = columns.chunk(2, -1)
        return value * F.gelu(gate, approximate=self.approximate)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(y + self.down(self.gated(self.up(self.norm(y)))))


class SwiGLU(Block):
    """The first half is the gate."""

    def gated(self, columns: Tensor) -> Tensor:
        gate, value = columns.chunk(2, -1)
        return F.silu(gate) * value


class Pair(Block):
    """Two layers of one value, as of FLUX.2 and Z-Image, which become one product."""

    def __init__(self) -> None:
        super().__init__(bias=False)
        self.up, self.gate = (nn.Linear(DEPTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        normed = self.norm(y)
        return self.last(y + self.down(F.silu(self.gate(normed)) * self.up(normed)))


class ReadTwice(Block):
    def gated(self, columns: Tensor) -> Tensor:
        value, gate = columns.chunk(2, -1)
        return value * F.gelu(gate) + gate


def calls_of(compiled: Compiled) -> Counter[str]:
    return Counter(step.op for step in compiled.program.call_steps)


def planned(module: nn.Module, numerics: str = "fp8", **options: Any) -> Compiled:
    given = Options(numerics=(numerics,), **options)
    return planned_by(module, SIZES, given, torch.float16)[0]


CASES = {
    "GEGLU": (Block(), Gate()),
    "tanh": (Block(approximate="tanh"), Gate(GELU_TANH)),
    "SwiGLU": (SwiGLU(), Gate(SILU, is_first=True)),
    "no biases": (Block(bias=False), Gate()),
    "two layers": (Pair(), Gate(SILU, is_first=True)),
}


@pytest.mark.parametrize(("module", "gate"), CASES.values(), ids=CASES)
def test_what_is_twice_as_wide_is_never_written(module: nn.Module, gate: Gate) -> None:
    own, apart = planned(module), planned(module, disable=("gated_codes",))
    assert calls_of(apart) == {"linear": 2, "scaled_product": 2}
    assert calls_of(own) == {"linear": 2, "scaled_product": 1, "scaled_geglu": 1}
    (found,) = (node for node in own.graph.nodes if node.op == "scaled_geglu")
    assert Gate.of(found.attrs) == gate
    assert str(found.shape[-1]) == str(WIDTH)
    assert next(row.name for row in rows_for(Call.of(found), H100)) == "wgmma_codes"
    # the kernel that quantises the gates reads them, and computes no activation
    kernels = [step.ops for step in own.program.kernel_steps]
    assert len(kernels) == len(apart.program.kernel_steps)
    assert not any({"gelu", "gelu_tanh", "silu"} & {*ops} for ops in kernels)
    assert sum("e4m3_code" in ops for ops in kernels) == 2


LEFT = {
    "read twice": (ReadTwice(), {}),
    "exact": (Block(), {"exact_layers": ("up",)}),
    "another format": (Block(), {"numerics": "int8"}),
    "no kernel": (Block(), {"kernels_off": ("wgmma_codes",)}),
    "in training": (Block(), {"disable": Options().in_training.disable}),
    "no WGMMA": (Block(), {"disable": Options().on(has_wgmma=False).disable}),
}


@pytest.mark.parametrize(("module", "how"), LEFT.values(), ids=LEFT)
def test_other_gates_stay(module: nn.Module, how: dict[str, Any]) -> None:
    assert not calls_of(planned(module, **how))["scaled_geglu"]


@pytest.mark.parametrize(("module", "gate"), CASES.values(), ids=CASES)
@torch.no_grad()
def test_values_are_those_of_the_rule(module: nn.Module, gate: Gate) -> None:
    torch.manual_seed(0)
    for part in module.half().modules():
        if isinstance(part, nn.Linear):
            part.reset_parameters()
    options = Options(numerics=("fp8",))
    own, names = planned_by(module, SIZES, options, torch.float16)
    x = torch.randn(2, 6, DEPTH).half()
    weights, arguments = dict(module.named_parameters()), dict[int, Tensor]()
    for spec, node in zip(own.program.inputs, own.graph.inputs, strict=True):
        index = node.attrs["index"]
        if spec.made:
            parts = [weights[names[i]] for i in spec.merged]
            coded = CodedWeight(parts, FORMATS["fp8"])
            coded.write(parts)
            arguments[index] = coded.codes if spec.made.endswith("codes") else coded.scales
        else:
            arguments[index] = weights[names[index]] if spec.is_state else x
    values = {node: arguments[node.attrs["index"]] for node in own.graph.inputs}
    (found,) = evaluate(own.graph.outputs, values, {"b": 2, "s": 6}, exact=False).values()
    wanted = in_torch(module, x)
    exact = module(x).float()
    # a last bit before it decides a code here and there; the rule itself is much further away
    assert float((found.float() - wanted).norm() / wanted.norm()) < 4e-3
    assert 8e-3 < float((found.float() - exact).norm() / exact.norm()) < 6e-2


def in_torch(module: Any, x: Tensor) -> Tensor:
    """The rule of 8 bits for the layers inside, in plain torch."""
    y = module.first(x)
    layers = [module.gate, module.up] if isinstance(module, Pair) else [module.up]
    weight = torch.cat([layer.weight for layer in layers])
    columns = eight_bit_linear(module.norm(y), weight, module.up.bias, "fp8")
    gated = SwiGLU.gated(module, columns) if isinstance(module, Pair) else module.gated(columns)
    down = eight_bit_linear(gated, module.down.weight, module.down.bias, "fp8")
    result: Tensor = module.last(y + down)
    return result.float()


@pytest.mark.parametrize("gate", [Gate(), Gate(SILU, is_first=True), Gate(GELU_TANH)], ids=str)
def test_torch_computes_the_same_where_no_kernel_does(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaled_calls, "_is_cublas", lambda device: True)
    source = torch.Generator().manual_seed(3)
    (codes, rows), (others, columns) = (
        FORMATS["fp8"].quantised(torch.randn(n, 64, generator=source)) for n in (20, 64)
    )
    bias = torch.randn(64, generator=source).half()
    value, gates = (
        (codes.double() @ others.double().t()) * rows[:, None] * columns + bias.double()
    ).chunk(2, 1)[:: -1 if gate.is_first else 1]
    activated = {
        SILU: F.silu,
        GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    }.get(gate.activation, F.gelu)(gates)
    out = torch.full((20, 32), torch.nan, dtype=torch.float16)
    attrs = {"is_fast": False, **gate.attrs}
    given = [codes.view(torch.uint8), others, rows[:, None], columns[None], bias]
    CUDA_PLANNED_OUT["scaled_geglu"](attrs)(given, out)
    wanted = value * activated
    assert float((out.double() - wanted).norm() / wanted.norm()) < 1e-3  # rounded three times


def test_on_other_gpus_there_is_a_row_of_a_library() -> None:
    """A program that was planned for Hopper is never asked to run there, and would."""
    (found,) = (node for node in planned(Block()).graph.nodes if node.op == "scaled_geglu")
    assert [row.name for row in rows_for(Call.of(found), A100)] == ["scaled_mm_and_torch"]
