"""What libraries offload by parts is compiled: their hooks do nothing meanwhile, and have all back
afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook, remove_hook_from_module
from diffusers.hooks import apply_group_offloading, group_offloading
from diffusers.hooks.group_offloading import _maybe_remove_and_reapply_group_offloading
from torch import Tensor, nn

import strop
from tests.budgeted import LANES, CountedMemory, lend_memory
from tests.dispatch.test_low_rank import activate, add
from tests.dispatch.test_weights_budget import (
    CLOSE,
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


def test_copies_are_diffusers_own(memory: CountedMemory, moves: Moves) -> None:
    net = compiled("block", "optimize first")
    check(net, plain())
    try:
        twin = copy.deepcopy(net)
    except TypeError:
        return
    before = moves.count
    check(twin, plain())
    assert moves.count > before
    assert not strop.api.dispatchers_of(twin)


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
