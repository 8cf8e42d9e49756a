"""Gradients and tangents that a forward takes itself: the value is eager's, for every operator."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import strop
import strop.frontend.operators  # defines torch.ops.strop
from strop.errors import UnsupportedError
from strop.frontend.differentiated import levels_closed
from strop.frontend.traced_graph import traced_graph
from tests.e2e import tiny

CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # fp32 sums in another order
# torch compiles some rules of forward-mode AD with it, in eager too
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
    pytest.mark.usefixtures("fresh_dynamo"),
]


class Net(nn.Module):
    """``body`` of a layer and x; weights are not small, so that a gradient left out shows."""

    def __init__(self, body: Callable[[Any, Tensor], Any], layer: nn.Module | None) -> None:
        super().__init__()
        self.body, self.layer = body, copy.deepcopy(layer)
        generator = torch.Generator().manual_seed(1)
        for weight in self.parameters():
            weight.data = torch.randn(weight.shape, generator=generator) * 0.5

    def forward(self, x: Tensor) -> Any:
        return self.body(self.layer, x)


def energy(function: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Guidance: the gradient of a number that ``function`` gives of x."""

    def body(layer: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            q = x.detach().requires_grad_()
            (found,) = torch.autograd.grad(function(layer, q).square().sum() + q.sum(), q)
        return found

    return body


def duals(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    with forward_ad.dual_level():
        y = layer(forward_ad.make_dual(x, torch.ones_like(x))).sin()
        primal, tangent = forward_ad.unpack_dual(y)
    return primal, tangent


class Fivefold(torch.autograd.Function):
    """A gradient of a user's own, which calls a functional."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return F.linear(grads[0], torch.eye(4) * 5)


def checkpointed(layer: Any, q: Tensor) -> Tensor:
    found: Tensor = torch.utils.checkpoint.checkpoint(layer, q, use_reentrant=False)
    return found


def hooked(layer: Any, q: Tensor) -> Tensor:
    y: Tensor = layer(q)
    y.register_hook(lambda gradient: gradient * 3)
    return y


def descent(layer: Any, x: Tensor) -> Tensor:
    for _ in range(2):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (found,) = torch.autograd.grad(layer(x).square().sum(), x)
        x = x - 0.1 * found
    return x


def second(layer: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        q = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(layer(q).pow(3).sum(), q, create_graph=True)
        return torch.autograd.grad(first.square().sum(), q)[0]


def product(q: Tensor) -> Tensor:
    return q @ q.transpose(-1, -2)


ROWS, TOKENS, PICTURE = (3, 4), (2, 3, 4), (2, 4, 6, 6)
LINEAR, CONV = nn.Linear(4, 4), nn.Conv2d(4, 4, 3, padding=1)
CASES: dict[str, tuple[Callable[[Any, Tensor], Any], nn.Module | None, tuple[int, ...]]] = {
    "linear": (energy(lambda layer, q: layer(q)), LINEAR, ROWS),
    "conv2d": (energy(lambda layer, q: layer(q)), CONV, PICTURE),
    "conv1d": (energy(lambda layer, q: layer(q)), nn.Conv1d(3, 3, 3), TOKENS),
    "conv3d": (energy(lambda layer, q: layer(q[:, :, None])), nn.Conv3d(4, 4, (1, 3, 3)), PICTURE),
    "transposed": (energy(lambda layer, q: layer(q)), nn.ConvTranspose2d(4, 4, 3), PICTURE),
    "group_norm": (energy(lambda layer, q: layer(q)), nn.GroupNorm(2, 4), PICTURE),
    "rms_norm": (energy(lambda layer, q: layer(q)), nn.RMSNorm(4), TOKENS),
    "attention": (
        energy(lambda layer, q: F.scaled_dot_product_attention(q, q * 2, q * 3)),
        None,
        PICTURE,
    ),
    "heads": (energy(lambda layer, q: layer(q, q, q)[0]), nn.MultiheadAttention(4, 2), TOKENS),
    "matmul": (energy(lambda layer, q: product(q)), None, PICTURE),
    "lstm": (energy(lambda layer, q: layer(q)[0]), nn.LSTM(4, 3), TOKENS),
    "interpolate": (
        energy(lambda layer, q: F.interpolate(q, scale_factor=1.5, mode="bilinear")),
        None,
        PICTURE,
    ),
    "reflect": (energy(lambda layer, q: F.pad(q, (1, 1, 1, 1), "reflect")), None, PICTURE),
    "pool": (energy(lambda layer, q: F.max_pool2d(q, 2) + F.avg_pool2d(q, 2)), None, PICTURE),
    "checkpoint": (energy(checkpointed), LINEAR, ROWS),
    "hook": (energy(hooked), LINEAR, ROWS),
    "function": (energy(lambda layer, q: Fivefold.apply(layer(q))), LINEAR, ROWS),
    "descent": (descent, LINEAR, ROWS),
    "second": (second, LINEAR, ROWS),
    "grad": (lambda layer, x: grad(lambda q: layer(q).square().sum())(x), LINEAR, ROWS),
    "vjp": (lambda layer, x: vjp(lambda q: layer(q).sin(), x)[1](x)[0], LINEAR, ROWS),
    "jacrev": (lambda layer, x: jacrev(lambda q: layer(q).sin())(x), LINEAR, ROWS),
    "jacfwd": (lambda layer, x: jacfwd(lambda q: layer(q).sin())(x), LINEAR, ROWS),
    "hessian": (lambda layer, x: hessian(lambda q: layer(q).sin().sum())(x), LINEAR, ROWS),
    "jvp": (lambda layer, x: jvp(lambda q: layer(q).sin(), (x,), (x * 2,)), LINEAR, ROWS),
    "jvp of conv2d": (lambda layer, x: jvp(layer, (x,), (x * 2,)), CONV, PICTURE),
    "jvp of group_norm": (lambda layer, x: jvp(layer, (x,), (x * 2,)), nn.GroupNorm(2, 4), PICTURE),
    "vmap": (lambda layer, x: vmap(lambda q: layer(q[None])[0])(x), CONV, PICTURE),
    "vmap of matmul": (lambda layer, x: vmap(product)(x), None, PICTURE),
    "vmap of grad": (
        lambda layer, x: vmap(grad(lambda q: layer(q).sin().sum()))(x),
        LINEAR,
        ROWS,
    ),
    "duals": (duals, LINEAR, ROWS),
}
# A few through Dynamo, one for each way in which it brings gradients to the backend. It breaks its
# graph at most of them.
BY_DYNAMO = ("linear", "conv2d", "group_norm", "attention", "grad", "jvp", "vmap", "duals")


def inputs(shape: tuple[int, ...]) -> list[Tensor]:
    """Of two sizes."""
    shapes = (shape, (shape[0] + 1, *shape[1:]))
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def check(fast: Any, eager: nn.Module, shape: tuple[int, ...]) -> None:
    with torch.no_grad():
        for x in inputs(shape):
            torch.testing.assert_close(fast(x), eager(x), **CLOSE)


@pytest.mark.parametrize("name", CASES)
def test_optimize(name: str) -> None:
    body, layer, shape = CASES[name]
    eager = Net(body, layer).eval()
    check(strop.optimize(copy.deepcopy(eager), options=tiny.options()), eager, shape)


@pytest.mark.parametrize("name", BY_DYNAMO)
def test_compile(name: str) -> None:
    body, layer, shape = CASES[name]
    eager = Net(body, layer).eval()
    options = {"cache_dir": tiny.cache_dir()}
    check(torch.compile(eager, backend="strop", options=options), eager, shape)


def test_guidance_is_compiled() -> None:
    """Not refused: the gradient is a part of the graph."""
    body, layer, shape = CASES["conv2d"]
    fast: Any = strop.optimize(Net(body, layer).eval(), options=tiny.options(strict=True))
    with torch.no_grad():
        fast(inputs(shape)[0])
    assert not fast.forward.counters.eager_calls


def test_what_torch_cannot_trace_is_said() -> None:
    body, layer, shape = CASES["jvp of group_norm"]
    fast: Any = strop.optimize(Net(body, layer).eval(), options=tiny.options())
    with torch.no_grad():
        fast(inputs(shape)[0])
    (reason,) = fast.forward.counters.fallbacks
    assert "forward-mode AD" in reason


def operators() -> list[str]:
    known = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeExplicitAutograd")
    return sorted(name for name in known if name.startswith("strop::"))


def test_operators_of_ours_are_found() -> None:
    assert {"strop::linear", "strop::lstm", "strop::dropout"} <= set(operators())


@pytest.mark.parametrize("key", ["Autograd[alias]", "FuncTorchBatched"])
def test_no_operator_can_lose_a_gradient(key: str) -> None:
    """Each has a kernel of its own where torch differentiates and maps."""
    registered = {name: torch._C._dispatch_dump(name) for name in operators()}
    assert [name for name, text in registered.items() if f"\n{key}:" not in text] == []


def test_dropout_keeps_its_tangent() -> None:
    """In a training step it is an autograd function, which transforms know nothing of."""
    from strop.frontend.joint import RETARGET

    def dropped(x: Tensor) -> Tensor:
        return RETARGET[F.dropout](x, 0.5)

    x = torch.ones(64)
    value, tangent = jvp(dropped, (x,), (x,))
    assert value.count_nonzero() in range(1, 64)
    torch.testing.assert_close(tangent, value, rtol=0, atol=0)
    assert set(grad(lambda x: dropped(x).sum())(x).tolist()) == {0.0, 2.0}


def test_a_trace_that_is_given_up_leaves_no_level_open() -> None:
    """Nodes of a graph enter levels, and what is behind the one that fails never leaves them."""
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()

    def fail(enter: Callable[[], int]) -> None:
        torch._C._functorch._jvp_increment_nesting()
        enter()
        raise ValueError("half way")

    for enter in (torch._C._enter_dual_level, forward_ad.enter_dual_level):
        with pytest.raises(ValueError, match="half way"), levels_closed():
            fail(enter)
        assert torch._C._functorch.get_dynamic_layer_stack_depth() == depth
        with forward_ad.dual_level():  # which fails inside another
            pass


def test_a_level_of_the_callers_stays_open() -> None:
    with forward_ad.dual_level():
        with pytest.raises(ValueError, match="half way"), levels_closed():
            raise ValueError("half way")
        dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        assert forward_ad.unpack_dual(dual * 3).tangent is not None


def test_the_dispatcher_leaves_graphs_of_levels_to_torch() -> None:
    """Inside a level that a node enters it would take no operator of ours for differentiated."""
    seen = torch._dynamo.testing.EagerAndRecordGraphs()
    body, layer, shape = CASES["duals"]
    torch.compile(Net(body, layer), backend=seen)(inputs(shape)[0])
    with pytest.raises(UnsupportedError, match="_enter_dual_level"):
        traced_graph(seen.graphs[0], has_blocks=False)
