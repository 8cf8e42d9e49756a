"""The dispatcher: what is compiled, what falls back and why, threads, aliases, modes."""

from __future__ import annotations

import copy
import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import strop
from strop.errors import UnsupportedError
from strop.runtime.run.executor import Bound
from tests.e2e import tiny

X = torch.randn(3, 8, generator=torch.manual_seed(0))
# fp32 results of one or two small sums in another order
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Net(nn.Module):
    """Merged linears, a fused activation, and a Parameter that kernels read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.act = nn.SiLU()
        self.gain = nn.Parameter(torch.randn(8, 8))
        self.scale = 1.0
        self.table = [2.0]

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.q(x) * self.k(x) + self.v(x)) * self.scale * self.table[0]
        return y + (self.gain * x[0]).sum(0)


def optimized(module: nn.Module, **changes: Any) -> Any:
    return strop.optimize(module.eval(), options=tiny.options(**changes))


def assert_as_eager(module: nn.Module, *args: Any) -> None:
    with torch.no_grad():
        actual = module(*args)
        torch.testing.assert_close(actual, type(module).forward(module, *args), **CLOSE)


def the_reason(module: Any) -> str:
    (reason,) = module.forward.counters.fallbacks
    return reason


# reasons


def test_gradients_fall_back():
    module = optimized(Net())
    module(X).sum().backward()
    assert module.q.weight.grad is not None
    assert "gradients are enabled" in the_reason(module)


def test_the_gradient_of_an_argument_of_a_frozen_module_is_kept():
    module = optimized(Net().requires_grad_(False))
    x = X.clone().requires_grad_()
    module(x).sum().backward()
    assert x.grad is not None
    assert "an argument requires a gradient" in the_reason(module)


def test_training_mode_falls_back():
    module = optimized(Net()).train()
    with torch.no_grad():
        module(X)
    assert "training mode" in the_reason(module)


def test_autocast_falls_back():
    module = optimized(Net())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = module.forward.eager(X)
        assert torch.equal(module(X), expected)
    assert "autocast is enabled" in the_reason(module)


def test_hooks_of_submodules_run():
    module = optimized(Net())
    assert_as_eager(module, X)
    seen: list[Tensor] = []
    handle = module.act.register_forward_hook(lambda m, args, out: seen.append(out))
    with torch.no_grad():
        module(X)
        assert len(seen) == 1
        handle.remove()
        module(X)
    assert len(seen) == 1
    assert "hooks" in the_reason(module)


def test_hooks_of_the_module_itself_run_once_and_outside():
    module, plain = Net(), Net()
    for net in (module, plain):
        net.register_forward_pre_hook(lambda m, args: (args[0] * 3,))
        net.register_forward_hook(lambda m, args, out: out * 2)
    optimized(module)
    with torch.no_grad():
        torch.testing.assert_close(module(X), plain(X), rtol=1e-5, atol=1e-5)
    assert not module.forward.counters.eager_calls


def test_hooks_of_all_modules_run():
    module = optimized(Net())
    assert_as_eager(module, X)
    seen: list[Any] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.append(m))
    try:
        with torch.no_grad():
            module(X)
    finally:
        handle.remove()
    assert len(seen) == len(list(module.modules()))
    assert "hooks for all modules" in the_reason(module)


def test_a_forward_that_is_put_into_a_part_runs():
    module = optimized(Net())
    assert_as_eager(module, X)
    own = module.act.forward
    for slope in (0.1, 0.2):  # as hooks of accelerate and diffusers are put there
        module.act.forward = partial(nn.functional.leaky_relu, negative_slope=slope)
        assert_as_eager(module, X)
    assert module.forward.counters.eager_calls == 2
    reason = "the forward of act (SiLU) is torch.nn.functional.leaky_relu instead of its class's"
    assert the_reason(module).startswith(reason)
    module.act.forward = own  # as they leave it
    assert_as_eager(module, X)
    assert_as_eager(module, X[:1])
    assert module.forward.counters.eager_calls == 2


def test_a_forward_that_was_put_back_compiles():
    module = Net()
    module.act.forward = module.act.forward
    assert_as_eager(optimized(module), X)
    assert not module.forward.counters.fallbacks


class Reads(nn.Module):
    """``read`` gets a tensor out of an argument of any type."""

    def __init__(self, read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.lin, self.read = nn.Linear(8, 8), read

    def forward(self, value: Any) -> Tensor:
        return self.lin(self.read(value))


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (defaultdict(list, x=X), lambda v: v["x"]),
        ({1.5: X, "a": X}, lambda v: v[1.5]),
        (SimpleNamespace(x=X), lambda v: v.x),
    ],
    ids=["mapping subclass", "mixed keys", "object"],
)
def test_unsupported_arguments_fall_back(value: Any, read: Callable[[Any], Tensor]):
    module = optimized(Reads(read))
    assert_as_eager(module, value)
    assert "argument of type" in the_reason(module)


class Locked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class ReadsValues(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) * x.sum().item()


class Branches(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) if x.sum() > 0 else self.k(x)


class WritesInput(Net):
    def forward(self, x: Tensor) -> Tensor:
        old = x.clone()
        x.copy_(self.q(x))
        return old + 1


class CountsCalls(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return self.q(x) * self.count


def three_calls_as_eager(kind: type[Net], caplog: Any, tolerance: dict[str, float]) -> Net:
    """Return an optimised module after three calls."""
    module, plain = optimized(kind()), kind().eval()
    with torch.no_grad(), caplog.at_level(logging.WARNING, "strop"):
        for _ in range(3):
            x, y = X.clone(), X.clone()
            torch.testing.assert_close(module(x), plain(y), **CLOSE)
            torch.testing.assert_close(x, y, **tolerance)
    return module


@pytest.mark.parametrize("kind", [Locked, ReadsValues, Branches])
def test_modules_that_cannot_be_captured_run_in_eager(kind: type[Net], caplog: Any):
    module = three_calls_as_eager(kind, caplog, {"rtol": 0, "atol": 0})
    assert module.forward.counters.eager_calls == 3
    assert caplog.messages == [f"{kind.__name__} runs in eager: {the_reason(module)}"]


@pytest.mark.parametrize("kind", [WritesInput, CountsCalls])
def test_modules_that_write_outside_are_left_to_dynamo(kind: type[Net], caplog: Any):
    module = three_calls_as_eager(kind, caplog, CLOSE)
    assert module.forward.counters.eager_calls == 0
    assert caplog.messages == [f"{kind.__name__}: {the_reason(module)}"]
    assert the_reason(module).startswith("Dynamo traces it: ")


@pytest.mark.parametrize("kind", [Locked, ReadsValues, Branches, WritesInput])
def test_strict_raises(kind: type[Net]):
    module = optimized(kind(), strict=True)
    with torch.no_grad(), pytest.raises(strop.errors.StropError):
        module(X)


def test_strict_raises_for_a_fallback():
    with pytest.raises(UnsupportedError, match="gradients are enabled"):
        optimized(Net(), strict=True)(X)


# keys


class Scales(Net):
    def forward(self, x: Tensor, factor: Any) -> Tensor:
        kind = {bool: 1.0, int: 2.0, float: 3.0}[type(factor)]
        return self.q(x) * kind * float(str(factor).replace("True", "1"))


def test_numbers_of_other_types_are_other_programs():
    module = optimized(Scales(), strict=True)
    for factor in (1, 1.0, True, -0.0, 0.0, 1):
        assert_as_eager(module, X, factor)


def test_nan_as_an_argument_is_compiled_once():
    module = optimized(Scales(), strict=True)
    with torch.no_grad():
        module(X, float("nan"))
        module(X, float("nan"))
    assert len(module.forward.variants.all) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "act", nn.Tanh()),
        lambda m: setattr(m, "scale", 3.0),
        lambda m: m.table.__setitem__(0, 5.0),
        lambda m: setattr(m.gain, "data", torch.randn(8, 8).t()),
        lambda m: setattr(m.gain, "data", torch.randn(8, 16)[:, ::2]),
        lambda m: setattr(m.q, "weight", m.k.weight),
        lambda m: setattr(m, "q", nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8))),
    ],
    ids=["submodule", "number", "list", "transposed", "with gaps", "tied", "deeper"],
)
def test_changes_of_the_module_are_seen(change: Callable[[Net], None]):
    module = optimized(Net())
    assert_as_eager(module, X)
    change(module)
    assert_as_eager(module, X)
    assert_as_eager(module, X * 2)


def test_lists_and_functions_are_part_of_the_key_on_disk(tmp_path: Any):
    for table, act in (([2.0], F.silu), ([3.0], F.silu), ([3.0], torch.tanh)):
        module = Net()
        module.table = table
        del module.act
        module.act = act
        optimized(module, cache_dir=str(tmp_path), strict=True)
        assert_as_eager(module, X)


# memory and modes


class Aliases(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = F.silu(self.q(x))
        return y[::2], x.clone(), y


def test_results_belong_to_the_caller():
    module = optimized(Aliases())
    x = X[:2].clone()
    with torch.no_grad():
        results = module(x)
        kept = [r.clone() for r in results]
        module(x + 1)
        results[1].add_(1)
    assert torch.equal(x, X[:2]), "a clone shares memory with the argument"
    assert torch.equal(results[0], kept[0])
    assert torch.equal(results[2], kept[2])


def test_a_first_call_in_inference_mode_leaves_no_inference_tensors():
    module = optimized(Net())
    with torch.inference_mode():
        module(X)
    assert_as_eager(module, X)
    assert_as_eager(module, torch.randn(300, 8))
    with torch.inference_mode():
        module(torch.randn(500, 8))
    assert_as_eager(module, X)
    strop.restore(module)
    module(X).sum().backward()
    parts = (module.q, module.k, module.v)
    assert all(part.weight.grad is not None for part in parts)


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_a_module_that_was_made_in_inference_mode(needs_gradient):
    """ComfyUI loads models within inference mode, and leaves requires_grad as it was made."""
    with torch.inference_mode():
        module = optimized(Net().requires_grad_(needs_gradient))
        plain = Net().requires_grad_(needs_gradient)
        for x in (X, torch.randn(300, 8)):
            torch.testing.assert_close(module(x), plain(x), **CLOSE)
        new = torch.randn(8, 8)
        module.q.weight, plain.q.weight = nn.Parameter(new), nn.Parameter(new.clone())
        torch.testing.assert_close(module(X), plain(X), **CLOSE)
        for net in (module, plain):
            net.k.weight.data.copy_(new)
        torch.testing.assert_close(module(X), plain(X), **CLOSE)
    assert module.forward.counters.eager_calls == 0
    assert len(module.forward.variants.all) == 1
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():  # eager can still look at parts of weights that have been merged
            torch.testing.assert_close(Net.forward(module, X), plain(X), **CLOSE)
    strop.restore(module)
    with torch.inference_mode():
        torch.testing.assert_close(module(X), plain(X), **CLOSE)


def test_a_copy_is_a_plain_module():
    module = optimized(Net())
    assert_as_eager(module, X)
    twin = copy.deepcopy(module)
    assert_as_eager(twin, X)
    twin.q.weight.data.zero_()
    assert module.q.weight.abs().sum() > 0
    assert module.forward.counters.calls == 1
    strop.optimize(twin, options=tiny.options())
    assert_as_eager(twin, X)


def test_empty_batches():
    assert_as_eager(optimized(Net()), torch.cat([X, X])[:1])


# threads


class Deep(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.lin, self.act = nn.Linear(64, 64), act

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.act(self.lin(x)) + 1
        return x


def test_threads_get_what_a_serial_program_gets():
    """Two modules, several shapes, twelve threads: memory of one stream is shared by all."""
    modules = [optimized(Deep(F.silu)), optimized(Deep(F.gelu))]
    inputs = [torch.randn(n, 64) for n in (1, 7, 64, 200)]
    with torch.no_grad():
        expected = [[m(x) for x in inputs] for m in modules]
    wrong: list[tuple[int, int]] = []

    def work(seed: int) -> None:
        with torch.no_grad():
            for step in range(24):
                which, size = (seed + step) % 2, (seed * 5 + step * 3) % len(inputs)
                if not torch.equal(modules[which](inputs[size]), expected[which][size]):
                    wrong.append((which, size))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_threads_may_meet_shapes_for_the_first_time():
    module = optimized(Deep(F.silu))
    inputs = [torch.randn(n, 64) for n in range(1, 9)]
    with torch.no_grad():
        expected = [module.forward.eager(x) for x in inputs]
    results: dict[int, Tensor] = {}

    def work(n: int) -> None:
        with torch.no_grad():
            results[n] = module(inputs[n])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, value in enumerate(expected):
        torch.testing.assert_close(results[n], value, rtol=1e-5, atol=1e-5)
    assert module.forward.variants.num_captures <= 1


# finiteness


def test_nan_in_a_first_result_is_reported(caplog: Any):
    module = optimized(Net())
    with torch.no_grad(), caplog.at_level(logging.WARNING, "strop"):
        module(X * float("nan"))
    assert len(module.forward.counters.nonfinite) == 1
    assert "the arguments hold NaN" in caplog.text


def test_kernels_for_other_sizes_are_begun_with_the_first_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Not behind it: the host then makes the libraries' first calls, and all compilers are idle."""
    net, begun, run = optimized(Net(), cache_dir=str(tmp_path)), list[float](), Bound.run

    def noted(self: Bound, *args: Any) -> Any:
        begun.append(net.forward.variants.all[0].later._began)
        return run(self, *args)

    monkeypatch.setattr(Bound, "run", noted)
    assert_as_eager(net, X)
    assert len(begun) == 1
    assert begun[0] > 0
