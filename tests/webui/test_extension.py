"""Check the extension beside a stand-in for A1111 and for Forge. Pictures are those without it."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dispatch import plan_keys
from tests.webui.stand_in import (
    KINDS,
    WIDTH,
    Network,
    Picture,
    WebUi,
    process_images,
)

SIZES = ((8, 8), (8, 12), (12, 8), (7, 9), (16, 8), (10, 10))


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def unet_of(model: Any) -> nn.Module:
    if hasattr(model, "forge_objects"):
        return model.forge_objects.unet.model.diffusion_model
    return model.model.diffusion_model


def deltas(model: Any, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the factors of a LoRA on attention, convolutions and the embedding of time."""
    found = {}
    for number, (name, layer) in enumerate(unet_of(model).named_modules()):
        if isinstance(layer, nn.Linear | nn.Conv2d):
            rows, columns = layer.weight.flatten(1).shape
            up = random(rows, 2, seed=100 * seed + number, scale=0.1)
            found[name] = up, random(2, columns, seed=seed, scale=0.1)
    return found


def put_lora(ui: WebUi, *seeds: int, scale: float = 1.0) -> None:
    """Have the LoRAs of a prompt applied, as the web UI does."""
    model = ui.shared.sd_model
    if ui.is_forge:
        parts = [deltas(model, seed) for seed in seeds]
        joined = {
            name: tuple(torch.cat([p[name][i] for p in parts], 1 - i) for i in (0, 1))
            for name in (parts[0] if parts else ())
        }
        model.put_lora(joined, scale)
        return
    ui.networks.loaded_networks[:] = [
        Network(f"lora{s}", {k.replace(".", "_"): v for k, v in deltas(model, s).items()}, scale)
        for s in seeds
    ]


def controlled(x: Tensor) -> dict[str, list[Tensor | None]]:
    """Return the lists of a ControlNet for a latent."""
    b, _, h, w = x.shape
    small = (h + 1) // 2, (w + 1) // 2
    return {
        "input": [random(b, WIDTH, h, w, seed=4)],
        "middle": [random(b, 2 * WIDTH, *small, seed=5)],
        "output": [],
    }


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    """Compare latents at 60 dB of their range, the rule for pictures of a CPU in fp32."""
    for one, other in zip(found, expected, strict=True):
        assert torch.isfinite(one).all()
        span = float(other.max() - other.min())
        error = float((one - other).square().mean().sqrt())
        assert error <= span * 1e-3, (error, span)


def drawn(ui: WebUi, **how: Any) -> str:
    """Make a picture with and without the extension. They are alike. Return the status line."""
    expected = process_images(Picture(ui, **how))
    p = Picture(ui, **how)
    assert_same(process_images(p, ui.script), expected)
    assert len(p.comments) == p.batches
    return p.comments[-1]


def compiled(ui: WebUi) -> Any:
    """Return the compiled form of the model that is loaded."""
    model = ui.shared.sd_model
    owner = model.forge_objects.unet.model if ui.is_forge else model
    return sys.modules["strop_webui.compiled_unet"]._OF_OWNERS[owner].module.forward


def test_the_script_shows_a_checkbox(ui: WebUi) -> None:
    script = ui.script
    assert script.title() == "Strop"
    assert script.show(True) is ui.modules["modules.scripts"].AlwaysVisible
    (checkbox,) = script.ui(False)
    assert checkbox.kwargs["value"] is False


def test_one_graph_for_sizes_and_networks(ui: WebUi) -> None:
    """6 sizes x 4 sets of LoRA (x a ControlNet on and off in Forge): nothing is compiled again."""
    controls = (None, controlled) if ui.is_forge else (None,)
    for control, size, seeds in itertools.product(controls, SIZES, ((), (1,), (2,), (1, 3))):
        put_lora(ui, *seeds)
        line = drawn(ui, size=size, control=control, steps=1)
        assert line == "Strop ran 1 of 1 calls compiled"
    found = compiled(ui)
    assert len(found.variants.all) == len(controls)
    assert found.counters.eager_calls == 0


def test_networks_come_and_go(ui: WebUi) -> None:
    pictures = []
    for seeds, scale in (((), 1.0), ((1,), 1.0), ((1,), 0.5), ((2,), 1.0), ((), 1.0)):
        put_lora(ui, *seeds, scale=scale)
        pictures += process_images(Picture(ui), ui.script)
        assert_same(pictures[-1:], process_images(Picture(ui)))
    assert torch.equal(pictures[0], pictures[-1])
    for one, other in itertools.combinations(pictures[:-1], 2):
        assert not torch.allclose(one, other, rtol=0.05)


def test_batches_hires_fix_and_previews(ui: WebUi) -> None:
    seen: list[Tensor] = []
    line = drawn(ui, batch=3, batches=2, hires=2.0, preview=seen.append)
    assert line == "Strop ran 4 of 4 calls compiled"
    assert len(seen) == 2 * 2 * 4
    assert len(compiled(ui).variants.all) == 1


def test_hires_fix_with_another_checkpoint(ui: WebUi) -> None:
    first = ui.shared.sd_model
    second = ui.load(1)
    ui.shared.sd_model = first
    drawn(ui, hires=1.5, hires_model=second)
    for model in (first, second):
        ui.shared.sd_model = model
        assert compiled(ui).counters.calls == 2
        assert "forward" not in vars(unet_of(model))


def test_other_checkpoints(ui: WebUi) -> None:
    """Another model is loaded, and the weights of another file are read into the same model."""
    drawn(ui)
    before = process_images(Picture(ui), ui.script)
    first = ui.shared.sd_model
    ui.load(1)
    drawn(ui)
    state = {
        name: value.clone() for name, value in unet_of(ui.shared.sd_model).state_dict().items()
    }
    ui.shared.sd_model = first
    assert_same(process_images(Picture(ui), ui.script), before)
    unet_of(first).load_state_dict(state)
    drawn(ui)
    assert not torch.allclose(process_images(Picture(ui), ui.script)[0], before[0], rtol=0.05)
    assert len(compiled(ui).variants.all) == 1


def test_unchecking_restores_everything(ui: WebUi) -> None:
    unet = unet_of(ui.shared.sd_model)
    before, own = process_images(Picture(ui)), set(vars(unet))
    forwards = [kind.forward for kind in KINDS.values()]
    p = Picture(ui)
    process_images(p, ui.script)
    calls = compiled(ui).counters.calls
    q = Picture(ui)
    assert torch.equal(process_images(q, ui.script, enabled=False)[0], before[0])
    assert torch.equal(process_images(Picture(ui))[0], before[0])
    assert q.comments == []
    assert compiled(ui).counters.calls == calls
    assert set(vars(unet)) == own
    assert [kind.forward for kind in KINDS.values()] == forwards
    if not ui.is_forge:
        assert ui.sd_unet.current_unet is None


def test_a_picture_that_breaks_off_leaves_nothing(ui: WebUi) -> None:
    def broken(x: Tensor) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        process_images(Picture(ui, preview=broken), ui.script)
    before = compiled(ui).counters.calls
    process_images(Picture(ui), ui.script, enabled=False)
    assert compiled(ui).counters.calls == before
    assert "forward" not in vars(unet_of(ui.shared.sd_model))


def test_an_interrupt_stops_the_sampling(ui: WebUi) -> None:
    def stop(x: Tensor) -> None:
        ui.shared.state.interrupted = True

    p = Picture(ui, steps=5, preview=stop)
    process_images(p, ui.script)
    assert p.comments == ["Strop ran 1 of 1 calls compiled"]
    drawn(ui)


def test_another_forward_in_the_unet_runs_as_before(ui: WebUi) -> None:
    """A1111's ControlNet goes through the blocks of the UNet in a forward of its own."""
    unet = unet_of(ui.shared.sd_model)
    original = unet.forward

    def hooked(*args: Any, **kwargs: Any) -> Tensor:
        return original(*args, **kwargs) * 0.9

    def through_blocks(x: Tensor, timesteps: Tensor, context: Tensor, **_: Any) -> Tensor:
        emb, skipped = unet.embedded(x, timesteps), unet.input_blocks[0](x)
        h = unet.middle_block[0](unet.input_blocks[1](skipped), emb)
        return unet.decoded(unet.middle_block[1](h, context) * 0.5, skipped, emb)

    for forward in (hooked, through_blocks):
        unet.forward = forward
        put_lora(ui, 1)
        line = drawn(ui)
        if forward is hooked and not ui.is_forge:  # it calls the forward of the class
            assert line == "Strop ran 2 of 2 calls compiled"
        else:
            assert line.startswith("Strop leaves the UNet as it is: the UNet has another forward")
            assert forward.__name__ in line
        assert unet.forward is forward
        del unet.forward
        if ui.is_forge:
            put_lora(ui)
    assert drawn(ui) == "Strop ran 2 of 2 calls compiled"


def test_another_forward_in_a_part_runs_as_before(ui: WebUi) -> None:
    part = unet_of(ui.shared.sd_model).middle_block[0]
    original = part.forward
    drawn(ui)
    part.forward = lambda *args: original(*args) * 0.5
    line = drawn(ui)
    assert line.startswith("Strop ran 0 of 2 calls compiled; 2 ran as before: ")
    assert "middle_block.0" in line
    del part.forward
    assert drawn(ui) == "Strop ran 2 of 2 calls compiled"


def test_old_way_of_lora_runs_as_before(a1111: WebUi) -> None:
    a1111.shared.opts.lora_functional = True
    put_lora(a1111, 1)
    assert "the setting 'use old method'" in drawn(a1111)
    put_lora(a1111)
    assert drawn(a1111) == "Strop ran 2 of 2 calls compiled"


def test_layers_of_another_extension_run_as_before(a1111: WebUi, monkeypatch: Any) -> None:
    """Something stands before the forward that LoRA has put into torch's classes."""
    before = nn.Linear.forward

    def halved(self: nn.Linear, x: Tensor) -> Tensor:
        return before(self, x) * 0.5

    monkeypatch.setattr(nn.Linear, "forward", halved)
    put_lora(a1111, 1)
    line = drawn(a1111)
    assert "torch's Linear has another forward: the function" in line
    assert "halved" in line
    assert nn.Linear.forward is halved


def test_autocast(a1111: WebUi) -> None:
    """A1111 draws under autocast. Latents are no further from fp32's than eager's are."""
    for size in ((8, 8), (8, 12), (12, 8)):
        for seeds in ((), (1,)):
            put_lora(a1111, *seeds)
            exact = process_images(Picture(a1111, size=size))[0]
            p = Picture(a1111, size=size)
            with torch.autocast("cpu", torch.bfloat16):
                eager = process_images(Picture(a1111, size=size))[0]
                found = process_images(p, a1111.script)[0]
            errors = [float((one - exact).square().mean().sqrt()) for one in (found, eager)]
            assert errors[0] <= 1.25 * errors[1], errors
            assert p.comments == ["Strop ran 2 of 2 calls compiled"]
    found = compiled(a1111)
    assert (found.counters.eager_calls, len(found.log.records)) == (0, 1)
    drawn(a1111)


def test_low_vram_runs_as_before(a1111: WebUi) -> None:
    a1111.shared.cmd_opts.lowvram = True
    assert "--lowvram" in drawn(a1111)


def test_the_choice_in_the_settings(a1111: WebUi) -> None:
    """A1111 moves the UNet to the CPU, and asks the one that is chosen, without the checkbox."""
    options: list[Any] = []
    a1111.unets[0](options)
    assert [option.label for option in options] == ["Strop"]
    expected = process_images(Picture(a1111))
    a1111.sd_unet.apply_unet(options[0])
    assert_same(process_images(Picture(a1111), a1111.script, enabled=False), expected)
    assert compiled(a1111).counters.calls == 2
    assert drawn(a1111) == "Strop ran 2 of 2 calls compiled"  # the checkbox leaves it there
    assert a1111.sd_unet.current_unet.option is options[0]
    a1111.sd_unet.apply_unet(None)
    calls = compiled(a1111).counters.calls
    assert torch.equal(process_images(Picture(a1111))[0], expected[0])
    assert compiled(a1111).counters.calls == calls


def test_another_unet_of_the_settings_stays(a1111: WebUi) -> None:
    class Other(a1111.sd_unet.SdUnet):
        def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
            return x * 0.1

    class Option(a1111.sd_unet.SdUnetOption):
        label = "[TRT] other"

        def create_unet(self) -> Other:
            return Other()

    a1111.sd_unet.apply_unet(Option())
    line = drawn(a1111)
    assert "another UNet is chosen in the settings: [TRT] other" in line


def put_option(ui: WebUi, name: str, value: Any) -> None:
    unet = ui.shared.sd_model.forge_objects.unet
    unet.model_options["transformer_options"][name] = value


def scaled(h: Tensor, when: Any, options: dict[str, Any]) -> Tensor:
    """Is what an extension puts into Forge's UNet."""
    return h * 1.1


def test_a_function_of_another_extension_runs_as_before(forge: WebUi) -> None:
    put_option(forge, "block_modifiers", [scaled])
    line = drawn(forge, steps=3)
    assert line.startswith("Strop ran 0 of 3 calls compiled; 3 ran as before: transformer_options")
    assert "['block_modifiers'] holds the function scaled of " in line
    assert "test_extension.py" in line
    put_option(forge, "block_modifiers", [])
    assert drawn(forge) == "Strop ran 2 of 2 calls compiled"


def test_a_unet_that_reads_what_changes_in_each_step(forge: WebUi) -> None:
    class Reading(type(unet_of(forge.shared.sd_model))):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            x = x * (1 + 0.001 * float(kwargs["transformer_options"]["sigmas"][0]))
            return super().forward(x, *args, **kwargs)

    unet_of(forge.shared.sd_model).__class__ = Reading
    line = drawn(forge, steps=3)
    assert "reads transformer_options['sigmas']" in line
    assert line.startswith("Strop ran 0 of 3 calls compiled")


def test_a_unet_that_reads_the_controlnet_itself(forge: WebUi) -> None:
    class Reading(type(unet_of(forge.shared.sd_model))):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return super().forward(x * len(kwargs["control_model"].__name__), *args, **kwargs)

    unet_of(forge.shared.sd_model).__class__ = Reading
    assert "reads control_model" in drawn(forge, control=controlled)


def test_lora_on_the_fly_and_weights_elsewhere_run_as_before(forge: WebUi) -> None:
    layer = unet_of(forge.shared.sd_model).time_embed[0]
    layer.forge_online_loras = {"weight": [1]}
    assert "LoRA is computed in each step" in drawn(forge)
    del layer.forge_online_loras
    assert drawn(forge) == "Strop ran 2 of 2 calls compiled"


def test_what_a_controlnet_leaves_in_defaults(forge: WebUi) -> None:
    """Its layers call those of the UNet without options: these write into their default."""
    layer = unet_of(forge.shared.sd_model).middle_block[1]
    for size in (4, 6):
        drawn(forge)
        layer(random(1, 2 * WIDTH, size, 4), random(1, 5, 24))
        assert type(layer).forward.__defaults__[0]["transformer_shape"][2] == size
    drawn(forge)
    assert len(compiled(forge).variants.all) == 1


def test_weights_are_let_go_when_another_model_is_loaded(ui: WebUi) -> None:
    process_images(Picture(ui), ui.script)
    kept, first = ui.shared.sd_model, compiled(ui)
    assert first.state.merged
    ui.load(1)
    assert not first.state.merged
    ui.shared.sd_model = kept
    drawn(ui)


def test_without_strop_the_checkbox_says_so(a1111: WebUi) -> None:
    script = a1111.extension.StropScript()
    script._picture = None
    p = Picture(a1111)
    process_images(p, script)
    assert p.comments == [a1111.extension.MISSING]


def test_another_process_finds_the_plan(ui: WebUi, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled is another object there: nothing of its own is in the plan's key."""
    keys, kept = plan_keys.noted(monkeypatch), []
    for _ in range(2):
        ui.load(0)
        drawn(ui, steps=1)
        kept.append(compiled(ui))
    assert len(keys) == 2
    assert keys[0] == keys[1]
