"""UNets of diffusers whose blocks are computed again in the backward pass, compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import strop
from strop.dispatch import training
from strop.dispatch.dynamo import AOT_LOG
from strop.frontend import repeated_gradients
from strop.frontend.checkpoints import tagged_checkpoints
from strop.ir.affine import base_of
from tests.e2e import tiny
from tests.train.compiled import (
    Args,
    assert_gradients_as_accurate,
    gradients,
    options,
    roles,
    unet_args,
)

pytestmark = [
    pytest.mark.usefixtures("fresh"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]
PAIR = ["backward", "forward"]
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"  # as the backward calls it


def small(is_checkpointed: bool = True, **changes: Any) -> nn.Module:
    """Residual blocks, and one with attention to itself and to the text."""
    parts = {
        "block_out_channels": (8,),
        "down_block_types": ("CrossAttnDownBlock2D",),
        "up_block_types": ("UpBlock2D",),
        "mid_block_type": None,
    }
    unet = tiny.unet(**parts, **changes).train()
    if is_checkpointed:
        unet.enable_gradient_checkpointing()
    return unet


def check_graphs(module: Any) -> None:
    """One pair of our own tracing, and nothing in eager."""
    report = strop.explain(module)
    assert roles(module.forward.log) == PAIR
    assert report.num_graphs == 2
    assert not report.fallbacks
    assert not module.forward.log.fallbacks
    assert not module.forward.traced_by_torch


def kept_bytes(module: Any) -> int:
    """What the forward keeps for the backward, beside arguments and weights."""
    (forward,) = (r for r in module.forward.log.records if r.role == "forward")
    graph = forward.compiled.graph
    saved = dict.fromkeys(graph.outputs[len(graph.outputs) - graph.num_saved :])
    return sum(o.numel.eval(graph.hints) for o in saved if base_of(o).op != "input")


def backward_of(module: Any) -> Any:
    (found,) = (graph for graph in strop.explain(module).graphs if graph.role == "backward")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "autocast", [pytest.param(None, marks=pytest.mark.nightly), torch.bfloat16], ids=str
)
def test_gradients(autocast: torch.dtype | None) -> None:
    """Attention runs again too: torch takes it for something that draws random numbers."""
    eager = small()
    ours = strop.optimize(copy.deepcopy(eager), train=True, options=options())
    inputs = [unet_args(n) for n in range(4)] * 2
    assert_gradients_as_accurate(ours, eager, inputs, autocast, per_tensor=False)
    check_graphs(ours)
    assert ours.forward.trained_calls == len(inputs)
    assert backward_of(ours).calls[ATTENTION] == 2
    assert strop.explain(ours).num_opaque_calls == 0
    if autocast is None:
        check_what_is_kept(ours, inputs[0])


def check_what_is_kept(ours: Any, args: Args) -> None:
    plain = strop.optimize(small(is_checkpointed=False), train=True, options=options())
    gradients(plain, args)
    assert ATTENTION not in backward_of(plain).calls
    assert kept_bytes(ours) < 0.5 * kept_bytes(plain)


@pytest.mark.slow
def test_dropout_draws_once() -> None:
    """The slope along a direction is that of the function with the masks of that call."""
    module = strop.optimize(small(dropout=0.3).double(), train=True, options=options())
    noisy, times, text = (t.double() for t in unet_args(0))

    def call(x: Tensor, seed: int = 7) -> Tensor:
        torch.manual_seed(seed)
        loss: Tensor = module(x.requires_grad_(), times, text).sample.square().sum()
        return loss

    direction = torch.randn_like(noisy)
    call(noisy).backward()
    ends = [call(noisy.detach() + h * direction).item() for h in (1e-5, -1e-5)]
    assert noisy.grad is not None
    slope = float((noisy.grad * direction).sum())
    torch.testing.assert_close(slope, (ends[0] - ends[1]) / 2e-5, rtol=1e-6, atol=1e-8)
    assert torch.equal(call(noisy), call(noisy))
    assert not torch.equal(call(noisy), call(noisy, seed=8))
    check_graphs(module)


def attended(y: Tensor) -> Tensor:
    rows = y.view(1, 2, -1, 8)
    return F.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.3).reshape(y.shape)


# what draws otherwise than dropout of Strop's own; the last two give the numbers beside the result
DRAWN: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda y: y * torch.rand_like(y),
    "attention": attended,
    "rrelu": lambda y: F.rrelu(y, training=True),
}


class Noisy(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor] = DRAWN["rand"]) -> None:
        super().__init__()
        self.up, self.down, self.draw = nn.Linear(8, 16), nn.Linear(16, 8), draw

    def _inner(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.sigmoid(self.draw(self.up(x))))
        return y

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self._inner, x, use_reentrant=False)
        return result


@pytest.mark.parametrize("name", DRAWN)
def test_other_numbers_are_drawn_once(name: str) -> None:
    module = Noisy(DRAWN[name]).double()
    strop.optimize(module, train=True, options=options(strict=False))

    def call(x: Tensor) -> Tensor:
        torch.manual_seed(7)
        loss: Tensor = module(x.requires_grad_()).square().sum()
        return loss

    x, direction = (torch.randn(6, 8, dtype=torch.float64) for _ in range(2))
    call(x).backward()
    ends = [call(x.detach() + h * direction).item() for h in (1e-6, -1e-6)]
    assert x.grad is not None
    slope = float((x.grad * direction).sum())
    torch.testing.assert_close(slope, (ends[0] - ends[1]) / 2e-6, rtol=1e-6, atol=1e-8)
    assert roles(module.forward.log) == PAIR
    assert not strop.explain(module).fallbacks


@pytest.mark.slow
def test_adapters() -> None:
    """Of the frozen base no weight has a gradient, nor is one computed."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=3, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False
    )
    eager = small()
    eager.add_adapter(config)
    ours = strop.optimize(copy.deepcopy(eager), train=True, options=options())
    assert_gradients_as_accurate(
        ours, eager, [unet_args(n) for n in range(4)] * 4, per_tensor=False
    )
    check_graphs(ours)
    found = gradients(ours, unet_args(0))
    assert len(found) == 2 * 8  # A and B of four layers, of two attentions
    assert all("lora" in name for name in found)
    (backward,) = (r for r in ours.forward.log.records if r.role == "backward")
    weights = [
        tuple(size.value for size in node.shape)
        for node in backward.compiled.graph.nodes
        if node.op == "linear" and all(size.is_const for size in node.shape)
    ]
    assert len(weights) == len(found)
    assert all(3 in shape for shape in weights), "gradients of A and B alone"
    masks = [
        dict(step.attrs)["args"][-1]
        for step in backward.compiled.program.call_steps
        if "convolution_backward" in str(dict(step.attrs).get("target"))
    ]
    assert all(tuple(mask) == (True, False, False) for mask in masks)


class Noting(nn.Module):
    """Writes into a part of its buffer, so that torch traces it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.up(x).sin()
        self.seen[:2] = found.detach().mean(0)[:2]
        return found


def test_what_torch_traces_no_more_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limit counts every module with this forward: the next one would run in eager unseen."""
    monkeypatch.setattr(training, "MOST_TRACES", 1)
    found = []
    for _ in range(2):
        module = strop.optimize(Noting(), train=True, options=options(strict=False))
        module(torch.randn(5, 8)).sum().backward()
        found.append(strop.explain(module).fallbacks)
    assert not found[0]
    assert any("runs it in eager" in reason for reason in found[1])


class Half(nn.Module):
    """Has three parts, so that its copies are those of a repeated block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(F.gelu(self.up(self.norm(x)))).sin()
        return found


class Whole(nn.Module):
    """Two halves, each within a checkpoint if ``inside``."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.first, self.second, self.inside = Half(), Half(), inside

    def forward(self, x: Tensor) -> Tensor:
        for half in (self.first, self.second):
            x = checkpoint(half, x, use_reentrant=False) if self.inside else half(x)
        return x.tanh()


class Stack(nn.Module):
    """Equal blocks, each within a checkpoint if ``outside``, behind one that is not."""

    def __init__(self, outside: bool, inside: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Whole(inside) for _ in range(4))
        self.outside = outside

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = checkpoint(block, x, use_reentrant=False) if self.outside else block(x)
        return x


PLACES = {"outside": (True, False), "inside": (False, True), "both": (True, True)}
KEPT = {"outside": (0.25, 2), "inside": (0.0, 8), "both": (0.0, 4)}


@pytest.mark.parametrize("place", PLACES)
def test_blocks_that_repeat(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a block's nodes lie in regions of their own, and gradients in none: kept are a
    block without a checkpoint, and what each region but the last hands on."""
    copied, copy_nodes = [], repeated_gradients.copy_nodes

    def counted(known: Any, *rest: Any) -> Any:
        copied.append(known)
        return copy_nodes(known, *rest)

    monkeypatch.setattr(repeated_gradients, "copy_nodes", counted)
    eager = Stack(*PLACES[place])
    ours = strop.optimize(copy.deepcopy(eager), train=True, options=options())
    inputs = [(torch.randn(n, 5, 8, requires_grad=True),) for n in (3, 2, 4, 7, 40, 90)]
    assert_gradients_as_accurate(ours, eager, inputs, per_tensor=False)
    check_graphs(ours)
    assert copied, "else there is no test here"
    plain = strop.optimize(Stack(False, False), train=True, options=options())
    gradients(plain, inputs[0])
    share, handed_on = KEPT[place]
    assert kept_bytes(ours) == share * kept_bytes(plain) + handed_on * inputs[0][0].numel()


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpoints_outside_of_a_trace(is_reentrant: bool) -> None:
    """Another thread may run them meanwhile."""
    layer = nn.Linear(8, 8)

    def gradient(through: Callable[..., Tensor]) -> Tensor:
        layer.zero_grad()
        x = torch.ones(3, 8, requires_grad=True)
        with tagged_checkpoints():
            through(lambda y: layer(y).sin(), x).sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    found = gradient(partial(checkpoint, use_reentrant=is_reentrant))
    assert torch.equal(found, gradient(lambda function, x: function(x)))


def steps(module: nn.Module, called: Any, sizes: list[Args]) -> list[Tensor]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for args in sizes:
        called(*args).sample.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in module.parameters()]


@pytest.mark.nightly
@pytest.mark.slow
def test_trained_by_torch_compile() -> None:
    """One pair of graphs serves all sizes."""
    AOT_LOG.records.clear()
    AOT_LOG.fallbacks.clear()
    eager = small(is_checkpointed=False)
    start = [p.detach().clone() for p in eager.parameters()]
    ours = copy.deepcopy(eager)
    fast = torch.compile(
        ours, backend="strop", options={"strict": True, "cache_dir": tiny.cache_dir()}
    )
    pictures = [(8, 12), (12, 8), (8, 12), (12, 8), (16, 12)]
    sizes = [tiny.unet_args(2, *picture, 7, seed=n) for n, picture in enumerate(pictures)]
    for found, expected, before in zip(
        steps(ours, fast, sizes), steps(eager, eager, sizes), start, strict=True
    ):
        moved = (expected - before).norm()
        assert moved > 0
        assert (found - expected).norm() < 1e-3 * moved
    assert roles(AOT_LOG) == sorted(PAIR)
    assert not AOT_LOG.fallbacks
