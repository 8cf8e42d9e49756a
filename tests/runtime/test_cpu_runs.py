"""The short way: calls of programs that are nothing but CPU kernels, once they are prepared."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import strop
from tests.e2e import tiny

CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # fp32 results of one small sum in another order


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor([0.5]))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.drop(x)) * self.slope


class Net(nn.Module):
    """Two kernels, two results in another order than they are made, no library call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = Inner()
        self.weight, self.scale = nn.Parameter(torch.randn(8)), 2.0
        self.widths = (1.0, 3.0)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = self.inner(x) * self.scale + y
        return F.layer_norm(z, (8,), self.weight) * self.widths[1], z


def arguments(rows: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, generator=source), torch.randn(rows, 8, generator=source)


def prepared(*args: Tensor) -> Any:
    net = strop.optimize(Net().eval(), options=tiny.options(strict=True))
    with torch.no_grad():
        net(*args)
    assert takes_prepared(net, *args)
    return net


def takes_prepared(net: Any, *args: Tensor) -> bool:
    """Whether the next call does, without the way that serves all calls."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(net.forward, "_serve_any", lambda args, kwargs: None)
        return net(*args) is not None


def assert_as_eager(net: Any, *args: Tensor) -> None:
    with torch.no_grad():
        expected = Net.forward(net, *args)
        for found, wanted in zip(net(*args), expected, strict=True):
            torch.testing.assert_close(found, wanted, **CLOSE)


def test_results_are_new_and_eagers():
    args = arguments()
    net = prepared(*args)
    with torch.no_grad():
        kept = net(*args)
        before = [r.clone() for r in kept]
        assert_as_eager(net, *arguments(seed=1))  # the same looks, other memory
        assert all(map(torch.equal, kept, before))
    assert net.forward.counters.launches == net.forward.latest.bounds[0].num_launches > 0
    assert net.forward.counters.calls == 4


def _replaced(net: Net) -> None:
    net.weight = nn.Parameter(torch.ones(8))


def _moved(net: Net) -> None:
    net.weight.data = torch.ones(8)


def _one_equal_element_replaced(net: Net) -> None:
    old, net.inner.slope = net.inner.slope, nn.Parameter(net.inner.slope.detach().clone())
    old.data.fill_(9.0)


def _written(net: Net) -> None:
    net.weight.data.zero_()


def _loaded(net: Net) -> None:
    net.load_state_dict({k: v + 1 for k, v in net.state_dict().items()})


def _rescaled(net: Net) -> None:
    net.scale = 3.0


def _another_tuple(net: Net) -> None:
    net.widths = (1.0, 4.0)


def _another_module(net: Net) -> None:
    net.inner.drop = nn.Sigmoid()


CHANGES = (
    _replaced,
    _moved,
    _one_equal_element_replaced,
    _written,
    _loaded,
    _rescaled,
    _another_tuple,
    _another_module,
)


@pytest.mark.parametrize("change", CHANGES, ids=[c.__name__.strip("_") for c in CHANGES])
def test_changes_are_seen(change: Callable[[Net], None]):
    args = arguments()
    net = prepared(*args)
    change(net)
    assert_as_eager(net, *args)
    assert_as_eager(net, *args)


def _training(net: Any) -> Any:
    net.train()
    return torch.no_grad()


def _part_in_training(net: Any) -> Any:
    net.inner.drop.train()
    return torch.no_grad()


def _hooked(net: Any) -> Any:
    net.inner.register_forward_hook(lambda module, args, result: result * 2)
    return torch.no_grad()


def _with_gradients(net: Any) -> Any:
    return torch.enable_grad()


def _autocast(net: Any) -> Any:
    return torch.autocast("cpu", torch.bfloat16)


MODES = (_training, _part_in_training, _hooked, _with_gradients, _autocast)


@pytest.mark.parametrize("change", MODES, ids=[c.__name__.strip("_") for c in MODES])
def test_what_eager_must_do_is_left_to_it(change: Callable[[Any], Any]):
    args = arguments()
    net = prepared(*args)
    net.forward.options = tiny.options(strict=False)
    with change(net):
        net(*args)
    assert net.forward.counters.eager_calls == 1


def _doubled(*args: Any) -> Any:
    return tuple(2 * r for r in args[-1])


HOOKS: dict[str, Callable[[Any], Any]] = {
    "after": lambda net: net.register_forward_hook(_doubled),
    "before": lambda net: net.register_forward_pre_hook(lambda m, args: (args[0] * 2, args[1])),
    "after any": lambda net: nn.modules.module.register_module_forward_hook(
        lambda m, args, result: _doubled(result) if m is net else None
    ),
    "before any": lambda net: nn.modules.module.register_module_forward_pre_hook(
        lambda m, args: (args[0] * 2, args[1]) if m is net else None
    ),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_run(name: str):
    args = arguments()
    net, plain = prepared(*args), Net().eval()
    handles = HOOKS[name](net), HOOKS[name](plain)
    with torch.no_grad():
        for found, wanted in zip(net(*args), plain(*args), strict=True):
            torch.testing.assert_close(found, wanted, **CLOSE)
    for handle in handles:
        handle.remove()
    assert_as_eager(net, *args)
    assert takes_prepared(net, *args)


def test_a_forward_that_somebody_replaces_runs():
    """accelerate does so with its hooks."""
    args = arguments()
    net = prepared(*args)
    ours, net.forward = net.forward, lambda *args: "theirs"
    with torch.no_grad():
        assert net(*args) == "theirs"
    del net.forward
    with torch.no_grad():
        for found, wanted in zip(net(*args), Net.forward(net, *args), strict=True):
            assert torch.equal(found, wanted)
    net.forward = ours
    assert takes_prepared(net, *args)


class Copied(Net):
    """Has all attributes copied, ours among them."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))


class Told(Copied):
    """Its text shows all of its attributes, as that of ``nn.EmbeddingBag`` does."""

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in vars(self).items())


def test_a_text_that_shows_all_attributes_ends() -> None:
    args = arguments()
    net = strop.optimize(Told().eval(), options=tiny.options(strict=True))
    with torch.no_grad():
        net(*args)
    assert takes_prepared(net, *args)
    assert "the entrance of compiled code" in repr(net)
    bag = strop.optimize(nn.EmbeddingBag(10, 4).eval(), options=tiny.options())
    with torch.no_grad():
        bag(torch.tensor([1, 2, 3]), torch.tensor([0, 2]))
    assert repr(bag) == "EmbeddingBag(10, 4, mode='mean')"


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("kind", [Net, Copied, Told])
def test_a_copy_has_a_way_of_its_own(kind: type[Net], copied: Callable[[Any], Any]):
    args = arguments()
    net = strop.optimize(kind().eval(), options=tiny.options(strict=True))
    with torch.no_grad():
        net(*args)
        assert takes_prepared(net, *args)
        twin = copied(net)
        twin.weight = nn.Parameter(torch.zeros(8))
        assert not twin(*args)[0].any()
    assert_as_eager(net, *args)


def test_restore_leaves_nothing():
    args, before = arguments(), vars(Net()).keys()
    net = prepared(*args)
    strop.restore(net)
    assert vars(net).keys() == before
    net = prepared(*args)
    net.compile(backend="eager")
    with torch.no_grad():
        net(*args)
    strop.restore(net)
    assert vars(net).keys() - before == {"_compiled_call_impl"}


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_take_the_long_way():
    args = arguments()
    net = prepared(*args)
    with Seen() as mode, torch.no_grad():
        net(*args)
    assert mode.seen


def test_shapes_in_turns():
    net = prepared(*arguments(5))
    for rows in (5, 6, 5, 6, 7, 5):
        assert_as_eager(net, *arguments(rows))
    assert all(takes_prepared(net, *arguments(rows)) for rows in (5, 6, 7, 6))


def test_another_number_of_arguments_gets_eagers_error():
    args = arguments()
    net = prepared(*args)
    for wrong in ((), args[:1], (*args, args[0])):
        with pytest.raises(TypeError, match="positional argument"), torch.no_grad():
            net(*wrong)
    with torch.no_grad():
        assert all(map(torch.equal, net(args[0], y=args[1]), net(*args)))


@pytest.mark.parametrize(
    "other",
    [
        lambda x: torch.randn(8, 5).t(),
        lambda x: torch.randn(5, 16)[:, ::2],
        lambda x: x[:3],
        lambda x: nn.Parameter(x),
        lambda x: torch.randn(80).as_strided((5, 8), (9, 1)),
    ],
    ids=["transposed", "strided", "fewer", "parameter", "padded"],
)
def test_other_looks_take_the_long_way(other: Callable[[Tensor], Tensor]):
    x, y = arguments()
    net = prepared(x, y)
    changed = other(x)
    given = (changed, y[: len(changed)])
    assert not takes_prepared(net, *given)
    assert_as_eager(net, *given)
    assert_as_eager(net, *given)


def test_results_in_inference_mode_are_normal_tensors():
    args = arguments()
    net = prepared(*args)
    with torch.inference_mode():
        assert not any(r.is_inference() for r in net(*args))


@pytest.mark.parametrize("mode", [torch.inference_mode, Seen], ids=["inference", "dispatch"])
def test_a_first_call_in_another_mode_is_no_measure(mode: Callable[[], Any]):
    args = arguments()
    net = strop.optimize(Net().eval(), options=tiny.options(strict=True))
    for _ in range(2):
        with mode(), torch.no_grad():
            assert not any(r.is_inference() for r in net(*args))
    with torch.no_grad():
        net(*args)
    assert takes_prepared(net, *args)


class Named(nn.Module):
    """Its argument has the name of one of ours."""

    def forward(self, module: Tensor) -> Tensor:
        return module * 2


def test_arguments_of_any_name():
    net = strop.optimize(Named().eval(), options=tiny.options(strict=True))
    x = torch.ones(3)
    with torch.no_grad():
        assert all(torch.equal(net(**kwargs), x * 2) for kwargs in [{"module": x}] * 2)
        net(x)
        assert torch.equal(net(module=x), x * 2)


class Columns(nn.Module):
    """Needs working memory, which all programs of a device share and which grows."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cos().sum(0)


def test_working_memory_that_has_moved_is_found():
    net = strop.optimize(Columns().eval(), options=tiny.options(strict=True))
    x = torch.randn(64, 16)
    with torch.no_grad():
        expected = [net(x) for _ in range(2)][1]
        net(torch.randn(5000, 4096))  # more of it
        filler = torch.randn(64, 16)
        for _ in range(3):
            assert torch.equal(net(x), expected)
            torch.testing.assert_close(net(filler), filler.cos().sum(0), rtol=1e-4, atol=1e-4)


def test_many_threads_get_what_one_gets():
    net = prepared(*arguments())
    given = [arguments(seed=n) for n in range(40)]
    with torch.no_grad():
        expected = [net(*args) for args in given]
    wrong: list[int] = []

    def work(start: int) -> None:
        with torch.no_grad():
            for n in [*range(start, 40), *range(start)] * 5:
                if not all(map(torch.equal, net(*given[n]), expected[n])):
                    wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(0, 40, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
