"""A user's code between two steps of a denoise loop: in a callback, a scheduler, a thread. The next
step sees what it has changed, whether programs are replayed before the model is looked at or not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import diffusers
import pytest
import torch
from diffusers import DDIMScheduler
from diffusers.callbacks import IPAdapterScaleCutoffCallback
from torch import Tensor, nn

import strop
from strop.bench.pipelines.all import PIPELINES
from strop.bench.pipelines.tiny import drawn
from strop.dispatch.module_state import ModuleState
from strop.runtime.loop.denoise_loop import DenoiseLoop
from tests.diffusion.replayed import replayed_first
from tests.e2e import tiny

STEPS = 5
PATHS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "ahead": replayed_first,
}
CLOSE = {"rtol": 0, "atol": 1e-3}  # fp32 sums in another order; a missed change is off by 1e-2


def picture(pipe: Any, **more: Any) -> Tensor:
    prompt = torch.randn(1, 7, tiny.PROMPT_DIM, generator=torch.manual_seed(0))
    found = pipe(
        prompt_embeds=prompt,
        negative_prompt_embeds=prompt * 0,
        num_inference_steps=STEPS,
        height=16,
        width=16,
        output_type="latent",
        generator=torch.manual_seed(1),
        **more,
    )
    return found.images


def doubled(unet: Any) -> None:
    unet.mid_block.resnets[0].output_scale_factor /= 2


class Scheduler(DDIMScheduler):
    """With a step that changes the model."""

    act: Callable[[], None] | None = None

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if self.act is not None:
            self.act()
        return super().step(*args, **kwargs)


def by_callback(pipe: Any) -> dict[str, Any]:
    def after(pipe: Any, step: int, timestep: Any, now: dict[str, Any]) -> dict[str, Any]:
        if step == 1:
            doubled(pipe.unet)
        return {}

    return {"callback_on_step_end": after}


def by_scheduler(pipe: Any) -> dict[str, Any]:
    seen: list[int] = []

    def act() -> None:
        seen.append(1)
        if len(seen) == 2:
            doubled(pipe.unet)

    pipe.scheduler.act = act
    return {}


def by_thread(pipe: Any) -> dict[str, Any]:
    def after(pipe: Any, step: int, timestep: Any, now: dict[str, Any]) -> dict[str, Any]:
        if step == 1:
            thread = threading.Thread(target=doubled, args=(pipe.unet,))
            thread.start()
            thread.join()
        return {}

    return {"callback_on_step_end": after}


def by_a_hook_of_the_model(pipe: Any) -> dict[str, Any]:
    """Its own, which eager runs too: around the compiled code."""
    seen: list[int] = []

    def after(unet: Any, given: Any, found: Any) -> None:
        seen.append(1)
        if len(seen) == 2:
            doubled(unet)

    pipe.unet.register_forward_hook(after)
    return {}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("way", [by_callback, by_scheduler, by_thread, by_a_hook_of_the_model])
def test_the_next_step_sees_a_change(way: Callable[[Any], dict[str, Any]], path: str) -> None:
    plain, fast = tiny.pipeline(), tiny.pipeline()
    for pipe in (plain, fast):
        pipe.scheduler = Scheduler.from_config(pipe.scheduler.config)
    strop.optimize(fast, options=tiny.options())
    with PATHS[path]():
        usual = [picture(fast) for _ in range(2)][-1]
        torch.testing.assert_close(usual, picture(plain), **CLOSE)
        found, expected = (picture(pipe, **way(pipe)) for pipe in (fast, plain))
        torch.testing.assert_close(found, expected, **CLOSE)
    assert (expected - usual).abs().max() > 1e-2, "a weak test"
    assert fast.unet.forward.counters.eager_calls == 0
    tally = fast.unet.forward.counters.hoisted
    assert tally.num_reuses > tally.num_runs, "what steps share is still computed once"


@pytest.mark.parametrize("path", PATHS)
def test_the_scale_of_an_ip_adapter_is_cut_off(path: str) -> None:
    case = next(case for case in PIPELINES if case.name == "sd15-ip-adapter")
    plain, fast = case.made(), case.made()
    for pipe in (plain, fast):
        pipe.set_ip_adapter_scale(100.0)  # a tiny model's adapter does little
    strop.optimize(fast, options=tiny.options())
    with PATHS[path]():
        usual = [drawn(case, fast) for _ in range(2)][-1]
        cut = {
            "callback_on_step_end": IPAdapterScaleCutoffCallback(None, cutoff_step_index=1),
            "callback_on_step_end_tensor_inputs": [],
        }
        found, expected = (drawn(case, pipe, **cut) for pipe in (fast, plain))
    change = (expected[0] - usual[0]).abs().max()
    assert change > 1e-5
    assert (found[0] - expected[0]).abs().max() < 0.1 * change  # sums in another order


@pytest.mark.parametrize("is_watched", [True, False])
def test_a_step_that_changes_nothing_looks_once(
    is_watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And binds nothing anew: graphs, what the prompt gives and timetables stay. In a loop that
    runs no user's code, the first step looks for all."""
    more = {"callback_on_step_end": lambda pipe, step, timestep, now: {}} if is_watched else {}
    looks: list[ModuleState] = []
    look = ModuleState.has_new_structure

    def noted(state: ModuleState) -> bool:
        looks.append(state)
        return look(state)

    pipe = strop.optimize(tiny.pipeline(), options=tiny.options(strict=True))
    picture(pipe)
    monkeypatch.setattr(ModuleState, "has_new_structure", noted)
    picture(pipe, **more)
    unet = pipe.unet.forward
    assert looks.count(unet.state) == (STEPS if is_watched else 1)
    assert unet.counters.rebinds == 0


def test_a_block_that_comes_with_a_hook_runs_it() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    net = strop.optimize(nn.Sequential(Block(), nn.ReLU()).eval(), options=tiny.options())
    x = torch.randn(2, 8)
    net(x)
    other = Block()
    other.inner.register_forward_hook(lambda m, given, out: out * 2)
    net[0] = other
    torch.testing.assert_close(net(x), (other.inner(x)).relu(), rtol=1e-5, atol=1e-6)
    (reason,) = net.forward.counters.fallbacks
    assert "forward hooks" in reason


def of_user(pipe: Any) -> bool:
    """What a loop of the pipeline notes."""
    seen: list[bool] = []
    begin = DenoiseLoop.begin

    def noted(loop: DenoiseLoop, *args: Any, **how: Any) -> None:
        begin(loop, *args, **how)
        seen.append(loop.has_user_code)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DenoiseLoop, "begin", noted)
        picture(pipe)
    (found,) = set(seen)
    return found


def patched_step(pipe: Any) -> None:
    step = pipe.scheduler.step
    pipe.scheduler.step = lambda *args, **kwargs: step(*args, **kwargs)


class Pipeline(diffusers.StableDiffusionPipeline):
    """With a loop of its own, as far as anybody can tell."""


DISTURBING: dict[str, Callable[[Any], Any]] = {
    "a hook of a model": lambda pipe: pipe.unet.register_forward_pre_hook(lambda m, args: None),
    "a scheduler's function": patched_step,
    "a scheduler of a class of the user's": lambda pipe: setattr(
        pipe, "scheduler", Scheduler.from_config(pipe.scheduler.config)
    ),
    "a class of the user's": lambda pipe: setattr(pipe, "__class__", Pipeline),
    "a function of the pipeline": lambda pipe: setattr(pipe, "helper", lambda: None),
}


def test_a_plain_loop_runs_no_code_of_a_user() -> None:
    pipe = strop.optimize(tiny.pipeline(), options=tiny.options())
    assert not of_user(pipe)
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        assert of_user(pipe)
    finally:
        ended.set()
        thread.join()
    assert not of_user(pipe)


@pytest.mark.parametrize("name", DISTURBING)
def test_what_may_run_a_user_s_code(name: str) -> None:
    pipe = strop.optimize(tiny.pipeline(), options=tiny.options())
    DISTURBING[name](pipe)
    assert of_user(pipe)


def test_a_loop_of_the_user_s_own_is_looked_at() -> None:
    plain, fast = tiny.pipeline(), tiny.pipeline()
    strop.optimize(fast, options=tiny.options())
    args = tiny.unet_args(2, 8, 8, 7)
    found = []
    for pipe in (plain, fast):
        with torch.no_grad(), pipe.progress_bar(total=3):
            results = []
            for step in range(3):
                results.append(pipe.unet(*args).sample)
                if step == 1:
                    doubled(pipe.unet)
        found.append(torch.stack(results))
    torch.testing.assert_close(*found, **CLOSE)
    assert (found[0][2] - found[0][0]).abs().max() > 1e-2
