"""What libraries offload by parts is compiled: their hooks do nothing meanwhile, and have all back
afterwards."""

from __future__ import annotations

import copy
import gc
import mmap
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook, remove_hook_from_module
from diffusers.hooks import apply_group_offloading, group_offloading
from diffusers.hooks.group_offloading import _maybe_remove_and_reapply_group_offloading
from torch import Tensor, nn

import strop
from strop.dispatch import budgeted_memory
from strop.runtime.run import workspace
from tests.budgeted import CLOSE, LANES, CountedMemory, lend_memory, wrong_in_threads
from tests.dispatch.test_low_rank import activate, add
from tests.dispatch.test_weights_budget import (
    WIDTH,
    WRITES,
    Block,
    X,
    budget_of,
    check,
    plain,
    size_of,
)
from tests.e2e import tiny

CPU = torch.device("cpu")


def offload(net: Any, kind: str) -> Any:
    if kind == "sequential":
        cpu_offload(net, CPU)
    elif kind == "leaf":
        apply_group_offloading(net, CPU, CPU, "leaf_level")
    else:
        apply_group_offloading(net, CPU, CPU, "block_level", num_blocks_per_group=2)
    return net


def end_offload(net: Any, kind: str) -> Any:
    if kind == "sequential":
        remove_hook_from_module(net, recurse=True)
    else:
        net._diffusers_hook.remove_hook(group_offloading._GROUP_OFFLOADING, recurse=True)


KINDS = ("block", "leaf", "sequential")
NAMES = dict(
    zip(
        KINDS,
        (
            "enable_group_offload, block_level of 2",
            "enable_group_offload, leaf_level",
            "enable_sequential_cpu_offload",
        ),
        strict=True,
    )
)


@pytest.fixture(params=LANES)
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CountedMemory:
    return lend_memory(monkeypatch, request.param)


class Moves:
    """It counts what libraries move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        group = group_offloading.ModuleGroup
        for kind, name in (
            (group, "onload_"),
            (group, "offload_"),
            (AlignDevicesHook, "pre_forward"),
        ):
            monkeypatch.setattr(kind, name, self._counting(getattr(kind, name)))

    def _counting(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def move(one: Any, *args: Any, **kwargs: Any) -> Any:
            self.count += getattr(one, "offload", True) is not False
            return own(one, *args, **kwargs)

        return move


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Moves:
    return Moves(monkeypatch)


def compiled(kind: str, order: str, **changes: Any) -> Any:
    net = plain()
    options = tiny.options(**({"strict": True} | changes))
    if order == "offload first":
        offload(net, kind)
    strop.optimize(net, options=options)
    if order == "optimize first":
        check(net, plain())
        offload(net, kind)
    return net


@pytest.mark.parametrize("order", ["optimize first", "offload first"])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_streamed(memory: CountedMemory, moves: Moves, kind: str, order: str) -> None:
    net, twin = offload(plain(), kind), offload(plain(), kind)
    before = attributes(net)
    if order == "optimize first":
        net = compiled(kind, order)
    strop.optimize(net, options=tiny.options(strict=True))
    check(net, twin)
    moved, parameters = moves.count, list(net.parameters())
    for _ in range(3):
        check(net, plain())
    assert moves.count == moved, "the library moves nothing"
    assert all(map(lambda a, b: a is b, parameters, net.parameters()))
    assert net.last.weight is net.first.weight
    (dispatcher,) = strop.api.dispatchers_of(net).values()
    assert dispatcher.counters.eager_calls == 0
    budget, report = budget_of(net), str(strop.explain(net))
    assert 0 < memory.most < size_of(net)
    assert memory.most <= budget.held_bytes <= budget._most_bytes
    plan = budget._plan
    assert plan is not None
    assert plan.blocks
    most = f"{budget._offload.most_bytes / 1e6:.2f} MB"
    assert f"({NAMES[kind]}, by itself {most} at most, does nothing meanwhile)" in report
    strop.restore(net)
    assert memory.now == 0
    assert not strop.api.dispatchers_of(net)
    if order == "offload first":
        assert attributes(net) == before
    moved = moves.count
    check(net, plain())
    assert moves.count > moved, "it moves them again"
    end_offload(net, kind)
    check(net, plain())


def seeded(kind: type[nn.Module]) -> Any:
    torch.manual_seed(3)
    return plain(kind)


def attributes(net: Any) -> Any:
    """Return what each part holds, and what hooks hold of it."""
    found = []
    for part in net.modules():
        own = vars(part)
        found += [(name, id(value)) for name, value in own.items() if name != "forward"]
        found += [
            (name, id(t))
            for table in (part._parameters, part._buffers)
            for name, t in table.items()
        ]
        for reference in getattr(own.get("_diffusers_hook"), "_fn_refs", ()):
            found += [(name, value) for name, value in vars(reference).items() if name != "forward"]
        for hook in (
            (own["_hf_hook"], *getattr(own["_hf_hook"], "hooks", ())) if "_hf_hook" in own else ()
        ):
            found += [(name, id(value)) for name, value in vars(hook).items()]
    return [item for item in found if item[0] not in ("tied_pointers_to_remove", "input_device")]


@pytest.mark.parametrize("kind", ["block", "sequential"])
@pytest.mark.parametrize("write", WRITES)
def test_writes_are_seen(memory: CountedMemory, write: str, kind: str) -> None:
    net, twin = compiled(kind, "offload first", strict=False), plain()
    check(net, twin)
    for each in (net, twin):
        torch.manual_seed(2)
        WRITES[write](each)
    for _ in range(2):
        check(net, twin)
        if kind == "block":
            assert all(map(torch.equal, net.parameters(), twin.parameters()))
    (dispatcher,) = strop.api.dispatchers_of(net).values()
    assert dispatcher.counters.eager_calls == 0
    strop.restore(net)
    check(net, twin)


def test_a_budget_of_the_user_is_kept(memory: CountedMemory) -> None:
    limit = int(0.7 * size_of(plain()))
    net = compiled("leaf", "offload first", weights_budget_bytes=limit)
    check(net, plain())
    assert 0.3 * limit < memory.most <= limit
    assert f"(weights_budget_bytes={limit}; enable_group_offload" in str(strop.explain(net))
    strop.restore(net)
    check(net, plain())


def test_hooks_that_are_made_anew_do_nothing_either(memory: CountedMemory, moves: Moves) -> None:
    """As diffusers makes them when adapters come and go."""
    net = compiled("block", "optimize first")
    check(net, plain())
    _maybe_remove_and_reapply_group_offloading(net)
    check(net, plain())
    before = moves.count
    check(net, plain())
    assert moves.count == before
    assert budget_of(net)._stretches


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_that_are_gone_leave_plain_weights(memory: CountedMemory, kind: str) -> None:
    net = compiled(kind, "optimize first")
    check(net, plain())
    end_offload(net, kind)
    check(net, plain())
    assert memory.now == 0
    (dispatcher,) = strop.api.dispatchers_of(net).values()
    assert dispatcher.budget is None
    assert dispatcher.counters.eager_calls == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_compiled_runs_as_diffusers_has_it(
    memory: CountedMemory, moves: Moves, kind: str
) -> None:
    net = compiled(kind, "optimize first", strict=False)
    check(net, plain())
    before = moves.count
    net.requires_grad_(True)
    torch.testing.assert_close(net(X), plain()(X), **CLOSE)
    assert moves.count > before
    assert memory.now == 0
    net.requires_grad_(False)
    check(net, plain())
    (dispatcher,) = strop.api.dispatchers_of(net).values()
    (reason,) = dispatcher.counters.fallbacks
    assert reason.startswith("gradients are enabled")
    assert dispatcher.counters.eager_calls == 1
    assert memory.now > 0, "it is streamed again"


def test_adapters_are_computed_beside(memory: CountedMemory) -> None:
    net, twin = compiled("block", "optimize first"), plain()
    for number in range(3):
        check(net, twin)
        for each in (net, twin):
            add(each, f"a{number}", seed=number)
            activate(each, f"a{number}")
        check(net, twin)


def copied(net: Any) -> Any:
    """Return a copy, or None where there can be none: groups of diffusers hold a Python module."""
    try:
        return copy.deepcopy(net)
    except TypeError:
        return None


@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_the_librarys_own(memory: CountedMemory, moves: Moves, kind: str) -> None:
    net = compiled(kind, "optimize first")
    check(net, plain())
    twin, alone = copied(net), copied(offload(plain(), kind))
    assert (twin is None) == (alone is None)
    assert kind != "sequential" or twin is not None
    for _ in range(2) if twin is not None else ():
        before = moves.count
        check(twin, plain())
        assert moves.count > before
        assert not strop.api.dispatchers_of(twin)
        net.first.weight.mul_(0.5)


def test_groups_on_disk_are_diffusers(memory: CountedMemory, tmp_path: Any) -> None:
    net, twin = (seeded(Block) for _ in range(2))
    strop.optimize(net, options=tiny.options())
    apply_group_offloading(net, CPU, CPU, "leaf_level", offload_to_disk_path=str(tmp_path))
    check(net, twin)
    (dispatcher,) = strop.api.dispatchers_of(net).values()
    (reason,) = dispatcher.counters.fallbacks
    assert reason.startswith("group offloading is on, with groups on disk")


def test_on_a_cpu_nothing_is_moved(moves: Moves) -> None:
    net = compiled("leaf", "optimize first")
    check(net, plain())
    (dispatcher,) = strop.api.dispatchers_of(net).values()
    assert dispatcher.budget is None
    assert dispatcher.counters.eager_calls == 0


class Twice(nn.Module):
    """A hook of the user's is in front of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * 2


def test_other_functions_in_front_are_not_left_out(memory: CountedMemory) -> None:
    net = Twice().eval().requires_grad_(False)
    offload(net, "leaf")
    own = net.net.first.forward
    net.net.first.forward = lambda x: own(x) + 1
    expected = net(X)
    strop.optimize(net, options=tiny.options())
    torch.testing.assert_close(net(X), expected, **CLOSE)


class Stream:
    """It stands for a stream of a GPU, which a CPU does not have."""

    def synchronize(self) -> None:
        """Do nothing, as copies are made at once."""

    def stream(self, stream: Any) -> Any:
        """Stand for the module of a backend."""
        return nullcontext()

    def current_stream(self) -> Any:
        return self


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have diffusers take a CPU for a backend that has streams, and copies for pinned memory."""
    monkeypatch.setattr(group_offloading, "TorchDeviceBackend", lambda device: Stream())
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor.clone())


def offload_with_stream(net: Any, kind: str, *, saves_memory: bool) -> None:
    config = group_offloading.GroupOffloadingConfig(
        CPU,
        CPU,
        group_offloading.GroupOffloadingType(f"{kind}_level"),
        non_blocking=True,
        record_stream=False,
        low_cpu_mem_usage=saves_memory,
        num_blocks_per_group=1,
        stream=Stream(),
    )
    group_offloading._apply_group_offloading(net, config)


@pytest.mark.parametrize("order", ["optimize first", "offload first"])
@pytest.mark.parametrize("saves_memory", [False, True])
@pytest.mark.parametrize("kind", ["block", "leaf"])
def test_groups_with_a_stream(
    memory: CountedMemory, streams: None, kind: str, saves_memory: bool, order: str
) -> None:
    net, twin = plain(Chain), plain(Chain)
    if order == "offload first":
        offload_with_stream(net, kind, saves_memory=saves_memory)
        check(net, twin)  # diffusers learns the order
    strop.optimize(net, options=tiny.options())
    check(net, twin)
    if order == "optimize first":
        offload_with_stream(net, kind, saves_memory=saves_memory)
    for number in range(3):
        check(net, twin)
        for each in (net, twin):
            each.layers[number].weight.mul_(0.5)
            each.layers[-1].weight.data = each.layers[-1].weight.data * 0.5
    (dispatcher,) = strop.api.dispatchers_of(net).values()
    assert dispatcher.counters.eager_calls == 0
    assert 0 < memory.most <= dispatcher.budget._most_bytes
    groups = dispatcher.hosted.taken.groups
    assert not any(group.cpu_param_dict for group in groups), "no second copy"
    net.requires_grad_(True)  # in eager
    for _ in range(2):
        torch.testing.assert_close(net(X), twin(X), **CLOSE)
    assert dispatcher.counters.eager_calls == 2
    assert memory.now == 0
    net.requires_grad_(False)
    check(net, twin)
    strop.restore(net)
    for _ in range(3):
        check(net, twin)
    for each in (net, twin):
        each.layers[2].weight.mul_(0.5)
    check(net, twin)


class Chain(nn.Module):
    """Layers in a list, and two beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x)


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_that_is_called_by_itself(memory: CountedMemory, kind: str) -> None:
    net, twin = compiled(kind, "optimize first"), plain()
    for number in range(3):
        check(net, twin)
        part, own = net.blocks[number], twin.blocks[number]
        torch.testing.assert_close(part(X), own(X), **CLOSE)
        torch.testing.assert_close(part(X), own(X), **CLOSE)
        for each in (net, twin):
            each.blocks[number].register_buffer("some", torch.ones(2))
    for each in (net, twin) if kind != "sequential" else ():
        each.blocks[0].k.weight.mul_(0.5)
    check(net, twin)
    (dispatcher,) = strop.api.dispatchers_of(net).values()
    assert dispatcher.counters.eager_calls == 0
    assert memory.now > 0


@pytest.mark.parametrize("kind", KINDS)
def test_threads_take_turns(memory: CountedMemory, kind: str) -> None:
    net, twin = compiled(kind, "offload first"), plain()
    given = [torch.randn(3, WIDTH, generator=torch.manual_seed(n)) for n in range(4)]
    assert not wrong_in_threads(net, given, [twin(x) for x in given], 10)


class CountedPins:
    """It counts what is pinned on the host, and how much of that is still there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = self.now = 0
        self._pinned = budgeted_memory.pinned
        monkeypatch.setattr(budgeted_memory, "pinned", self)

    def __call__(self, size_bytes: int, *, for_gpu: bool) -> Tensor:
        pages = mmap.mmap(-1, size_bytes)
        self.count, self.now = self.count + 1, self.now + size_bytes
        weakref.finalize(pages, self._give_back, size_bytes)
        return torch.frombuffer(pages, dtype=torch.uint8)

    def _give_back(self, size_bytes: int) -> None:
        self.now -= size_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_rest_are_pinned_once(
    memory: CountedMemory, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A model whose weights go to the host at the end of each picture pins nothing anew for the
    next one, nor is it looked at anew."""
    pins = CountedPins(monkeypatch)
    net, twin = compiled(kind, "offload first"), plain()
    (served,) = strop.api.dispatchers_of(net).values()
    check(net, twin)
    served.rest()
    check(net, twin)
    served.rest()  # what lay apart when it was given is one piece now
    count, scans = pins.count, served.state.num_scans
    for factor in (0.5, 2.0):
        net.blocks[1].q.weight.mul_(factor)  # while it rests
        twin.blocks[1].q.weight.mul_(factor)
        check(net, twin)
        net.last.bias.data.add_(factor)  # while it does not
        twin.last.bias.data.add_(factor)
        served.rest()
        assert memory.now == 0
    assert (pins.count, served.state.num_scans) == (count, scans)
    assert size_of(net) <= pins.now <= 1.5 * size_of(net)
    net.blocks[0].q.weight.data = torch.ones(WIDTH, WIDTH)
    twin.blocks[0].q.weight.data = torch.ones(WIDTH, WIDTH)
    for _ in range(2):
        check(net, twin)
        served.rest()
    net.blocks[0], twin.blocks[0] = plain().blocks[0], plain().blocks[0]
    check(net, twin)
    assert served.state.num_scans > scans
    strop.restore(net)
    check(net, twin)
    assert memory.now == 0
    del net, served
    gc.collect()
    assert pins.now == 0


def test_working_memory_of_others_makes_room(memory: CountedMemory) -> None:
    """What another model has worked in does not lie beside weights that come."""
    net, twin = compiled("block", "offload first"), plain()
    (served,) = strop.api.dispatchers_of(net).values()
    other = strop.optimize(Wide().eval(), options=tiny.options(strict=True))
    x = torch.randn(512, WIDTH)
    for _ in range(2):
        other(x)
        assert working_bytes() > 100_000
        check(net, twin)
        assert working_bytes() == served.budget.working_bytes < 10_000
        served.rest()
    other(x)
    torch.testing.assert_close(other(x), Wide.of(x), **CLOSE)


class Wide(nn.Module):
    """It keeps two large values while it runs."""

    def forward(self, x: Tensor) -> Tensor:
        return self.of(x)

    @staticmethod
    def of(x: Tensor) -> Tensor:
        wide = x @ x.T
        return torch.softmax(wide, 1) @ torch.softmax(wide, 0) @ x


def working_bytes() -> int:
    spaces = [space for space in workspace._GROWING if space.device.type == "cpu"]
    return sum(space.memory.numel() for space in spaces)


@pytest.mark.parametrize("kind", ["block", "leaf"])
def test_two_models_share_weights(memory: CountedMemory, kind: str) -> None:
    nets, twins = [plain(), plain()], [plain(), plain()]
    for one, other in (nets, twins):
        other.blocks[0].q.weight = one.blocks[1].q.weight
        other.last.weight = one.last.weight
    for net in nets:
        strop.optimize(offload(net, kind), options=tiny.options(strict=True))
    for _ in range(3):
        for net, twin in zip(nets, twins, strict=True):
            check(net, twin)
        for one, _other in (nets, twins):
            one.blocks[1].q.weight.mul_(0.5)
            one.last.weight.data.mul_(0.5)
    strop.restore(nets[0])
    for net, twin in zip(nets, twins, strict=True):
        check(net, twin)
    strop.restore(nets[1])
    assert memory.now == 0
    for net, twin in zip(nets, twins, strict=True):
        check(net, twin)


def test_weights_that_no_hook_moves_keep_their_place(memory: CountedMemory) -> None:
    net, twin = plain(), plain()
    apply_group_offloading(net.blocks, CPU, CPU, "leaf_level")
    strop.optimize(net, options=tiny.options(strict=True))
    check(net, twin)
    budget = budget_of(net)
    assert {id(t) for t, _ in budget._homes.elsewhere} == {
        id(net.first.weight),
        id(net.first.bias),
        id(net.last.bias),
        id(net.scale),
    }
    strop.restore(net)
    check(net, twin)


def test_a_layer_of_an_offloaded_model_is_left_alone(memory: CountedMemory) -> None:
    net = offload(plain(), "block")
    strop.optimize(net.blocks[1], options=tiny.options())
    check(net, plain())
    check(net, plain())
    (dispatcher,) = strop.api.dispatchers_of(net.blocks[1]).values()
    (reason,) = dispatcher.counters.fallbacks
    assert reason == "group offloading is on, and this is one of a larger model's groups"


@pytest.mark.parametrize("change", ["load", "assign", "cast"])
@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts(memory: CountedMemory, kind: str, change: str) -> None:
    net, twin = compiled(kind, "offload first"), plain()
    check(net, twin)
    found, expected = net.state_dict(), twin.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    state = {name: value * 0.5 for name, value in expected.items()}
    for each in (net, twin):
        if change == "cast":
            each.double()
            each.float()
        else:
            each.load_state_dict(state, assign=change == "assign")
    check(net, twin)
    strop.restore(net)
    check(net, twin)
    end_offload(net, kind)
    check(net, twin)


def test_check_is_refused(memory: CountedMemory) -> None:
    net = compiled("leaf", "offload first", strict=False, check=True)
    check(net, plain())
    (dispatcher,) = strop.api.dispatchers_of(net).values()
    (reason,) = dispatcher.counters.fallbacks
    assert "check=True" in reason


class Giving(nn.Module):
    """It gives back a weight, which may lie on the host."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.linear.weight[:2]


def test_a_weight_that_is_given_back_runs_in_eager(memory: CountedMemory, moves: Moves) -> None:
    """With sequential offloading torch fails to copy such a weight to the caller."""
    net, twin = offload(plain(Giving), "leaf"), offload(plain(Giving), "leaf")
    strop.optimize(net, options=tiny.options())
    for number in range(2):
        before = moves.count
        results, expected = net(X), twin(X)
        torch.testing.assert_close(results[0], expected[0], **CLOSE)
        assert results[1].device == expected[1].device
        assert moves.count > before, number
    (dispatcher,) = strop.api.dispatchers_of(net).values()
    (reason,) = dispatcher.counters.fallbacks
    assert "gives back a weight" in reason


def test_training_is_not_offloaded(memory: CountedMemory) -> None:
    net = plain()
    offload(net, "leaf")
    strop.optimize(net, train=True, options=tiny.options())
    torch.testing.assert_close(net(X), plain()(X), **CLOSE)
    (dispatcher,) = strop.api.dispatchers_of(net).values()
    assert memory.most == 0
    reasons = {**dispatcher.traced_by_torch, **dispatcher.counters.fallbacks}
    assert any("nothing stands here" in reason for reason in reasons), reasons


def test_gradients_stay_wanted(memory: CountedMemory) -> None:
    net = compiled("sequential", "offload first", strict=False)
    check(net, plain())
    net.requires_grad_(True)
    net(X)
    assert all(w.requires_grad and w.is_meta for w in net.parameters())
    net.requires_grad_(False)
    check(net, plain())
    assert not any(w.requires_grad for w in net.parameters())
