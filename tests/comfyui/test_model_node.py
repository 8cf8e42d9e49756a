"""The model's node, beside a stand-in for ComfyUI: pictures are those without it, in one graph."""

from __future__ import annotations

import itertools
import logging
import sys
import types
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strop import extensions
from tests.comfyui.stand_in import (
    PROMPT,
    WIDTH,
    BaseModel,
    InterruptProcessingException,
    ModelPatcher,
    OriginalUNet,
    ResidualBlock,
    WrappersMP,
    attended,
    interrupt_current_processing,
    sample,
)
from tests.dispatch import plan_keys

SIZES = ((8, 8), (8, 12), (12, 8), (7, 9), (16, 8), (10, 10))


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.fixture
def patcher() -> ModelPatcher:
    torch.manual_seed(0)
    unet = OriginalUNet().eval().requires_grad_(False)
    return ModelPatcher(BaseModel(unet))


@pytest.fixture
def optimize(pack: ModuleType) -> Any:
    node = pack.NODE_CLASS_MAPPINGS["StropOptimizeModel"]()
    return lambda patcher, **given: node.optimize(patcher, **given)[0]


PROMPTS = random(1, 5, PROMPT, seed=1), random(1, 5, PROMPT, seed=2)


def lora(patcher: ModelPatcher, seed: int, strength: float = 1.0) -> ModelPatcher:
    """Return a clone with an adapter on attention, convolutions and the embedding of time."""
    clone = patcher.clone()
    patches = {}
    for number, (name, layer) in enumerate(patcher.model.named_modules()):
        if isinstance(layer, nn.Linear | nn.Conv2d) and "first" not in name:
            rows, columns = layer.weight.flatten(1).shape
            up = random(rows, 2, seed=100 * seed + number, scale=0.2)
            patches[f"{name}.weight"] = up, random(2, columns, seed=seed, scale=0.2)
    clone.add_patches(patches, strength)
    return clone


def controlled(seed: int, missing: str = "") -> Any:
    """Return what gives the lists of a ControlNet for latents."""

    def control(x: Tensor) -> dict[str, list[Tensor | None]]:
        b, _, h, w = x.shape
        small = (h + 1) // 2, (w + 1) // 2
        found = {
            "input": [random(b, WIDTH, h, w, seed=seed)],
            "middle": [random(b, 2 * WIDTH, *small, seed=seed)],
            "output": [random(b, WIDTH, h, w, seed=seed)],
        }
        return {name: [None] if name == missing else parts for name, parts in found.items()}

    return control


def draw(patcher: ModelPatcher, height: int = 8, width: int = 8, batch: int = 1, **how: Any) -> Any:
    return sample(patcher, random(batch, 4, height, width, seed=3), PROMPTS, **how)


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Compare latents at 60 dB of their range, the rule for pictures of a CPU in fp32."""
    assert torch.isfinite(found).all()
    span = float(expected.max() - expected.min())
    error = float((found - expected).square().mean().sqrt())
    assert error <= span * 1e-3, (error, span)


def counters(optimized: ModelPatcher) -> Any:
    (compiled,) = optimized.wrappers[WrappersMP.DIFFUSION_MODEL]["strop"]
    return compiled.module.forward.counters, compiled.module.forward.variants


def plain_calls(optimized: ModelPatcher) -> dict[str, int]:
    (compiled,) = optimized.wrappers[WrappersMP.DIFFUSION_MODEL]["strop"]
    return compiled.plain_calls


def test_one_graph_for_sizes_adapters_and_a_controlnet(patcher, optimize) -> None:
    """6 sizes x 3 LoRAs x a ControlNet on and off: one graph with its lists, one without, and
    nothing is compiled again."""
    loras = [lora(patcher, seed) for seed in (1, 2, 3)]
    optimized = [optimize(one) for one in loras]
    seen = set[int]()
    for number, (size, control) in enumerate(itertools.product(SIZES, (None, controlled(4)))):
        for one, fast in zip(loras, optimized, strict=True):
            how = {"control": control, "steps": 1}
            assert_same(draw(fast, *size, **how), draw(one, *size, **how))
        if number == 1:
            seen.add(len(counters(optimized[0])[1].all))
    found, variants = counters(optimized[0])
    assert seen == {len(variants.all)}
    assert len(variants.all) == 2
    assert found.calls == 3 * len(SIZES) * 2
    assert found.eager_calls == 0
    assert not plain_calls(optimized[0])


def test_batches_and_a_controlnet_with_gaps(patcher, optimize) -> None:
    fast = optimize(patcher)
    for batch in (1, 3, 2):
        assert_same(draw(fast, batch=batch), draw(patcher, batch=batch))
    for missing in ("input", "middle"):
        control = controlled(5, missing)
        assert_same(draw(fast, control=control), draw(patcher, control=control))
    assert counters(fast)[0].eager_calls == 0


def test_tensors_in_another_order(patcher, optimize) -> None:
    """A latent of a VAE and the lists of a ControlNet may lie channels-last: one graph for both."""
    last, fast = torch.channels_last, optimize(patcher)
    ordered = controlled(4)

    def turned(x: Tensor) -> dict[str, list[Tensor | None]]:
        lists = ordered(x)
        return {name: [t.to(memory_format=last) for t in some] for name, some in lists.items()}

    noise = random(2, 4, 8, 12, seed=3)
    for control in (ordered, turned):
        for given in (noise, noise.to(memory_format=last)):
            found, expected = (sample(p, given, PROMPTS, control=control) for p in (fast, patcher))
            assert_same(found, expected)
    assert len(counters(fast)[1].all) == 1


def test_what_a_controlnet_leaves_in_defaults(patcher, optimize) -> None:
    """Its layers call functions that the model calls, without options: they write into the default
    of these, other sizes each time."""
    fast = optimize(patcher)
    first = draw(fast)
    for size in (4, 6):
        attended(patcher.model.diffusion_model.attention, random(1, 2 * WIDTH, size, 4), PROMPTS[0])
        assert attended.__defaults__[0]["activations_shape"][2] == size
        assert torch.equal(draw(fast), first)
    assert len(counters(fast)[1].all) == 1
    assert counters(fast)[0].rebinds == 0


def test_adapters_come_and_go(patcher, optimize) -> None:
    """A LoRA lies in new memory each time, and what was there before comes back."""
    first, second = lora(patcher, 1), lora(patcher, 2, 0.5)
    order = [patcher, first, second, first, patcher, lora(second, 3), patcher]
    for one in order:
        assert_same(draw(optimize(one)), draw(one))
    assert not torch.allclose(draw(optimize(first)), draw(optimize(second)), rtol=0.1)
    assert len(counters(optimize(patcher))[1].all) == 1


@pytest.mark.parametrize("name", ["up", "attention.attn1.to_q", "last.conv_out"])
def test_writes_that_nobody_counts(name, patcher, optimize) -> None:
    fast = optimize(patcher)
    before = draw(fast)
    weight = patcher.model.diffusion_model.get_submodule(name).weight
    with torch.inference_mode():
        weight.data.copy_(random(*weight.shape, seed=7, scale=0.3))
    assert_same(draw(fast), draw(patcher))
    assert not torch.allclose(draw(fast), before, rtol=1e-2)


def test_other_branches_are_left_alone(patcher, optimize) -> None:
    before, unet = draw(patcher), patcher.model.diffusion_model
    own = dict(vars(unet))
    fast = optimize(patcher)
    draw(fast)
    calls = counters(fast)[0].calls
    assert torch.equal(draw(patcher), before)
    assert torch.equal(draw(optimize(fast, enabled=False)), before)
    assert counters(fast)[0].calls == calls
    assert vars(unet).keys() == own.keys()
    assert patcher.wrappers == {}
    assert len(optimize(fast).wrappers[WrappersMP.DIFFUSION_MODEL]["strop"]) == 1


class FreeLunch:
    """Is a node that scales what an output block gets."""

    @staticmethod
    def patch(model: ModelPatcher, factor: float) -> ModelPatcher:
        def scaled(h: Tensor, skipped: Tensor, options: dict[str, Any]) -> Any:
            return h * factor, skipped

        clone = model.clone()
        clone.set_model_patch(scaled, "output_block_patch")
        return clone


class ReplacedAttention:
    """Is an object that a node puts in the place of attention."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        return v * float(options["sigmas"][0])


def test_a_patch_runs_as_before_and_its_node_is_named(
    patcher, optimize, monkeypatch, caplog
) -> None:
    nodes = types.ModuleType("nodes")
    nodes.NODE_CLASS_MAPPINGS = {"FreeLunch": FreeLunch}
    nodes.NODE_DISPLAY_NAME_MAPPINGS = {"FreeLunch": "Free Lunch (scale)"}
    monkeypatch.setitem(sys.modules, "nodes", nodes)
    lunch = FreeLunch.patch(patcher, 1.5)
    with caplog.at_level(logging.WARNING, "strop.comfyui"):
        found = draw(optimize(lunch), steps=3)
    assert torch.equal(found, draw(lunch, steps=3))
    (message,) = caplog.messages
    assert "'Free Lunch (scale)'" in message
    assert "transformer_options['patches']['output_block_patch']" in message
    ((_, calls),) = plain_calls(optimize(lunch)).items()
    assert calls == 3
    assert_same(draw(optimize(patcher)), draw(patcher))
    assert counters(optimize(patcher))[0].calls == 2


def test_replaced_attention_runs_as_before(patcher, optimize) -> None:
    other = patcher.clone()
    other.set_model_attn1_replace(ReplacedAttention(), "middle", 0)
    fast = optimize(other)
    assert torch.equal(draw(fast), draw(other))
    (reason,) = plain_calls(fast)
    assert "ReplacedAttention" in reason
    assert "('middle', 0)" in reason


def test_wrappers_of_other_nodes_run_before_it_and_behind_it(patcher, optimize) -> None:
    order: list[str] = []

    def wrapper(name: str) -> Any:
        def run(executor: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            order.append(name)
            return executor(x * 1.1, *args, **kwargs) * 0.9

        return run

    plain = patcher.clone()
    plain.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "a", wrapper("a"))
    fast = optimize(plain)
    for one in (plain, fast):
        one.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "b", wrapper("b"))
    expected, seen = draw(plain), [*order]
    order.clear()
    assert_same(draw(fast), expected)
    assert order == seen == ["a", "b"] * 2
    assert counters(fast)[0].eager_calls == 0
    assert counters(fast)[0].calls == 2


def test_low_vram_runs_as_before(patcher, optimize) -> None:
    one = lora(patcher, 1)
    fast = optimize(one)
    assert torch.equal(draw(fast, is_low_vram=True), draw(one, is_low_vram=True))
    (reason,) = plain_calls(fast)
    assert "low VRAM" in reason
    assert_same(draw(fast), draw(one))
    assert counters(fast)[0].calls == 2


def test_an_interrupt_stops_the_sampling(patcher, optimize) -> None:
    fast = optimize(patcher)
    with pytest.raises(InterruptProcessingException):
        draw(fast, steps=3, preview=lambda step: interrupt_current_processing())
    assert counters(fast)[0].calls == 1
    assert_same(draw(fast), draw(patcher))
    assert counters(fast)[0].eager_calls == 0


def test_an_interrupt_in_the_middle_of_a_trace(patcher, optimize, monkeypatch) -> None:
    """The first call traces the model, which takes seconds: the layers ask meanwhile."""
    fast, middle = optimize(patcher), patcher.model.diffusion_model.middle
    forward = type(middle).forward

    def interrupting(self: nn.Module, *args: Any) -> Any:
        interrupt_current_processing()
        return forward(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(type(middle), "forward", interrupting)
        with pytest.raises(InterruptProcessingException):
            draw(fast)
    assert_same(draw(fast), draw(patcher))
    assert counters(fast)[0].eager_calls == 0


def test_a_part_that_a_node_replaces(patcher, optimize) -> None:
    torch.manual_seed(1)
    block = ResidualBlock(2 * WIDTH, 2 * WIDTH).eval().requires_grad_(False)
    other = patcher.clone()
    other.add_object_patch("diffusion_model.middle", block)
    for one in (patcher, other, patcher):
        assert_same(draw(optimize(one)), draw(one))
    assert not torch.allclose(draw(other), draw(patcher), rtol=1e-2)


def test_a_model_that_reads_what_changes_in_each_step(optimize) -> None:
    class Reading(OriginalUNet):
        def _forward(
            self, x: Tensor, timesteps: Any, context: Any, y: Any, control: Any,
            transformer_options: Any, **kwargs: Any,
        ) -> Tensor:  # fmt: skip
            x = x * float(transformer_options["sigmas"][0])
            return super()._forward(x, timesteps, context, y, control, transformer_options)

    torch.manual_seed(0)
    patcher = ModelPatcher(BaseModel(Reading().eval().requires_grad_(False)))
    fast = optimize(patcher)
    assert torch.equal(draw(fast, steps=3), draw(patcher, steps=3))
    (reason,) = counters(fast)[0].fallbacks
    assert "reads transformer_options['sigmas']" in reason


def test_a_forward_whose_arguments_have_no_names(optimize) -> None:
    class Nameless(OriginalUNet):
        def _forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return super()._forward(*args, **kwargs)

    torch.manual_seed(0)
    patcher = ModelPatcher(BaseModel(Nameless().eval().requires_grad_(False)))
    fast = optimize(patcher)
    assert torch.equal(draw(fast), draw(patcher))
    (reason,) = plain_calls(fast)
    assert reason == "its forward takes arguments without names (*args)"


def test_texts_of_many_lengths_whose_length_is_an_argument(optimize) -> None:
    """Lumina, Z-Image and OmniGen are told it as a number; each would be a graph of its own. One
    that is not the length, since a mask leaves words out, is a number as others."""

    class ReadsLength(OriginalUNet):
        def _forward(
            self,
            x: Tensor,
            timesteps: Tensor,
            context: Tensor,
            y: Tensor | None = None,
            control: Any = None,
            transformer_options: Any = None,
            num_tokens: int = 0,
        ) -> Tensor:
            context = context * context[:, :num_tokens].mean()
            return super()._forward(x, timesteps, context, y, control, transformer_options)

    class TellsLength(BaseModel):
        kept = 100

        def apply_model(self, x: Tensor, t: Tensor, **conds: Any) -> Tensor:
            length = min(self.kept, conds["c_crossattn"].shape[1])
            return super().apply_model(x, t, **conds, num_tokens=length)

    torch.manual_seed(0)
    patcher = ModelPatcher(TellsLength(ReadsLength().eval().requires_grad_(False)))
    fast = optimize(patcher)
    for kept, graphs in ((100, 1), (3, 2)):
        patcher.model.kept = kept
        for length in (5, 9, 12):
            prompts = random(1, length, PROMPT, seed=1), random(1, length, PROMPT, seed=2)
            drawn = [sample(one, random(1, 4, 8, 8, seed=3), prompts) for one in (fast, patcher)]
            assert_same(*drawn)
        assert len(counters(fast)[1].all) == graphs
    assert counters(fast)[0].eager_calls == 0


def test_a_model_whose_forward_takes_no_context(optimize) -> None:
    """Stable Cascade's, for instance, names its text otherwise."""

    class NamesText(OriginalUNet):
        def _forward(
            self,
            x: Tensor,
            timesteps: Tensor,
            text: Tensor,
            y: Tensor | None = None,
            control: Any = None,
            transformer_options: Any = None,
        ) -> Tensor:
            return super()._forward(x, timesteps, text, y, control, transformer_options)

    torch.manual_seed(0)
    patcher = ModelPatcher(BaseModel(NamesText().eval().requires_grad_(False)))
    fast = optimize(patcher)
    assert_same(draw(fast), draw(patcher))
    assert counters(fast)[0].eager_calls == 0


class DynamicPatcher(ModelPatcher):
    """Has weights that are nowhere until a layer asks, and can load the model as a whole."""

    cached_patcher_init: Any = None

    def is_dynamic(self) -> bool:
        return True

    def get_non_dynamic_delegate(self) -> ModelPatcher:
        return ModelPatcher(self.model).clone()


def test_a_model_under_dynamic_vram_is_loaded_whole(patcher, optimize, caplog) -> None:
    dynamic = DynamicPatcher(patcher.model)
    dynamic.cached_patcher_init = (list, ())
    assert not optimize(dynamic).is_dynamic()
    dynamic.cached_patcher_init = None
    with caplog.at_level(logging.WARNING, "strop.comfyui"):
        fast = optimize(dynamic)
    assert "cannot be loaded without dynamic VRAM" in caplog.text
    patcher.model.diffusion_model.up._v = object()
    assert torch.equal(draw(fast), draw(patcher))
    (reason,) = plain_calls(fast)
    assert "under dynamic VRAM" in reason


def test_weights_are_let_go_when_the_model_leaves_its_device(patcher, optimize) -> None:
    fast = optimize(patcher)
    before = draw(fast)
    (compiled,) = fast.wrappers[WrappersMP.DIFFUSION_MODEL]["strop"]
    fast.detach()
    assert not compiled.module.forward.state.merged
    assert torch.equal(draw(fast), before)


def test_nothing_is_let_go_when_another_clone_takes_the_model_over(patcher, optimize) -> None:
    """ComfyUI has a clone do so before each sampling; all that was made of weights would be made
    again, and graphs captured again."""
    fast = optimize(patcher)
    before = draw(fast)
    (compiled,) = fast.wrappers[WrappersMP.DIFFUSION_MODEL]["strop"]
    made = [line for line in compiled.report().splitlines() if " made " in line]
    assert made
    assert compiled.module.forward.state.merged
    fast.detach(unpatch_all=False)
    assert compiled.module.forward.state.merged
    assert torch.equal(draw(fast.clone()), before)
    assert made == [line for line in compiled.report().splitlines() if " made " in line]


def test_the_report_says_what_ran(pack, patcher, optimize) -> None:
    node = pack.NODE_CLASS_MAPPINGS["StropReport"]()
    fast = optimize(patcher)
    assert "Nothing has run compiled yet" in node.report(None, model=fast)["result"][0]
    draw(fast)
    draw(optimize(FreeLunch.patch(patcher, 1.5)))
    text = node.report(None, model=fast)["result"][0]
    assert "2 calls ran without Strop: transformer_options" in text
    assert "1 graph, 0 recompiles" in text


def test_another_process_finds_the_plan(optimize, monkeypatch) -> None:
    """What is compiled is another object there: nothing of its own is in the plan's key."""
    keys, kept = plan_keys.noted(monkeypatch), []
    for _ in range(2):
        torch.manual_seed(0)
        made = ModelPatcher(BaseModel(OriginalUNet().eval().requires_grad_(False)))
        kept.append(optimize(made))
        draw(kept[-1], steps=1)
    assert len(keys) == 2
    assert keys[0] == keys[1]


class AsksItsPlace(OriginalUNet):
    """Doubles its result by what it has written into the options."""

    def _forward(  # type: ignore[override]
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor,
        y: Any,
        control: Any,
        transformer_options: Any,
    ) -> Tensor:
        found = super()._forward(x, timesteps, context, y, control, transformer_options)
        return found * 2 if transformer_options["block"][0] == "output" else found


def test_code_that_asks_for_its_place_is_shown_it(optimize) -> None:
    """A first call runs as before, and those behind it compiled, with what the code asks for."""
    torch.manual_seed(0)
    made = ModelPatcher(BaseModel(AsksItsPlace().eval().requires_grad_(False)))
    fast = optimize(made)
    for size in ((8, 8), (8, 12), (12, 8)):
        assert_same(draw(fast, *size, steps=1), draw(made, *size, steps=1))
    found, variants = counters(fast)
    (reason,) = found.fallbacks
    assert "asks transformer_options where in the model it is called" in reason
    assert found.eager_calls < found.calls
    assert len(variants.all) == 1


ASKS: dict[str, Any] = {
    "equal": lambda place: place == ("input", 0),
    "not equal": lambda place: place != 0,
    "less": lambda place: place < 3,
    "true": bool,
    "long": len,
    "parts": list,
    "whole": int,
    "index": lambda place: [1, 2][place],
    "real": float,
    "text": str,
    "in a text": lambda place: f"{place}",
    "as written": repr,
    "difference": lambda place: place - 1,
    "rest": lambda place: place % 2,
    "contains": lambda place: "input" in place,
    "patches": lambda place: {0: 1}.get(place),  # one that is stored under the same hash
}


@pytest.mark.parametrize("name", ASKS)
def test_a_place_does_not_say_which_it_is(name: str) -> None:
    with pytest.raises(LookupError, match="where in the model"):
        ASKS[name](extensions.PLACE)


def test_a_place_is_handed_on() -> None:
    options = extensions.TracedOptions.of({"block": 1, "other": 2}, shows_places=False)
    assert options["block"] == 1
    options["block"], options["block_index"], options["other"] = ("input", 3), 5, 6
    options["block_index"] += 1
    for found in (options, options.copy()):
        assert found["block"][0] is found["block_index"] is extensions.PLACE
        assert {}.get((found["block"], 1)) is None
        assert found["other"] == 6
        found["block"] = 7
        assert found["block"] is extensions.PLACE
    shown = extensions.TracedOptions.of({}, shows_places=True)
    shown["block"] = 7
    assert shown["block"] == shown.copy()["block"] == 7
