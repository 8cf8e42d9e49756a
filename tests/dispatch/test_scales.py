"""Scales that everybody turns are inputs from the first graph on: no other value, 0 among them,
asks for another graph. Neither does an IP-Adapter that goes and comes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0
from torch import Tensor

import strop
from strop.bench.pipelines import twins
from strop.bench.pipelines.all import PIPELINES
from strop.bench.pipelines.stable import ip_adapter_state, pictures_of_prompts
from strop.dispatch.module_state import ModuleState
from tests.e2e import tiny

BY_NAME = {case.name: case for case in PIPELINES}
Do = Callable[[Any], Any]

TOLERANCES = {"cpu": 1e-4, "cuda": 2e-3}  # convolutions round to TF32 there


def set_scale(value: Any) -> Do:
    return lambda pipe: pipe.set_ip_adapter_scale(value)


def loaded(*seeds: int) -> Do:
    def load(pipe: Any) -> dict[str, Any]:
        states = [ip_adapter_state(pipe.unet, seed=seed) for seed in seeds]
        pipe.unet._load_ip_adapter_weights(states, low_cpu_mem_usage=False)
        return {"ip_adapter_image_embeds": _embeds(pipe) * len(seeds)}

    return load


def unloaded(pipe: Any) -> dict[str, Any]:
    pipe.unload_ip_adapter()
    return {"ip_adapter_image_embeds": None}


def _embeds(pipe: Any, count: int = 1) -> list[Tensor]:
    return pictures_of_prompts(pipe, count)["ip_adapter_image_embeds"]


def pictures(count: int) -> Do:
    return lambda pipe: pictures_of_prompts(pipe, count)


def set_free_u(value: float) -> Do:
    return lambda pipe: pipe.enable_freeu(s1=value, s2=value, b1=1.2, b2=1 + value)


def given(**more: Any) -> Do:
    return lambda pipe: more


# What is done in turn, from the pipeline as it is made, and how many graphs the module has by then
ROADS: dict[str, tuple[str, str, int, list[Do]]] = {
    "scales": (
        "sd15-ip-adapter",
        "unet",
        1,
        [
            *map(set_scale, (0.3, 0.0, 1, 0, 0.5)),
            set_scale({"up": 0.5, "down": 0.25}),
            set_scale({"up": {"block_1": [0.0, 1.0]}, "mid": 1}),
        ],
    ),
    "pictures": ("sd15-ip-adapter", "unet", 1, [pictures(2), pictures(3), pictures(1)]),
    "pictures of plus": ("sd15-ip-adapter-plus", "unet", 1, [pictures(2), pictures(3)]),
    "others": (
        "sd15-ip-adapter",
        "unet",
        2,
        [loaded(5), unloaded, loaded(2), set_scale(0.0), unloaded, loaded(6)],
    ),
    "two": (
        "sd15-ip-adapter",
        "unet",
        2,
        [
            loaded(2, 5),
            set_scale([0.0, 0.9]),
            set_scale([{"up": 0.3}, 1]),
            loaded(6, 7),
            loaded(2),
        ],
    ),
    "controlnet": (
        "sd15-controlnet",
        "controlnet",
        1,
        [given(controlnet_conditioning_scale=value) for value in (0.5, 0.0, 0.7)],
    ),
    "free u": (
        "sd15",
        "unet",
        2,
        [set_free_u(0.9), set_free_u(0.5), lambda pipe: pipe.disable_freeu(), set_free_u(0.4)],
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ROADS)
def test_no_value_needs_another_graph(name: str) -> None:
    kind, part, graphs, road = ROADS[name]
    eager, fast = BY_NAME[kind].made(), BY_NAME[kind].made()
    strop.optimize(fast, options=tiny.options())
    dispatcher, more = getattr(fast, part).forward, dict[str, Any]()
    for do in (given(), *road):
        told, _ = do(eager), do(fast)
        more |= told if isinstance(told, dict) else {}
        found, wanted = (twins.drawn(BY_NAME[kind], pipe, **more)[0] for pipe in (fast, eager))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert len(dispatcher.variants.all) == graphs
    assert dispatcher.counters.eager_calls == 0


def unet_with_adapter() -> Any:
    unet = tiny.unet(encoder_hid_dim=None)
    unet._load_ip_adapter_weights([ip_adapter_state(unet)], low_cpu_mem_usage=False)
    return unet.eval()


def call(unet: Any, picture: Tensor) -> Tensor:
    sample, timestep, prompt = (a.to(picture.device) for a in tiny.unet_args(2, 8, 8, 5))
    with torch.no_grad():
        found = unet(sample, timestep, prompt, added_cond_kwargs={"image_embeds": [picture]})
    return found.sample


def processors(unet: Any) -> list[Any]:
    found = unet.attn_processors.values()
    return [p for p in found if isinstance(p, IPAdapterAttnProcessor2_0)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device", tiny.DEVICES)
def test_a_scale_of_0_adds_nothing_that_has_overflown(device: str) -> None:
    """The code leaves an adapter of scale 0 out, so it must not matter what it would add."""
    eager = unet_with_adapter().to(device)
    fast = strop.optimize(copy.deepcopy(eager), options=tiny.options(strict=True))
    picture = torch.full((2, 1, eager.config.cross_attention_dim * 2), 1.0, device=device)
    for scale, factor in ((0.5, 1.0), (0.0, 1.0), (0.0, float("inf")), (0.2, 1.0)):
        for processor in (*processors(eager), *processors(fast)):
            processor.scale = [scale]
        for _ in range(3):
            wanted = call(eager, picture * factor)
            assert wanted.isfinite().all()
            found, tolerance = call(fast, picture * factor), TOLERANCES[device]
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    assert len(fast.forward.variants.all) == 1


@pytest.mark.filterwarnings("ignore")
def test_code_of_a_users_own_keeps_its_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody puts in the place of the library's code may mean something by a 0."""
    plain = IPAdapterAttnProcessor2_0.__call__

    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = plain(self, *args, **kwargs)
        return found * 2 if self.scale[0] == 0 else found

    monkeypatch.setattr(IPAdapterAttnProcessor2_0, "__call__", doubled)
    eager = unet_with_adapter()
    fast = strop.optimize(copy.deepcopy(eager), options=tiny.options())
    picture = torch.ones(2, 1, eager.config.cross_attention_dim * 2)
    for scale in (0.5, 0.0, 0.2):
        for processor in (*processors(eager), *processors(fast)):
            processor.scale = [scale]
        torch.testing.assert_close(call(fast, picture), call(eager, picture), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_a_unet_without_its_adapter_is_the_one_before() -> None:
    pipe = BY_NAME["sd15"].made()
    state = ModuleState(pipe.unet)
    before, seen = state.structure, set[int]()
    for seed in (1, 2):
        loaded(seed)(pipe)
        state.scan()
        seen.add(state.structure)
        unloaded(pipe)
        state.scan()
        assert state.structure == before
    assert len(seen) == 1
