"""Weights that have a budget of device memory are streamed: calls give what eager gives, whatever
copies are late, and no more memory is taken than there is in the budget."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.dispatch.weights_budget import WeightsBudget
from strop.errors import OptionError, UnsupportedError
from tests.budgeted import CLOSE, LANES, CountedMemory, lend_memory, wrong_in_threads
from tests.e2e import tiny

WIDTH, DEPTH = 16, 6
X = torch.randn(3, WIDTH, generator=torch.manual_seed(0))


class Block(nn.Module):
    """Three linears that become one, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.q(x)) * torch.tanh(self.k(x)) + torch.tanh(self.v(x))
        y = y + self.conv(y[:, None, :, None]).sum(1)[..., 0]
        return x + torch.tanh(self.out(y))


class Net(nn.Module):
    """Blocks, a weight that is tied across all of them, and a buffer that each reads."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) * self.scale
        return self.last(x)


@pytest.fixture(params=LANES)
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CountedMemory:
    return lend_memory(monkeypatch, request.param)


def plain(kind: type[nn.Module] = Net) -> Any:
    return kind().eval().requires_grad_(False)


def size_of(net: Any) -> int:
    return sum(w.nbytes for w in (*net.parameters(), *net.buffers()))


def options(share: float, net: Any, **changes: Any) -> strop.Options:
    budget_bytes = int(share * size_of(net))
    return tiny.options(**({"strict": True, "weights_budget_bytes": budget_bytes} | changes))


def budgeted(share: float = 0.6, net: Any = None) -> Any:
    net = plain() if net is None else net
    return strop.optimize(net, options=options(share, net))


def budget_of(net: Any) -> WeightsBudget:
    (dispatcher,) = strop.api.dispatchers_of(net).values()
    assert dispatcher.budget is not None
    return dispatcher.budget


def check(net: Any, twin: Any, x: Tensor = X) -> None:
    expected = twin(x)
    assert not expected.isnan().any()
    torch.testing.assert_close(net(x), expected, **CLOSE)


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9, 1.5])
def test_calls_within_a_budget(memory: CountedMemory, share: float) -> None:
    net = plain()
    before = list(net.parameters())
    budgeted(share, net)
    for _ in range(3):
        check(net, plain())
    assert 0 < memory.most <= share * size_of(net)
    assert all(map(lambda a, b: a is b, before, net.parameters()))
    assert net.last.weight is net.first.weight
    budget, report = budget_of(net), str(strop.explain(net))
    plan = budget._plan
    assert plan is not None
    assert (len(plan.blocks) > 2) == (share < 1)
    kept, streamed = budget._resident_bytes, plan.streamed_bytes
    assert f"weights: {kept / 1e6:.2f} MB stay on cpu" in report
    assert f"weights_budget_bytes={int(share * size_of(net))}" in report
    assert budget.streamed_bytes == streamed
    assert budget.peak_bytes == budget.held_bytes + budget.working_bytes
    assert budget.working_bytes >= WIDTH * X.shape[0] * X.element_size()
    assert f"a call takes {budget.peak_bytes / 1e6:.2f} MB at its peak" in report
    if share < 1:
        assert f"{streamed / 1e6:.2f} MB are streamed there in each call, in" in report
        assert f"{len(plan.blocks)} blocks through 2 slots of" in report
        assert kept + streamed >= size_of(net)
    (dispatcher,) = strop.api.dispatchers_of(net).values()
    assert dispatcher.counters.eager_calls == 0
    assert dispatcher.counters.rebinds == 0


def test_the_least_that_would_do_does(memory: CountedMemory) -> None:
    net = strop.optimize(plain(), options=tiny.options(weights_budget_bytes=1000))
    with pytest.raises(OptionError, match="=1000 is too small") as caught:
        net(X)
    found = re.search(r"or (\d+) at least", str(caught.value))
    assert found is not None
    least = int(found[1])
    with pytest.raises(OptionError, match="too small"):
        strop.optimize(net, options=tiny.options(weights_budget_bytes=least - 1))(X)
    strop.optimize(net, options=tiny.options(weights_budget_bytes=least, strict=True))
    check(net, plain())
    assert 0 < memory.most <= least < size_of(net)


WRITES = {
    "in place": lambda net: [b.k.weight.mul_(2) for b in net.blocks],
    "through data": lambda net: [b.out.weight.data.mul_(2) for b in net.blocks],
    "another Parameter": lambda net: [
        setattr(b.k, "weight", nn.Parameter(b.k.weight.detach() * 2, requires_grad=False))
        for b in net.blocks
    ],
    "other data": lambda net: [
        setattr(b.k.weight, "data", b.k.weight.data * 2) for b in net.blocks
    ],
    "a buffer": lambda net: net.scale.fill_(0.25),
    "a tied weight": lambda net: net.first.weight.mul_(0.5),
    "a state dict": lambda net: net.load_state_dict(
        {name: value * 0.5 for name, value in net.state_dict().items()}
    ),
    "an assigned state dict": lambda net: net.load_state_dict(
        {name: value * 0.5 for name, value in net.state_dict().items()}, assign=True
    ),
    "another type and back": lambda net: net.half().float(),
    "a layer that is gone": lambda net: net.blocks.__delitem__(1),
    "a layer more": lambda net: net.blocks.append(plain(Block)),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_are_seen(memory: CountedMemory, write: str) -> None:
    net, twin = budgeted(), plain()
    check(net, twin)
    check(net, twin)
    for each in (net, twin):
        torch.manual_seed(2)
        WRITES[write](each)
    for _ in range(3):
        check(net, twin)
        assert all(map(torch.equal, net.parameters(), twin.parameters()))
    assert memory.most <= budget_of(net).budget_bytes


def test_programs_of_several_shapes_share_the_weights(memory: CountedMemory) -> None:
    net, twin = budgeted(), plain()
    places = []
    for rows in (3, 1, 5, 1, 3):
        check(net, twin, torch.randn(rows, WIDTH, generator=torch.manual_seed(rows)))
        places.append([w.data_ptr() for w in net.parameters()])
    assert places[-1] == places[-2] == places[-3]
    assert memory.most <= budget_of(net).budget_bytes


class Looking(nn.Module):
    """Its first step may fail, in the middle of a stream."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.before = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.table = nn.Embedding(5, WIDTH)
        self.behind = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.behind(self.before(x) + self.table(rows))


def test_a_call_that_fails_leaves_a_module_that_works(memory: CountedMemory) -> None:
    net, twin = budgeted(0.7, plain(Looking)), plain(Looking)
    for rows in ([1, 2, 3], [1, 2, 7], [4, 0, 1], [4, 0, 1]):
        index = torch.tensor(rows)
        if max(rows) < 5:
            torch.testing.assert_close(net(X, index), twin(X, index), **CLOSE)
        else:
            with pytest.raises(IndexError):
                net(X, index)


def test_threads_take_turns(memory: CountedMemory) -> None:
    net, twin = budgeted(), plain()
    given = [torch.randn(3, WIDTH, generator=torch.manual_seed(n)) for n in range(4)]
    assert not wrong_in_threads(net, given, [twin(x) for x in given], 20)


def test_an_artefact_serves_under_a_budget(memory: CountedMemory, tmp_path: Path) -> None:
    net = strop.optimize(plain(), options=tiny.options(strict=True, cache_dir=str(tmp_path / "a")))
    net(X)
    strop.save(net, tmp_path / "net.strop")
    other = plain()
    given = options(0.6, other, cache_dir=str(tmp_path / "b"))
    strop.load(other, tmp_path / "net.strop", trust=True, options=given)
    check(other, plain())
    (dispatcher,) = strop.api.dispatchers_of(other).values()
    assert dispatcher.variants.num_captures == 0
    plan = budget_of(other)._plan
    assert plan is not None
    assert plan.blocks
    strop.save(other, tmp_path / "again.strop")
    third = strop.load(plain(), tmp_path / "again.strop", trust=True, options=given)
    check(third, plain())


def test_restore_leaves_plain_weights(memory: CountedMemory) -> None:
    net = budgeted()
    check(net, plain())
    assert memory.now > 0
    strop.restore(net)
    assert memory.now == 0, "nobody keeps what stands for memory of a GPU"
    check(net, plain())
    assert all(w.untyped_storage().nbytes() == w.nbytes for w in net.parameters())
    assert net.last.weight is net.first.weight


def test_a_budget_is_for_gpus() -> None:
    net = budgeted()
    check(net, plain())
    assert "of which no call was served yet" in str(strop.explain(net))


class Giving(nn.Module):
    """It returns a part of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.linear.weight[:2]


def test_a_weight_is_not_given_back(memory: CountedMemory) -> None:
    net = budgeted(1.0, plain(Giving))
    with pytest.raises(OptionError, match="gives back a weight"):
        net(X)
    strop.restore(net)
    net(X)


def test_weights_with_gradients_are_refused(memory: CountedMemory) -> None:
    net = budgeted()
    net.first.weight.grad = torch.zeros_like(net.first.weight)
    with pytest.raises(OptionError, match=r"first\.weight has a gradient"):
        net(X)
    net.zero_grad(set_to_none=True)
    check(net, plain())


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"train": True}, "train=True needs all weights"),
        ({"lora": "merged"}, "a second copy"),
        ({"check": True}, "no longer there"),
    ],
)
def test_options_that_contradict_a_budget(how: dict[str, Any], says: str) -> None:
    net, train = plain(), how.pop("train", False)
    with pytest.raises(OptionError, match=says):
        strop.optimize(net, train=train, options=options(0.6, net, **how))


def test_torch_compile_has_no_budget() -> None:
    net = torch.compile(plain(), backend="strop", options={"weights_budget_bytes": 1000})
    with pytest.raises(Exception, match=r"is for strop\.optimize"):
        net(X)


def test_eager_is_refused_where_weights_are_elsewhere(
    memory: CountedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = budgeted()
    check(net, plain())
    monkeypatch.setattr(WeightsBudget, "is_away", lambda self: True)
    net.requires_grad_(True)
    with pytest.raises(UnsupportedError, match=r"gradients are enabled.*keeps weights on the host"):
        net(X)


class Adding(nn.Module):
    """It takes two arguments."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.layers(x + y)


@pytest.mark.parametrize("shape", [(3, WIDTH), ()])
def test_an_argument_on_another_device_is_not_read_as_if_it_were_here(
    memory: CountedMemory, shape: tuple[int, ...]
) -> None:
    net = strop.optimize(plain(Adding), options=options(0.6, plain(Adding), strict=False))
    expected = net(X, X)
    with pytest.raises(RuntimeError, match="meta"):
        net(X, torch.empty(shape, device="meta"))
    assert torch.equal(net(X, X), expected)
