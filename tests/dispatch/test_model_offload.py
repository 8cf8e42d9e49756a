"""A compiled model whose weights accelerate takes to the host between calls keeps pinned copies
there, and its programs notice where weights are now."""

from __future__ import annotations

import gc
import mmap
import weakref
from typing import Any, ClassVar

import pytest
import torch
from accelerate import cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module
from torch import Tensor, nn

import strop
from strop.dispatch import model_offload, offloaded_weights
from strop.dispatch.offloaded_weights import OffloadedWeights
from strop.runtime.run import flat_copy
from strop.runtime.run.flat_copy import ROW_BYTES, FlatCopy, FlatSums
from strop.runtime.run.workspace import Workspace
from tests.e2e import tiny
from tests.standing_memory import Guest, StandingMemory

CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # fp32 sums of eight in another order
CPU = torch.device("cpu")
X = torch.randn(3, 8, generator=torch.manual_seed(0))


class Net(nn.Module):
    """Three linears that become one, a convolution that is turned, a tied weight and a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.again = nn.Linear(8, 8, bias=False)
        self.again.weight = self.q.weight
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.q(x) * self.k(x) + self.v(x) + self.again(x)
        return self.conv(y[:, None, :, None]).sum(1)[..., 0] * self.scale


class CountedMemory:
    """Memory that moves, and of which the test knows whether anybody still refers to it."""

    stays = False
    made: ClassVar[list[weakref.ref[mmap.mmap]]] = []

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8)

    def grow(self, size_bytes: int) -> None:
        pages = mmap.mmap(-1, size_bytes)
        self.made.append(weakref.ref(pages))
        self.tensor = torch.frombuffer(pages, dtype=torch.uint8)

    def rest(self) -> None:
        self.tensor = self.tensor.new_empty(0)


@pytest.fixture(params=["stays", "moves"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have weights go to other memory of the CPU, as to a GPU's."""
    monkeypatch.setattr(model_offload, "DEVICES", ("cpu",))
    if request.param == "stays":
        monkeypatch.setattr(offloaded_weights, "memory_on", StandingMemory)
    return request.param


def plain() -> Any:
    return Net().eval().requires_grad_(False)


def check(net: Any, expected: Any) -> None:
    torch.testing.assert_close(net(X), expected(X), **CLOSE)


@pytest.mark.parametrize("first", ["optimize", "offload"])
def test_compiled_calls_between_host_and_device(memory: str, first: str) -> None:
    net = plain()
    if first == "offload":
        cpu_offload_with_hook(net, "cpu")
    strop.optimize(net, options=tiny.options(strict=True))
    dispatcher = strop.api.dispatchers_of(net)["Net"]
    hook = net._hf_hook if first == "offload" else cpu_offload_with_hook(net, "cpu")[1].hook
    places, copies = [], []
    for _ in range(5):
        check(net, plain())
        places.append([w.data_ptr() for w in net.parameters()])
        hook.init_hook(net)
        copies.append([w.data_ptr() for w in net.parameters()])
        assert not {*copies[-1]} & {*places[-1]}, "the host has a copy of its own"
        assert net.again.weight is net.q.weight
    weights = model_offload.known_offload(net)
    assert weights is not None
    assert weights.num_copied_back <= 2  # as given, and as programs want it
    assert copies[-1] == copies[-2] == copies[-3]
    text = str(strop.explain(net))
    size = f"{weights.size_bytes / 1e6:.2f} MB"
    assert f"weights: {size} on the host between calls, on cpu as long while it runs" in text
    assert dispatcher.counters.eager_calls == 0
    assert dispatcher.variants.num_captures <= 1  # or a stored plan
    if memory == "stays":
        assert places[-1] == places[-2] == places[-3]
        assert dispatcher.counters.rebinds <= 3
    strop.restore(net)
    assert not {"init_hook", "pre_forward"} & {*vars(hook)}
    assert model_offload.known_offload(net) is None
    check(net, plain())
    remove_hook_from_module(net)
    assert getattr(net.forward, "__func__", None) is Net.forward
    check(net, plain())


WRITES = {
    "in place": lambda net: net.k.weight.mul_(2),
    "through data": lambda net: net.k.weight.data.mul_(2),
    "another Parameter": lambda net: setattr(
        net.k, "weight", nn.Parameter(net.k.weight.detach() * 2, requires_grad=False)
    ),
    "other data": lambda net: setattr(net.k.weight, "data", net.k.weight.data * 2),
    "a buffer": lambda net: net.scale.fill_(3.0),
    "a state dict": lambda net: net.load_state_dict(
        {name: value * 2 for name, value in net.state_dict().items()}
    ),
    "another type and back": lambda net: net.half().float(),
    "two that cancel out": lambda net: net.k.weight.data.view(torch.int32)[:2].copy_(
        net.k.weight.data.view(torch.int32)[:2].flip(0).clone()
    ),
}


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("write", WRITES)
def test_writes_are_kept(memory: str, write: str, where: str) -> None:
    net, twin = strop.optimize(plain(), options=tiny.options(strict=True)), plain()
    _, handle = cpu_offload_with_hook(net, "cpu")
    for _ in range(3):
        check(net, twin)
        handle.offload()
    if where == "device":
        check(net, twin)
    WRITES[write](net)
    WRITES[write](twin)
    for _ in range(3):
        check(net, twin)
        handle.offload()
        assert all(map(torch.equal, net.parameters(), twin.parameters()))


def test_a_hook_that_has_gone_leaves_plain_weights(memory: str) -> None:
    net = strop.optimize(plain(), options=tiny.options(strict=True))
    _, handle = cpu_offload_with_hook(net, "cpu")
    check(net, plain())
    handle.offload()
    remove_hook_from_module(net)
    for _ in range(2):
        check(net, plain())
    assert model_offload.known_offload(net) is None
    assert all(w.untyped_storage().nbytes() == w.nbytes for w in net.parameters())


def test_the_model_before_is_taken_to_the_host_first(memory: str) -> None:
    one, two = (strop.optimize(plain(), options=tiny.options(strict=True)) for _ in range(2))
    _, first = cpu_offload_with_hook(one, "cpu")
    cpu_offload_with_hook(two, "cpu", prev_module_hook=first)
    for number in range(3):
        check(one, plain())
        moved = [w.data_ptr() for w in one.parameters()]
        check(two, plain())
        if number:  # the first calls let Strop know of the hooks
            assert [w.data_ptr() for w in one.parameters()] != moved


def test_weights_that_cannot_be_in_one_piece_are_accelerates(memory: str) -> None:
    net = strop.optimize(plain(), options=tiny.options(strict=True))
    net.k.weight.grad = torch.zeros_like(net.k.weight)
    _, handle = cpu_offload_with_hook(net, "cpu")
    before = [w.data_ptr() for w in net.parameters()]
    for _ in range(2):
        check(net, plain())
        handle.offload()
    weights = OffloadedWeights(net, CPU)
    assert not weights.load()
    assert not weights.offload()
    assert len(before) == len(list(net.parameters()))


def test_nothing_keeps_the_memory_of_a_model_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_offload, "DEVICES", ("cpu",))
    monkeypatch.setattr(offloaded_weights, "memory_on", CountedMemory)
    net = strop.optimize(plain(), options=tiny.options(strict=True))
    _, handle = cpu_offload_with_hook(net, "cpu")
    for number in range(4):
        check(net, plain())
        check(net, plain())
        if number:
            assert CountedMemory.made[-1]() is not None
        handle.offload()
        gc.collect()
        assert not [made for made in CountedMemory.made if made() is not None]
    assert len(CountedMemory.made) == 3  # the first time the hook moves the weights as ever
    strop.restore(net)


def test_sums_see_what_plain_sums_do_not() -> None:
    flat = torch.randint(0, 255, (4 * ROW_BYTES,), dtype=torch.uint8)
    known = FlatSums.of(flat)
    numbers = flat.view(torch.int64)
    numbers[[0, 5000]] = numbers[[5000, 0]]
    assert not known.equal(FlatSums.of(flat))
    numbers[[0, 5000]] = numbers[[5000, 0]]
    assert known.equal(FlatSums.of(flat))


def test_a_copy_in_chunks_is_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_copy, "CHUNK_BYTES", ROW_BYTES)
    host = torch.randint(0, 255, (3 * ROW_BYTES,), dtype=torch.uint8)
    memory = StandingMemory(CPU)
    copy = FlatCopy(host, memory)
    copy.go_on(2 * ROW_BYTES - 1)
    assert copy.copied_bytes == ROW_BYTES, "whole chunks"
    copy.go_on(ROW_BYTES)
    assert copy.copied_bytes == memory.tensor.numel() == ROW_BYTES
    flat, sums = copy.finish()
    assert torch.equal(flat, host)
    assert sums.equal(FlatSums.of(host))


@pytest.mark.parametrize("write", [False, True])
def test_a_model_comes_while_the_one_before_is_still_there(
    write: bool, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As much of it is copied as both have room for; what is written meanwhile is seen."""
    monkeypatch.setattr(flat_copy, "CHUNK_BYTES", ROW_BYTES)
    monkeypatch.setattr(offloaded_weights, "SPARE", 1.0)
    begun: list[int] = []
    usual = FlatCopy.go_on

    def go_on(copy: FlatCopy, end_bytes: int) -> None:
        usual(copy, end_bytes)
        begun.append(copy.copied_bytes)

    one, two = (strop.optimize(plain(), options=tiny.options(strict=True)) for _ in range(2))
    _, first = cpu_offload_with_hook(one, "cpu")
    _, second = cpu_offload_with_hook(two, "cpu", prev_module_hook=first)
    twin = plain()
    for _ in range(4):
        check(one, plain())
        monkeypatch.setattr(FlatCopy, "go_on", go_on)
        if write:
            for net in (two, twin):
                net.v.weight.data.mul_(0.5)
        check(two, twin)
        monkeypatch.setattr(FlatCopy, "go_on", usual)
        second.offload()
    size = ROW_BYTES  # of either
    # begun beside the first one, and nothing is left for the rest
    expected = [size, size] if memory == "stays" else [size]
    assert begun[-len(expected) :] == expected


@pytest.mark.parametrize("is_larger", [False, True])
def test_working_memory_does_not_lie_beside_a_larger_model(is_larger: bool, memory: str) -> None:
    """Beside a smaller one it may: the peak is that of the larger one anyway."""
    made = [plain(), nn.Sequential(plain(), nn.Linear(8, 2048)).eval().requires_grad_(False)]
    first, second = made if is_larger else reversed(made)
    expected = second(X)
    for net in made:
        strop.optimize(net, options=tiny.options(strict=True))
    _, before = cpu_offload_with_hook(first, "cpu")
    _, behind = cpu_offload_with_hook(second, "cpu", prev_module_hook=before)
    space = Workspace(CPU)
    for count in range(3):
        first(X)
        size = space.reserve(1 << 12, Guest()).numel()
        torch.testing.assert_close(second(X), expected, **CLOSE)
        rests = is_larger and count > 0  # the first call finds accelerate's own hooks
        assert space.memory.numel() == (0 if rests else size)
        behind.offload()
