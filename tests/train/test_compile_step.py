"""A step as one callable does what the loop that one writes by hand does, bit for bit."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop import train
from strop.errors import CaptureError, OptionError
from strop.runtime.run import graph_keep_alive as leases
from strop.runtime.run import workspace
from strop.train import diagnosis, whole_step
from strop.train.whole_step import _Call
from tests.train import taped
from tests.train.stepping import CASES, compare, rounded_at_random


@pytest.mark.parametrize("name", CASES)
def test_on_a_cpu(name: str) -> None:
    step = compare(CASES[name])
    assert step.report().plain_runs == CASES[name].steps
    assert "no graphs" in repr(step)


@pytest.mark.parametrize("name", CASES)
def test_replayed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    taped.use(monkeypatch)
    case = CASES[name]
    report = compare(case).report()
    assert report.replays > 0
    assert report.plain_runs + report.replays == case.steps
    assert report.stale == 0
    assert report.captures <= report.buckets


def linear(**how: Any) -> tuple[nn.Linear, train.FusedSGD, Any]:
    """A step that multiplies its first argument by the second."""
    module = nn.Linear(3, 2)
    optimizer = train.FusedSGD(module.parameters(), lr=0.1)

    def loss_fn(x: Tensor, factor: float = 1.0, **more: Any) -> Tensor:
        return (module(x) * factor).square().mean()

    return module, optimizer, train.compile_step(loss_fn, optimizer, **how)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> taped.Recorder:
    pytest.importorskip("triton")
    return taped.use(monkeypatch)


X = torch.arange(6.0).reshape(2, 3)
LIKE_X = {
    "the same": lambda: (X,),
    "other values": lambda: (X + 1,),
    "rows of a larger tensor": lambda: (torch.ones(4, 3)[::2],),
    "one row twice": lambda: (torch.ones(1, 3).expand(2, 3),),
    "other strides": lambda: (torch.ones(3, 2).t(),),
    "another size": lambda: (torch.ones(4, 3),),
    "another number": lambda: (X, 2.0),
    "1 and 1.0 are two": lambda: (X, 1),
    "a default that is given": lambda: (X, 1.0),
}


def test_buckets(recorder: taped.Recorder) -> None:
    """Each look of the arguments has a graph of its own, and values go into it."""
    module, _, step = linear()
    twin, _, plain = linear(graph=False)
    twin.load_state_dict(module.state_dict())
    for _ in range(3):
        for make in LIKE_X.values():
            assert torch.equal(step(*make()), plain(*make()))
            assert torch.equal(module.weight, twin.weight)
    report = step.report()
    assert (report.buckets, report.captures) == (8, 8)
    assert report.plain_runs == 16
    assert report.replays == 3 * len(LIKE_X) - report.plain_runs


def test_plain_steps_compute_what_replays_do(recorder: taped.Recorder) -> None:
    """transformers asks whether torch captures, and computes a causal attention otherwise then."""
    library = pytest.importorskip("transformers.utils.import_utils")
    said = []
    for graph in (True, False):
        module = nn.Linear(3, 2)

        def loss_fn(x: Tensor, module: nn.Linear = module) -> Tensor:
            said.append(library.is_tracing())
            return module(x).square().mean()

        optimizer = train.FusedSGD(module.parameters(), lr=0.1)
        step = train.compile_step(loss_fn, optimizer, graph=graph)
        for _ in range(4):
            step(X)
    assert said == [True] * 3 + [False] * 4  # two plain steps and a capture, which was replayed
    assert not library.is_tracing()


def test_one_tensor_twice(recorder: taped.Recorder) -> None:
    """Two arguments that are one tensor have one copy: compiled code may depend on it."""
    seen = []
    p = nn.Parameter(torch.ones(2))

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        seen.append(x is y)
        return (p * x * y).sum()

    step = train.compile_step(loss_fn, train.FusedSGD([p], lr=0.0))
    a, b = torch.ones(2), torch.ones(2)
    for args in ((a, a), (a, a), (a, b), (a, b)):
        step(*args)
    assert seen == [True] * 3 + [False] * 3  # the third of each is the capture


def change_storage(module: nn.Linear, optimizer: train.FusedSGD) -> None:
    module.weight.data = module.weight.data.clone()


def load_into_module(module: nn.Linear, optimizer: train.FusedSGD) -> None:
    module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()})


def load_into_optimizer(module: nn.Linear, optimizer: train.FusedSGD) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def freeze(module: nn.Linear, optimizer: train.FusedSGD) -> None:
    module.bias.requires_grad_(False)


def train_mode(module: nn.Linear, optimizer: train.FusedSGD) -> None:
    module.eval()


def new_rate(module: nn.Linear, optimizer: train.FusedSGD) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


# what is done between calls: graphs that it makes useless, and the plain runs that it costs
CHANGES = {
    change_storage: (1, 2),
    load_into_module: (0, 0),
    load_into_optimizer: (1, 2),
    freeze: (0, 2),
    train_mode: (0, 2),
    new_rate: (0, 0),
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_what_changes_between_calls(
    change: Callable[[nn.Linear, train.FusedSGD], None], recorder: taped.Recorder
) -> None:
    module, optimizer, step = linear()
    twin, other, plain = linear(graph=False)
    twin.load_state_dict(module.state_dict())
    for number in range(8):
        if number == 4:
            change(module, optimizer)
            change(twin, other)
        assert torch.equal(step(X), plain(X)), number
        assert torch.equal(module.weight, twin.weight), number
        assert torch.equal(module.bias, twin.bias), number
    stale, runs = CHANGES[change]
    assert (step.report().stale, step.report().plain_runs) == (stale, 2 + runs)


def test_gradients_of_another_backward_pass(recorder: taped.Recorder) -> None:
    """They are added to, as always, and never written over in place of the caller's tensor."""
    module, _, step = linear()
    twin, _, plain = linear(graph=False)
    twin.load_state_dict(module.state_dict())
    for number in range(6):
        for one, call in ((module, step), (twin, plain)):
            if number % 2:
                one.weight.sum().backward()
            call(X)
        assert torch.equal(module.weight, twin.weight), number
    assert step.report().replays == 2


def test_twins_in_half_precision(recorder: taped.Recorder) -> None:
    """The shadows of an optimizer get the gradients, and are written by replays."""
    ends = []
    for graph in (True, False):
        torch.manual_seed(0)
        module = nn.Linear(3, 2)
        optimizer = train.FusedAdamW(module.parameters(), lr=0.1, shadow_dtype=torch.bfloat16)
        twin = optimizer.shadow(module)
        step = train.compile_step(
            lambda x, twin=twin: twin(x).float().square().mean(),
            optimizer,
            accumulate=2,
            graph=graph,
        )
        for number in range(8):
            step((X + number).bfloat16())
        ends.append([*module.parameters(), *twin.parameters()])
        assert step.report().replays == (4 if graph else 0)
    assert all(map(torch.equal, *ends))


def test_generators_that_a_loss_reaches(recorder: taped.Recorder) -> None:
    generator, p = torch.Generator().manual_seed(0), nn.Parameter(torch.ones(2))

    class Objective:
        def __init__(self) -> None:
            self.sources = {"noise": generator}

        def __call__(self, x: Tensor) -> Tensor:
            noise = torch.randn(2, generator=self.sources["noise"])
            return (p * x * noise).sum()

    seen: list[Any] = []
    usual = recorder.record
    recorder.record = lambda body, found: (seen.append(found), usual(body, found))[1]
    step = train.compile_step(Objective(), train.FusedSGD([p], lr=0.0))
    drawn = [float(step(torch.ones(2))) for _ in range(5)]
    again = torch.Generator().manual_seed(0)
    wanted = [float(torch.randn(2, generator=again).sum()) for _ in range(5)]
    assert drawn == wanted
    assert seen == [[generator]]


def read(x: Tensor) -> Tensor:
    return x * 2 if x.detach().sum().item() > 0 else x


def choose(x: Tensor) -> Tensor:
    return x[x > 0]


class Reading(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * float(grad.sum())


@pytest.mark.parametrize(
    ("what", "named"),
    [
        (read, r"_local_scalar_dense.* at \S+test_compile_step.py:\d+, in read: return x \* 2 if"),
        (Reading.apply, r"_local_scalar_dense.*in backward: return grad \* float"),
    ],
    ids=["forward", "backward"],
)
def test_what_no_graph_can_hold(
    what: Callable[[Tensor], Tensor], named: str, recorder: taped.Recorder
) -> None:
    """The error names operator and line; the step has run, and goes on without graphs."""
    module = nn.Linear(3, 2)
    optimizer = train.FusedSGD(module.parameters(), lr=0.1)
    before, state = module.weight.detach().clone(), torch.get_rng_state()
    step = train.compile_step(lambda x: what(module(x)).mean(), optimizer)
    step(X)
    with pytest.raises(CaptureError, match="graph=False") as caught:
        step(X)
    assert re.search(named, str(caught.value)), caught.value
    assert "The step itself has run" in str(caught.value)
    assert not torch.equal(module.weight, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert module.weight.grad is None
    assert repr(step).count("2 plain runs")


def test_a_mask_is_named(recorder: taped.Recorder) -> None:
    found = diagnosis.culprits(lambda: choose(X).sum())
    assert len(found) == 1
    assert "in choose: return x[x > 0]: the number of elements that a mask chooses" in found[0]


def detached(x: Tensor) -> Tensor:
    return x.detach().mean()


P = nn.Parameter(torch.ones(3))
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no scalar": (
        lambda: train.compile_step(lambda x: P * x, train.FusedSGD([P]))(X[0]),
        r"of shape \(3,\): a step needs one loss",
    ),
    "no tensor": (
        lambda: train.compile_step(lambda x: 1.0, train.FusedSGD([P]))(X),
        "a value float: a step needs one loss",
    ),
    "no gradient": (
        lambda: train.compile_step(detached, train.FusedSGD([P]))(X),
        "has no gradient: it was detached",
    ),
    "no optimizer": (lambda: train.compile_step(detached, P), "optimizer is a Parameter"),
    "no function": (lambda: train.compile_step(P, train.FusedSGD([P])), "loss_fn is a Parameter"),
    "no scaler": (
        lambda: train.compile_step(detached, train.FusedSGD([P]), scaler=2.0),
        "scaler is a float: use strop.train.GradScaler",
    ),
    "accumulate": (
        lambda: train.compile_step(detached, train.FusedSGD([P]), accumulate=0),
        "accumulate is 0: it must be a whole number",
    ),
    "an object": (
        lambda: train.compile_step(detached, train.FusedSGD([P]))(object()),
        "argument of type object; a step takes tensors",
    ),
    "an argument with gradients": (
        lambda: train.compile_step(detached, train.FusedSGD([P]))(P),
        "tensor 0 of the arguments requires a gradient",
    ),
    "nothing to train": (
        lambda: train.compile_step(detached, train.FusedSGD([X]))(X),
        "no parameter of the optimizer requires a gradient",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(OptionError, match=message):
        call()


def hooked() -> torch.optim.Optimizer:
    optimizer = train.FusedSGD([P])
    optimizer.register_step_post_hook(lambda *args: None)
    return optimizer


UNRECORDABLE = {
    "host numbers": (lambda: torch.optim.AdamW([P]), None, "AdamW reads numbers on the host"),
    "no such argument": (lambda: torch.optim.SGD([P]), None, "SGD reads numbers on the host"),
    "host rate": (
        lambda: torch.optim.AdamW([P], capturable=True),
        None,
        "lr of AdamW is a number of the host",
    ),
    "hooks": (hooked, None, "FusedSGD has hooks on its step"),
}


@pytest.mark.parametrize("name", UNRECORDABLE)
def test_optimizers_that_no_graph_can_hold(name: str, recorder: taped.Recorder) -> None:
    make, scaler, message = UNRECORDABLE[name]
    step = train.compile_step(lambda x: (P * x).mean(), make(), scaler=scaler)
    with pytest.raises(OptionError, match=message):
        step(X)


def test_torchs_optimizer_without_graphs() -> None:
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    theirs, ours = torch.optim.AdamW([p], lr=0.1), torch.optim.AdamW([q], lr=0.1)
    step = train.compile_step(lambda x: (q * x).square().mean(), ours)
    for _ in range(3):
        (p * X).square().mean().backward()
        theirs.step()
        theirs.zero_grad()
        step(X)
    assert torch.equal(p, q)


def test_compiled_modules(recorder: taped.Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks on gradients and copied arguments cost no graph more, and the working memory of what
    ran for a capture is kept when larger sizes ask for more."""
    monkeypatch.setattr(whole_step, "WARM_UPS", 99)  # no tape holds kernels in C++
    monkeypatch.setattr(workspace, "_WORKSPACES", {})  # others have made theirs grow
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8))
    eager = copy.deepcopy(net)
    strop.optimize(net, train=True, options=strop.Options(strict=True))
    ends = []
    for module in (net, eager):
        optimizer = train.FusedSGD(module.parameters(), lr=0.1)
        step = train.compile_step(
            lambda x, module=module: module(x).square().mean(), optimizer, accumulate=2
        )
        for number in range(4):
            batch = _Call(None, (torch.randn(3 + number // 2, 8, generator=seeded(number)),))
            step(*(batch.copied() if number % 2 else batch).tensors)
        ends.append(list(module.parameters()))
    for found, expected in zip(*ends, strict=True):
        torch.testing.assert_close(found, expected)
    assert [graph.role for graph in strop.explain(net).graphs] == ["forward", "backward"]
    with leases.taken() as small:
        net(torch.randn(4, 8)).sum().backward()
    before = [(lease, [_address(m) for m in lease.memory]) for lease in small]
    with leases.taken() as large:
        net(torch.randn(4000, 8)).sum().backward()
    assert len(small) == len(large) == 2
    assert any(sum(addresses) for _, addresses in before), "nothing here uses working memory"
    moved = []
    for (lease, addresses), after in zip(before, large, strict=True):
        assert [_address(m) for m in lease.memory] == addresses
        moved.append(not set(addresses) & {_address(m) for m in after.memory} - {0})
    assert any(moved), "no pass asks for more"
    assert not leases.are_wanted()


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def _address(memory: object) -> int:
    return memory.data_ptr() if isinstance(memory, Tensor) and memory.numel() else 0


def test_rounding_at_random(recorder: taped.Recorder) -> None:
    assert all(map(torch.equal, rounded_at_random("cpu", True), rounded_at_random("cpu", False)))
