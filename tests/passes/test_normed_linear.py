"""Batch norms by known statistics at the end of products."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetModel

import strop
from strop.debug.reference import evaluate, input_values
from strop.ir.affine import base_of
from strop.ir.contractions import NORMED, ColumnNorm
from strop.ir.graph import Graph, Node
from strop.ir.normed_linear import normed_linear
from strop.ir.program import CallStep
from strop.kernels.kernel import Call
from strop.kernels.library import select
from strop.options import Options
from strop.passes import run as run_passes
from strop.runtime.run.library_calls import CUDA_PLANNED_OUT
from strop.testing import assert_as_accurate_as_eager
from tests.frontend.tracing import trace
from tests.gpus import A100, H100
from tests.passes.planning import planned_by

HALVES = [torch.float16, torch.bfloat16]
HALF = torch.float16


class Layer(nn.Module):
    """A convolution and its norm."""

    def __init__(self, ins: int, outs: int, size: int = 1, **more: Any) -> None:
        super().__init__()
        affine = more.pop("affine", True)
        self.conv = nn.Conv2d(ins, outs, size, padding=size // 2, **{"bias": False, **more})
        self.norm = nn.BatchNorm2d(outs, eps=1e-3, affine=affine)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """As in ResNet-50, with a layer on the way around it or without."""

    def __init__(self, ins: int, outs: int = 64, act: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        self.first, self.second, self.third = Layer(ins, 32), Layer(32, 32, 3), Layer(32, outs)
        self.around = Layer(ins, outs) if ins != outs else nn.Identity()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        y = self.third(self.act(self.second(self.act(self.first(x)))))
        return self.act(y + self.around(x))


class Inverted(nn.Module):
    """As in EfficientNet: what is added to a norm is a norm that other layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.back = Layer(32, 40), Layer(40, 96), Layer(96, 40)
        self.last = nn.Conv2d(40, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(self.back(F.silu(self.wide(y))) + y)  # type: ignore[no-any-return]


def trained(module: nn.Module) -> nn.Module:
    """Give norms what training would have given them."""
    torch.manual_seed(0)
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d | nn.BatchNorm1d):
            vectors = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
            for vector in vectors:
                if vector is not None:
                    vector.data.uniform_(0.5, 1.5)
    return module.eval().requires_grad_(False)


def traced(
    module: nn.Module,
    shape: str = "b 32 h w",
    dtype: torch.dtype = HALF,
    device: str = "cuda",
    options: Options | None = None,
) -> Graph:
    sizes = {"b": 2, "h": 6, "w": 5}
    known = {name: size for name, size in sizes.items() if name in shape.split()}
    given = trace(module.to(dtype), shape, dtype=dtype, **known).graph
    return run_passes(given, options or Options(), device)[0]


def found_in(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op in NORMED]


def count(*args: Any, **more: Any) -> int:
    return len(found_in(traced(*args, **more)))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("act", [F.relu, F.silu, lambda x: x], ids=["relu", "silu", "none"])
def test_blocks(act: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """All norms of 1x1 convolutions, and the sums behind them; those of 3x3 stay."""
    module = trained(nn.Sequential(Bottleneck(32, act=act), Bottleneck(64, act=act), Layer(64, 8)))
    made = trace(module.to(dtype), "b 32 h w", dtype=dtype, b=2, h=6, w=5)
    graph, _ = run_passes(made.graph, Options(), "cuda")
    found = [node.op for node in found_in(graph)]
    assert sorted(found) == [*[NORMED[0]] * 3, *[NORMED[1]] * 2]
    assert sum(node.op == "rsqrt" for node in graph.nodes) == 3  # of 3x3, and what a user gets
    x = torch.randn(2, 32, 6, 5).to(dtype)
    names = made.captured.state_names
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    given = {number: state[name] for number, name in enumerate(names)} | {len(names): x}
    env = {"b": 2, "h": 6, "w": 5}
    plain, _ = run_passes(made.graph, Options(disable=("normed_linear",)), "cuda")
    wanted = copy.deepcopy(module).double()(x.double())

    def error(graph: Graph, exact: bool) -> float:
        (value,) = evaluate(graph.outputs, input_values(graph, given), env, exact=exact).values()
        return float((value.double() - wanted).norm() / wanted.norm())

    assert error(graph, True) < 1e-6
    assert error(graph, False) < 1.1 * error(plain, False)  # torch rounds the product as well


def test_a_norm_that_is_read_and_added_later() -> None:
    found = found_in(traced(trained(Inverted())))
    assert [node.op for node in found] == [*[NORMED[0]] * 2, NORMED[1]]
    first, wide, back = found
    assert base_of(wide.inputs[0]) is base_of(back.inputs[2]) is first


class AndMore(nn.Module):
    """A layer, and what reads its result."""

    def __init__(self, layer: nn.Module, more: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.more, self.last = layer, more, nn.Conv2d(32, 8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.more(self.last(y) if (y := self.layer(x)).dim() == 4 else y, y)


class Few(nn.Sequential):
    """A layer with fewer columns than any tile has."""

    def __init__(self) -> None:
        super().__init__(Layer(32, 24), nn.Conv2d(24, 32, 3))


PLAIN = lambda found, y: found  # noqa: E731


def test_the_plain_layer_is_one() -> None:
    """Else the tests below would say nothing."""
    assert count(trained(AndMore(Layer(32, 32), PLAIN))) == 1


@pytest.mark.parametrize(
    ("module", "given"),
    [
        (AndMore(Layer(32, 32, bias=True), PLAIN), {}),
        (AndMore(Layer(32, 32, affine=False), PLAIN), {}),
        (AndMore(Layer(32, 32, 3), PLAIN), {}),
        (AndMore(Layer(32, 32, stride=2), PLAIN), {}),
        (AndMore(Layer(32, 32, groups=2), PLAIN), {}),
        (AndMore(Layer(28, 32), PLAIN), {"shape": "b 28 h w"}),
        (AndMore(Few(), PLAIN), {}),
        (AndMore(Layer(32, 32), PLAIN), {"dtype": torch.float32}),
        (AndMore(Layer(32, 32), PLAIN), {"device": "cpu"}),
        (AndMore(Layer(32, 32), PLAIN), {"options": Options().in_training}),
        (AndMore(Layer(32, 32), PLAIN), {"options": Options().on(has_wgmma=False)}),
        (AndMore(Layer(32, 32), PLAIN), {"options": Options(disable=("normed_linear",))}),
        (AndMore(Layer(32, 32), lambda found, y: (found, y)), {}),
        (nn.Sequential(Layer(32, 32), nn.AvgPool2d(3)), {}),
        (nn.Sequential(Layer(32, 32)), {}),
    ],
    ids=[
        *("bias", "no factors", "3x3", "stride", "groups", "odd depth", "few columns"),
        *("fp32", "cpu"),
        *("training", "another GPU", "disabled", "returned too", "a kernel reads it", "result"),
    ],
)
def test_where_a_kernel_of_its_own_stays(module: nn.Module, given: dict[str, Any]) -> None:
    graph = traced(trained(module), **given)
    assert not found_in(graph)
    assert any(node.op == "rsqrt" for node in graph.nodes)


class ReadTwice(Layer):
    """The product itself is wanted too."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.norm(y) * y  # type: ignore[no-any-return]


class Computed(Layer):
    """By statistics that the network computes."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean((0, 2, 3))
        how = self.norm.running_var, self.norm.weight, self.norm.bias
        return F.batch_norm(self.conv(x), mean, *how)


class Mixed(Layer):
    """Statistics of another type than the product."""

    def forward(self, x: Tensor) -> Tensor:
        how = (self.norm.running_mean, self.norm.running_var, self.norm.weight, self.norm.bias)
        return F.batch_norm(self.conv(x).float(), *(v.float() for v in how)).to(x.dtype)


@pytest.mark.parametrize("kind", [ReadTwice, Computed, Mixed])
def test_other_norms_stay(kind: type[Layer]) -> None:
    assert count(trained(AndMore(kind(32, 32), PLAIN))) == 0


def test_a_norm_by_statistics_of_the_batch_stays() -> None:
    module = trained(AndMore(Layer(32, 32), PLAIN))
    module.layer.norm = nn.BatchNorm2d(32, track_running_stats=False).eval()
    assert count(module) == 0


class Sum(nn.Module):
    def __init__(self, other: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.other, self.last = Layer(32, 32), other, nn.Conv2d(32, 8, 3)
        self.inner = nn.Conv2d(32, 32, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        return self.last(F.relu(self.layer(x) + self.other(x, self.inner(x))))


@pytest.mark.parametrize(
    ("other", "wanted"),
    [
        (lambda x, y: y, 1),
        (lambda x, y: F.relu(y), 0),
        (lambda x, y: x[:, :32], 0),
        (lambda x, y: y[:1], 0),
        (lambda x, y: y[:, :, :1, :1], 0),
    ],
    ids=["a call's", "a kernel computes it", "an argument", "one for all", "one for all places"],
)
def test_sums(other: Callable[[Tensor, Tensor], Tensor], wanted: int) -> None:
    """Where a kernel has to run anyway, it does all of it. The convolution's biases are added by
    one."""
    module = Sum(other)
    module.inner.bias = None
    assert [node.op for node in found_in(traced(trained(module)))] == [NORMED[1]] * wanted


def test_a_linear_of_rows() -> None:
    layers = nn.Linear(32, 48, bias=False), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 8)
    graph = traced(trained(nn.Sequential(*layers)), "b 32")
    (found,) = found_in(graph)
    assert found.attrs["activation"] == "relu"
    assert found.origin == "0"


def test_nothing_is_derived_from_weights() -> None:
    """The product reads weight and vectors where the module has them: whoever writes to one is seen
    by the next call, in a CUDA graph too."""
    module = trained(nn.Sequential(Bottleneck(32), Bottleneck(64), Layer(64, 8)))
    made, names = planned_by(module, {"x": ("b", "32", "6", "5")}, Options(), HALF, {"b": 2})
    assert not [spec for spec in made.program.inputs if spec.made or spec.merged]
    steps = [s for s in made.program.steps if isinstance(s, CallStep) and s.op in NORMED]
    assert len(steps) == 5
    read = set[str]()
    for step in steps:
        buffers = [made.program.buffers[ref.buffer] for ref in step.inputs]
        read |= {names[b.index] for b in buffers if b.kind == "input" and b.index < len(names)}
    ends = ("weight", "bias", "running_mean", "running_var")
    kinds = {(name.split(".")[-2], name.split(".")[-1]) for name in read}
    assert kinds == {("conv", "weight"), *(("norm", end) for end in ends)}


def test_resnet_50_takes_28_launches_less() -> None:
    """Narrow, but as deep. What is left: 20 convolutions and their 16 norms, the last of three
    blocks with a stride, the classifier's pool."""
    config = ResNetConfig(embedding_size=16, hidden_sizes=[128, 128, 192, 256], depths=[3, 4, 6, 3])
    module = Picture(ResNetModel(config))
    sizes: dict[str, int] = {"b": 2}
    specs = {"x": ("b", "3", "64", "64")}
    launches = list[int]()
    for disabled in (("normed_linear",), ()):
        made, _ = planned_by(module, specs, Options(disable=disabled), HALF, sizes)
        launches.append(len(made.program.at({"b": 1})))
        norms = found_in(made.graph)
    assert [node.op for node in norms].count(NORMED[1]) == 12
    assert len(norms) == 29
    assert launches[0] - launches[1] == 28
    for node in norms:
        call = Call.of(node)
        for batch in (1, 8, 32):
            assert select(call, call.at({"b": batch}), H100).kernel == "wgmma_gemm"
        assert select(call, call.at({"b": 1}), A100).kernel == "cublas_and_torch_norm"


class Picture(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(pixel_values=x, return_dict=False)[1]


@pytest.mark.parametrize("op", NORMED)
@pytest.mark.parametrize("activation", ["", "relu", "silu"])
def test_the_librarys_way(op: str, activation: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(50, 32).to(HALF), torch.randn(16, 32).to(HALF)
    added = [torch.randn(50, 16).to(HALF)] * (op == NORMED[1])
    mean, variance, factor, shift = (torch.rand(16).to(HALF) for _ in range(4))
    given = (x, weight, *added, mean, variance, factor, shift)
    out = torch.empty(50, 16, dtype=HALF)
    attrs = {"eps": 1e-3, "activation": activation}
    CUDA_PLANNED_OUT[op](attrs)(given, out)
    exact = normed_linear([t.double() for t in given], ColumnNorm.of(op, attrs))
    norm = F.batch_norm((x.double() @ weight.double().t()), *(
        v.double() for v in (mean, variance, factor, shift)), eps=1e-3)  # fmt: skip
    wanted = norm + added[0].double() if added else norm
    wanted = {"": wanted, "relu": F.relu(wanted), "silu": F.silu(wanted)}[activation]
    torch.testing.assert_close(exact, wanted)
    torch.testing.assert_close(out.double(), wanted, rtol=5e-3, atol=2e-2)


def written(module: nn.Module) -> Iterator[str]:
    """Write to each tensor of each norm and to its weight, in the ways that users do."""
    layers = [layer for layer in module.modules() if isinstance(layer, Layer)]
    for name in ("conv.weight", "norm.weight", "norm.bias", "norm.running_mean"):
        for layer in layers:
            layer.get_parameter(name).mul_(0.9) if "running" not in name else (
                layer.get_buffer(name).add_(0.1)
            )
        yield name
    for layer in layers:
        layer.norm.running_var.data.mul_(1.3)
    yield "running_var, which nobody counts"
    module.load_state_dict({k: 0.95 * v for k, v in module.state_dict().items()})
    yield "load_state_dict"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_values_and_changes_on_a_gpu(dtype: torch.dtype, tmp_path: Path) -> None:
    module = nn.Sequential(Bottleneck(32), Bottleneck(64), Bottleneck(64), Layer(64, 8))
    eager = trained(module).to("cuda", dtype)
    fast = strop.optimize(copy.deepcopy(eager), options=strop.Options(cache_dir=str(tmp_path)))
    others, ours = written(eager), written(fast)
    for side in (14, 7, 28, 14, 14, 14, 14):
        x = torch.randn(3, 32, side, side + 1, device="cuda", dtype=dtype)
        with torch.no_grad():
            for _ in range(3):  # the last ones are replayed
                found = fast(x)
            exact = copy.deepcopy(eager).double()
            assert_as_accurate_as_eager(found, eager(x), exact(x.double()))
            assert next(others, None) == next(ours, None)
    calls = strop.explain(fast).summary()["calls"]
    assert (calls[NORMED[0]], calls[NORMED[1]]) == (4, 3)
