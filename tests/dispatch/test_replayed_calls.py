"""A call that is replayed from a graph takes a short way if it is like one before."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode

import strop
from strop.bench.pipelines.actions_weights import (
    copy_in_place,
    data_assigned,
    data_copy,
    load_state_dict,
    load_state_dict_assign,
    new_parameter,
)
from strop.dispatch import dynamo, replayed_calls
from strop.dispatch.native_look import native_look
from strop.runtime.run import graph_keep_alive
from strop.runtime.run.graph_capture import NoGraphError
from tests.diffusion.replayed import Pool
from tests.e2e import tiny

FACTOR = 2.0


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act, self.scale = nn.Linear(16, 16), nn.ReLU(), 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x)) * self.scale * FACTOR


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(), Part()])

    def forward(self, pixels: Tensor, mask: Any = None, return_dict: Any = True, how: Any = ""):
        for part in self.parts:
            pixels = part(pixels)
        if mask is not None:
            pixels = pixels * mask
        pixels = pixels + (3 if return_dict is True else 1 if return_dict == 1 else 0)
        return {"last": pixels, "sum": pixels.sum(-1)} if return_dict else (pixels, pixels.sum(-1))


def given(shift: float = 0.0, *, rows: int = 3) -> Tensor:
    return torch.linspace(-1, 1, 16 * rows).reshape(rows, 16) + shift


def pair(folder: Path, module: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = (module or Net()).eval().requires_grad_(False)
    own = tiny.options(cache_dir=str(folder), **options)
    return plain, strop.optimize(copy.deepcopy(plain), options=own)


def assert_same(plain: Any, fast: Any, *args: Any, **kwargs: Any) -> Any:
    found, expected = fast(*args, **kwargs), plain(*args, **kwargs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    return found


def warm(plain: Any, fast: Any, *args: Any, **kwargs: Any) -> int:
    """Call it until calls take the short way, and return how many have."""
    counters = fast.forward.counters
    with torch.no_grad():
        for _ in range(5):
            assert_same(plain, fast, *args, **kwargs)
    assert counters.short_replays == 2  # the first two have no graph yet, the third is looked at
    assert counters.replays == 4
    assert counters.calls == 5
    return counters.short_replays


def short_of(fast: Any) -> int:
    return fast.forward.counters.short_replays


def test_results_are_new_ones(pool: Pool, tmp_path: Path) -> None:
    plain, fast = pair(tmp_path)
    warm(plain, fast, pixels=given(), return_dict=False)
    with torch.no_grad():
        first = fast(pixels=given(), return_dict=False)
        kept = [result.clone() for result in first]
        second = assert_same(plain, fast, pixels=given(1), return_dict=False)
    assert all(map(torch.equal, first, kept))
    assert type(second) is tuple
    assert short_of(fast) == 4
    assert fast.forward.counters.launches > 0
    assert fast.forward.latest.uses == 7
    assert "4 replays took the short way" in str(strop.explain(fast))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_results_are_of_the_kind_that_the_long_way_gives(
    mode: Callable[[], Any], pool: Pool, tmp_path: Path
) -> None:
    _, fast = pair(tmp_path)
    with mode():
        kinds = [fast(given())["last"].is_inference() for _ in range(5)]
    assert short_of(fast) == 2
    assert len({*kinds}) == 1


def test_each_kind_of_call_has_its_own(pool: Pool, tmp_path: Path) -> None:
    plain, fast = pair(tmp_path)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((given(),), {}),
        ((), {"pixels": given()}),
        ((given(),), {"return_dict": False}),
        ((given(),), {"return_dict": 0}),
        ((given(),), {"return_dict": 1}),
        ((given(),), {"return_dict": True}),
        ((given(),), {"how": False}),
        ((given(),), {"mask": given()}),
        ((given(), given()), {"how": "other"}),
        ((given(rows=2),), {}),
        ((given()[:, ::1].t().contiguous().t(),), {}),
        ((given().double().float().requires_grad_(),), {}),
    ]
    with torch.no_grad():
        for _ in range(5):
            for args, kwargs in calls:
                assert_same(plain, fast, *args, **kwargs)
    assert short_of(fast) > 2 * (len(calls) - 2)


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def autocast_of_another() -> Iterator[None]:
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "gradients": torch.enable_grad,
    "inference": torch.inference_mode,
    "autocast of this device": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast of another": autocast_of_another,
    "a dispatch mode": Watching,
    "forward-mode AD": forward_ad.dual_level,
    "a capture that is to come": graph_keep_alive.taken,
}


@pytest.mark.parametrize("name", MODES)
def test_modes_in_which_it_is_not_taken(name: str, pool: Pool, tmp_path: Path) -> None:
    plain, fast = pair(tmp_path)
    seen = warm(plain, fast, given())
    with torch.no_grad(), MODES[name]():
        fast(given(1))
        assert short_of(fast) == seen
    with torch.no_grad():
        assert_same(plain, fast, given(1))
    assert short_of(fast) == seen + 1


@pytest.mark.parametrize("name", list(MODES)[:5])
def test_each_mode_is_asked_for(name: str) -> None:
    """torch's guards notice some of them, too."""
    with torch.no_grad():
        assert replayed_calls._is_in_plain_modes()
        with MODES[name]():
            assert replayed_calls._is_in_plain_modes() == (name == "inference")


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_results_lie_as_those_of_other_arguments_do_in_eager(pool: Pool, tmp_path: Path) -> None:
    plain, fast = pair(tmp_path, Doubled())
    warm(plain, fast, given())
    turned = given().t().contiguous().t()
    with torch.no_grad():
        assert assert_same(plain, fast, turned).stride() == turned.stride()


def test_nor_is_it_under_a_transform(pool: Pool, tmp_path: Path) -> None:
    plain, fast = pair(tmp_path)
    seen = warm(plain, fast, given())
    with torch.no_grad():
        found = torch.func.vmap(lambda x: fast(x)["last"])(torch.stack([given(), given(1)]))
        torch.testing.assert_close(found[1], plain(given(1))["last"])
    assert short_of(fast) == seen


def test_nor_in_a_capture_of_the_caller(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, fast = pair(tmp_path)
    seen = warm(plain, fast, given())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with torch.no_grad():
        assert_same(plain, fast, given(1))
    assert short_of(fast) == seen


def test_nor_in_a_denoise_loop(pool: Pool, tmp_path: Path) -> None:
    plain, fast = pair(tmp_path)
    seen = warm(plain, fast, given())
    fast.forward.loop.begin()
    with torch.no_grad():
        assert_same(plain, fast, given(1))
    assert short_of(fast) == seen
    fast.forward.loop.end()


def test_nor_beside_hooks_for_all_modules(pool: Pool, tmp_path: Path) -> None:
    plain, fast = pair(tmp_path)
    seen, names = warm(plain, fast, given()), list[str]()
    handle = register_module_forward_hook(lambda m, *_: names.append(type(m).__name__))
    with torch.no_grad():
        fast(given(1))
    handle.remove()
    assert names.count("Part") == 2
    assert short_of(fast) == seen


def test_hooks_of_the_module_itself_run(pool: Pool, tmp_path: Path) -> None:
    plain, fast = pair(tmp_path)
    seen, names = warm(plain, fast, given()), list[str]()
    fast.register_forward_hook(lambda m, *_: names.append(type(m).__name__))
    with torch.no_grad():
        assert_same(plain, fast, given(1))
    assert names == ["Net"]
    assert short_of(fast) == seen + 1


def other_activation(net: Net) -> None:
    net.parts[0].act = nn.Tanh()


def other_number(net: Net) -> None:
    net.parts[1].scale = 0.25


def other_forward(net: Net) -> None:
    net.parts[0].forward = lambda x: x + 5


def own_hook(net: Net) -> None:
    net.parts[0].register_forward_hook(lambda m, args, result: result + 5)


def one_part_less(net: Net) -> None:
    del net.parts[1]


def one_part_more(net: Net) -> None:
    net.parts.append(copy.deepcopy(net.parts[0]))


def replaced_part(net: Net) -> None:
    net.parts[0] = copy.deepcopy(net.parts[1])


CHANGES: tuple[Callable[[Any], Any], ...] = (
    load_state_dict,
    load_state_dict_assign,
    copy_in_place,
    data_copy,
    data_assigned,
    new_parameter,
    other_activation,
    other_number,
    other_forward,
    own_hook,
    one_part_less,
    one_part_more,
    replaced_part,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_the_next_call_sees_it(change: Callable[[Any], Any], pool: Pool, tmp_path: Path) -> None:
    plain, fast = pair(tmp_path)
    warm(plain, fast, given())
    before = plain(given())["last"]
    for net in (plain, fast):
        change(net)
    calls = fast.forward.counters.calls
    with torch.no_grad():
        for _ in range(5):
            found = assert_same(plain, fast, given())
    assert fast.forward.counters.calls == calls + 5
    assert (found["last"] - before).abs().max() > 1e-3, "the change makes no difference"


def test_it_sees_a_name_that_the_code_reads(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, fast = pair(tmp_path)
    warm(plain, fast, given())
    replays = fast.forward.counters.replays
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    with torch.no_grad():
        assert_same(plain, fast, given())
    assert fast.forward.counters.replays == replays  # of those whose results somebody has seen


class Dropping(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 16), nn.Dropout(0.999))


def test_it_sees_training_mode(pool: Pool, tmp_path: Path) -> None:
    plain, fast = pair(tmp_path, Dropping())
    seen = warm(plain, fast, given())
    fast[1].train()
    with torch.no_grad():
        assert (fast(given()) == 0).float().mean() > 0.8
    assert short_of(fast) == seen


def test_a_graph_that_has_gone_is_captured_by_the_long_way(pool: Pool, tmp_path: Path) -> None:
    plain, fast = pair(tmp_path)
    seen = warm(plain, fast, given())
    pool._graphs.clear()
    with torch.no_grad():
        assert_same(plain, fast, given(1))
        assert (short_of(fast), pool.num_captures) == (seen, 2)
        assert_same(plain, fast, given(1))
    assert short_of(fast) == seen + 1


def test_a_replay_that_fails_is_left_to_the_long_way(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, fast = pair(tmp_path)
    seen = warm(plain, fast, given())

    def fail(*args: Any) -> Any:
        raise NoGraphError("out of memory")

    monkeypatch.setattr(fast.forward._runner, "replayed", fail)
    with torch.no_grad():
        assert_same(plain, fast, given(1))
    assert short_of(fast) == seen
    assert fast.forward.counters.replays == 5


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x) * 2


def test_each_call_counts_once_however_it_ends(pool: Pool, tmp_path: Path) -> None:
    """A kernel is asked for a row that is not there, and the next call says so: by the short way,
    and by the long one. So does a replay that finds the module changed."""
    plain, fast = pair(tmp_path, Table())
    good, bad = torch.tensor([0, 4]), torch.tensor([0, 5])
    seen, counters = warm(plain, fast, good), fast.forward.counters
    with torch.no_grad():
        for mode in (torch.no_grad, torch.inference_mode):
            calls = counters.calls
            with mode():
                fast(bad)
            with pytest.raises(IndexError), mode():
                fast(good)
            assert counters.calls == calls + 2
        assert_same(plain, fast, good)
        assert (counters.calls, short_of(fast)) == (calls + 3, seen + 2)
        for net in (plain, fast):
            copy_in_place(net)
            net.table.weight = nn.Parameter(net.table.weight.detach() + 1, requires_grad=False)
        assert_same(plain, fast, good)
        assert (counters.calls, short_of(fast)) == (calls + 4, seen + 2)


def test_looks_are_shared_until_the_module_is_scanned_anew(pool: Pool, tmp_path: Path) -> None:
    plain, fast = pair(tmp_path)
    warm(plain, fast, given())
    short, state = fast.forward._replayed, fast.forward.state
    with torch.no_grad():
        for _ in range(5):
            assert_same(plain, fast, given(rows=2))
    first, second = short._ways.values()
    assert first.is_unchanged is second.is_unchanged
    state.scan()
    native, _ = native_look(fast.forward.options.cache_dir)
    assert short._comparison(native) is not first.is_unchanged
    short.forget()
    assert short._look is None


def test_looks_tell_calls_apart(pool: Pool) -> None:
    x, y = given(), given(rows=2)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x,), {}),
        ((), {"x": x}),
        ((), {"y": x}),
        ((y,), {}),
        ((x.double(),), {}),
        ((x, x), {}),
        ((x,), {"x": x}),
        ((x, 1), {}),
        ((x, True), {}),
        ((x, None), {}),
        ((x, "1"), {}),
        ((), {"x": x, "y": 1}),
        ((), {"y": 1, "x": x}),
        (([x],), {}),
        (((x,),), {}),
        (([x], 1), {}),
        (([x, 1],), {}),
        (([[x], 1],), {}),
        (([[x, 1]],), {}),
        (({"x": x},), {}),
        (({"y": x},), {}),
        (([],), {}),
        (([], []), {}),
        (([[]],), {}),
        (({},), {}),
        ((), {"x": [x, y]}),
        ((), {"x": [x], "y": y}),
    ]
    found = [replayed_calls.look_of(*call) for call in calls]
    with torch.inference_mode():
        found.append(replayed_calls.look_of(*calls[0]))
    looks = [look for look, _ in filter(None, found)]
    assert len({*looks}) == len(looks) == len(calls) + 1
    endless: list[Any] = []
    endless.append(endless)
    for other in (0.5, nn.Parameter(x), 1j, [0.5], (x, 1j), {"a": 0.5}, {1: x}, endless, {x}):
        assert replayed_calls.look_of((x, other), {}) is None


class Cached(nn.Module):
    """Return a sum, and what a cache holds from now on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, cache: list[Tensor], scales: dict[str, Tensor]) -> Any:
        y = self.linear(x) * scales["y"]
        return y + cache[0], [torch.cat([kept, y]) for kept in cache], ((y * scales["z"],), 2)


def test_lists_and_dictionaries_of_tensors_have_it(pool: Pool, tmp_path: Path) -> None:
    plain, fast = pair(tmp_path, Cached())
    scales = {"y": given() + 1, "z": given() + 2}
    warm(plain, fast, given(), [given(), given()], scales)
    with torch.no_grad():
        cache = [given(1.0), given(2.0)]
        _, kept, rest = assert_same(plain, fast, given(3.0), cache, scales)
        assert short_of(fast) == 3
        assert type(kept) is list
        assert type(rest) is tuple
        # a tensor that is given twice, another number of them, other names, another order of names
        assert_same(plain, fast, given(), [cache[0], cache[0]], scales)
        assert_same(plain, fast, given(), cache[:1], scales)
        assert_same(plain, fast, given(), cache, {**scales, "a": given()})
        assert_same(plain, fast, given(), cache, {"z": scales["y"], "y": scales["z"]})
        assert short_of(fast) == 3


class Leaving(nn.Module):
    """Leave what it has computed in a list among its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        kept[0] = self.linear(x)
        return kept[0] + 1


def test_what_a_call_leaves_in_a_list_takes_the_long_way(pool: Pool, tmp_path: Path) -> None:
    plain, fast = pair(tmp_path, Leaving())
    with torch.no_grad():
        for n in range(6):
            ours, theirs = [given()], [given()]
            torch.testing.assert_close(fast(given(n), ours), plain(given(n), theirs))
            torch.testing.assert_close(ours, theirs)
    assert fast.forward.counters.replays
    assert not short_of(fast)


def test_there_is_room_for_so_many_kinds_of_calls(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replayed_calls, "MOST_KNOWN", 2)
    plain, fast = pair(tmp_path)
    with torch.no_grad():
        for how in ("a", "b", "c"):
            for _ in range(4):
                assert_same(plain, fast, given(), how=how)
            assert len(fast.forward._replayed._ways) <= 2
    assert fast.forward._replayed._ways


def test_what_the_lock_was_held_for_is_seen(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, fast = pair(tmp_path)
    seen, short = warm(plain, fast, given()), fast.forward._replayed

    class Lock(nullcontext[None]):
        def __enter__(self) -> None:
            short.forget()  # as whoever looks at the module anew does

    monkeypatch.setattr(short, "_lock", Lock())
    with torch.no_grad():
        assert_same(plain, fast, given(1))
    assert short_of(fast) == seen


def test_other_models_rest_and_offloading_is_followed(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, fast = pair(tmp_path)
    seen, rested = warm(plain, fast, given()), list[Any]()
    monkeypatch.setattr(replayed_calls, "have_others_rest", rested.append)
    with torch.no_grad():
        assert_same(plain, fast, given(1))
        assert rested == [fast.forward]
        refusal = replayed_calls.model_offload.refusal
        monkeypatch.setattr(replayed_calls.model_offload, "refusal", lambda *_: "offloaded")
        assert_same(plain, fast, given(1))
        monkeypatch.setattr(replayed_calls.model_offload, "refusal", refusal)
        assert short_of(fast) == seen + 1
        monkeypatch.setattr(replayed_calls, "is_cast_as_one", lambda module: True)
        assert_same(plain, fast, given(1))
    assert short_of(fast) == seen + 1


def test_graphs_of_dynamo_take_it_too(
    pool: Pool, tmp_path: Path, fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sizes have names that Dynamo gave, and their arguments are as those of any module."""
    monkeypatch.setattr(dynamo, "AOT_LOG", dynamo.AotLog())
    torch.manual_seed(0)
    plain = (
        nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).eval().requires_grad_(False)
    )
    own = {"cache_dir": str(tmp_path), "strict": True}
    fast = torch.compile(copy.deepcopy(plain), backend="strop", options=own)
    with torch.no_grad():
        for shift in range(5):
            assert_same(plain, fast, given(shift))
        (served,) = dynamo.AOT_LOG.served
        (dispatcher,) = served.dispatchers
        assert dispatcher.counters.short_replays == 2
        assert_same(plain, fast, given(rows=2))  # other sizes are another call
    assert dispatcher.counters.short_replays == 2
