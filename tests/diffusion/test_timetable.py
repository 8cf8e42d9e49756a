"""What depends on the timestep runs for all timesteps of a loop at once, and no step is stale."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.api import optimize_module
from strop.diffusion.components import DenoiserAdapter
from strop.dispatch.derived_inputs import HOISTED, TIMETABLE
from strop.dispatch.entry_runner import EntryRunner
from strop.runtime.derived import sources
from strop.runtime.loop import timetable
from strop.runtime.loop.denoise_loop import DenoiseLoop, moment_of, place_among
from strop.runtime.loop.hoisting import stamp_of
from strop.runtime.run.cuda_graphs import CapturedGraph
from strop.runtime.run.executor import Bound
from tests.diffusion.replayed import replayed_first
from tests.diffusion.test_hoisting import (
    STEPS,
    after_step,
    guidance_ends,
    is_same,
    nothing,
    picture,
    pipeline,
    plain,  # noqa: F401
    prompt_written,
)
from tests.diffusion.test_hoisting_rules import Recorded
from tests.diffusion.test_never_stale import _is_ahead
from tests.e2e import tiny


class Sizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.table[: x.shape[1]] * 2


NUM_TIMED = 7  # launches: sines, two linears with their activation, all projections in one
Counts = tuple[int, int]  # timetables that were made, and calls that found their timestep there


def counts(pipe: Any) -> Counts:
    row = strop.explain(pipe).components[0].derived_of(TIMETABLE)
    return (row.num_made, row.num_reuses) if row else (0, 0)


def test_one_timetable_a_picture():
    on, off = (pipeline(hoist=hoist) for hoist in (True, False))
    for number in (1, 2):
        assert is_same(picture(on, seed=number), picture(off, seed=number))
        assert counts(on) == (number, number * (STEPS - 1))
    row, without = (strop.explain(pipe).components[0] for pipe in (on, off))
    hoisted, timed = row.derived_of(HOISTED), row.derived_of(TIMETABLE)
    assert timed.count == NUM_TIMED
    assert row.num_launches == without.num_launches - hoisted.count - NUM_TIMED
    assert f"computed for all timesteps at once: {NUM_TIMED} launches, " in str(timed)
    assert timed.size_bytes > 0


def time_weight_written(pipe: Any, step: int, t: Tensor, now: dict[str, Any]) -> dict[str, Any]:
    pipe.unet.time_embedding.linear_1.weight.mul_(2)
    return {}


def projection_written(pipe: Any, step: int, t: Tensor, now: dict[str, Any]) -> dict[str, Any]:
    """A part of the merged weight of all projections."""
    pipe.unet.mid_block.resnets[0].time_emb_proj.weight[3].mul_(50)
    return {}


def other_weight_written(pipe: Any, step: int, t: Tensor, now: dict[str, Any]) -> dict[str, Any]:
    pipe.unet.conv_in.weight.mul_(2)
    return {}


def time_written(pipe: Any, step: int, t: Tensor, now: dict[str, Any]) -> dict[str, Any]:
    """The loop goes through views of these."""
    pipe.scheduler.timesteps[step + 1 :].sub_(100)
    return {}


# what comes of two steps before and two behind it; the first step, which makes one, does without
CALLBACKS: dict[Callable[..., Any], Counts] = {
    nothing: (1, 3),
    other_weight_written: (1, 3),
    time_weight_written: (2, 3),
    projection_written: (2, 3),
    time_written: (2, 3),
    prompt_written: (1, 3),
    guidance_ends: (2, 3),  # another batch
}


@pytest.mark.parametrize("device", tiny.DEVICES)
@pytest.mark.parametrize("callback", CALLBACKS, ids=lambda c: c.__name__)
def test_the_next_step_sees_what_a_callback_did(callback: Callable[..., Any], device: str):
    on, off = (pipeline(hoist=hoist, device=device) for hoist in (True, False))
    if device == "cuda":  # graphs are captured at the second use
        picture(off), picture(on)
    before = counts(on)
    expected = picture(off, **after_step(1, callback))
    found = picture(on, **after_step(1, callback))
    assert is_same(found, expected)
    made, used = (now - then for now, then in zip(counts(on), before, strict=True))
    if device == "cpu" or callback is not guidance_ends:  # whose new shape is captured first
        assert (made, used) == CALLBACKS[callback]
    assert is_same(found, picture(pipeline(hoist=True, device=device))) == (callback is nothing)


@pytest.mark.parametrize("callback", [time_weight_written, time_written])
def test_these_tests_would_notice_a_missing_check(
    callback: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sources, "versions_of", lambda tensors: ())
    on, off = (pipeline(hoist=hoist) for hoist in (True, False))
    more = after_step(1, callback)
    assert not is_same(picture(on, **more), picture(off, **more))


def time_parameter(pipe: Any) -> None:
    linear = pipe.unet.time_embedding.linear_2
    linear.weight = torch.nn.Parameter(linear.weight.detach() * 2)


def time_data(pipe: Any) -> None:
    projection = pipe.unet.mid_block.resnets[0].time_emb_proj.weight
    projection.data = projection.data * 50


def time_uncounted(pipe: Any) -> None:
    pipe.unet.time_embedding.linear_1.weight.data.mul_(2)


@pytest.mark.parametrize("ahead", [False, True], ids=["", "looked at behind the run"])
@pytest.mark.parametrize("change", [time_parameter, time_data, time_uncounted])
def test_the_next_picture_sees_another_weight(
    change: Callable[[Any], None], ahead: bool, monkeypatch: pytest.MonkeyPatch
):
    if ahead:
        monkeypatch.setattr(EntryRunner, "may_run_ahead", _is_ahead)
    on, off = (pipeline(hoist=hoist) for hoist in (True, False))
    for pipe in (on, off):
        picture(pipe), picture(pipe)
        change(pipe)
    found = picture(on)
    assert is_same(found, picture(off))
    assert not is_same(found, picture(pipeline(hoist=True)))


# Timesteps that are not the scheduler's, or nobody counts writes to


def in_a_loop(pipe: Any, timesteps: Any, batch: int = 2) -> list[Tensor]:
    """One call for each of them."""
    pipe.scheduler.set_timesteps(STEPS)
    sample, _, prompt = tiny.unet_args(batch, 8, 8, 7)
    with pipe.progress_bar(total=STEPS):
        return [pipe.unet(sample, t, prompt).sample for t in timesteps(pipe.scheduler.timesteps)]


FOREIGN: dict[str, Callable[[Tensor], Any]] = {
    "numbers": lambda timesteps: timesteps.tolist(),
    "copies": lambda timesteps: [t.clone() for t in timesteps],
    "a vector each": lambda timesteps: [torch.stack([t, t + 1]) for t in timesteps],
    "two of them": lambda timesteps: [timesteps[n : n + 2] for n in range(STEPS - 1)],
    "other types": lambda timesteps: [t.float() for t in timesteps],
}


@pytest.mark.parametrize("timesteps", FOREIGN.values(), ids=FOREIGN)
def test_other_timesteps_are_computed(timesteps: Callable[[Tensor], Any]):
    on, off = (pipeline(hoist=hoist) for hoist in (True, False))
    assert all(map(torch.equal, in_a_loop(on, timesteps), in_a_loop(off, timesteps)))
    assert counts(on) == (0, 0)


def test_some_of_the_timesteps_in_any_order():
    on, off = (pipeline(hoist=hoist) for hoist in (True, False))

    def some(timesteps: Tensor) -> list[Tensor]:
        return [timesteps[2], timesteps[0], timesteps[3].reshape(1), timesteps[2].expand(2)]

    found = in_a_loop(on, some)
    assert all(map(is_same, found, in_a_loop(off, some)))
    assert not is_same(found[0], found[1])
    assert counts(on) == (1, 4)


def test_outside_of_a_loop_there_is_no_timetable():
    pipe = pipeline(hoist=True)
    in_a_loop(pipe, iter)
    sample, _, prompt = tiny.unet_args(2, 8, 8, 7)
    pipe.unet(sample, pipe.scheduler.timesteps[1], prompt)
    assert counts(pipe) == (1, STEPS - 1)
    (kept,) = pipe.unet.forward.loop.kept.values()
    (table,) = kept.timetables
    assert table.held is None, "the end of a loop lets go"


def test_timesteps_of_inference_mode_count_no_writes():
    on, off = (pipeline(hoist=hoist) for hoist in (True, False))
    for pipe in (on, off):
        with torch.inference_mode():
            pipe.scheduler.set_timesteps(STEPS)
        pipe.scheduler.set_timesteps = lambda *args: None
    assert all(map(torch.equal, in_a_loop(on, iter), in_a_loop(off, iter)))
    assert counts(on) == (0, 0)


@pytest.mark.parametrize(
    ("batch", "copies"),
    [(1, 50), (2, 25), (3, 17), (20, 3), (21, 3), (31, 2), (32, 0)],
)
def test_as_many_copies_as_the_guards_allow(batch: int, copies: int):
    """A UNet's batch must be below 64, as diffusers' upsampling says."""
    pipe = pipeline(hoist=True)
    pipe.scheduler.set_timesteps(50)
    sample, _, prompt = tiny.unet_args(batch, 8, 8, 7)
    with pipe.progress_bar(total=50):
        for t in pipe.scheduler.timesteps[:2]:
            pipe.unet(sample, t, prompt)
    (entry,) = pipe.unet.forward.shapes.entries
    work = entry.bounds[0].timetable._work
    assert counts(pipe) == ((1, 1) if copies else (0, 0))
    assert (work.copies if work else 0) == copies
    if work:
        assert len(work.tables[0]) == -(-50 // copies) * copies * batch


def test_a_large_timetable_is_not_made(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timetable, "MOST_BYTES", 1000)
    monkeypatch.setattr(timetable, "WEIGHTS_SHARE", 1 << 30)
    on, off = (pipeline(hoist=hoist) for hoist in (True, False))
    assert torch.equal(picture(on), picture(off))
    assert counts(on) == (0, 0)


def test_sdxl_reads_what_the_prompt_gave():
    """Its time embedding is a sum with one of the prompt and of sizes, one for each row."""
    changes = {
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 4,
        "projection_class_embeddings_input_dim": 32,
    }
    sample, _, prompt = tiny.unet_args(3, 8, 8, 7)
    more = {"text_embeds": torch.randn(3, 8), "time_ids": torch.arange(18.0).view(3, 6)}
    found = []
    for hoist in (True, False):
        pipe = tiny.pipeline()
        pipe.unet = tiny.unet(**changes)
        strop.optimize(pipe, options=tiny.options(hoist=hoist, strict=True))
        pipe.scheduler.set_timesteps(STEPS)
        with pipe.progress_bar(total=STEPS), torch.no_grad():
            found.append(
                [
                    pipe.unet(sample, t, prompt, added_cond_kwargs=more).sample
                    for t in pipe.scheduler.timesteps
                ]
            )
        assert counts(pipe) == ((1, STEPS - 1) if hoist else (0, 0))
    assert all(map(is_same, *found))


@pytest.mark.parametrize("reads_prompt", [False, True])
def test_prompts_in_turns(reads_prompt: bool):
    """A table for each call would cost more than it saves: one serves half of the loop before
    another is made, where it depends on the prompt."""
    changes = (
        {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 4,
            "projection_class_embeddings_input_dim": 32,
        }
        if reads_prompt
        else {}
    )
    sample, _, prompt = tiny.unet_args(2, 8, 8, 7)
    prompts = [(prompt, torch.randn(2, 8)), (prompt + 1, torch.randn(2, 8))]
    ids, found = torch.arange(12.0).view(2, 6), []
    for hoist in (True, False):
        pipe = tiny.pipeline()
        pipe.unet = tiny.unet(**changes)
        strop.optimize(pipe, options=tiny.options(hoist=hoist, strict=True))
        pipe.scheduler.set_timesteps(STEPS)
        with pipe.progress_bar(total=STEPS):
            for t in pipe.scheduler.timesteps:
                for states, pooled in prompts:
                    more = {"text_embeds": pooled, "time_ids": ids} if reads_prompt else None
                    found.append(pipe.unet(sample, t, states, added_cond_kwargs=more).sample)
        if hoist:
            assert counts(pipe) == ((3, 4) if reads_prompt else (1, 2 * STEPS - 1))
    half = len(found) // 2
    assert all(map(is_same, found[:half], found[half:]))


def test_another_shape_in_the_loop_has_a_table_of_its_own():
    pipe = pipeline(hoist=True)
    pipe.scheduler.set_timesteps(STEPS)
    shapes = [tiny.unet_args(*size) for size in ((2, 8, 8, 7), (3, 16, 8, 7))]
    with pipe.progress_bar(total=STEPS):
        for t in pipe.scheduler.timesteps:
            for sample, _, prompt in shapes:
                pipe.unet(sample, t, prompt)
    assert counts(pipe) == (2, 2 * (STEPS - 1))


def test_a_call_that_fails_ahead_leaves_the_model_to_be_looked_at(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(EntryRunner, "may_run_ahead", _is_ahead)
    on, off = (pipeline(hoist=hoist) for hoist in (True, False))
    sample, _, prompt = tiny.unet_args(2, 8, 8, 7)
    for pipe in (on, off):
        in_a_loop(pipe, iter), in_a_loop(pipe, iter)
        time_parameter(pipe)
    run, t = Bound.run, on.scheduler.timesteps[1]

    def interrupted(self: Bound, *args: Any) -> Any:
        monkeypatch.setattr(Bound, "run", run)
        raise KeyboardInterrupt

    monkeypatch.setattr(Bound, "run", interrupted)
    with on.progress_bar(total=2):
        with pytest.raises(KeyboardInterrupt):
            on.unet(sample, t, prompt)
        found = on.unet(sample, t, prompt).sample
    with off.progress_bar(total=1):
        assert is_same(found, off.unet(sample, t, prompt).sample)


def test_nothing_waits_for_the_garbage_collector():
    """Memory of a program goes with it, its timetable's too, in the middle of a loop."""
    pipe = pipeline(hoist=True)
    pipe.scheduler.set_timesteps(STEPS)
    sample, _, prompt = tiny.unet_args(2, 8, 8, 7)
    with pipe.progress_bar(total=STEPS):
        pipe.unet(sample, pipe.scheduler.timesteps[0], prompt)
        (entry,) = pipe.unet.forward.shapes.entries
        (bound,) = entry.bounds.values()
        work = bound.timetable._work
        gone = [weakref.ref(bound), weakref.ref(work.tables[0])]
        gc.disable()
        try:
            del bound, work
            entry.bounds.clear()
            assert [found() for found in gone] == [None, None]
        finally:
            gc.enable()


def test_a_graph_that_reads_no_argument_copies_none():
    """One that asks an argument for its size alone."""
    net, loop = Sizes().eval(), DenoiseLoop()
    dispatcher = optimize_module(net, tiny.options(hoist=True), loop=loop)
    with torch.no_grad():
        x = torch.randn(2, 3)
        expected = net(x)
        (entry,) = dispatcher.shapes.entries
        (bound,) = entry.bounds.values()
        result = torch.empty_like(expected)
        rest = Recorded(lambda: result.copy_(*bound.run_rest([x])))
        captured = CapturedGraph(rest, None, None, (x,), (result,), bound, 0, 0)  # type: ignore[arg-type]
        assert bound.late_arguments == []
        assert torch.equal(captured.replay([x], None)[0][0], expected)


def test_a_graph_replays_what_no_timetable_has(plain: Iterator[None]):  # noqa: F811
    pipe = pipeline(hoist=True)
    sample, _, prompt = tiny.unet_args(2, 8, 8, 7)
    pipe.scheduler.set_timesteps(STEPS)
    times = pipe.scheduler.timesteps
    with pipe.progress_bar(total=1):
        expected = [pipe.unet(sample, t, prompt).sample for t in times]
    (entry,) = pipe.unet.forward.shapes.entries
    (bound,) = entry.bounds.values()
    inputs = [prompt.clone(), sample.clone(), times[0].expand(2).float()]
    result = torch.empty_like(sample)
    parts = [
        Recorded(lambda: bound.run_prologue(inputs)),
        Recorded(lambda: bound.run_timed(inputs)),
        Recorded(lambda: result.copy_(*bound.run_rest(inputs))),
    ]
    prologue, timed, rest = parts
    captured = CapturedGraph(rest, prologue, timed, tuple(inputs), (result,), bound, 0, 5, 2)  # type: ignore[arg-type]

    def replay(place: int, number: int, known: Tensor | None, launches: int) -> list[int]:
        given, t = stamp_of(number, [prompt]), times[place].expand(2)
        (found,), count = captured.replay([prompt, sample, t], given, moment_of(known, t, given))
        assert is_same(found, expected[place])
        assert count == launches
        return [part.num_replays for part in parts]

    assert replay(0, 1, times, 7) == [1, 1, 1]
    assert replay(2, 1, times, 5) == [1, 1, 2]
    assert replay(1, 1, None, 7) == [1, 2, 3]
    assert replay(3, 1, times, 5) == [1, 2, 4]
    inputs[2].fill_(-1.0)  # nobody reads it where a timetable has all
    assert replay(1, 1, times, 5) == [1, 2, 5]
    assert replay(1, 2, times, 5) == [2, 2, 6], "a step amid a loop makes a table first"
    assert replay(0, 3, times, 7) == [3, 3, 7]


def test_the_first_picture_looks_up_what_others_do() -> None:
    """The step that captures the graph is its second one, for which the first made no table."""
    with replayed_first():
        pipe = pipeline(hoist=True)
        pictures = [picture(pipe, seed=3)]
        assert counts(pipe) == (1, STEPS - 1)
        pictures.append(picture(pipe, seed=3))
        assert counts(pipe) == (2, 2 * (STEPS - 1))
    assert torch.equal(*pictures)


def test_where_a_timestep_is():
    times = torch.arange(10, 0, -1)
    assert [place_among(times, t) for t in times] == list(range(10))
    assert place_among(times[2:6], times[1]) is None
    assert place_among(times[2:6], times[6]) is None
    assert place_among(times, times[3].clone()) is None
    assert place_among(times, times.view(torch.float64)[3]) is None


class ByTime(nn.Module):
    """Takes a timestep as a tensor without dims, as a scheduler's loop gives it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.time, self.words = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        scale = self.time(timestep.float().expand(4) / 10)
        return sample * scale + self.words(encoder_hidden_states)


def test_a_timestep_without_dims_has_no_timetable():
    net, plain_net, loop = ByTime().eval(), ByTime().eval(), DenoiseLoop()
    options = tiny.options(hoist=True, strict=True)
    dispatcher = optimize_module(net, options, adapter=DenoiserAdapter(), loop=loop)
    times, words = torch.arange(9, 0, -2), torch.randn(3, 4)
    with torch.no_grad():
        loop.begin(times)
        for t in times:
            x = torch.randn(3, 4)
            given = {"timestep": t, "encoder_hidden_states": words}
            torch.testing.assert_close(net(x, **given), plain_net(x, **given))
        loop.end()
    assert dispatcher.counters.hoisted.num_timetables == 0
    assert dispatcher.counters.eager_calls == 0
