"""Compiled training steps: gradients no further from fp64 than eager's, one pair of graphs."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.errors import OptionError
from strop.ir.affine import base_of
from tests.train.compiled import (
    MODELS,
    Args,
    Block,
    Mlp,
    Resnet,
    assert_gradients_as_accurate,
    block_args,
    gradients,
    mlp_args,
    options,
    resnet_args,
    roles,
)

PAIR = ["backward", "forward"]


pytestmark = pytest.mark.usefixtures("fresh")


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["mlp", "block", "resnet", "unet"])
def test_gradients_over_five_shapes(name: str, autocast: torch.dtype | None) -> None:
    if name == "unet" and autocast is not None:
        pytest.skip("its parts are judged in half precision; tracing it takes long")
    make, args = MODELS[name]
    eager = make().train()
    ours = strop.optimize(copy.deepcopy(eager), train=True, options=options())
    inputs = [args(n) for n in range(5)] * (2 if autocast or name == "unet" else 3)
    # of a UNet's 168 tensors some are beyond any limit by chance
    assert_gradients_as_accurate(ours, eager, inputs, autocast, per_tensor=name != "unet")
    assert roles(ours.forward.log) == PAIR, "one pair of graphs for every shape"
    assert not ours.forward.log.fallbacks
    assert not ours.forward.counters.fallbacks
    assert ours.forward.trained_calls == len(inputs)


class Conditioned(nn.Module):
    """As SDXL's UNet reads sizes of pictures: its rows by the batch of another argument."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(24, 8)

    def forward(self, x: Tensor, text: Tensor, ids: Tensor) -> Tensor:
        waves = (ids.flatten()[:, None] * torch.arange(1.0, 5.0)).sin()
        return self.lift(waves.reshape(text.shape[0], -1)) * x + text


def test_a_batch_divided_by_another_is_one_size() -> None:
    eager = Conditioned()
    ours = strop.optimize(copy.deepcopy(eager), train=True, options=options(strict=False))
    inputs = [(torch.randn(n, 8), torch.randn(n, 8), torch.rand(n, 6)) for n in (4, 3, 5)]
    assert_gradients_as_accurate(ours, eager, inputs, None)
    assert roles(ours.forward.log) == PAIR
    assert not ours.forward.log.fallbacks
    odd = torch.randn(2, 8), torch.randn(2, 8), torch.rand(1, 12)  # another quotient
    torch.testing.assert_close(ours(*odd), eager(*odd))
    assert roles(ours.forward.log) == sorted(PAIR * 2)


def test_gradients_accumulate() -> None:
    module = strop.optimize(Mlp().train(), train=True, options=options())
    first, second = torch.randn(4, 32), torch.randn(6, 32)
    each = [gradients(module, (x,)) for x in (first, second)]
    summed = {name: each[0][name] + each[1][name] for name in each[0]}
    module.zero_grad()
    for x in (first, second):
        module(x).square().mean().backward()
    loss = module(first).square().mean()
    for _ in range(2):  # backward twice through one graph
        (0.0 * loss).backward(retain_graph=True)
    found = {name: p.grad for name, p in module.named_parameters()}
    torch.testing.assert_close(found, summed, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("budget", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["plain", "checkpoint"])
def test_dropout_has_one_mask_however_much_is_computed_again(
    budget: float, is_checkpointed: bool
) -> None:
    """The slope along a direction is that of the function with the mask of that call."""
    module = Mlp(dropout=0.3).train()
    module.is_checkpointed = is_checkpointed
    module = strop.optimize(module.double(), train=True, options=options(memory_budget=budget))

    def call(x: Tensor) -> Tensor:
        torch.manual_seed(7)
        return module(x.requires_grad_()).square().sum()

    x, direction = (torch.randn(5, 32, dtype=torch.float64) for _ in range(2))
    call(x).backward()
    with_step = [call(x.detach() + h * direction).item() for h in (1e-6, -1e-6)]
    slope = (with_step[0] - with_step[1]) / 2e-6
    assert x.grad is not None
    torch.testing.assert_close(float((x.grad * direction).sum()), slope, rtol=1e-5, atol=1e-7)
    torch.manual_seed(8)
    assert not torch.equal(module(x).square().sum(), call(x))
    assert roles(module.forward.log) == PAIR


def test_a_smaller_budget_and_checkpoints_keep_less() -> None:

    def kept(budget: float, module: nn.Module, args: Args) -> int:
        torch._dynamo.reset()
        strop.optimize(module.train(), train=True, options=options(memory_budget=budget))
        gradients(module, args)
        (forward,) = (r for r in module.forward.log.records if r.role == "forward")
        graph = forward.compiled.graph
        saved = dict.fromkeys(graph.outputs[len(graph.outputs) - graph.num_saved :])
        return sum(o.numel.eval(graph.hints) for o in saved if base_of(o).op != "input")

    whole, less, least = (kept(budget, Block(), block_args(0)) for budget in (1.0, 0.5, 0.0))
    assert least < less < whole
    checkpointed = Mlp()
    checkpointed.is_checkpointed = True
    assert kept(1.0, checkpointed, mlp_args(3)) < kept(1.0, Mlp(), mlp_args(3))


def test_norms_are_computed_again_from_their_statistics() -> None:
    """Of GroupNorm, SiLU and convolution the input is kept, and what the convolution read."""
    module = strop.optimize(Resnet().train(), train=True, options=options())
    args = resnet_args(0)
    gradients(module, args)
    (forward,) = (r for r in module.forward.log.records if r.role == "forward")
    saved = forward.compiled.graph.outputs[1:]
    large = {
        o for o in saved if o.numel.eval(forward.compiled.graph.hints) > 24 * 32 and o.op != "input"
    }
    # conv1's result plus the embedding; the inputs of both convolutions
    assert len(large) == 3, [o.op for o in large]
    assert all(o.order == (0, 2, 3, 1) for o in large), "no copy into another layout"


def test_lora_computes_no_gradient_of_its_frozen_base() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q", "k", "v", "out"], init_lora_weights=False)
    eager = peft.inject_adapter_in_model(config, Block()).train()
    ours = strop.optimize(copy.deepcopy(eager), train=True, options=options())
    assert_gradients_as_accurate(ours, eager, [block_args(n) for n in range(5)] * 2)
    assert roles(ours.forward.log) == PAIR
    (backward,) = (r for r in ours.forward.log.records if r.role == "backward")
    weights = Counter(
        tuple(size.value for size in node.shape)
        for node in backward.compiled.graph.nodes
        if node.op == "linear" and all(s.is_const for s in node.shape)
    )
    # of A and B, four layers each; a base weight would be (32, 32), or larger
    assert weights == {(4, 32): 4, (32, 4): 4} or sum(weights.values()) == 8
    assert all(4 in shape for shape in weights)


def test_a_frozen_convolution_has_no_weight_gradient() -> None:
    module = Resnet().train()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("norm" in name)
    strop.optimize(module, train=True, options=options())
    found = gradients(module, resnet_args(0))
    assert {name.split(".")[1] for name in found} == {"norm1", "norm2"}
    (backward,) = (r for r in module.forward.log.records if r.role == "backward")
    masks = [
        dict(step.attrs)["args"][-1]
        for step in backward.compiled.program.call_steps
        if "convolution_backward" in str(dict(step.attrs).get("target"))
    ]
    assert masks
    assert all(tuple(mask) == (True, False, False) for mask in masks)


def test_weights_are_live_and_inference_goes_on() -> None:
    module = strop.optimize(Mlp().train(), train=True, options=options())
    plain = copy.deepcopy(module)  # of an optimised module the plain one
    x, optimizer = torch.randn(5, 32), torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(3):
        gradients(module, (x,))
        optimizer.step()
        plain.load_state_dict(module.state_dict())
        torch.testing.assert_close(module(x), plain(x))
        module.eval()
        with torch.no_grad():
            torch.testing.assert_close(module(x), plain(x))
        module.train()
    assert roles(module.forward.log) == PAIR
    assert module.forward.variants.num_captures == 1, "without gradients: the inference program"
    assert module.forward.counters.eager_calls == 0
    strop.restore(module)
    assert "forward" not in module.__dict__


def test_the_report_shows_both_graphs() -> None:
    module = strop.optimize(Resnet().train(), train=True, options=options())
    gradients(module, resnet_args(1))
    report = strop.explain(module)
    found = {graph.role: graph for graph in report.graphs}
    assert found.keys() == {"forward", "backward"}
    assert found["backward"].calls["aten.convolution_backward.default"] == 3
    assert found["forward"].num_saved > 0
    assert report.compiled_node_share > 0.7
    launches = sum(r.runner.latest.num_launches for r in module.forward.log.records)
    assert report.num_launches == launches > 20
    assert "backward graph" in str(report)


def test_a_batch_norm_in_training_that_torch_traces_is_counted() -> None:
    """Torch does so where a part of a buffer is written."""

    class Noting(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            self.seen[:2] = y.detach().mean((0, 2, 3))[:2]
            return y

    eager = Noting(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).train()
    eager.register_buffer("seen", torch.zeros(8))
    module = strop.optimize(copy.deepcopy(eager), train=True, options=options(strict=False))
    x = torch.randn(4, 3, 9, 8)
    found = zip(*(gradients(m, (x,)).values() for m in (module, eager)), strict=True)
    for mine, theirs in found:
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(module[1].running_mean, eager[1].running_mean)
    assert strop.explain(module).num_opaque_calls > 0


@pytest.mark.filterwarnings("ignore")  # Dynamo looks at .grad of what it passes on
def test_what_is_cut_is_counted() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = F.silu(self.layer(x))
            if y.sum() > 1e6:  # only a value says
                y = y / y.sum()
            return self.layer(y)

    module = strop.optimize(Cut(), train=True, options=options(strict=False))
    module(torch.randn(3, 4)).sum().backward()
    assert any("cut into 2 graphs" in reason for reason in module.forward.counters.fallbacks)


def test_a_pipeline_is_refused() -> None:
    class Pipeline:
        components = ()

    with pytest.raises(OptionError, match=r"pipe\.unet"):
        strop.optimize(Pipeline(), train=True)
