"""The short way of programs on a CPU in which libraries do a part, and of calls with names."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.runtime.run import cpu_runs
from strop.runtime.run.executor import Bound
from strop.runtime.run.fair_turns import LANES
from strop.runtime.run.workspace import workspace_of
from tests.e2e import tiny

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
CPU = torch.device("cpu")


class Clip(nn.Module):
    """Two convolutions over time, which torch does, and kernels between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(3, 4, 3, padding=1), nn.Conv3d(4, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).mean((2, 3))


class Tagged(nn.Module):
    """A recurrent layer between kernels."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent, self.head = kind(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found, _ = self.recurrent(x * 2)
        return self.head(found), found


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv3d": (Clip, (2, 3, 4, 6, 6)),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 3, 2), nn.SiLU()), (2, 3, 5, 5)),
    "lstm": (lambda: Tagged(nn.LSTM), (2, 5, 6)),
    "gru": (lambda: Tagged(nn.GRU), (2, 5, 6)),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A caller with several threads waits for whoever holds a lane, which one of these tests does
    itself."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind][0]().eval().requires_grad_(False)


def given(kind: str, seed: int = 1) -> Tensor:
    return torch.randn(MODELS[kind][1], generator=torch.Generator().manual_seed(seed))


def prepared(kind: str) -> Any:
    net = strop.optimize(made(kind), options=tiny.options())
    with torch.no_grad():
        net(given(kind))
    assert takes_prepared(net, given(kind))
    return net


def takes_prepared(net: Any, *args: Tensor, **named: Tensor) -> bool:
    """Whether the next call does, without the way that serves all calls."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(net.forward, "_serve_any", lambda args, kwargs: None)
        return net(*args, **named) is not None


def assert_as(plain: nn.Module, net: Any, x: Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(net(x), plain(x), **CLOSE)


@pytest.mark.parametrize("kind", MODELS)
def test_the_second_call_takes_the_short_way(kind: str):
    net, plain = prepared(kind), made(kind)
    with torch.no_grad():
        results = [net(given(kind, seed)) for seed in range(4)]
        for seed, found in enumerate(results):  # no later call has written into an earlier result
            torch.testing.assert_close(found, plain(given(kind, seed)), **CLOSE)
    assert net.forward.counters.calls == 1 + 1 + 4
    assert net.forward.counters.launches == net.forward.latest.bounds[0].num_launches


def _swap(net: Any) -> None:
    net.second.weight = nn.Parameter(torch.ones_like(net.second.weight), requires_grad=False)


def _write(net: Any) -> None:
    net.first.weight.mul_(3)


def _move(net: Any) -> None:
    net.first.weight.data = net.first.weight.data * -2


def _replace(net: Any) -> None:
    net.first = nn.Conv3d(3, 4, 3, padding=1, bias=False).eval().requires_grad_(False)
    net.first.weight.fill_(0.25)


def _hook(net: Any) -> None:
    net.register_forward_hook(lambda module, args, result: result * 2)


def _method(net: Any) -> None:
    net.second.forward = lambda x: x * 5


CHANGES = [_swap, _write, _move, _replace, _hook, _method]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_nothing_is_stale(change: Callable[[Any], None]):
    net, plain = prepared("conv3d"), made("conv3d")
    change(net)
    change(plain)
    for seed in range(3):
        assert_as(plain, net, given("conv3d", seed))


def test_modes_take_the_long_way():
    net, x = prepared("lstm"), given("lstm")
    with torch.inference_mode():
        assert not any(result.is_inference() for result in net(x))
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():  # else eager raises, too
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert net(x)[0].dtype is torch.bfloat16  # as in eager
    assert net(x)[0].requires_grad is False
    net.train()
    assert not takes_prepared(net, x)


def test_another_caller_has_it_take_the_long_way():
    """Working memory that is in use, or lanes: both are for the way that takes turns."""
    net, plain, x = prepared("conv3d"), made("conv3d"), given("conv3d")
    is_held, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        with workspace_of(CPU, 0).lock:
            is_held.set()
            may_go.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_held.wait(60)
    try:
        assert not takes_prepared(net, x)
    finally:
        may_go.set()
        holder.join()
    assert takes_prepared(net, x)
    turn = LANES.take()
    try:
        assert not takes_prepared(net, x)
        assert_as(plain, net, x)
    finally:
        LANES.give(turn.number)
    assert takes_prepared(net, x)


def test_whoever_writes_what_it_reads_waits_for_it(monkeypatch: pytest.MonkeyPatch):
    net, x = prepared("conv3d"), given("conv3d")
    counts, usual = [], Bound.is_linked

    def is_linked(self: Bound, linked: Any) -> bool:
        counts.append(net.forward._in_flight.count)
        return usual(self, linked)

    monkeypatch.setattr(Bound, "is_linked", is_linked)
    assert takes_prepared(net, x)
    assert counts == [1]
    assert net.forward._in_flight.count == 0


def test_threads_get_their_own_results():
    net, plain = prepared("gru"), made("gru")
    inputs = [given("gru", seed) for seed in range(6)]
    with torch.no_grad():
        expected = [plain(x) for x in inputs]
    wrong = list[int]()

    def work(number: int) -> None:
        with torch.no_grad():
            for _ in range(40):
                for found, wanted in zip(net(inputs[number]), expected[number], strict=True):
                    if not torch.allclose(found, wanted, **CLOSE):
                        wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert takes_prepared(net, inputs[0])


def test_an_error_reaches_the_caller_and_the_next_call_is_right(monkeypatch: pytest.MonkeyPatch):
    net, plain, x = prepared("conv3d"), made("conv3d"), given("conv3d")

    def short_of_memory(*args: Any) -> Any:
        return torch.empty(1 << 60, dtype=torch.uint8)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(cpu_runs, "_empty_strided_cpu", short_of_memory)
        with pytest.raises(RuntimeError, match="allocate memory") as caught:
            net(x)
    assert "working memory at" in caught.value.__notes__[0]
    assert net.forward._in_flight.count == 0
    for _ in range(2):  # its link is gone: the first call goes the long way
        assert_as(plain, net, x)
    assert takes_prepared(net, x)


def _moved(net: Any) -> weakref.ref[Tensor]:
    """Return what working memory was, having put it elsewhere."""
    space = workspace_of(CPU, 0)
    before = weakref.ref(space.memory)
    with space.lock:
        space.give_back()
        space.reserve(1 << 16, net.forward.latest.bounds[0])
    assert space.memory is not before()
    return before


def test_memory_of_kernels_that_has_moved_is_free():
    net, x = strop.optimize(Deep().eval(), options=tiny.options()), torch.randn(3, 40)
    with torch.no_grad():
        net(x)
        assert takes_prepared(net, x)
        assert net.forward.latest.bounds[0].arena_bytes
        assert _moved(net)() is None
        torch.testing.assert_close(net(x), Deep()(x), **CLOSE)
        net(x)
    assert takes_prepared(net, x)


def test_memory_that_has_moved_is_no_longer_read():
    """Another module wants more than there is: programs are linked to the new memory."""
    net, plain, x = prepared("lstm"), made("lstm"), given("lstm")
    before = _moved(net)
    assert before() is None  # nothing keeps what nobody reads
    for seed in range(3):
        assert_as(plain, net, given("lstm", seed))
    assert takes_prepared(net, x)


def test_a_users_own_operator_takes_the_long_way():
    """It may do whatever it likes, also call the module: that needs the dispatcher's lock."""

    @torch.library.custom_op("strop_walks::doubled", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    doubled.register_fake(torch.empty_like)

    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.strop_walks.doubled(x + 1) + 1

    net = strop.optimize(Own().eval(), options=tiny.options())
    x = torch.randn(3)
    with torch.no_grad():
        net(x)
        assert net.forward.latest is not None
        assert not takes_prepared(net, x)
        torch.testing.assert_close(net(x), (x + 1) * 2 + 1)


class Masked(nn.Module):
    """Kernels alone, called by names; it tells its arguments apart."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor, mask: Tensor, other: Tensor | None = None) -> Tensor:
        found = torch.softmax(x * self.scale, -1) * mask
        return found if other is None else found - other * 2


def masked() -> Any:
    net = strop.optimize(Masked().eval().requires_grad_(False), options=tiny.options())
    x, mask, other = (torch.randn(4, 6, generator=_seeded(n)) for n in range(3))
    with torch.no_grad():
        for _ in range(2):
            net(x, mask=mask)
            net(x, mask=mask, other=other)
            net(x, mask, other)
            net(other=other, mask=mask, x=x)
    return net, x, mask, other


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_arguments_with_names_take_the_short_way():
    net, x, mask, other = masked()
    plain = Masked().eval()
    assert takes_prepared(net, x, mask=mask)
    assert takes_prepared(net, x, mask=mask, other=other)
    assert takes_prepared(net, other=other, mask=mask, x=x)
    with torch.no_grad():
        cases: list[tuple[tuple[Tensor, ...], dict[str, Tensor]]] = [
            ((x,), {"mask": mask}),
            ((x, mask), {"other": other}),  # its names are new: the long way
            ((x,), {"other": other, "mask": mask}),
            ((), {"x": other, "other": x, "mask": mask}),
            ((x, mask, other), {}),
            ((), {"other": other, "mask": mask, "x": x}),
            ((x[:2],), {"mask": mask[:2], "other": other[:2]}),
        ]
        for args, named in [*cases, *cases[::-1], *cases]:
            torch.testing.assert_close(net(*args, **named), plain(*args, **named), **CLOSE)
        for args, named in cases:
            assert takes_prepared(net, *args, **named)
    assert not takes_prepared(net, x, mask=mask.double())


def test_names_that_forward_does_not_know_get_eagers_error():
    net, x, mask, other = masked()
    for named in ({"masks": mask}, {"mask": mask, "x": x}, {"other": other}):
        with torch.no_grad(), pytest.raises(TypeError, match="argument"):
            net(x, **named)


@pytest.mark.parametrize("change", ["weight", "hook", "own hook", "forward"])
def test_nothing_is_stale_by_name(change: str):
    (net, x, mask, other), plain = masked(), Masked().eval()
    for module in (net, plain):
        if change == "weight":
            module.scale = nn.Parameter(torch.full((6,), 0.5), requires_grad=False)
        elif change == "hook":
            module.register_forward_hook(lambda module, args, result: result + 1)
        elif change == "own hook":
            module.register_forward_pre_hook(
                lambda module, args, kwargs: (args, {**kwargs, "mask": kwargs["mask"] * 3}),
                with_kwargs=True,
            )
        else:
            module.forward = lambda x, mask, other: x + mask + other
    with torch.no_grad():
        for _ in range(3):
            named = {"mask": mask, "other": other}
            torch.testing.assert_close(net(x, **named), plain(x, **named), **CLOSE)


class Deep(nn.Module):
    """As many kernels as make a run long."""

    def forward(self, x: Tensor) -> Tensor:
        for number in range(10):
            x = torch.softmax(x, number % 2)
        return x


def test_long_runs_of_kernels_leave_calls_to_the_lanes(monkeypatch: pytest.MonkeyPatch):
    net, x = strop.optimize(Deep().eval(), options=tiny.options()), torch.randn(3, 40)
    with torch.no_grad():
        net(x)
    bound = net.forward.latest.bounds[0]
    assert len(bound.plan.order.steps) >= cpu_runs.MANY_KERNELS
    turn = LANES.take()
    try:
        for longest, is_short in ((1e9, True), (0.0, False)):
            monkeypatch.setattr(cpu_runs, "LONG_S", longest)
            assert takes_prepared(net, x) == is_short
            with torch.no_grad():
                torch.testing.assert_close(net(x), Deep()(x), **CLOSE)
    finally:
        LANES.give(turn.number)
