"""How long hoisted results live: one denoise loop, for one module, on one stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers.utils.import_utils import is_peft_available
from torch import Tensor

import strop
from strop.bench.pipelines import actions_adapters as adapters
from strop.bench.pipelines import actions_code as code
from strop.bench.pipelines import actions_weights as weights
from strop.dispatch.derived_inputs import HOISTED
from strop.dispatch.entry_runner import EntryRunner
from tests.diffusion import test_never_stale as changes
from tests.diffusion.test_hoisting import counts, is_same, picture, pipeline, plain  # noqa: F401
from tests.e2e import tiny

SIZE = (2, 8, 8, 7)
NUM_THREADS, NUM_PROMPTS = 200, 5
Args = tuple[Tensor, Tensor, Tensor]


def loop(pipe: Any, args: Args, calls: int = 2) -> Tensor:
    """A denoise loop of calls that are all the same."""
    with pipe.progress_bar(total=calls):
        results = [pipe.unet(*args).sample for _ in range(calls)]
    assert all(torch.equal(result, results[0]) for result in results)
    return results[0]


# What may happen to a prompt between two loops without torch counting it


def by_data(prompt: Tensor) -> None:
    prompt.data.mul_(0.5)


def by_data_assigned(prompt: Tensor) -> None:
    prompt.data = prompt.data * 0.5


def by_numpy(prompt: Tensor) -> None:
    prompt.numpy()[:] *= 0.5


def by_dlpack(prompt: Tensor) -> None:
    torch.from_dlpack(prompt).mul_(0.5)


def by_storage(prompt: Tensor) -> None:
    half = prompt * 0.5
    prompt.untyped_storage().copy_(half.untyped_storage())


@pytest.mark.parametrize("write", [by_data, by_data_assigned, by_numpy, by_dlpack, by_storage])
def test_the_next_loop_sees_an_uncounted_write(write: Callable[[Tensor], None]):
    on, off = (pipeline(hoist=hoist) for hoist in (True, False))
    args = tiny.unet_args(*SIZE)
    before = loop(on, args)
    write(args[2])
    after = loop(on, args)
    assert counts(on) == (2, 2)
    assert torch.equal(after, loop(off, args))
    assert not torch.equal(after, before)


def test_nothing_is_reused_outside_of_a_loop():
    pipe, args = pipeline(hoist=True), tiny.unet_args(*SIZE)
    loop(pipe, args)
    for _ in range(3):
        pipe.unet(*args)
    assert counts(pipe) == (4, 1)
    alone = strop.optimize(tiny.unet(), options=tiny.options(hoist=True))
    alone(*args)
    assert strop.explain(alone).components[0].derived_of(HOISTED) is None, "nobody tells of loops"


def test_the_end_of_a_loop_lets_go_of_the_prompt():
    pipe, args = pipeline(hoist=True), tiny.unet_args(*SIZE)
    with pipe.progress_bar(total=1):
        pipe.unet(*args)
        (kept,) = pipe.unet.forward.loop.kept.values()
        assert kept.held is not None
    assert kept.held is None


def test_shapes_share_the_memory():
    """It is as large as the largest, and each shape computes its own again."""
    on, off = (pipeline(hoist=hoist) for hoist in (True, False))
    sizes = [(2, 8, 8, 7), (4, 8, 16, 9), (2, 16, 8, 7), (1, 8, 8, 3)]
    many = [tiny.unet_args(*size) for size in sizes]
    for pipe in (on, off):
        pipe.results = []
        with pipe.progress_bar(total=1):
            for _ in range(2):
                pipe.results += [pipe.unet(*args).sample for args in many for _ in range(2)]
    assert all(map(torch.equal, on.results, off.results))
    assert counts(on) == (8, 8)
    bounds = [entry.bounds[0] for entry in on.unet.forward.shapes.entries]
    kept = strop.explain(on).components[0].derived_of(HOISTED).size_bytes
    assert kept == max(bound.kept_bytes for bound in bounds)
    # what is kept no longer lies in the arena
    others = [entry.bounds[0] for entry in off.unet.forward.shapes.entries]
    for bound, other in zip(bounds, others, strict=True):
        assert bound.arena_bytes + bound.kept_bytes <= other.arena_bytes + 2 * bound.kept_bytes


CHANGES: list[changes.Change] = [
    weights.load_state_dict,
    weights.load_state_dict_assign,
    weights.copy_in_place,
    weights.data_copy,
    weights.data_assigned,
    weights.one_data_assigned,
    weights.new_parameter,
    weights.ema,
    weights.ema_restored,
    code.swap_block,
    weights.dtype_round_trip,
    changes.unload_lora,
    changes.fuse_adapter,
]


@pytest.mark.skipif(not is_peft_available(), reason="LoRA in diffusers needs peft")
@pytest.mark.parametrize("ahead", [False, True], ids=["", "looked at behind the run"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_the_next_loop_sees_a_change_of_the_model(
    change: changes.Change, ahead: bool, monkeypatch: pytest.MonkeyPatch
):
    """The same prompt, the same weights by identity, and whatever a user may do to a UNet."""
    if ahead:  # as calls of a CUDA graph are, here without one
        monkeypatch.setattr(EntryRunner, "may_run_ahead", changes._is_ahead)
    args, found = tiny.unet_args(*SIZE), []
    for hoist in (True, False):
        pipe = tiny.pipeline()
        if change in changes.LORA_CHANGES:
            adapters.add_adapter(pipe.unet)
        strop.optimize(pipe, options=tiny.options(hoist=hoist, strict=True))
        before = loop(pipe, args)
        change(pipe.unet)
        found.append(loop(pipe, args))
    assert torch.equal(*found)
    if change not in changes.SAME_RESULT:
        assert (found[0] - before).abs().max() > 1e-3, "the change makes no difference"


@pytest.mark.skipif(not is_peft_available(), reason="LoRA in diffusers needs peft")
@pytest.mark.parametrize(
    "change", [changes.other_scale, changes.lora_weights_written], ids=lambda c: c.__name__
)
def test_the_next_step_sees_a_change_of_lora(change: changes.Change):
    args, found = tiny.unet_args(*SIZE), []
    for hoist in (True, False):
        pipe = tiny.pipeline()
        adapters.add_adapter(pipe.unet)
        strop.optimize(pipe, options=tiny.options(hoist=hoist, strict=True))
        with pipe.progress_bar(total=4):
            before = pipe.unet(*args).sample
            pipe.unet(*args)
            change(pipe.unet)
            found += [pipe.unet(*args).sample, pipe.unet(*args).sample]
        assert not hoist or counts(pipe) == (2, 2)
    assert all(torch.equal(result, found[0]) for result in found)
    assert not torch.equal(found[0], before)


def test_two_pipelines_share_a_unet():
    """The loops of either are marked, also those of the one whose UNet was optimised again."""
    first, alone = tiny.pipeline(), pipeline(hoist=False)
    strop.optimize(first, options=tiny.options(hoist=True, strict=True))
    second = tiny.pipeline()
    second.unet = first.unet
    strop.optimize(second, options=tiny.options(hoist=True, strict=True))
    for seed in (3, 4):
        expected = picture(alone, seed=seed)
        assert is_same(picture(first, seed=seed), expected)
        assert is_same(picture(second, seed=seed), expected)
    assert counts(second) == (2 * 2, 2 * 6)


def test_a_picture_inside_a_picture():
    """The inner loop ends the reuse of the outer one."""
    on, off = (pipeline(hoist=hoist) for hoist in (True, False))

    def inner(pipe: Any, step: int, t: Tensor, now: dict[str, Any]) -> dict[str, Any]:
        scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
        outer, pipe.scheduler = pipe.scheduler, scheduler
        state = {name: vars(pipe).get(name) for name in ("_guidance_scale", "_num_timesteps")}
        drawn = picture(pipe, seed=9) if step == 1 else None
        pipe.scheduler = outer
        vars(pipe).update(state)
        return {} if drawn is None else {"latents": now["latents"] + drawn}

    more = {"callback_on_step_end": inner}
    assert is_same(picture(on, **more), picture(off, **more))


def test_many_threads(plain: Iterator[None]):  # noqa: F811
    """Threads in one loop and outside of any, with prompts of their own."""
    pipe, reference = pipeline(hoist=True), pipeline(hoist=False)
    prompts = [tiny.unet_args(*SIZE, seed=seed) for seed in range(NUM_PROMPTS)]
    expected = [reference.unet(*args).sample for args in prompts]
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.no_grad():
            which = number % NUM_PROMPTS
            results = [pipe.unet(*prompts[which]).sample for _ in range(2)]
            if number % 20 == 7:  # while others are in the loop
                pipe.unet.forward.loop.begin()
            wrong.extend([number] * sum(not torch.equal(r, expected[which]) for r in results))

    with pipe.progress_bar(total=1):
        threads = [threading.Thread(target=work, args=(n,)) for n in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with torch.no_grad():  # on a busy machine each of the threads may have begun a loop
            last = [pipe.unet(*prompts[0]).sample for _ in range(2)]
    assert not wrong
    assert all(torch.equal(found, expected[0]) for found in last)
    runs, reuses = counts(pipe)
    assert runs + reuses == 2 * NUM_THREADS + 2
    assert reuses > 0
