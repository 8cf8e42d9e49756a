"""Linears of values and weights that are dequantised, as PT2E writes them, multiply codes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # defines the operators
from torch import Tensor, nn

import strop
from strop.options import Options
from strop.passes import dequantised_linear
from strop.testing import assert_as_accurate_as_eager
from tests.frontend.tracing import Function

OPS = torch.ops.quantized_decomposed
INT8, UINT8 = (-128, 127, torch.int8), (0, 255, torch.uint8)
EPS = 2.0**-12


class Quantised(nn.Module):
    """A linear of which both operands are quantised. ``scale`` None: found in each call."""

    def __init__(
        self,
        columns: int,
        depth: int,
        *,
        scale: float | None = 0.02,
        zero: int = 117,
        codes: Any = UINT8,
        is_symmetric: bool = False,
        has_bias: bool = True,
    ) -> None:
        super().__init__()
        self.scale, self.zero, self.codes = scale, zero, codes
        self.is_symmetric = is_symmetric
        rows = torch.arange(columns)
        self.register_buffer("weight", torch.randint(-128, 128, (columns, depth)).to(torch.int8))
        self.register_buffer("scales", torch.rand(columns) / 100 + 1e-3)
        self.register_buffer("zeros", torch.zeros_like(rows) if is_symmetric else rows % 9 - 4)
        self.register_buffer("bias", torch.randn(columns) if has_bias else None)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The values and the weight, both dequantised."""
        if self.scale is None:
            choose = OPS.choose_qparams_symmetric if self.is_symmetric else OPS.choose_qparams
            least, most, dtype = self.codes
            given = choose.tensor(x, least, most, EPS, dtype)
            held = OPS.quantize_per_tensor.tensor(x, *given, *self.codes)
            values = OPS.dequantize_per_tensor.tensor(held, *given, *self.codes)
        else:
            given = self.scale, self.zero
            held = OPS.quantize_per_tensor.default(x, *given, *self.codes)
            values = OPS.dequantize_per_tensor.default(held, *given, *self.codes)
        return values, self.own_weight()

    def own_weight(self) -> Tensor:
        return OPS.dequantize_per_channel.default(self.weight, self.scales, self.zeros, 0, *INT8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(*self.operands(x), self.bias)

    def exact(self, x: Tensor) -> Tensor:
        values, weight = (operand.double() for operand in self.operands(x))
        bias = None if self.bias is None else self.bias.double()
        return nn.functional.linear(values, weight, bias)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def compiled(module: nn.Module, folder: Path, **options: Any) -> Any:
    own = copy.deepcopy(module).eval()
    strop.optimize(own, options=Options(cache_dir=str(folder), strict=True, **options))
    return own


def products(module: nn.Module) -> int:
    """How many kernels multiply codes."""
    kernels = strop.explain(module).components[0].latest.kernels
    return sum(k.num_launches for k in kernels if k.name.startswith("codes_"))


KINDS = {
    "static": {},
    "static int8": {"codes": INT8, "zero": -7},
    "static at 128": {"zero": 128},
    "static without a zero point": {"codes": INT8, "zero": 0},
    "no bias": {"has_bias": False},
    "dynamic": {"scale": None},
    "dynamic int8": {"scale": None, "codes": INT8},
    "symmetric": {"scale": None, "is_symmetric": True},
    "symmetric int8": {"scale": None, "codes": INT8, "is_symmetric": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_multiplied_in_one_graph_for_all_sizes(kind, folder):
    torch.manual_seed(1)
    eager = Quantised(48, 70, **KINDS[kind]).eval()
    own = compiled(eager, folder)
    with torch.no_grad():
        for rows in (5, 2, 30):
            x = torch.randn(rows, 4, 70) + 0.3
            assert_as_accurate_as_eager(own(x), eager(x), eager.exact(x))
    assert strop.explain(own).num_graphs == 1
    assert products(own) == 1
    assert not strop.explain(own).calls


def test_it_can_be_left_out(folder):
    own = compiled(Quantised(48, 70), folder, disable=("dequantised_linear",))
    with torch.no_grad():
        own(torch.randn(5, 70))
    assert strop.explain(own).calls == {"linear": 1}


def test_whatever_is_written_counts(folder):
    eager, x = Quantised(33, 40, is_symmetric=True).eval(), torch.randn(26, 40)
    own = compiled(eager, folder)

    def both(change: Any) -> None:
        for module in (own, eager):
            change(module)
        assert_as_accurate_as_eager(own(x), eager(x), eager.exact(x))

    with torch.no_grad():
        both(lambda module: None)
        both(lambda module: module.weight.data.neg_())
        both(lambda module: module.scales.mul_(2))
        both(lambda module: module.zeros.data.add_(3))
        both(lambda module: module.bias.numpy().fill(1))
        other = Quantised(33, 40).state_dict()
        both(lambda module: module.load_state_dict(other))


class OneScale(Quantised):
    """Has one scale for the whole weight, and rounds both operands on their way."""

    def own_weight(self) -> Tensor:
        return OPS.dequantize_per_tensor.default(self.weight, 0.01, 3, *INT8)

    def forward(self, x: Tensor) -> Tensor:
        values, weight = self.operands(x)
        return nn.functional.linear(values.bfloat16(), weight.bfloat16())


def test_one_scale_for_a_weight_and_halves(folder):
    """What is rounded on its way is as near to the truth as eager's at least."""
    eager, x = OneScale(16, 40, has_bias=False).eval(), torch.randn(9, 40)
    own = compiled(eager, folder)
    with torch.no_grad():
        found, wanted = own(x), eager(x)
        assert found.dtype is torch.bfloat16
        assert_as_accurate_as_eager(found, wanted, eager.exact(x))
    assert products(own) == 1


class InHalves(Quantised):
    """Dequantises both operands in bf16, as PT2E writes it for a model of bf16."""

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        given = (self.scale, self.zero)
        held = OPS.quantize_per_tensor.default(x, *given, *self.codes)
        values = OPS.dequantize_per_tensor.default(
            held, *given, *self.codes, out_dtype=torch.bfloat16
        )
        return values, self.own_weight()

    def own_weight(self) -> Tensor:
        given = self.weight, self.scales, self.zeros, 0, *INT8
        return OPS.dequantize_per_channel.default(*given, out_dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.bfloat16()
        return nn.functional.linear(*self.operands(x), bias)


@pytest.mark.parametrize("kind", ["static", "static int8", "static at 128", "no bias"])
def test_models_of_bf16(kind, folder):
    torch.manual_seed(2)
    eager = InHalves(48, 70, **KINDS[kind]).eval()
    own = compiled(eager, folder)
    with torch.no_grad():
        for rows in (5, 2, 30):
            x = (torch.randn(rows, 4, 70) + 0.3).bfloat16()
            found, wanted = own(x), eager(x)
            assert found.dtype is torch.bfloat16
            assert_as_accurate_as_eager(found, wanted, eager.exact(x))
    assert products(own) == 1
    assert not strop.explain(own).calls


class Tied(Quantised):
    """Multiplies values by one weight twice, with another zero point each time."""

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for zero in (self.zero, self.zero - 90):
            self.zero, before = zero, self.zero
            found.append(super().forward(x))
            self.zero = before
        return found[0] - 2 * found[1]

    def exact(self, x: Tensor) -> Tensor:
        found = []
        for zero in (self.zero, self.zero - 90):
            self.zero, before = zero, self.zero
            found.append(super().exact(x))
            self.zero = before
        return found[0] - 2 * found[1]


def test_one_packed_weight_serves_any_zero_point_of_values(folder):
    eager = Tied(48, 64).eval()
    own = compiled(eager, folder)
    with torch.no_grad():
        for rows in (5, 5, 60, 3):
            x = torch.randn(rows, 64)
            assert_as_accurate_as_eager(own(x), eager(x), eager.exact(x))


def test_the_library_takes_zero_points_off(folder):
    """Where panels have too few rows of a large weight, and without our product."""
    eager = Quantised(1024, 300).eval()
    own = compiled(eager, folder, kernels_off=("code_sums",))
    with torch.no_grad():
        for rows in (1, 3, 40):
            x = torch.randn(rows, 300)
            assert_as_accurate_as_eager(own(x), eager(x), eager.exact(x))


class Aside(Quantised):
    """Moves values between their codes and the linear."""

    def forward(self, x: Tensor) -> Tensor:
        values, weight = self.operands(x)
        return nn.functional.linear(values.transpose(0, 1), weight, self.bias)


class ByRows(Quantised):
    """Has a scale for each row of values."""

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scales = torch.ones(x.shape[0]) / 50
        zeros = torch.zeros_like(scales, dtype=torch.int64)
        given = scales, zeros, 0, *INT8
        held = OPS.quantize_per_channel.default(x, *given)
        return OPS.dequantize_per_channel.default(held, *given), self.own_weight()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Aside, "moved"), (ByRows, "several scales"), (Quantised, "may leave int32")],
)
def test_explain_says_why_others_stay(kind, reason, tmp_path, monkeypatch):
    if kind is Quantised:
        monkeypatch.setitem(dequantised_linear.__globals__, "MOST_DEPTH", 69)
    eager = kind(48, 70).eval()
    own, x = compiled(eager, tmp_path), torch.randn(5, 4, 70)
    with torch.no_grad():
        torch.testing.assert_close(own(x), eager(x), rtol=1e-4, atol=1e-4)
    assert reason in str(strop.explain(own))
    assert products(own) == 0


def scale_and_zero(x: Tensor) -> tuple[Tensor, ...]:
    found = []
    for codes in (INT8, UINT8):
        given = OPS.choose_qparams.tensor(x, *codes[:2], EPS, codes[2])
        found += [*(each + 0 for each in given), OPS.quantize_per_tensor.tensor(x, *given, *codes)]
    given = OPS.choose_qparams_symmetric.tensor(x, *UINT8[:2], EPS, UINT8[2])
    return (*found, *(each + 0 for each in given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scales_zero_points_and_codes_are_those_of_eager(dtype, folder):
    own = compiled(Function(scale_and_zero), folder)
    xs = [torch.randn(7, 9), torch.rand(7, 9), -torch.rand(7, 9) - 1, torch.zeros(7, 9)]
    with torch.no_grad():
        for x in (*xs, 1e4 * torch.randn(3, 9)):
            for found, wanted in zip(own(x.to(dtype)), scale_and_zero(x.to(dtype)), strict=True):
                torch.testing.assert_close(found, wanted, rtol=0, atol=0, check_dtype=False)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 96), nn.Linear(96, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(nn.functional.gelu(self.a(x)))


# torch's own walk over a GraphModule that is copied warns
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
def test_what_pt2e_has_quantised(is_dynamic, tmp_path):
    x86 = pytest.importorskip(
        "torchao.quantization.pt2e.quantizer.x86_inductor_quantizer", reason="needs torchao"
    )
    pt2e = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e", reason="needs torchao")
    torch.manual_seed(0)
    x, size = torch.randn(8, 5, 64), torch.export.Dim("b", min=2, max=64)
    exported = torch.export.export(Net().eval(), (x,), dynamic_shapes=({0: size},)).module()
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_dynamic=is_dynamic))
    watched = pt2e.prepare_pt2e(exported, quantizer)
    watched(x)
    eager = pt2e.convert_pt2e(watched)
    for part in eager.modules():
        part.training = False
    own = compiled(eager, tmp_path)
    with torch.no_grad():
        for rows in (8, 3):
            x = torch.randn(rows, 5, 64)
            torch.testing.assert_close(own(x), eager(x), rtol=1e-3, atol=1e-2)
    assert products(own) == 2
    assert strop.explain(own).num_graphs == 1
