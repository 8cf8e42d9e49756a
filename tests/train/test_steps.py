"""Training steps that Strop traces itself, and what it leaves to torch."""

from __future__ import annotations

import copy
import logging
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import strop
from strop.errors import CaptureError
from strop.frontend.step import capture_step
from strop.ir.tensor_spec import TensorSpec
from tests.train.compiled import (
    MODELS,
    Block,
    Mlp,
    assert_gradients_as_accurate,
    block_args,
    mlp_args,
    options,
    roles,
)

PAIR = ["backward", "forward"]


pytestmark = pytest.mark.usefixtures("fresh")


def optimised(module: nn.Module, **changes: Any) -> Any:
    return strop.optimize(module, train=True, options=options(**changes))


@pytest.mark.parametrize("name", MODELS)
def test_torch_traces_nothing(name: str) -> None:
    make, args = MODELS[name]
    ours = optimised(make().train())
    for n in range(2):
        found = ours(*args(n))
        getattr(found, "sample", found).sum().backward()
    assert ours.forward.traced_by_torch == {}
    assert roles(ours.forward.log) == PAIR
    assert "traced by torch" not in str(strop.explain(ours))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["mlp", "block", "resnet", "unet"])
def test_gradients_on_a_gpu(
    name: str, autocast: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # cuDNN has TF32 for some layouts only: either side may be the exact one
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    make, args = MODELS[name]
    eager = make().train().cuda()
    ours = optimised(copy.deepcopy(eager))
    inputs = [tuple(t.cuda() for t in args(n)) for n in range(5)] * 2
    assert_gradients_as_accurate(ours, eager, inputs, autocast, per_tensor=False)
    assert ours.forward.traced_by_torch == {}
    assert roles(ours.forward.log) == PAIR


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.up(x))
        self.seen[:2] = y.detach().mean(0)[:2]
        return y


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(F.silu, self.up(x), use_reentrant=True)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.calls = nn.Linear(4, 6), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.up(x)


class Rolling(nn.Module):
    """Layers are left out by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) if random.random() < 2 else x


class Passing(nn.Module):
    """Gives an argument back beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.up(x), x


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Noting, "writes into a part of a buffer"),
        (Checkpointed, "use_reentrant=True"),
        (Counting, "it sets calls of a Counting"),
        (Passing, "shares memory with an argument"),
    ],
    ids=["part", "checkpoint", "attribute", "argument"],
)
def test_left_to_torch_with_a_reason(make: Any, reason: str) -> None:
    eager, x = make().train(), torch.randn(5, 4)
    ours = optimised(copy.deepcopy(eager), strict=False)
    results = []
    for net in (eager, ours):
        found = net(x)
        (found[0] if isinstance(found, tuple) else found).square().sum().backward()
        results.append([*(p.grad for p in net.parameters()), *net.buffers()])
    torch.testing.assert_close(results[1], results[0])
    assert getattr(ours, "calls", 1) == 1, "as in eager"
    (found,) = ours.forward.traced_by_torch
    assert re.search(reason, found)
    assert f"traced by torch 1x: {found}" in str(strop.explain(ours))


@pytest.mark.filterwarnings("ignore")  # Dynamo looks at .grad of what it passes on
def test_a_tensor_that_was_computed() -> None:
    """As weight_norm by hooks keeps one: such a module cannot be copied to trace it."""

    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 6)
            self.weight = self.up.weight * 2

        def forward(self, x: Tensor) -> Tensor:
            return F.silu(F.linear(x, self.weight))

    torch.manual_seed(1)
    eager, x = Doubled(), torch.randn(5, 4)
    torch.manual_seed(1)
    ours = optimised(Doubled(), strict=False)
    for net in (eager, ours):
        net(x).square().sum().backward()
    torch.testing.assert_close(ours.up.weight.grad, eager.up.weight.grad)
    (found,) = ours.forward.traced_by_torch
    assert re.search("cannot be copied", found)
    assert not ours.forward.log.fallbacks


class Several(nn.Module):
    """Results of several kinds, a weight without use, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.unused, self.frozen = nn.Linear(4, 6), nn.Linear(2, 2), nn.Linear(6, 6)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, *, scale: float = 2.0) -> dict[str, Any]:
        y = self.frozen(F.silu(self.up(x))) * scale
        return {"pair": [y, y.mean()], "places": y.argmax(-1), "scale": scale, "none": None}


def test_results_of_every_kind() -> None:
    eager, x = Several(), torch.randn(5, 4)
    ours = optimised(copy.deepcopy(eager))
    for rows in (5, 3):
        expected, found = (net(x[:rows], scale=3.0) for net in (eager, ours))
        torch.testing.assert_close(found, expected)
        assert not found["places"].requires_grad
        for result in (expected, found):  # of one of the results nobody asks for a gradient
            result["pair"][1].backward()
    assert ours.unused.weight.grad is None
    assert ours.frozen.weight.grad is None
    torch.testing.assert_close(ours.up.weight.grad, eager.up.weight.grad)
    assert ours.forward.traced_by_torch == {}
    assert roles(ours.forward.log) == ["backward", *PAIR]  # one of them without that result


def test_gradients_of_arguments() -> None:
    eager = Block()
    ours = optimised(copy.deepcopy(eager))
    (given,) = block_args(1)
    grads = []
    for net in (eager, ours):
        x = given.clone().requires_grad_()
        net(x).square().mean().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-6)
    ours(given).sum().backward()  # another pair: x wants none
    assert roles(ours.forward.log) == sorted(PAIR * 2)


def test_what_a_step_depends_on() -> None:
    """Training mode, autocast and who is frozen: each has graphs of its own, kept for the next."""
    ours = optimised(Mlp(dropout=0.5))
    (x,) = mlp_args(1)
    for _ in range(2):
        ours.train()
        assert not torch.equal(ours(x), ours(x)), "dropout"
        ours.eval()
        assert torch.equal(ours(x), ours(x))
        with torch.autocast("cpu", torch.bfloat16):
            assert ours(x).dtype == torch.bfloat16
        ours.up.requires_grad_(False)
        ours(x).sum().backward()
        assert ours.up.weight.grad is None
        ours.up.requires_grad_(True)
    assert roles(ours.forward.log) == sorted(PAIR * 4)
    assert ours.forward.traced_by_torch == {}


def test_a_batch_of_one_and_a_large_one() -> None:
    eager = Block()
    ours = optimised(copy.deepcopy(eager))
    for rows in (1, 2, 300, 1):
        x, grads = torch.randn(rows, 7, 32), []
        for net in (eager, ours):
            net.zero_grad()
            net(x).square().mean().backward()
            grads.append([p.grad for p in net.parameters()])
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-6)
    assert roles(ours.forward.log) == PAIR


def test_timesteps_that_are_integers() -> None:
    """The UNet's adapter has them read as numbers of one type."""
    make, args = MODELS["unet"]
    eager, given = make().train(), list(args(1))
    given[1] = torch.tensor([3, 500, 998])[: len(given[0])]
    ours = optimised(copy.deepcopy(eager))
    torch.testing.assert_close(ours(*given).sample, eager(*given).sample, rtol=1e-3, atol=1e-4)
    assert ours.forward.traced_by_torch == {}


def test_no_second_derivative() -> None:
    ours = optimised(Mlp())
    x = mlp_args(0)[0].requires_grad_()
    (grad,) = torch.autograd.grad(ours(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_a_weight_that_is_written_between_both_passes() -> None:
    ours = optimised(Block())
    loss = ours(*block_args(0)).sum()
    with torch.no_grad():
        ours.out.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_backward_twice_wants_to_be_told() -> None:
    ours = optimised(Mlp())
    loss = ours(*mlp_args(0)).sum()
    loss.backward(retain_graph=True)
    first = ours.up.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(ours.up.weight.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_every_error_of_a_module_is_its_own() -> None:
    class Refusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 3:
                raise ValueError("three rows")
            return self.up(x)

    ours = optimised(Refusing(), strict=False)
    with pytest.raises(ValueError, match="three rows"):
        ours(torch.randn(3, 4))
    assert len(ours.forward.traced_by_torch) == 1
    for rows in (2, 5):
        ours(torch.randn(rows, 4)).sum().backward()
    assert sum(ours.forward.traced_by_torch.values()) == 1, "the wrong call alone"
    assert roles(ours.forward.log) == PAIR


# Calls that are wrong in themselves.
WRONG: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], torch.dtype]] = {
    "width": (Mlp, (3, 5), torch.float32),
    "channels": (lambda: nn.Conv2d(3, 4, 3), (2, 5, 8, 8), torch.float32),
    "kind": (Mlp, (3, 4), torch.float64),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_gets_the_error_of_eager(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else: torch logs what fails on fake tensors, with a page of its own code."""
    monkeypatch.setattr(logging.getLogger("torch"), "propagate", True)
    make, shape, dtype = WRONG[name]
    eager, x = make(), torch.randn(shape, dtype=dtype)
    with pytest.raises(RuntimeError) as theirs:
        eager(x)
    ours = optimised(copy.deepcopy(eager), strict=False)
    with pytest.raises(RuntimeError) as raised:
        ours(x)
    assert str(raised.value) == str(theirs.value)
    assert raised.value.__context__ is None
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert ours.forward.counters.fallbacks == {}


class Overwriting(nn.Module):
    """Eager's backward pass refuses it; a joint trace meets that in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).sigmoid()
        gated = hidden * hidden
        hidden.mul_(2.0)
        return gated + hidden


def test_what_torch_cannot_trace_runs_in_eager() -> None:
    ours = optimised(Overwriting(), strict=False)
    x = torch.randn(3, 4)
    found = ours(x)
    assert torch.equal(found, ours.forward.eager(x))
    ((reason, count),) = ours.forward.counters.fallbacks.items()
    assert reason.startswith("torch cannot trace it: ")
    assert count == ours.forward.counters.eager_calls == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        optimised(Overwriting(), strict=True)(x)


def test_chance_of_python_is_no_part_of_a_graph() -> None:
    module, before = Rolling(), random.getstate()
    spec = TensorSpec(("b", "4"), torch.float32, torch.device("cpu"))
    with pytest.raises(CaptureError, match="draws random numbers in Python"):
        capture_step(module, module.forward, [spec], {"b": 3}, [True, True, False])
    assert random.getstate() == before


def test_sizes_stay_symbols() -> None:
    """One trace, in sizes of batch and length, of results and gradients."""
    spec = TensorSpec(("b", "s", "32"), torch.float32, torch.device("cpu"))
    module = Block()
    wants = [True] * len(list(module.parameters())) + [False]
    captured = capture_step(module, module.forward, [spec], {"b": 3, "s": 7}, wants)
    assert captured.sizes.hints == {"b": 3, "s": 7}
    assert captured.sizes.fixed == ()
    assert captured.differentiable == (True,)
    (output,) = captured.graph.graph.find_nodes(op="output")
    shapes = [
        tuple(map(str, captured.sizes.symbols.shape(n.meta["val"].shape))) for n in output.args[0]
    ]
    assert shapes[0] == ("b", "s", "32")
    assert shapes[1:] == [tuple(map(str, p.shape)) for p in module.parameters()]


def test_explain_counts_every_stage() -> None:
    ours = optimised(Mlp())
    args = mlp_args(0)
    ours(*args).sum().backward()
    found = strop.explain(ours).stage_seconds()
    stages = ("capture", "partition", "passes", "fusion", "lowering", "codegen", "kernels")
    assert found.keys() >= {*stages}
    assert all(found[stage] > 0 for stage in stages[:-1])  # kernels may be those of a test before
