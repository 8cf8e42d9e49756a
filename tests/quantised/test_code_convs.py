"""Convolutions of values and weights that are dequantised, as PT2E writes them, convolve codes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # defines the operators
from torch import Tensor, nn

import strop
from strop.dispatch.derived_inputs import PACKED
from strop.ir.code_conv import code_conv2d
from strop.options import Options
from strop.testing import assert_as_accurate_as_eager

OPS = torch.ops.quantized_decomposed
INT8, UINT8 = (-128, 127, torch.int8), (0, 255, torch.uint8)


class Quantised(nn.Module):
    """A convolution of which both operands are quantised."""

    def __init__(
        self,
        outs: int,
        ins: int,
        window: tuple[int, int] = (3, 3),
        *,
        places: tuple[Any, ...] = (1, 1),
        zero: int = 117,
        codes: Any = UINT8,
        is_symmetric: bool = True,
        has_bias: bool = True,
        groups: int = 1,
    ) -> None:
        super().__init__()
        self.places, self.zero, self.codes, self.groups = places, zero, codes, groups
        weight = torch.randint(-128, 128, (outs, ins // groups, *window)).to(torch.int8)
        channels = torch.arange(outs)
        self.register_buffer("weight", weight)
        self.register_buffer("scales", torch.rand(outs) / 100 + 1e-3)
        zeros = torch.zeros_like(channels) if is_symmetric else channels % 9 - 4
        self.register_buffer("zeros", zeros)
        self.register_buffer("bias", torch.randn(outs) if has_bias else None)

    def range_of(self, x: Tensor) -> tuple[Any, Any]:
        return 0.02, self.zero

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The values and the weight, both dequantised."""
        given = self.range_of(x)
        name = "tensor" if isinstance(given[0], Tensor) else "default"
        held = getattr(OPS.quantize_per_tensor, name)(x, *given, *self.codes)
        values = getattr(OPS.dequantize_per_tensor, name)(held, *given, *self.codes)
        own = OPS.dequantize_per_channel.default(self.weight, self.scales, self.zeros, 0, *INT8)
        return values, own

    def forward(self, x: Tensor) -> Tensor:
        operands = self.operands(x)
        places = *self.places, *(1,) * (3 - len(self.places))
        return torch.conv2d(*operands, self.bias, *places, self.groups)

    def exact(self, x: Tensor) -> Tensor:
        values, own = (operand.double() for operand in self.operands(x))
        bias = None if self.bias is None else self.bias.double()
        places = *self.places, *(1,) * (3 - len(self.places))
        return torch.conv2d(values, own, bias, *places, self.groups)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def compiled(module: nn.Module, folder: Path, **options: Any) -> Any:
    own = copy.deepcopy(module).eval()
    strop.optimize(own, options=Options(cache_dir=str(folder), strict=True, **options))
    return own


def given(*shape: int) -> Tensor:
    return torch.randn(shape) + 0.3


KINDS = {
    "3x3": {},
    "1x1": {"window": (1, 1), "places": (1, 0)},
    "1x1 with a border": {"window": (1, 1)},
    "stride": {"places": (2, 1)},
    "dilation": {"places": (1, 2, 2), "is_symmetric": False},
    "3x5": {"window": (3, 5), "places": ((1, 2), (0, 2))},
    "5x5 of int8": {"window": (5, 5), "places": (1, 4), "codes": INT8, "zero": -7},
    "weights with zero points": {"is_symmetric": False, "zero": 0},
    "no zero points, no bias": {"codes": INT8, "zero": 0, "has_bias": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_convolved_in_one_graph_for_all_sizes(kind, folder):
    torch.manual_seed(1)
    eager = Quantised(37, 13, **KINDS[kind]).eval()
    own = compiled(eager, folder)
    with torch.no_grad():
        for shape in ((2, 13, 9, 11), (1, 13, 16, 24), (3, 13, 5, 5)):
            x = given(*shape)
            assert_as_accurate_as_eager(own(x), eager(x), eager.exact(x))
    report = strop.explain(own)
    assert report.num_graphs == 1
    assert report.calls == {"code_conv2d": 1}
    assert "1 code_conv\n" in str(report)


class Sums(nn.Module):
    """A convolution by scales that are powers of 2, and sums that fp32 holds exactly."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        values = OPS.dequantize_per_tensor.default(x, 0.5, 3, *INT8)
        own = OPS.dequantize_per_tensor.default(self.weight, 0.25, 0, *INT8)
        return torch.conv2d(values, own, None, 1, 1)


@pytest.mark.parametrize(("outs", "ins"), [(1, 1), (16, 4), (65, 7), (130, 12), (20, 70)])
def test_sums_are_exact_at_any_sizes(outs, ins, folder):
    weight = torch.randint(-128, 128, (outs, ins, 3, 3), dtype=torch.int8)
    own = compiled(Sums(weight), folder)
    for batch, height, width in ((1, 1, 1), (2, 7, 5), (1, 5, 30)):
        x = torch.randint(-128, 128, (batch, ins, height, width), dtype=torch.int8)
        places = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
        wanted = code_conv2d(x, weight, zero=3, **places)
        assert torch.equal(own(x).double() * 8, wanted)
    assert strop.explain(own).calls == {"code_conv2d": 1}


def test_whatever_is_written_counts(folder):
    eager, x = Quantised(33, 8).eval(), given(2, 8, 6, 6)
    own = compiled(eager, folder)

    def both(change: Any) -> None:
        for module in (own, eager):
            change(module)
        assert_as_accurate_as_eager(own(x), eager(x), eager.exact(x))

    with torch.no_grad():
        both(lambda module: None)
        both(lambda module: module.weight.data.neg_())
        both(lambda module: module.weight.numpy().fill(5))
        both(lambda module: module.scales.mul_(2))
        both(lambda module: module.zeros.data.add_(3))
        other = Quantised(33, 8, is_symmetric=False).state_dict()
        both(lambda module: module.load_state_dict(other))


def test_a_weight_is_packed_once(tmp_path):
    own = compiled(Quantised(33, 8), tmp_path)

    def packed() -> tuple[int, int]:
        found = strop.explain(own).components[0].derived
        (one,) = (each for each in found if each.kind == PACKED)
        return one.count, one.num_made

    with torch.no_grad():
        for shape in ((1, 8, 4, 4), (2, 8, 20, 20), (1, 8, 4, 4)):
            own(given(*shape))
            assert packed() == (1, 1)
        own.weight.data.neg_()
        own(given(1, 8, 4, 4))
        assert packed() == (1, 2)


def test_pictures_and_weights_that_lie_otherwise(folder):
    eager = Quantised(16, 8).eval()
    own = compiled(eager, folder)
    with torch.no_grad():
        x = given(2, 8, 6, 5)
        for module in (own, eager):
            module.weight = module.weight.to(memory_format=torch.channels_last)
        for each in (x, x.to(memory_format=torch.channels_last), x.transpose(2, 3)):
            assert_as_accurate_as_eager(own(each), eager(each), eager.exact(each))


def test_threads_change_nothing(folder):
    eager, x, before = Quantised(64, 32).eval(), given(2, 32, 20, 20), torch.get_num_threads()
    own = compiled(eager, folder)
    with torch.no_grad():
        wanted = own(x)
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                assert torch.equal(own(x), wanted)
        finally:
            torch.set_num_threads(before)


class Dynamic(Quantised):
    """Looks for the range of its values in each call."""

    def range_of(self, x: Tensor) -> tuple[Any, Any]:
        found: tuple[Any, Any] = OPS.choose_qparams.tensor(x, 0, 255, 2.0**-12, torch.uint8)
        return found


@pytest.mark.parametrize(
    ("eager", "reason"),
    [
        (Quantised(16, 8, groups=2), "several groups"),
        (Dynamic(16, 8), "computed in each call"),
        (Quantised(4, 3641), "may leave int32"),
    ],
)
def test_explain_says_why_others_stay(eager, reason, tmp_path):
    own, x = compiled(eager, tmp_path), given(1, eager.weight.shape[1] * eager.groups, 6, 6)
    with torch.no_grad():
        torch.testing.assert_close(own(x), eager.eval()(x), rtol=1e-4, atol=1e-2)
    assert reason in str(strop.explain(own))
    assert strop.explain(own).calls == {"conv2d": 1}


@pytest.mark.parametrize("is_off", [False, True], ids=["check", "off"])
def test_torch_computes_the_same(is_off, tmp_path):
    """By itself, and as what a check compares with."""
    how: Any = {"kernels_off": ("code_conv",)} if is_off else {"check": True}
    eager = Quantised(16, 8, is_symmetric=False).eval()
    own = compiled(eager, tmp_path, **how)
    with torch.no_grad():
        for shape in ((2, 8, 5, 7), (1, 8, 12, 12)):
            x = given(*shape)
            assert_as_accurate_as_eager(own(x), eager(x), eager.exact(x))
    assert not own.forward.counters.findings


class Net(nn.Module):
    """A block of a UNet."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 24, 3, padding=1), nn.Conv2d(24, 24, 3, 2, 1)
        self.norm, self.last = nn.GroupNorm(4, 24), nn.Conv2d(24, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.silu(self.norm(self.a(x)))
        return self.last(y[:, :, ::2, ::2] + self.b(y))


# torch's own walk over a GraphModule that is copied warns
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_pt2e_has_quantised(tmp_path):
    x86 = pytest.importorskip(
        "torchao.quantization.pt2e.quantizer.x86_inductor_quantizer", reason="needs torchao"
    )
    pt2e = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e", reason="needs torchao")
    torch.manual_seed(0)
    x, size = given(4, 8, 10, 12), torch.export.Dim("b", min=2, max=64)
    exported = torch.export.export(Net().eval(), (x,), dynamic_shapes=({0: size},)).module()
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    watched = pt2e.prepare_pt2e(exported, quantizer)
    watched(x)
    eager = pt2e.convert_pt2e(watched)
    for part in eager.modules():
        part.training = False
    own = compiled(eager, tmp_path)
    with torch.no_grad():
        for batch in (4, 2):
            x = given(batch, 8, 10, 12)
            torch.testing.assert_close(own(x), eager(x), rtol=1e-3, atol=2e-2)
    assert strop.explain(own).calls == {"code_conv2d": 3}
    assert strop.explain(own).num_graphs == 1
