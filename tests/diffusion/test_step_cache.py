"""Step caches of whole pipelines: pictures are those of eager code that reuses the same parts at
the same steps, and nothing that is kept outlives what it was made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from diffusers import (
    FirstBlockCacheConfig,
    HeunDiscreteScheduler,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
)
from torch import Tensor, nn

import strop
from strop.dispatch.step_cache import lanes
from strop.dispatch.step_cache.lanes import UNKNOWN_LENGTH
from strop.dispatch.step_cache.served import StepCacheDispatcher
from strop.errors import OptionError
from strop.testing import psnr
from tests.e2e import controls, dits, tiny

STEPS = 9
BALANCED = [0, 1, 2, 5, 8]  # of nine steps: three, one of three, and the last
KEPT = "up_blocks.1.attentions.0"  # of the tiny UNet
OnStep = Callable[[Any, int], dict[str, Tensor] | None]


def fast(pipe: Any, word: str = "step_cache", **more: Any) -> Any:
    return strop.optimize(pipe, options=tiny.options(strict=True, numerics=(word,), **more))


def picture(pipe: Any, *, size: int = 16, seed: int = 3, on_step: OnStep | None = None) -> Tensor:
    """(1, 4, size / 2, size / 2), a latent, under guidance."""
    g = torch.Generator().manual_seed(seed)
    prompt = torch.randn(1, 7, tiny.PROMPT_DIM, generator=g)
    more: dict[str, Any] = {}
    if isinstance(pipe, StableDiffusionControlNetPipeline):
        more["image"] = torch.rand(1, 3, size, size, generator=g)
    if on_step is not None:
        names = ["latents", "prompt_embeds"]
        more |= {
            "callback_on_step_end_tensor_inputs": names,
            "callback_on_step_end": lambda own, step, _, given: on_step(own, step) or {},
        }
    device = pipe.vae.device
    pipe.set_progress_bar_config(disable=True)
    found = pipe(
        prompt_embeds=prompt.to(pipe.unet.dtype).to(device),
        negative_prompt_embeds=prompt.to(pipe.unet.dtype).to(device) / 2,
        height=size,
        width=size,
        num_inference_steps=STEPS,
        generator=g,
        output_type="latent",
        **more,
    )
    return torch.as_tensor(found.images)


def reusing(pipe: Any, full: Sequence[int], kept: str = KEPT) -> Any:
    """Have an eager UNet give at ``kept`` what it gave at the last of the calls that are full."""
    state: dict[str, Any] = {"call": 0}

    def begin(*_: Any) -> None:
        state["is_full"] = state["call"] in full
        state["call"] += 1

    def hook(_: nn.Module, __: Any, result: Any) -> Any:
        if state["is_full"]:
            state["deep"] = result
        return state["deep"]

    pipe.unet.register_forward_pre_hook(begin)
    pipe.unet.get_submodule(kept).register_forward_hook(hook)
    return pipe


class Watched:
    """Note which calls were computed in full; ``change`` is called behind one step."""

    def __init__(self, change: Callable[[Any], dict[str, Tensor] | None], at: int) -> None:
        self.change, self.at = change, at
        self.full, self._before = list[int](), 0

    def __call__(self, pipe: Any, step: int) -> dict[str, Tensor] | None:
        served = pipe.unet.forward
        if isinstance(served, StepCacheDispatcher):
            self._before = 0 if step == 0 else self._before
            if served.num_full > self._before:
                self.full.append(step)
            self._before = served.num_full
        return self.change(pipe) if step == self.at else None


def test_pictures_are_those_of_eager_that_reuses_the_same_features() -> None:
    pipe = fast(tiny.pipeline())
    for size in (16, 32, 16):
        found = picture(pipe, size=size)
        assert psnr(found, picture(reusing(tiny.pipeline(), BALANCED), size=size)) >= 60
        assert psnr(found, picture(tiny.pipeline(), size=size)) < 60  # it is another picture
    served = pipe.unet.forward
    assert (served.num_full, served.num_cached) == (15, 12)
    assert (served.variants.num_captures, len(served.variants.all)) == (2, 2)
    # what depends on the prompt alone is computed once for each piece of a step
    assert served.counters.hoisted.num_runs == 2 * 3
    assert not served.left_out
    assert not served.counters.eager_calls
    report = strop.explain(pipe)
    assert report.fallbacks == {}
    assert "step cache (balanced): 12 of 27 calls from the cache, 15 in full" in str(report)
    assert not served.loop.lanes  # nothing is kept behind the loop


@pytest.mark.parametrize(
    ("word", "full"),
    [("step_cache:cautious", [0, 1, 2, 4, 6, 8]), ("step_cache:fast", [0, 1, 2, 3, 4, 8])],
)
def test_words_say_how_often(word: str, full: list[int]) -> None:
    found = picture(fast(tiny.pipeline(), word))
    assert psnr(found, picture(reusing(tiny.pipeline(), full))) >= 60


def test_a_step_of_a_plain_up_block() -> None:
    def pipeline() -> Any:
        pipe = tiny.pipeline()
        kinds = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
        pipe.unet = tiny.unet(0, down_block_types=kinds[0], up_block_types=kinds[1])
        return pipe

    found = picture(fast(pipeline()))
    kept = "up_blocks.1.resnets.0"
    assert psnr(found, picture(reusing(pipeline(), BALANCED, kept))) >= 60


def test_a_controlnet_runs_in_each_step() -> None:
    pipe = fast(controls.with_controlnets(1))
    found = picture(pipe)
    assert psnr(found, picture(reusing(controls.with_controlnets(1), BALANCED))) >= 60
    assert pipe.controlnet.forward.counters.calls == STEPS
    assert not isinstance(pipe.controlnet.forward, StepCacheDispatcher)


def in_place(pipe: Any) -> None:
    with torch.no_grad():
        pipe.unet.mid_block.resnets[0].conv1.weight.mul_(-3)


def another_weight(pipe: Any) -> None:
    conv = pipe.unet.mid_block.resnets[0].conv1
    conv.weight = nn.Parameter(conv.weight.detach() * -3, requires_grad=False)


def setting(pipe: Any) -> None:
    pipe.unet.mid_block.resnets[0].output_scale_factor = 3.0


def another_prompt(pipe: Any) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(9)
    return {"prompt_embeds": torch.randn(2, 7, tiny.PROMPT_DIM, generator=g)}


CHANGES = [in_place, another_weight, setting, another_prompt]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_amid_a_loop_is_seen_at_once(change: Any) -> None:
    watch = Watched(change, at=3)  # the next step would come from the cache
    found = picture(fast(tiny.pipeline()), on_step=watch)
    assert watch.full[:4] == [0, 1, 2, 4]
    assert watch.full[-1] == 8
    eager = reusing(tiny.pipeline(), watch.full)
    assert psnr(found, picture(eager, on_step=Watched(change, at=3))) >= 60


def test_other_adapters_amid_a_loop_are_seen_at_once() -> None:
    from peft import LoraConfig

    def adapted() -> Any:
        pipe = tiny.pipeline()
        torch.manual_seed(0)
        pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"]), "a")
        for name, weight in pipe.unet.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight)
        pipe.unet.requires_grad_(requires_grad=False)
        return pipe

    watch = Watched(lambda pipe: pipe.unet.set_adapters("a", 0.1), at=3)
    pipe = fast(adapted())
    found = picture(pipe, on_step=watch)
    assert watch.full[:4] == [0, 1, 2, 4]
    expected = picture(reusing(adapted(), watch.full), on_step=Watched(watch.change, at=3))
    assert psnr(found, expected) >= 60
    assert len(pipe.unet.forward.variants.all) == 2


def test_a_cancelled_loop_leaves_nothing() -> None:
    def cancel(_: Any) -> None:
        raise KeyboardInterrupt

    pipe = fast(tiny.pipeline())
    with pytest.raises(KeyboardInterrupt):
        picture(pipe, on_step=Watched(cancel, at=2))
    assert not pipe.unet.forward.loop.lanes
    found = picture(pipe, seed=5)
    assert torch.equal(found, picture(fast(tiny.pipeline()), seed=5))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of NumPy in diffusers
def test_a_scheduler_of_the_second_order_has_its_last_calls_in_full() -> None:
    def pipeline() -> Any:
        pipe = tiny.pipeline()
        pipe.scheduler = HeunDiscreteScheduler()
        return pipe

    full = [0, 1, 2, 5, 8, 11, 14, 16]  # of 17 calls
    assert psnr(picture(fast(pipeline())), picture(reusing(pipeline(), full))) >= 60


def test_a_loop_from_a_picture_has_its_own_length() -> None:
    def drawn(pipe: Any) -> Tensor:
        g = torch.Generator().manual_seed(3)
        prompt = torch.randn(1, 7, tiny.PROMPT_DIM, generator=g)
        made = StableDiffusionImg2ImgPipeline.from_pipe(pipe)
        made.set_progress_bar_config(disable=True)
        found = made(
            image=torch.rand(1, 3, 16, 16, generator=g),
            prompt_embeds=prompt,
            negative_prompt_embeds=prompt / 2,
            num_inference_steps=10,
            strength=0.6,
            generator=g,
            output_type="latent",
        )
        return torch.as_tensor(found.images)

    pipe = fast(tiny.pipeline())
    assert psnr(drawn(pipe), drawn(reusing(tiny.pipeline(), [0, 1, 2, 5]))) >= 60
    assert (pipe.unet.forward.num_full, pipe.unet.forward.num_cached) == (4, 2)


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_transformers_do_as_diffusers_own_first_block_cache(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Diffusers' cache computes neither two first nor last steps whatever changes."""
    monkeypatch.setattr(lanes, "NUM_LAST", 0)
    threshold = {"flux": 0.4, "wan": 0.5}[name]
    monkeypatch.setitem(lanes.RULES, "balanced", lanes.Rule(1, 3, threshold))
    plain, pipe = getattr(dits, name)(), fast(getattr(dits, name)())
    parts = [n for n in ("transformer", "transformer_2") if getattr(pipe, n, None) is not None]
    for part in parts:
        getattr(plain, part).enable_cache(FirstBlockCacheConfig(threshold=threshold))
    for size in ((64, 64), (64, 96), (64, 64)):
        assert psnr(dits.picture(pipe, *size), dits.picture(plain, *size)) >= 50
    served = [getattr(pipe, part).forward for part in parts]
    assert sum(one.num_cached for one in served) > 0
    assert all(len(one.variants.all) <= 4 for one in served)
    assert not any(one.left_out or one.counters.eager_calls for one in served)


def test_a_transformer_whose_last_block_gives_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lanes.RULES, "balanced", lanes.Rule(1, 3, 1e9))
    pipe = fast(dits.sd3())
    found = [dits.picture(pipe, 64, 64) for _ in range(2)]
    assert psnr(*found) >= 100
    served = pipe.transformer.forward
    assert served.num_cached >= 2
    monkeypatch.setitem(lanes.RULES, "balanced", lanes.Rule(1, 3, 0.0))
    exact = fast(dits.sd3())
    assert psnr(dits.picture(exact, 64, 64), dits.picture(dits.sd3(), 64, 64)) >= 60
    assert not exact.transformer.forward.num_cached


def test_two_prompts_of_a_step_have_a_cache_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wan calls its transformer once for each prompt, in turns."""
    monkeypatch.setitem(lanes.RULES, "balanced", lanes.Rule(1, 3, 1e9))
    pipe = fast(dits.wan())
    seen = list[int]()
    served = pipe.transformer.forward
    pipe_end = type(served.loop).end

    def noted(loop: Any) -> None:
        seen.append(len([key for key in loop.lanes if key[0] == id(served)]))
        pipe_end(loop)

    monkeypatch.setattr(type(served.loop), "end", noted)
    for _ in range(2):
        dits.picture(pipe, 64, 64)
    assert seen[-1] == 2


def test_without_a_length_all_steps_are_whole() -> None:
    pipe = fast(tiny.pipeline())
    loop = pipe.unet.forward.loop
    loop.begin(None)
    given = tiny.unet_args(2, 8, 8, 7)
    with torch.no_grad():
        found = pipe.unet(*given)[0]
        torch.testing.assert_close(found, tiny.unet()(*given)[0], rtol=0, atol=1e-4)
    loop.end()
    assert pipe.unet.forward.left_out == {UNKNOWN_LENGTH: 1}
    assert f"without the cache 1x: {UNKNOWN_LENGTH}" in str(strop.explain(pipe))


def test_outside_of_a_loop_the_model_is_whole() -> None:
    pipe = fast(tiny.pipeline())
    given = tiny.unet_args(2, 8, 8, 7)
    with torch.no_grad():
        for _ in range(2):
            found = pipe.unet(*given)[0]
            torch.testing.assert_close(found, tiny.unet()(*given)[0], rtol=0, atol=1e-4)
    assert (pipe.unet.forward.num_full, pipe.unet.forward.num_cached) == (0, 0)


def test_restored_it_is_as_before() -> None:
    pipe, plain = tiny.pipeline(), tiny.pipeline()
    fast(pipe)
    picture(pipe)
    strop.restore(pipe)
    assert "forward" not in vars(pipe.unet)
    assert torch.equal(picture(pipe), picture(plain))


def test_other_options_take_another_dispatcher() -> None:
    pipe = fast(tiny.pipeline())
    served = pipe.unet.forward
    assert fast(pipe).unet.forward is served
    strop.optimize(pipe, options=tiny.options())
    assert not isinstance(pipe.unet.forward, StepCacheDispatcher)
    assert psnr(picture(pipe), picture(tiny.pipeline())) >= 60


def test_a_component_in_the_place_of_one_has_a_cache_too() -> None:
    pipe = fast(tiny.pipeline())
    pipe.unet = tiny.unet(1)
    assert isinstance(pipe.unet.forward, StepCacheDispatcher)
    picture(pipe)
    assert pipe.unet.forward.num_cached == STEPS - len(BALANCED)


class Unknown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_what_cannot_be_divided_is_refused() -> None:
    pipe = dits.flux()
    pipe.transformer.single_transformer_blocks[0] = Unknown()
    with pytest.raises(OptionError, match="diffusers does not say what Unknown give"):
        fast(pipe)
    pipe = dits.flux()
    del pipe.transformer.single_transformer_blocks[0]
    with pytest.raises(OptionError, match="it has 1 block in lists"):
        fast(pipe)
    pipe = tiny.pipeline()
    kinds = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "AttnUpBlock2D")
    pipe.unet = tiny.unet(0, down_block_types=kinds[0], up_block_types=kinds[1])
    with pytest.raises(OptionError, match="its last up block is a AttnUpBlock2D, not one of"):
        fast(pipe)


def test_what_cannot_be_together_is_refused() -> None:
    pipe = tiny.pipeline()
    with pytest.raises(OptionError, match="and weights_budget_bytes: weights are streamed"):
        fast(pipe, weights_budget_bytes=1 << 20)
    with pytest.raises(OptionError, match="and parallel='cfg' cannot be together yet"):
        strop.optimize(pipe, options=tiny.options(numerics=("step_cache",)), parallel="cfg")


@pytest.mark.gpu
def test_graphs_keep_what_the_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """No replay may write over what an earlier step has left."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    pipe = fast(tiny.pipeline().to("cuda"))
    for size in (16, 32, 16, 16):
        eager = reusing(tiny.pipeline().to("cuda"), BALANCED)
        assert psnr(picture(pipe, size=size).cpu(), picture(eager, size=size).cpu()) >= 40
    served = pipe.unet.forward
    assert (served.num_full, served.num_cached) == (20, 16)
    assert served.counters.replays > 0


def test_in_inference_mode_a_callback_ends_reuse() -> None:
    """Torch does not count what a callback writes then."""
    pipe = fast(tiny.pipeline())
    with torch.inference_mode():
        found = picture(pipe)
    assert psnr(found, picture(reusing(tiny.pipeline(), BALANCED))) >= 60
    with torch.inference_mode():
        found = picture(pipe, on_step=lambda *_: None)
    assert psnr(found, picture(tiny.pipeline())) >= 60
    assert pipe.unet.forward.left_out == {lanes.UNCOUNTED: STEPS}


def test_a_cache_of_diffusers_takes_the_place_of_ours() -> None:
    pipe, plain = dits.flux(), dits.flux()
    strop.optimize(pipe, options=tiny.options(numerics=("step_cache",)))
    for one in (pipe, plain):
        one.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.4))
    assert psnr(dits.picture(pipe, 64, 64), dits.picture(plain, 64, 64)) >= 60
    served = pipe.transformer.forward
    assert (served.num_full, served.num_cached) == (0, 0)
    (reason,) = served.left_out
    assert reason.startswith("First Block Cache is on")
