"""Convolutions by e4m3 codes: which ones, what stands in their place, and what that is worth."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strop.backend import Compiled
from strop.debug.reference import evaluate
from strop.dispatch.coded_weights import CodedWeight
from strop.ir.code_conv import scaled_conv2d
from strop.ir.eight_bit import FORMATS
from strop.kernels.gemm.rows import why_no_window
from strop.kernels.kernel import Call
from strop.options import Options
from strop.runtime.run.library_calls import CUDA_PLANNED_OUT
from tests.passes.planning import planned_by

GPU = torch.device("cuda", 0)
CHANNELS = 320
SIZES = {"x": ("b", str(CHANNELS), "h", "w"), "time": ("b", "16")}
HINTS = {"b": 2, "h": 16, "w": 16}


class Block(nn.Module):
    """A residual block, from channels last to every second pixel."""

    def __init__(self, channels: int = CHANNELS, window: int = 3, groups: int = 1) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(32, channels) for _ in range(2))
        around: dict[str, int] = {"padding": window // 2, "groups": groups}
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, window, **around) for _ in "ab")
        self.down = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.time = nn.Linear(16, channels)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.convs[0](functional.silu(self.norms[0](x)))
        y = y + self.time(time)[:, :, None, None]
        y = self.convs[1](functional.silu(self.norms[1](y)))
        return self.down(x + y)


def planned(module: nn.Module, numerics: str = "fp8", **options: object) -> Compiled:
    return named(module, numerics, **options)[0]


def named(module: nn.Module, numerics: str, **options: object) -> tuple[Compiled, list[str]]:
    """Return what is compiled for a GPU, and the names of the weights among its arguments."""
    module = module.to(memory_format=torch.channels_last)
    wanted = Options(numerics=(numerics,), record=True, **options)  # type: ignore[arg-type]
    return planned_by(module, SIZES, wanted, torch.float16, HINTS)


def calls_of(compiled: Compiled) -> Counter[str]:
    return Counter(step.op for step in compiled.program.call_steps)


def test_the_kernel_that_normalises_a_picture_quantises_it() -> None:
    exact, own = (planned(Block(), name) for name in ("none", "fp8"))
    assert calls_of(exact) == {"conv2d": 3, "linear": 1}
    assert calls_of(own) == {"scaled_conv2d": 3, "linear": 1}
    second = [step.ops for step in own.program.kernel_steps if "silu" in step.ops][1]
    assert {"sub", "amax", "e4m3_code"} <= {*second}
    made = [spec for spec in own.program.inputs if spec.made]
    assert Counter(spec.made for spec in made) == {"fp8 codes": 3, "fp8 scales": 3}
    # two more where what is normalised lies channels first, or is a sum that is read twice
    assert len(own.program.kernel_steps) == len(exact.program.kernel_steps) + 2


def test_what_is_named_and_other_formats_stay_exact(caplog: pytest.LogCaptureFixture) -> None:
    assert calls_of(planned(Block(), "int8"))["conv2d"] == 3
    assert calls_of(planned(Block(), exact_layers=("convs.*",))) == {
        "conv2d": 2,
        "scaled_conv2d": 1,
        "linear": 1,
    }
    assert "exact_layers" not in caplog.text
    planned(Block(), exact_layers=("conv.*",))
    assert "'conv.*', which no layer for 8 bits" in caplog.text


@pytest.mark.parametrize(
    "block", [Block(window=5), Block(groups=2), Block(window=1)], ids=["5x5", "groups", "1x1"]
)
def test_what_the_kernel_does_not_take_stays_exact(block: Block) -> None:
    assert calls_of(planned(block))["scaled_conv2d"] == 1  # the one that leaves out pixels


def test_the_kernel_takes_what_the_pass_makes() -> None:
    nodes = [n for n in planned(Block()).graph.nodes if n.op == "scaled_conv2d"]
    for call in map(Call.of, nodes):
        weight = call.known(1)
        assert weight is not None
        assert why_no_window(call, weight[0], weight[1], weight[2:]) == ""


@torch.no_grad()
def test_values_are_those_of_the_rule() -> None:
    torch.manual_seed(0)
    block = Block()
    own, names = named(block, "fp8")
    x = torch.randn(2, CHANNELS, 9, 11).half()
    time = torch.randn(2, 16).half()
    weights = dict(block.named_parameters())
    arguments: dict[int, Tensor] = {}
    given = iter((x, time))
    for spec, node in zip(own.program.inputs, own.graph.inputs, strict=True):
        index = node.attrs["index"]
        if spec.made:
            (part,) = (arguments[i] for i in spec.merged)
            coded = CodedWeight([part], FORMATS["fp8"])
            coded.write([part])
            arguments[index] = coded.codes if spec.made.endswith("codes") else coded.scales
        else:
            arguments[index] = weights[names[index]] if spec.is_state else next(given)
    values = {node: arguments[node.attrs["index"]] for node in own.graph.inputs}
    sizes = {"b": 2, "h": 9, "w": 11}
    (found,) = evaluate(own.graph.outputs, values, sizes, exact=False).values()
    wanted = block.double()(x.double(), time.double())
    off = float((found.double() - wanted).norm() / wanted.norm())
    assert 1e-3 < off < 4e-2


def test_a_weight_of_a_convolution_lies_channels_last() -> None:
    weight = torch.randn(8, 16, 3, 3)
    coded = CodedWeight([weight], FORMATS["fp8"])
    coded.write([weight])
    assert coded.codes.is_contiguous(memory_format=torch.channels_last)
    wide = coded.codes.float() * coded.scales[:, None, None, None]
    assert float((wide - weight).norm() / weight.norm()) < 4e-2


@pytest.mark.parametrize("stride", [(1, 1), (2, 2)], ids=str)
def test_torch_computes_the_same_by_bytes(stride: tuple[int, int]) -> None:
    own = FORMATS["fp8"]
    x, w = torch.randn(2, 5, 6, 16), torch.randn(8, 16, 3, 3)
    codes, pixels = own.quantised(x.flatten(end_dim=-2))
    columns, scales = own.quantised(w.flatten(1))
    x = (codes.float() * pixels[:, None]).view(2, 5, 6, 16).permute(0, 3, 1, 2)
    w = columns.float().view(w.shape) * scales[:, None, None, None]
    around = {"stride": stride, "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    wanted = torch.conv2d(x.double(), w.double(), stride=stride, padding=1)
    given = (
        codes.view(2, 5, 6, 16).permute(0, 3, 1, 2).view(torch.uint8),
        columns.view(8, 16, 3, 3),
        pixels.view(2, 1, 5, 6),
        scales,
    )
    found = scaled_conv2d(*given, **around)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    out = torch.empty(found.shape)
    CUDA_PLANNED_OUT["scaled_conv2d"](around)(given, out)
    torch.testing.assert_close(out, found.float())
