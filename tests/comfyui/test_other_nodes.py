"""The nodes for a VAE and for CLIP, and the switch, beside a stand-in for ComfyUI."""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.comfyui.stand_in import CLIP, VAE, Autoencoder, CLIPEncoder, TextModel, WrappersMP
from tests.comfyui.test_model_node import assert_same, draw, optimize, patcher, random
from tests.dispatch import plan_keys

__all__ = ["optimize", "patcher"]  # fixtures


@pytest.fixture
def vae() -> VAE:
    torch.manual_seed(0)
    return VAE(Autoencoder().eval().requires_grad_(False))


@pytest.fixture
def clip() -> CLIP:
    torch.manual_seed(0)
    return CLIP(TextModel().eval().requires_grad_(False))


def run(pack: ModuleType, kind: str, given: Any, **how: Any) -> Any:
    return pack.NODE_CLASS_MAPPINGS[kind]().optimize(given, **how)[0]


def counters(part: Any, name: str) -> Any:
    return part.strop_parts[name].module.forward.counters


def test_a_vae(pack, vae) -> None:
    fast = run(pack, "StropOptimizeVAE", vae)
    for batch, height, width in ((1, 16, 16), (2, 16, 24), (1, 24, 16)):
        pixels = random(batch, 3, height, width)
        code = vae.encode(pixels)
        assert_same(fast.encode(pixels), code)
        assert_same(fast.decode(code), vae.decode(code))
    for name in ("encode", "decode"):
        found = fast.first_stage_model.strop_parts[name].module.forward
        assert found.counters.calls == 3
        assert found.counters.eager_calls == 0
    assert isinstance(vae.first_stage_model, Autoencoder)
    assert run(pack, "StropOptimizeVAE", fast, enabled=False).first_stage_model is (
        vae.first_stage_model
    )
    again = run(pack, "StropOptimizeVAE", vae)
    assert again.first_stage_model is fast.first_stage_model, "one stand-in for all branches"


def test_a_vae_whose_weights_are_not_ready(pack, vae, caplog) -> None:
    fast, code = run(pack, "StropOptimizeVAE", vae), random(1, 4, 8, 8)
    vae.first_stage_model.up.weight_function = [lambda weight: weight * 2]
    with caplog.at_level(logging.WARNING, "strop.comfyui"):
        for _ in range(2):
            assert torch.equal(fast.decode(code), vae.decode(code))
    assert [m for m in caplog.messages if "Autoencoder as it is: weights are patched" in m]
    assert len(caplog.messages) == 1
    vae.first_stage_model.up.weight_function = []
    assert_same(fast.decode(code), vae.decode(code))
    assert counters(fast.first_stage_model, "decode").calls == 1


def test_clip(pack, clip) -> None:
    fast = run(pack, "StropOptimizeCLIP", clip)
    for length in (5, 9, 3):
        tokens = list(range(length))
        for found, expected in zip(fast.encode(tokens), clip.encode(tokens), strict=True):
            assert_same(found, expected)
    found = counters(fast.cond_stage_model, ".encoder")
    assert (found.calls, found.eager_calls) == (3, 0)
    assert type(clip.cond_stage_model.encoder) is CLIPEncoder, "it is put back after each text"
    assert clip.cond_stage_model.options == {"layer": -1}, "settings reach the module"
    assert fast.clone().cond_stage_model is fast.cond_stage_model
    plain = run(pack, "StropOptimizeCLIP", fast, enabled=False)
    assert plain.cond_stage_model is clip.cond_stage_model


def test_an_error_leaves_clip_as_it_was(pack, clip) -> None:
    fast = run(pack, "StropOptimizeCLIP", clip)
    with pytest.raises(IndexError):
        fast.encode([99])
    assert type(clip.cond_stage_model.encoder) is CLIPEncoder


def test_the_report_of_all_parts(pack, patcher, optimize, vae, clip) -> None:
    node = pack.NODE_CLASS_MAPPINGS["StropReport"]()
    model = optimize(patcher)
    fast = run(pack, "StropOptimizeVAE", vae), run(pack, "StropOptimizeCLIP", clip)
    fast[0].decode(random(1, 4, 8, 8))
    text = node.report(None, model=model, vae=fast[0], clip=fast[1])["result"][0]
    assert "decode:\n1 graph, 0 recompiles" in text
    assert "encode: nothing has run compiled yet" in text
    assert "forward: nothing has run compiled yet" in text
    assert "has not passed through a node" in node.report(None, vae=vae)["result"][0]
    assert node.report(None)["result"] == ("Connect a model, a VAE or CLIP.",)


@pytest.fixture
def switched_on(pack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn the switch on, and off again after the test."""
    helpers, sd = (sys.modules[f"comfy.{name}"] for name in ("sampler_helpers", "sd"))
    monkeypatch.setattr(helpers, "prepare_model_patcher", helpers.prepare_model_patcher)
    monkeypatch.setattr(sd.VAE, "__init__", sd.VAE.__init__)
    monkeypatch.setattr(sd.CLIP, "__init__", sd.CLIP.__init__)
    monkeypatch.setenv("COMFYUI_STROP", "1")
    for _ in range(2):
        sys.modules["strop_pack.switch"].install_if_wanted()


def calls_of(pack: ModuleType, model: Any) -> int:
    compiled = sys.modules["strop_pack.compiled_model"].compiled_for(model)
    return 0 if compiled.module is None else compiled.module.forward.counters.calls


def test_the_switch_compiles_a_model_without_a_node(pack, patcher, optimize, switched_on) -> None:
    off = optimize(patcher, enabled=False)
    expected: Tensor = draw(off)
    assert calls_of(pack, patcher.model) == 0
    assert_same(draw(patcher), expected)
    assert calls_of(pack, patcher.model) == 2
    assert_same(draw(optimize(patcher)), expected)
    assert calls_of(pack, patcher.model) == 4, "a node beside it does not do it twice"
    assert WrappersMP.DIFFUSION_MODEL not in patcher.wrappers


def test_the_switch_compiles_a_vae_and_clip(switched_on) -> None:
    vae, clip = VAE(Autoencoder().eval()), CLIP(TextModel().eval())
    vae.decode(random(1, 4, 8, 8))
    clip.clone().encode([1, 2, 3])
    assert counters(vae.first_stage_model, "decode").calls == 1
    assert counters(clip.cond_stage_model, ".encoder").calls == 1


@pytest.mark.parametrize(("value", "is_on"), [("0", False), ("", False), ("yes", None)])
def test_values_of_the_switch(value, is_on, pack, monkeypatch) -> None:
    monkeypatch.setenv("COMFYUI_STROP", value)
    switch = sys.modules["strop_pack.switch"]
    if is_on is None:
        with pytest.raises(ValueError, match="COMFYUI_STROP='yes': it takes 1"):
            switch.install_if_wanted()
    else:
        switch.install_if_wanted()
    helpers = sys.modules["comfy.sampler_helpers"]
    assert not hasattr(helpers.prepare_model_patcher, "__wrapped__")


def test_another_process_finds_the_plans(pack, monkeypatch) -> None:
    keys, kept = plan_keys.noted(monkeypatch), []
    for _ in range(2):
        vae, clip = VAE(Autoencoder().eval()), CLIP(TextModel().eval().requires_grad_(False))
        kept.append([run(pack, "StropOptimizeVAE", vae), run(pack, "StropOptimizeCLIP", clip)])
        kept[-1][0].decode(random(1, 4, 8, 8))
        kept[-1][1].encode([1, 2, 3])
    assert len(keys) == 4
    assert keys[:2] == keys[2:]
