"""A pipeline whose models are offloaded is compiled, and nothing is copied to the host twice."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn

import strop
from strop.dispatch import model_offload, offloaded_weights
from strop.dispatch.model_offload import known_offload
from strop.runtime.run.workspace import Workspace
from tests.e2e import tiny
from tests.standing_memory import Guest, StandingMemory

PROMPT = torch.randn(1, 7, tiny.PROMPT_DIM, generator=torch.manual_seed(0))
ARGUMENTS = {
    "prompt_embeds": PROMPT,
    "negative_prompt_embeds": PROMPT * 0,
    "num_inference_steps": 3,
    "height": 16,
    "width": 16,
    "output_type": "np",
}


def picture(pipe: Any) -> Tensor:
    return torch.from_numpy(pipe(**ARGUMENTS, generator=torch.manual_seed(0)).images)


@pytest.mark.parametrize("order", ["optimize first", "offload first"])
def test_pictures_of_an_offloaded_pipeline(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_offload, "DEVICES", ("cpu",))
    expected, pipe = picture(tiny.pipeline()), tiny.pipeline()
    if order == "offload first":
        pipe.enable_model_cpu_offload(device="cpu")
    strop.optimize(pipe, options=tiny.options(strict=True))
    if order == "optimize first":
        pipe.enable_model_cpu_offload(device="cpu")
    copies = []
    for _ in range(3):
        torch.testing.assert_close(picture(pipe), expected, rtol=0, atol=1e-4)  # fp32 sums
        weights = known_offload(pipe.unet)
        assert weights is not None
        assert weights._flat is None, "the end of a picture offloads"
        copies.append(weights.num_copied_back)
    assert copies[1] == copies[2] <= 2
    served = strop.api.dispatchers_of(pipe)
    assert {d.counters.eager_calls for d in served.values()} == {0}
    strop.restore(pipe)
    torch.testing.assert_close(picture(pipe), expected, rtol=0, atol=0)
    assert known_offload(pipe.unet) is None
    assert not strop.api.dispatchers_of(pipe)


class LargeMemory(StandingMemory):
    most_bytes = 1 << 23


def offloaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return an optimised pipeline behind two pictures: its weights lie where they stay."""
    monkeypatch.setattr(model_offload, "DEVICES", ("cpu",))
    monkeypatch.setattr(offloaded_weights, "memory_on", LargeMemory)
    pipe = strop.optimize(tiny.pipeline(), options=tiny.options())
    pipe.enable_model_cpu_offload(device="cpu")
    for _ in range(2):
        picture(pipe)
    return pipe


def hooks_of(pipe: Any) -> list[Any]:
    return [each.hook for each in pipe._all_hooks]


def test_hooks_stay_and_nothing_is_looked_at_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = offloaded(monkeypatch)
    hooks, looks = hooks_of(pipe), {}
    for _ in range(2):
        before = dict(looks)
        picture(pipe)
        looks = {n: d.state.num_scans for n, d in strop.api.dispatchers_of(pipe).items()}
        assert not before or looks == before
        assert all(map(is_, hooks_of(pipe), hooks))
    weights = known_offload(pipe.unet)
    assert weights is not None
    assert weights.is_on_host()


def test_programs_let_go_of_weights_before_these_are_offloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Graphs would keep them on the GPU, beside those that the next picture takes there."""
    monkeypatch.setattr(model_offload, "DEVICES", ("cpu",))
    pipe = strop.optimize(tiny.pipeline(), options=tiny.options(strict=True))
    expected = picture(pipe)
    served = strop.api.dispatchers_of(pipe)
    assert any(d.shapes.entries for d in served.values())
    pipe.enable_model_cpu_offload(device="cpu")
    assert not any(d.shapes.entries for d in served.values())
    torch.testing.assert_close(picture(pipe), expected, rtol=0, atol=0)


def test_no_working_memory_is_left_behind_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = offloaded(monkeypatch)
    space = Workspace(pipe._offload_device)
    space.reserve(100, Guest())
    expected = picture(pipe)
    assert not space.memory.numel()
    space.reserve(100, Guest())
    torch.testing.assert_close(picture(pipe), expected, rtol=0, atol=0)
    assert not space.memory.numel()


def another_model(pipe: Any) -> None:
    pipe.unet = strop.optimize(tiny.unet(), options=tiny.options(strict=True))


def hook_taken_out(pipe: Any) -> None:
    remove_hook_from_module(pipe.vae)


def hook_in_a_part(pipe: Any) -> None:
    add_hook_to_module(pipe.vae.decoder.conv_in, ModelHook())


def forward_replaced(pipe: Any) -> None:
    own = vars(pipe.vae)["forward"]
    pipe.vae.forward = lambda *args, **kwargs: own(*args, **kwargs)


def other_device(pipe: Any) -> None:
    pipe._offload_device = torch.device("cpu")


@pytest.mark.parametrize(
    "change", [another_model, hook_taken_out, hook_in_a_part, forward_replaced, other_device]
)
def test_hooks_are_set_anew_where_something_has_changed(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = offloaded(monkeypatch)
    hooks = hooks_of(pipe)
    change(pipe)
    picture(pipe)
    assert not any(map(is_, hooks_of(pipe), hooks))
    modules = [m for m in pipe.components.values() if isinstance(m, nn.Module)]
    assert {id(each.model) for each in pipe._all_hooks} == set(map(id, modules))
    hooked = [part for m in modules for part in m.modules() if hasattr(part, "_hf_hook")]
    assert set(map(id, hooked)) == set(map(id, modules))
