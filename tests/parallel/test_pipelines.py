"""Pictures of tiny pipelines whose calls are spread over devices are those of eager pipelines."""

from __future__ import annotations

import inspect
import logging
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch

import strop
from strop.api import dispatchers_of
from strop.bench.pipelines import actions_adapters, actions_loras
from strop.bench.pipelines.actions import ACTIONS, JOINT
from strop.bench.pipelines.all import PIPELINES
from strop.bench.pipelines.tiny import TinyPipeline, drawn
from strop.bench.pipelines.twins import nearness
from strop.diffusion.parts import DENOISERS
from strop.dispatch.dispatcher import Dispatcher
from strop.dispatch.parallel.rules import family_of
from strop.dispatch.parallel.served import ParallelDispatcher
from strop.errors import OptionError
from tests.e2e import tiny

LEAST = 100.0  # decibels from eager's
# Pipelines that call their model twice a step, and those whose rows see each other
BATCHES = (
    *("flux", "flux-controlnet", "chroma", "qwen-image", "wan", "ltx-image", "cogvideox"),
    *("hunyuan-video", "hunyuan-dit", "sd3-controlnet", "sd15-pix2pix", "sd15-pag", "sd3-pag"),
)
PAIR: dict[str, Any] = {"devices": ["cpu", "cpu"]}
BY_NAME = {case.name: case for case in PIPELINES}
# What is no LoRA, and rows of adapters, of which eager does not know
OTHERS = ("textual_inversion", "ip_adapter", "free_u", "fuse_qkv", "other_ip_adapter")
OTHERS += ("lora_of_a_row",)
SEVERAL = ("num_images_per_prompt", "num_videos_per_prompt")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("diffusers"), "disabled", True)


def spread(pipe: Any, mode: str) -> list[ParallelDispatcher]:
    strop.optimize(pipe, options=tiny.options(), parallel=mode, **PAIR)
    return split_of(pipe)


def split_of(pipe: Any) -> list[ParallelDispatcher]:
    return [d for d in dispatchers_of(pipe).values() if isinstance(d, ParallelDispatcher)]


def near(case: TinyPipeline, fast: Any, eager: Any, **more: Any) -> float:
    return nearness(drawn(case, fast, **more), drawn(case, eager, **more))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("case", "mode"),
    [
        *(pytest.param(case, "cfg", id=case.name) for case in PIPELINES),
        *(pytest.param(BY_NAME[name], "batch", id=f"{name}-batch") for name in BATCHES),
    ],
)
def test_every_pipeline(case: TinyPipeline, mode: str) -> None:
    if case.needs:
        pytest.skip("it needs packages")
    try:
        eager, fast = case.made(), case.made()
    except (NameError, AttributeError) as error:
        pytest.skip(f"diffusers cannot build it: {error}")
    denoisers = [getattr(fast, name, None) for name in DENOISERS]
    if not any(part is not None and family_of(part) for part in denoisers):
        with pytest.raises(OptionError, match="no denoiser whose calls Strop knows how to split"):
            spread(fast, mode)
        return
    found = spread(fast, mode)
    taken = inspect.signature(eager.__call__).parameters
    more = {name: 3 for name in SEVERAL if name in taken and mode == "batch"}
    wanted = drawn(case, eager, **more)
    for _ in range(2):
        assert nearness(drawn(case, fast, **more), wanted) >= LEAST
    assert all(d.num_split or d.alone for d in found)


@pytest.mark.filterwarnings("ignore")
def test_a_pipeline_from_optimize_to_restore() -> None:
    case = BY_NAME["sd15"]
    eager, fast = case.made(), case.made()
    (unet,) = spread(fast, "cfg")
    assert near(case, fast, eager) >= LEAST
    assert unet.num_split == 3
    assert unet.twins[0].dispatcher.counters.calls == 3

    strop.optimize(fast, options=tiny.options(), parallel="cfg", **PAIR)
    assert split_of(fast) == [unet]  # it stays as it is

    def halve(pipe: Any, step: int, timestep: Any, kept: dict[str, Any]) -> dict[str, Any]:
        """Change the weights between two steps, where nobody counts it."""
        pipe.unet.conv_out.weight.data.mul_(0.5)
        return kept

    assert near(case, fast, eager, callback_on_step_end=halve) >= LEAST

    other = case.made(seed=1).unet
    for pipe in (eager, fast):
        pipe.unet = type(other).from_config(other.config)
        pipe.unet.load_state_dict(other.state_dict())
        pipe.unet.eval()
    assert near(case, fast, eager) >= LEAST
    (latest,) = split_of(fast)
    assert latest is not unet
    assert latest.num_split

    strop.optimize(fast, options=tiny.options())
    assert not split_of(fast)
    assert near(case, fast, eager) >= LEAST
    strop.restore(fast)
    assert not dispatchers_of(fast)
    assert near(case, fast, eager) >= LEAST


@pytest.mark.filterwarnings("ignore")
def test_twins_follow_all_actions_with_loras() -> None:
    case = BY_NAME["sd15"]
    actions = [
        action
        for action in ACTIONS
        if action.do.__module__ in (actions_adapters.__name__, actions_loras.__name__)
        and action.on != JOINT
        and not action.name.startswith(OTHERS)
    ]
    assert len(actions) >= 20
    for action in actions:
        eager, fast = case.made(), case.made()
        spread(fast, "cfg")
        before = drawn(case, fast)
        with ExitStack() as around:
            more: dict[str, Any] = {}
            for pipe in (eager, fast):
                told = action.do(action.target(pipe))
                more |= told if isinstance(told, dict) else {}
                if isinstance(told, AbstractContextManager):
                    around.enter_context(told)
            wanted = drawn(case, eager, **more)
            for _ in range(2):
                assert nearness(drawn(case, fast, **more), wanted) >= LEAST, action.name
        assert not action.is_seen or nearness(before, wanted) < LEAST, action.name


def test_a_pipeline_without_a_known_denoiser_is_left_as_it_was() -> None:
    pipe = BY_NAME["text-to-video"].made()
    with pytest.raises(OptionError, match="UNet3DConditionModel"):
        strop.optimize(pipe, parallel="cfg", **PAIR)
    with pytest.raises(OptionError, match="needs two GPUs"):
        strop.optimize(BY_NAME["sd15"].made(), parallel="batch")
    assert not dispatchers_of(pipe)
    strop.optimize(pipe, options=tiny.options())
    assert {type(d) for d in dispatchers_of(pipe).values()} == {Dispatcher}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["sd15", "sdxl-controlnet", "sd3"])
@pytest.mark.parametrize("mode", ["cfg", "batch"])
def test_pictures_on_two_gpus(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU that is current is neither of the model's own in one of the turns."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    case = BY_NAME[name]
    for place in ("cuda:0", "cuda:1"):
        eager, fast = case.made().to(place), case.made().to(place)
        strop.optimize(fast, options=tiny.options(), parallel=mode)
        for number in range(4):  # captured, replayed, changed
            if number == 3:
                for pipe in (eager, fast):
                    for name_of in ("unet", "transformer", "controlnet"):
                        if (part := getattr(pipe, name_of, None)) is not None:
                            for weight in part.parameters():
                                weight.data.mul_(1.1)
            assert near(case, fast, eager, num_images_per_prompt=2) >= 80
        assert all(d.num_split and not d.alone for d in split_of(fast))
        assert torch.cuda.current_device() == 0
        strop.restore(fast)
