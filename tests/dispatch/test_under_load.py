"""Many threads call one module: all that decides a call is of one moment, and errors leave nothing
behind."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

import strop
from strop.dispatch.known_dispatchers import dispatcher_of
from strop.runtime.run import fewer_threads, workspace
from strop.runtime.run.executor import Bound
from strop.runtime.run.fair_turns import LANES
from tests.e2e import tiny
from tests.runtime.test_threads import in_threads
from tests.waiting import LIMIT_S, wait_until

NUM_THREADS = 16


@pytest.fixture(autouse=True)
def side_by_side(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Four calls run at once, with one thread each, whatever machine this is."""
    monkeypatch.setattr(LANES, "_most", lambda: 4)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Deep(nn.Module):
    """Linear layers, one after the other, which adapters can be put on."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(depth))

    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh() * gain
        return x


def adapted() -> nn.Module:
    config = LoraConfig(r=4, target_modules=["0", "1", "2", "3", "4", "5"], init_lora_weights=False)
    return inject_adapter_in_model(config, Deep()).eval().requires_grad_(False)


def optimized(module: nn.Module, **changes: Any) -> Any:
    """Compile it with torch's linears: calls of kernels alone need no lane for as long."""
    options = tiny.options(kernels_off=("cpu_linear",), **changes)
    return strop.optimize(module.eval().requires_grad_(False), options=options)


def given(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))


def is_at_rest(module: Any) -> bool:
    """Whether no lock of it is held, and no call under way."""
    dispatcher = dispatcher_of(module)
    assert dispatcher is not None
    return not (dispatcher._lock.is_held or dispatcher._in_flight.count or LANES.are_used)


def test_calls_run_side_by_side_each_in_its_own_memory() -> None:
    """As many as there are lanes, of 16 threads; all of them with serial results."""
    module = optimized(Deep(), strict=True)
    inputs = [given(rows, rows) for rows in (3, 70, 200)]
    with torch.no_grad():
        expected = [[module(x) for x in inputs] for _ in range(2)][1]
    together, most, usual = set[int](), list[int](), Bound._walk
    gate = threading.Barrier(4, timeout=LIMIT_S)

    def walk(self: Any, linked: Any, positions: Any) -> None:
        together.add(threading.get_ident())
        most.append(len(together))
        if not gate.broken:
            try:
                gate.wait()  # holds until four are here
                gate.abort()
            except threading.BrokenBarrierError:
                pass
        usual(self, linked, positions)
        together.discard(threading.get_ident())

    wrong = list[int]()

    def work(number: int) -> None:
        for step in range(12):
            which = (number + step) % len(inputs)
            if not torch.equal(module(inputs[which]), expected[which]):
                wrong.append(which)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bound, "_walk", walk)
        in_threads(work, NUM_THREADS)
    assert max(most) == 4
    assert not wrong
    assert is_at_rest(module)
    lanes = {lane for entry in module.forward.shapes.entries for lane in entry.bounds}
    assert lanes <= {0, 1, 2, 3}
    assert len([1 for device, _ in workspace._WORKSPACES if device.type == "cpu"]) <= 4


def test_who_waits_for_a_lane_runs_in_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first caller is alone when it begins, and runs in its own thread. The second one has to
    wait for it; the third one may find a lane that is free again."""
    monkeypatch.setattr(LANES, "_most", lambda: 1)
    module, x = optimized(Deep(), strict=True), given(40)
    with torch.no_grad():
        expected = [module(x) for _ in range(2)][1]
    ran, usual, found = list[str](), Bound._walk, list[Tensor]()
    lock = module.forward._lock

    def walk(self: Any, linked: Any, positions: Any) -> None:
        if positions:
            ran.append(threading.current_thread().name)
            if len(ran) == 1:  # one more waits for the lane, and the third for the lock
                wait_until(lambda: LANES._waiting and lock._turns._waiting)
        usual(self, linked, positions)

    def work(number: int) -> None:
        if number:
            wait_until(lambda: ran)
        found.append(module(x))

    monkeypatch.setattr(Bound, "_walk", walk)
    in_threads(work, 3)
    assert [name == "strop-lane-0" for name in ran[:2]] == [False, True]
    assert all(torch.equal(one, expected) for one in found)
    assert is_at_rest(module)


class Wide(nn.Module):
    """Products that are large enough for several threads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + x


def threads_of_runs(module: Any, work: Callable[[int], None], callers: int) -> list[int]:
    """How many threads torch had in each run, while so many call."""
    seen, usual = list[int](), Bound._walk

    def walk(self: Any, linked: Any, positions: Any) -> None:
        if positions:
            seen.append(torch.get_num_threads())
        usual(self, linked, positions)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bound, "_walk", walk)
        in_threads(work, callers)
    return seen


@pytest.mark.parametrize("has_other_bits", [False, True])
def test_callers_share_the_cores_if_bits_are_the_same(
    has_other_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch has four threads here: a lone call has them all, and of many each has one, unless a
    product gives other bits then."""
    torch.set_num_threads(4)
    module = optimized(Wide(), strict=True)
    inputs = [torch.randn(rows, 256) for rows in (64, 65, 200)]
    with torch.no_grad():
        expected = [[module(x) for x in inputs] for _ in range(2)][1]
    if has_other_bits:
        monkeypatch.setattr(fewer_threads, "_is_same", lambda call, full, fewer: False)
    wrong = list[int]()

    def work(number: int) -> None:
        for step in range(10):
            which = (number + step) % len(inputs)
            if not torch.equal(module(inputs[which]), expected[which]):
                wrong.append(which)

    assert threads_of_runs(module, lambda number: work(0), 1) == [4] * 10
    counts = threads_of_runs(module, work, NUM_THREADS)
    assert len(counts) == 10 * NUM_THREADS
    if has_other_bits:
        assert {*counts} == {4}
    else:
        assert counts.count(1) > 5 * NUM_THREADS, "most of them, and not those with few beside them"
    assert not wrong
    assert torch.get_num_threads() == 4
    assert is_at_rest(module)


@pytest.mark.parametrize("flushes", [False, True])
def test_denormal_numbers_are_what_they_are_to_the_caller(flushes: bool) -> None:
    """``torch.set_flush_denormal`` is a setting of the thread that calls it."""
    module, x = optimized(Deep(1), strict=True), given(40) * 1e-37
    with torch.no_grad():
        module.layers[0].bias.zero_()
    expected, wrong = list[Tensor](), list[int]()

    def alone(number: int) -> None:
        torch.set_flush_denormal(flushes)
        expected.extend(module(x) for _ in range(2))

    def work(number: int) -> None:
        torch.set_flush_denormal(flushes == (number % 2 == 0))
        for _ in range(20):
            found = module(x)
            if number % 2 == 0 and not torch.equal(found, expected[1]):
                wrong.append(number)

    in_threads(alone, 1)
    in_threads(work, NUM_THREADS)
    below = expected[1].abs().lt(2.0**-126) & expected[1].ne(0)
    assert below.any() != flushes
    assert not wrong


def test_a_call_has_its_own_numbers() -> None:
    """Which floats are inputs is decided once for calls that come one after the other: not with
    those of another thread's call."""
    module = optimized(Deep(), strict=True)
    gains = [0.5 + 0.125 * n for n in range(8)]
    x = given(9)
    with torch.no_grad():
        for gain in gains:
            module(x, gain=gain)
        expected = [module(x, gain=gain) for gain in gains]
    wrong = list[float]()

    def work(number: int) -> None:
        for step in range(40):
            which = (number * 3 + step) % len(gains)
            if not torch.equal(module(x, gain=gains[which]), expected[which]):
                wrong.append(gains[which])

    in_threads(work, NUM_THREADS)
    assert not wrong


def test_numbers_are_decided_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above may have luck: nobody else can be between the look and the call."""
    module = optimized(Deep(), strict=True)
    with torch.no_grad():
        module(given(3), gain=0.5)
        dispatcher, held = module.forward, list[bool]()
        usual = dispatcher._maker.resolved

        def resolved(*args: Any) -> Any:
            held.append(dispatcher._lock._owner == threading.get_ident())
            return usual(*args)

        monkeypatch.setattr(dispatcher._maker, "resolved", resolved)
        module(given(3), gain=0.25)
    assert held
    assert all(held)


@pytest.mark.parametrize("mode", ["merged", "unmerged"])
def test_adapters_change_as_a_whole(mode: str) -> None:
    """Another thread changes the scale of one layer after the other: a call has all of the old
    ones or all of the new ones."""
    module, x = optimized(adapted(), lora=mode, strict=True), given(150)
    scales = (0.5, 2.0, -1.0)

    def put(scale: float) -> None:
        with strop.changing(module):
            for layer in module.layers:
                layer.scaling["default"] = scale
                stop.wait(0.001)  # others would come in between

    stop, expected, found = threading.Event(), [], list[Tensor]()
    with torch.no_grad():
        for _ in range(2):  # the second ones are those of a graph in which scales are inputs
            expected = []
            for scale in scales:
                put(scale)
                expected.append(module(x))

    def work(number: int) -> None:
        if not number:
            for step in range(12):
                put(scales[step % 3])
            stop.set()
            return
        while not stop.is_set():
            found.append(module(x))

    in_threads(work, 6)
    assert len(found) > 12
    matches = [[torch.equal(one, other) for other in expected] for one in found]
    assert all(map(any, matches))
    assert len({match.index(True) for match in matches}) > 1
    assert is_at_rest(module)


def test_a_scale_of_each_call_is_its_own() -> None:
    """diffusers' ``scale`` is written into weights that all calls read: not under those that run,
    which have another one."""
    unet = tiny.unet()
    unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    module = optimized(unet, strict=True)
    args, scales = tiny.unet_args(1, 8, 8, 5), (0.5, 1.0, 1.5)

    def call(scale: float) -> Tensor:
        kwargs = {"cross_attention_kwargs": {"scale": scale}, "return_dict": False}
        result: Tensor = module(*args, **kwargs)[0]
        return result

    with torch.no_grad():
        expected = [[call(scale) for scale in scales] for _ in range(2)][1]
    assert not torch.equal(expected[0], expected[1])
    wrong = list[float]()

    def work(number: int) -> None:
        for step in range(6):
            which = (number + step) % 3
            if not torch.equal(call(scales[which]), expected[which]):
                wrong.append(scales[which])

    in_threads(work, 8)
    assert not wrong


def test_those_who_change_two_models_do_not_wait_for_each_other() -> None:
    both = [optimized(Deep(2)), optimized(Deep(2))]
    pairs = [{"unet": both[0], "vae": both[1]}, {"unet": both[1], "vae": both[0]}]

    def work(number: int) -> None:
        from strop.dispatch.changing import held

        for _ in range(200):
            with held(module.forward for module in pairs[number].values()):
                pass

    in_threads(work, 2)


# errors


def test_an_exception_in_the_middle_leaves_the_others_alone() -> None:
    """A debugger's place between the steps stands for a kernel that fails."""
    module, x = optimized(Deep(), strict=True), given(50)
    with torch.no_grad():
        expected = [module(x) for _ in range(2)][1]
    usual, failed, wrong = Bound._walk, list[str](), list[int]()
    calls = iter(range(10_000))

    def walk(self: Any, linked: Any, positions: Any) -> None:
        if positions and next(calls) % 5 == 0:
            usual(self, linked, positions[: len(positions) // 2])
            raise RuntimeError("in the middle")
        usual(self, linked, positions)

    def work(number: int) -> None:
        for _ in range(20):
            try:
                found = module(x)
            except RuntimeError as error:
                failed.append(str(error))
            else:
                if not torch.equal(found, expected):
                    wrong.append(number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bound, "_walk", walk)
        in_threads(work, NUM_THREADS)
    assert len(failed) == NUM_THREADS * 20 / 5
    assert set(failed) == {"in the middle"}
    assert not wrong
    assert is_at_rest(module)
    with torch.no_grad():
        assert torch.equal(module(x), expected)


def short_of_memory(failing: int, count: list[int]) -> Callable[..., Any]:
    """Return ``torch.empty`` whose ``failing``-th call finds no memory."""
    usual = torch.empty

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        count[0] += 1
        if count[0] == failing:
            raise torch.OutOfMemoryError("out of memory: tried to allocate 1.00 GiB")
        return usual(*args, **kwargs)

    return empty


@pytest.mark.parametrize("failing", range(1, 9))
def test_no_memory_for_the_arena_or_weights(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever allocation of a first, larger or adapted call fails: the error reaches the caller,
    and the same call works when there is memory again."""
    module, plain = optimized(adapted(), strict=True), adapted()
    small, large = given(3), given(500)
    with torch.no_grad():
        module(small)
        monkeypatch.setattr(workspace, "_WORKSPACES", {})
        module.forward.forget_shapes()
        for layer in module.layers:
            layer.scaling["default"] = 3.0
        for layer in plain.layers:
            layer.scaling["default"] = 3.0
        count = [0]
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", short_of_memory(failing, count))
            if count_of_allocations(module, large, count) < failing:
                pytest.skip("so many allocations there are not")
        assert is_at_rest(module)
        for x in (large, small, large):
            torch.testing.assert_close(module(x), plain(x), rtol=1e-4, atol=1e-5)
        again = module(large)
        assert all(torch.equal(module(large), again) for _ in range(3))
        assert module.forward.counters.eager_calls == 0


def count_of_allocations(module: Any, x: Tensor, count: list[int]) -> int:
    """Call it, where the error that is expected is no failure; return how many were made."""
    with contextlib.suppress(torch.OutOfMemoryError):
        module(x)
    return count[0]


def test_memory_that_runs_out_under_load_is_one_callers_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Calls of sizes that need more working memory fail now and then; all others are right, and so
    are all when there is memory again."""
    module = optimized(Deep(), strict=True)
    inputs = [given(rows, rows) for rows in (3, 70, 200, 900)]
    with torch.no_grad():
        expected = [[module(x) for x in inputs] for _ in range(2)][1]
    monkeypatch.setattr(workspace, "_WORKSPACES", {})
    module.forward.forget_shapes()
    failed, wrong, usual = list[int](), list[int](), workspace.Workspace.reserve
    notes = list[str]()
    calls = iter(range(100_000))

    def reserve(self: Any, size_bytes: int, tenant: Any) -> Tensor:
        if next(calls) % 7 == 3:
            self.give_back()
            raise torch.OutOfMemoryError("out of memory: tried to allocate 1.00 GiB")
        return usual(self, size_bytes, tenant)

    def work(number: int) -> None:
        for step in range(20):
            which = (number + step) % len(inputs)
            try:
                found = module(inputs[which])
            except torch.OutOfMemoryError as error:
                failed.append(which)
                notes.append(error.__notes__[0])
            else:
                if not torch.equal(found, expected[which]):
                    wrong.append(which)

    with monkeypatch.context() as patch:
        patch.setattr(workspace.Workspace, "reserve", reserve)
        in_threads(work, NUM_THREADS)
    assert failed
    assert not wrong
    assert all("MB of working memory at" in note for note in notes)
    assert is_at_rest(module)
    with torch.no_grad():
        assert all(torch.equal(module(x), y) for x, y in zip(inputs, expected, strict=True))


def short_half_way(size_bytes: int, device: str, every: int) -> Callable[..., None]:
    """Return a walk over steps that asks for so much memory behind half of them, at every so many
    calls."""
    usual, calls = Bound._walk, iter(range(100_000))

    def walk(self: Any, linked: Any, positions: Any) -> None:
        half = len(positions) // 2 if positions and next(calls) % every == 0 else 0
        if half:
            usual(self, linked, positions[:half])
            torch.empty(size_bytes, dtype=torch.uint8, device=device)
        usual(self, linked, positions[half:])

    return walk


def test_memory_runs_out_in_the_middle_and_the_pipeline_draws_as_before() -> None:
    """Some calls of many threads ask for more memory than there is when half of their steps have
    run: their callers get torch's own error, all others the serial bits, and the pipeline draws the
    same picture afterwards."""
    pipe = tiny.pipeline()
    strop.optimize(pipe, options=tiny.options())

    def drawn() -> Any:
        source = torch.Generator().manual_seed(3)
        given = {"num_inference_steps": 2, "height": 16, "width": 16, "output_type": "np"}
        embeds = {
            "prompt_embeds": tiny.unet_args(1, 8, 8, 5)[2],
            "negative_prompt_embeds": tiny.unet_args(2, 8, 8, 5)[2][:1],
        }
        return pipe(generator=source, **embeds, **given).images

    cases = [tiny.unet_args(1, 8, 8, 5), tiny.unet_args(2, 8, 4, 7)]
    with torch.no_grad():
        picture = [drawn() for _ in range(2)][1]
        expected = [[pipe.unet(*args)[0] for args in cases] for _ in range(2)][1]
    failed, wrong = list[str](), list[int]()

    def work(number: int) -> None:
        for step in range(10):
            which = (number + step) % len(cases)
            try:
                found = pipe.unet(*cases[which])[0]
            except RuntimeError as error:
                failed.append(f"{error} {error.__notes__}")
            else:
                if not torch.equal(found, expected[which]):
                    wrong.append(which)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bound, "_walk", short_half_way(1 << 60, "cpu", every=5))
        in_threads(work, NUM_THREADS)
    assert NUM_THREADS * 10 / 5 <= len(failed) < NUM_THREADS * 10  # a call walks once or more
    assert all("allocate memory" in text and "MB of working memory at" in text for text in failed)
    assert not wrong
    assert is_at_rest(pipe.unet)
    with torch.no_grad():
        assert (drawn() == picture).all()
        found = [pipe.unet(*args)[0] for args in cases]
    assert all(map(torch.equal, found, expected))
    assert pipe.unet.forward.counters.eager_calls == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_runs_out_of_memory_under_load() -> None:
    """Every third call of many threads needs more than the GPU has left, for its results, and
    takes what a small one beside it may want; then each small one runs out in the middle. The
    others get serial bits, and so does everyone when there is memory again."""
    module = optimized(Deep().cuda(), strict=True)
    small, large = [given(rows, rows).cuda() for rows in (3, 64, 200)], given(1 << 20).cuda()
    with torch.no_grad():
        expected = [[module(x) for x in small] for _ in range(3)][2]
        wanted = module.forward.eager(large)
    failed, wrong = list[int](), list[int]()
    total = torch.cuda.get_device_properties(0).total_memory

    def work(number: int) -> None:
        for step in range(12):
            which = (number + step) % len(small)
            try:
                if step % 3 == 2:
                    module(large)
                    continue
                found = module(small[which])
            except torch.OutOfMemoryError:
                failed.append(step % 3)
            else:
                if not torch.equal(found, expected[which]):
                    wrong.append(which)

    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved() + large.nbytes // 2) / total
    )
    try:
        in_threads(work, NUM_THREADS)
        assert failed.count(2) == 4 * NUM_THREADS, "all large calls fail"
        assert len(failed) < 12 * NUM_THREADS, "small ones are served"
        before = len(failed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Bound, "_walk", short_half_way(large.nbytes, "cuda", every=1))
            module.forward.forget_shapes()  # step by step again, without a CUDA graph
            in_threads(work, 4)
        assert len(failed) > before + 4 * 4, "small calls fail in the middle, too"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert not wrong
    assert not module.forward._lock.is_held
    with torch.no_grad():
        torch.testing.assert_close(module(large), wanted, rtol=1e-3, atol=1e-4)
        assert all(torch.equal(module(x), y) for x, y in zip(small, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_without_memory_leaves_a_module_that_works() -> None:
    module = optimized(Deep().cuda(), strict=True)
    small, large = given(64).cuda(), torch.randn(1 << 20, 32, device="cuda")
    with torch.no_grad():
        expected = [module(small) for _ in range(3)][2]
        wanted = module.forward.eager(large)
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        taken = torch.cuda.memory_reserved() + large.nbytes // 2
        torch.cuda.set_per_process_memory_fraction(taken / total)
        try:
            with pytest.raises(torch.OutOfMemoryError):
                module(large)
            assert torch.equal(module(small), expected)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        torch.testing.assert_close(module(large), wanted, rtol=1e-3, atol=1e-4)
        assert torch.equal(module(small), expected)
        assert not module.forward._lock.is_held


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_threads_of_a_gpu_get_serial_bits() -> None:
    module = optimized(Deep().cuda().half(), strict=True)
    inputs = [given(rows, rows).cuda().half() for rows in (3, 70, 200)]
    with torch.no_grad():
        expected = [[module(x) for x in inputs] for _ in range(3)][2]
    wrong = list[int]()

    def work(number: int) -> None:
        for step in range(50):
            which = (number + step) % len(inputs)
            if not torch.equal(module(inputs[which]), expected[which]):
                wrong.append(which)

    in_threads(work, 32)
    assert not wrong
    assert not module.forward._lock.is_held
