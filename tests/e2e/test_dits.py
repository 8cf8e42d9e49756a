"""Pipelines whose work is done by transformers and ControlNets: the same pictures, one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection, T5Config, T5EncoderModel

import strop
from strop.api import dispatchers_of
from strop.bench.pipelines.tiny import drawn
from strop.bench.pipelines.twins import nearness
from strop.bench.pipelines.videos import VIDEOS
from strop.diffusion.parts import DENOISERS, compiled_modules
from strop.testing import psnr
from tests.e2e import dits, tiny

SIZES = ((32, 32, 2), (48, 32, 2), (64, 32, 3))
FROM_ONE = ((32, 32, 1), (48, 32, 2), (64, 32, 3))  # a batch of one is like others
PIPELINES = {
    "sd3": (dits.sd3, SIZES),
    "flux": (dits.flux, FROM_ONE),
    "pixart": (dits.pixart, SIZES),
    "wan": (dits.wan, ((32, 32, 2), (48, 32, 2))),
    "controlnet": (dits.controlled, SIZES),
}


def denoisers(pipe: Any) -> dict[str, Any]:
    return {name: module for name, module in compiled_modules(pipe).items() if name in DENOISERS}


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("device", tiny.DEVICES)
def test_pictures_are_equal(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    make, sizes = PIPELINES[name]
    eager, fast = make().to(device), make().to(device)
    strop.optimize(fast, options=tiny.options())
    for size in sizes:
        assert psnr(dits.picture(fast, *size), dits.picture(eager, *size)) >= 60
    assert denoisers(fast)
    for part in denoisers(fast).values():
        assert part.forward.counters.calls
        assert part.forward.counters.eager_calls == 0
        assert len(part.forward.variants.all) == 1
    for dispatcher in dispatchers_of(fast).values():  # Wan's VAE keeps frames in lists of its call
        assert dispatcher.counters.eager_calls == 0


@pytest.mark.parametrize("device", tiny.DEVICES)
def test_videos_of_any_length_and_size_have_one_graph(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LTX is told frames, height and width of its tokens as whole numbers."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    case = next(case for case in VIDEOS if case.name == "ltx")
    eager, fast = case.made().to(device), case.made().to(device)
    strop.optimize(fast, options=tiny.options())
    for frames, height, width in (
        (9, 32, 32),
        (17, 32, 32),
        (25, 64, 32),
        (1, 32, 96),
        (9, 64, 64),
    ):
        size = {"num_frames": frames, "height": height, "width": width}
        assert nearness(drawn(case, fast, **size), drawn(case, eager, **size)) >= 100
    dispatcher = dispatchers_of(fast)["transformer"]
    assert dispatcher.counters.eager_calls == 0
    assert len(dispatcher.variants.all) == 1


def test_new_weights_make_new_pictures() -> None:
    """Weights are looked at when a loop begins, for a transformer as for a UNet."""
    eager, fast = dits.sd3(), strop.optimize(dits.sd3(), options=tiny.options())
    before = dits.picture(fast, 32, 32)
    for pipe in (eager, fast):
        pipe.transformer.load_state_dict(dits.sd3(seed=5).transformer.state_dict())
    after = dits.picture(fast, 32, 32)
    assert psnr(after, before) < 40
    assert psnr(after, dits.picture(eager, 32, 32)) >= 60
    with torch.no_grad():
        for pipe in (eager, fast):
            weight = pipe.transformer.transformer_blocks[0].attn.to_q.weight
            weight.data = weight.data * 3
    assert psnr(dits.picture(fast, 32, 32), dits.picture(eager, 32, 32)) >= 60
    assert len(fast.transformer.forward.variants.all) == 1


def test_lora_on_a_transformer() -> None:
    from peft import LoraConfig

    eager, fast = dits.sd3(), strop.optimize(dits.sd3(), options=tiny.options())
    plain = dits.picture(fast, 32, 32)
    for pipe in (eager, fast):
        torch.manual_seed(4)
        pipe.transformer.add_adapter(
            LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False)
        )
    changed = dits.picture(fast, 32, 32)
    assert psnr(changed, plain) < 60
    assert psnr(changed, dits.picture(eager, 32, 32)) >= 60
    fast.transformer.disable_adapters()
    assert psnr(dits.picture(fast, 32, 32), plain) >= 60


def test_restored() -> None:
    pipe = dits.flux()
    expected = dits.picture(pipe, 32, 32)
    dits.picture(strop.optimize(pipe, options=tiny.options()), 32, 32)
    strop.restore(pipe)
    assert "forward" not in vars(pipe.transformer)
    assert torch.equal(dits.picture(pipe, 32, 32), expected)


def test_encoders() -> None:
    """T5 as SD3's third text encoder, and the encoder of pictures that IP-Adapters bring."""
    torch.manual_seed(0)
    t5 = T5EncoderModel(
        T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    ).eval()
    clip = CLIPVisionModelWithProjection(
        CLIPVisionConfig(
            hidden_size=16,
            intermediate_size=32,
            projection_dim=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=32,
            patch_size=8,
        )
    ).eval()
    pipe = dits.sd3()
    pipe.register_modules(text_encoder_3=t5, image_encoder=clip)
    ids, image = torch.randint(50, (2, 7)), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        wanted = [t5(ids)[0], clip(image).image_embeds]
        strop.optimize(pipe, options=tiny.options())
        found = [t5(ids)[0], clip(image).image_embeds]
    for ours, eager in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
    for module in (t5, clip):
        assert module.forward.counters.calls == 1
        assert not module.forward.counters.fallbacks
