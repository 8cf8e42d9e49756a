"""What depends on the prompt alone is computed once a denoise loop, and no picture is stale."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import strop
from strop.bench.pipelines import actions_weights as weights
from strop.dispatch.derived_inputs import HOISTED
from strop.runtime.derived import sources
from tests.e2e import tiny

STEPS = 4
Kwargs = dict[str, Any]
Callback = Callable[[Any, int, Tensor, Kwargs], Kwargs]
Counts = tuple[int, int]  # prologues that ran, and calls that found their results


@pytest.fixture(autouse=True)
def plain(monkeypatch) -> Iterator[None]:
    """One thread in each operator, so that sums have one order; no gradients."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


def pipeline(*, hoist: bool, device: str = "cpu", **more: Any) -> Any:
    pipe = tiny.pipeline().to(device)
    return strop.optimize(pipe, options=tiny.options(hoist=hoist, strict=True, **more))


def counts(pipe: Any) -> Counts:
    row = strop.explain(pipe).components[0].derived_of(HOISTED)
    return (row.num_made, row.num_reuses) if row else (0, 0)


def picture(pipe: Any, seed: int = 3, guidance: float = 7.5, **more: Any) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    prompt, negative = torch.randn(2, 1, 7, tiny.PROMPT_DIM, generator=g).to(pipe.device)
    return pipe(
        prompt_embeds=prompt,
        negative_prompt_embeds=negative,
        num_inference_steps=STEPS,
        guidance_scale=guidance,
        height=16,
        width=16,
        generator=g,
        output_type="latent",
        **more,
    ).images


def is_same(one: Tensor, other: Tensor) -> bool:
    """But for rounding: what depends on the timestep comes of larger products, whose sums have
    another order."""
    return bool((one - other).norm() <= 1e-5 * other.norm())


# What a callback may do at the end of a step


def nothing(pipe: Any, step: int, t: Tensor, now: Kwargs) -> Kwargs:
    return {}


def latents_changed(pipe: Any, step: int, t: Tensor, now: Kwargs) -> Kwargs:
    return {"latents": now["latents"] * 0.5}


def preview(pipe: Any, step: int, t: Tensor, now: Kwargs) -> Kwargs:
    """Another program in the same working memory."""
    pipe.vae.decode(now["latents"])
    return {}


def other_prompt(pipe: Any, step: int, t: Tensor, now: Kwargs) -> Kwargs:
    return {"prompt_embeds": now["prompt_embeds"] * 0.5}


def prompt_written(pipe: Any, step: int, t: Tensor, now: Kwargs) -> Kwargs:
    now["prompt_embeds"].mul_(0.5)
    return {}


def prompt_written_by_view(pipe: Any, step: int, t: Tensor, now: Kwargs) -> Kwargs:
    now["prompt_embeds"][1:].detach().add_(1)
    return {}


def prompt_written_by_out(pipe: Any, step: int, t: Tensor, now: Kwargs) -> Kwargs:
    prompt = now["prompt_embeds"]
    torch.add(prompt, 1, out=prompt)
    return {}


def prompt_written_by_foreach(pipe: Any, step: int, t: Tensor, now: Kwargs) -> Kwargs:
    torch._foreach_mul_([now["prompt_embeds"]], 0.5)
    return {}


def prompt_written_in_inference_mode(pipe: Any, step: int, t: Tensor, now: Kwargs) -> Kwargs:
    with torch.inference_mode():
        now["prompt_embeds"].mul_(0.5)
    return {}


def prompt_data_assigned(pipe: Any, step: int, t: Tensor, now: Kwargs) -> Kwargs:
    now["prompt_embeds"].data = now["prompt_embeds"].data * 0.5
    return {}


def prompt_data_assigned_twice(pipe: Any, step: int, t: Tensor, now: Kwargs) -> Kwargs:
    """The allocator would give the second one the address of the first."""
    prompt = now["prompt_embeds"]
    values = prompt.tolist()
    prompt.data = torch.empty(0, device=prompt.device)
    prompt.data = torch.tensor(values, device=prompt.device) * 0.5
    return {}


def guidance_ends(pipe: Any, step: int, t: Tensor, now: Kwargs) -> Kwargs:
    """As SDCFGCutoffCallback does it: half of the batch from here on."""
    pipe._guidance_scale = 0.0
    return {"prompt_embeds": now["prompt_embeds"][-1:]}


def weights_copied(pipe: Any, step: int, t: Tensor, now: Kwargs) -> Kwargs:
    weights.copy_in_place(pipe.unet)
    return {}


def weights_loaded(pipe: Any, step: int, t: Tensor, now: Kwargs) -> Kwargs:
    weights.load_state_dict(pipe.unet)
    return {}


def key_weight_written(pipe: Any, step: int, t: Tensor, now: Kwargs) -> Kwargs:
    """A part of the merged weight that the prologue reads."""
    pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn2.to_k.weight[3].mul_(5)
    return {}


def other_weight_written(pipe: Any, step: int, t: Tensor, now: Kwargs) -> Kwargs:
    pipe.unet.conv_in.weight.mul_(2)
    return {}


CALLBACKS: dict[Callback, Counts] = {
    nothing: (1, 3),
    latents_changed: (1, 3),
    preview: (1, 3),
    other_prompt: (2, 2),
    prompt_written: (2, 2),
    prompt_written_by_view: (2, 2),
    prompt_written_by_out: (2, 2),
    prompt_written_by_foreach: (2, 2),
    prompt_written_in_inference_mode: (2, 2),
    prompt_data_assigned: (2, 2),
    prompt_data_assigned_twice: (2, 2),
    guidance_ends: (2, 2),
    weights_copied: (2, 2),
    weights_loaded: (2, 2),
    key_weight_written: (2, 2),
    other_weight_written: (1, 3),
}
SAME_PICTURE = (nothing, preview)


def after_step(number: int, callback: Callback) -> Kwargs:
    def call(pipe: Any, step: int, t: Tensor, now: Kwargs) -> Kwargs:
        return callback(pipe, step, t, now) if step == number else {}

    return {
        "callback_on_step_end": call,
        "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"],
    }


@pytest.mark.parametrize("device", tiny.DEVICES)
@pytest.mark.parametrize("callback", CALLBACKS, ids=lambda c: c.__name__)
def test_the_next_step_sees_what_a_callback_did(callback: Callback, device: str):
    on, off = (pipeline(hoist=hoist, device=device) for hoist in (True, False))
    if device == "cuda":  # graphs are captured at the second use, with a prologue that runs again,
        picture(off), picture(on)  # and captured again where another needs more working memory
    before = counts(on)
    expected = picture(off, **after_step(1, callback))
    found = picture(on, **after_step(1, callback))
    assert is_same(found, expected)
    runs, reuses = (now - then for now, then in zip(counts(on), before, strict=True))
    if device == "cuda" and callback is guidance_ends:  # its new shape is run, captured, replayed
        assert (runs, reuses) == (4, 1)
    else:
        assert (runs, reuses) == CALLBACKS[callback]
    assert counts(off) == (0, 0)
    unchanged = picture(pipeline(hoist=True, device=device))
    assert is_same(found, unchanged) == (callback in SAME_PICTURE), "a weak test"


def test_these_tests_would_notice_a_missing_check(monkeypatch):
    """Without versions, a prompt that was written to in place goes unseen."""
    monkeypatch.setattr(sources, "versions_of", lambda tensors: ())
    on, off = (pipeline(hoist=hoist) for hoist in (True, False))
    more = after_step(1, prompt_written)
    assert not is_same(picture(on, **more), picture(off, **more))


def test_a_callback_that_raises_ends_the_loop():
    def fail(pipe: Any, step: int, t: Tensor, now: Kwargs) -> Kwargs:
        raise KeyboardInterrupt

    pipe = pipeline(hoist=True)
    with pytest.raises(KeyboardInterrupt):
        picture(pipe, **after_step(1, fail))
    assert not pipe.unet.forward.loop.is_running
    assert is_same(picture(pipe, seed=4), picture(pipeline(hoist=False), seed=4))


def test_other_prompts_and_inference_mode():
    """Tensors of inference mode do not count writes: nothing is reused."""
    on, off = (pipeline(hoist=hoist) for hoist in (True, False))
    for seed in (3, 4):
        assert is_same(picture(on, seed=seed), picture(off, seed=seed))
    assert counts(on) == (2, 6)
    with torch.inference_mode():
        assert torch.equal(picture(on, seed=5), picture(off, seed=5))
    assert counts(on) == (6, 6)
