"""Schedulers that hear the time from the host: the same pictures, and no step waits for the GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import strop
from strop.diffusion import denoise_loops
from strop.diffusion import scheduler as ours
from strop.diffusion.scheduler import ASKING, Known, host_timesteps
from strop.options import Options

diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore")
ELSEWHERE = "no device is called so"  # then timesteps of the CPU are those of another device


def is_shared(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@pytest.mark.parametrize("begin", [0, 3])
def test_what_a_loop_hands_out_is_known(begin: int) -> None:
    timesteps = torch.arange(900, 0, -100)
    known = Known(timesteps)
    for given in timesteps[begin:]:
        found = known(given)
        assert torch.equal(found, given)
        assert not is_shared(found, timesteps)


def test_what_is_none_of_them_stays_as_it_is() -> None:
    timesteps = torch.arange(900, 0, -100)
    known = Known(timesteps[2:])
    for other in (7, 900.0, torch.tensor(900), timesteps[1], timesteps[2:3], timesteps[2].float()):
        assert known(other) is other
    given = timesteps[4]
    timesteps[4] = 1
    assert known(given) is given
    assert int(given) == 1


class Asking:
    """What a scheduler of diffusers is to us."""

    def __init__(self, timesteps: Any) -> None:
        self.timesteps, self.heard = timesteps, list[Any]()

    def step(self, model_output: Any, timestep: Any, sample: Any, eta: float = 0.0) -> Any:
        self.heard.append(timestep)
        return model_output, sample, eta


class DDIMScheduler(Asking):
    pass


def test_steps_within_hear_it_and_steps_after_do_not() -> None:
    scheduler = DDIMScheduler(torch.arange(5))
    with host_timesteps(scheduler, ELSEWHERE):
        assert scheduler.step(1, scheduler.timesteps[2], 3, eta=0.5) == (1, 3, 0.5)
        assert "eta" in inspect.signature(scheduler.step).parameters  # as pipelines look for it
    scheduler.step(1, scheduler.timesteps[2], 3)
    first, second = scheduler.heard
    assert int(first) == int(second) == 2
    assert [is_shared(t, scheduler.timesteps) for t in (first, second)] == [False, True]
    assert "step" not in vars(scheduler)


def test_a_step_of_somebodys_own_comes_back_after_an_error() -> None:
    def own(model_output: Any, timestep: Tensor, sample: Any) -> None:
        raise KeyError(int(timestep), is_shared(timestep, scheduler.timesteps))

    scheduler: Any = DDIMScheduler(torch.arange(5))
    scheduler.step = own
    with pytest.raises(KeyError, match="3, False"), host_timesteps(scheduler, ELSEWHERE):
        scheduler.step(1, scheduler.timesteps[3], 2)
    assert scheduler.step is own


class Looking(DDIMScheduler):
    """Looks a number up, as schedulers do."""

    def __init__(self, timesteps: Any) -> None:
        super().__init__(timesteps)
        self.alphas_cumprod = torch.arange(10.0)
        self.found = list[tuple[float, bool]]()

    def step(self, model_output: Any, timestep: Any, sample: Any, eta: float = 0.0) -> Any:
        table = self.alphas_cumprod
        self.found.append((float(table[timestep]), is_shared(table, model_output)))
        if eta:
            raise ValueError(eta)


Looking.__name__ = "DDIMScheduler"


def test_steps_look_numbers_up_on_the_host() -> None:
    """And find their table where it was behind it, also after an error. ``True``: the scheduler's
    own: outside of the loop, for a timestep that is none of the loop's, and where somebody has
    written to it, or put another in its place."""
    scheduler = Looking(torch.arange(5))
    own = scheduler.alphas_cumprod
    with host_timesteps(scheduler, ELSEWHERE):
        scheduler.step(own, scheduler.timesteps[2], 3)
        with pytest.raises(ValueError, match=r"1\.0"):
            scheduler.step(own, scheduler.timesteps[3], 3, eta=1.0)
        assert scheduler.alphas_cumprod is own
        scheduler.step(own, 4, 3)
        own[3] = 7.0
        scheduler.step(own, scheduler.timesteps[3], 3)
        other = scheduler.alphas_cumprod = own * 2
        scheduler.step(other, scheduler.timesteps[4], 3)
        assert scheduler.alphas_cumprod is other
    scheduler.alphas_cumprod = own
    scheduler.step(own, scheduler.timesteps[1], 3)
    assert scheduler.found == [(2, False), (3, False), (4, True), (7, True), (8, True), (1, True)]


def of_inference_mode() -> Tensor:
    with torch.inference_mode():
        return torch.arange(5)


@pytest.mark.parametrize(
    "made",
    [
        lambda: Asking(torch.arange(5)),  # another scheduler
        lambda: DDIMScheduler([3, 2, 1]),
        lambda: DDIMScheduler(torch.arange(6).view(2, 3)),
        lambda: DDIMScheduler(torch.arange(6)[::2]),
        lambda: DDIMScheduler(of_inference_mode()),  # nobody counts who writes to it
        lambda: None,
    ],
)
def test_others_stay_as_they_are(made: Callable[[], Any]) -> None:
    scheduler = made()
    with host_timesteps(scheduler, ELSEWHERE):
        assert "step" not in vars(scheduler or Asking(0))


def test_timesteps_of_the_host_need_no_help() -> None:
    scheduler = DDIMScheduler(torch.arange(5))
    with host_timesteps(scheduler):
        assert "step" not in vars(scheduler)


def pipe_with(name: str, folder: Path, device: str) -> Any:
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(folder, safety_checker=None).to(device)
    pipe.set_progress_bar_config(disable=True)
    kind = getattr(diffusers, name)
    settings = {"skip_prk_steps": True} if name == "PNDMScheduler" else {"clip_sample": False}
    pipe.scheduler = kind.from_config(pipe.scheduler.config, timestep_spacing="leading", **settings)
    return pipe


def picture(pipe: Any, **more: Any) -> Tensor:
    source = torch.Generator().manual_seed(0)
    found = pipe(
        "a red ring",
        width=64,
        height=64,
        num_inference_steps=6,
        output_type="pt",
        generator=source,
        **more,
    )
    return torch.as_tensor(found.images)


@pytest.mark.parametrize(
    ("name", "is_linear"), [*((name, False) for name in ASKING), ("DDIMScheduler", True)]
)
def test_pictures_are_the_same(
    name: str, is_linear: bool, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, but where steps are products and sums of lists: these are rounded otherwise."""
    if not is_linear:
        monkeypatch.setattr(ours, "linear_step", lambda *args: None)
    pipe = pipe_with(name, tiny_model, "cpu")
    strop.optimize(pipe, options=Options(cache_dir=str(tmp_path)))
    expected, heard = picture(pipe), list[bool]()
    monkeypatch.setattr(denoise_loops, "host_timesteps", partial(host_timesteps, host=ELSEWHERE))
    step = type(pipe.scheduler).step

    def listening(self: Any, model_output: Any, timestep: Any, *args: Any, **kwargs: Any) -> Any:
        heard.append(is_shared(timestep, self.timesteps))
        return step(self, model_output, timestep, *args, **kwargs)

    monkeypatch.setattr(type(pipe.scheduler), "step", listening)
    found = picture(pipe)
    assert torch.equal(found, expected) is not is_linear
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert len(heard) >= 6
    assert not any(heard)
    strop.restore(pipe)
    assert "step" not in vars(pipe.scheduler)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", ASKING)
def test_from_a_picture_no_number_is_looked_up_on_the_gpu(
    name: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """diffusers leaves its table there."""
    made = pipe_with(name, tiny_model, "cuda").to(torch.float16)
    pipe = diffusers.StableDiffusionImg2ImgPipeline(
        **made.components, requires_safety_checker=False
    )
    pipe.set_progress_bar_config(disable=True)
    image, places = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1)), set[str]()

    def drawn() -> Tensor:
        found = pipe(
            "a red ring",
            image=image,
            num_inference_steps=6,
            output_type="pt",
            generator=torch.Generator().manual_seed(0),
        )
        return torch.as_tensor(found.images)

    expected = drawn()
    strop.optimize(pipe, options=Options(cache_dir=str(tmp_path)))
    step = type(pipe.scheduler).step

    def listening(self: Any, *args: Any, **kwargs: Any) -> Any:
        places.add(self.alphas_cumprod.device.type)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(type(pipe.scheduler), "step", listening)
    for _ in range(3):
        found = drawn()
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=0)
    assert places == {"cpu"}
    assert pipe.scheduler.alphas_cumprod.is_cuda


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", ASKING)
def test_no_step_waits_for_the_gpu(name: str, tiny_model: Path, tmp_path: Path) -> None:
    """torch raises where anything waits, from the second step on to the end of the loop."""
    pipe = pipe_with(name, tiny_model, "cuda").to(torch.float16)
    expected = picture(pipe)
    strop.optimize(pipe, options=Options(cache_dir=str(tmp_path)))
    for _ in range(2):  # runs, then captures graphs
        picture(pipe)
    steps = list[int]()

    def watch(pipe: Any, number: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        steps.append(number)
        torch.cuda.set_sync_debug_mode("error" if number < len(pipe.scheduler.timesteps) - 1 else 0)
        return tensors

    try:
        found = picture(pipe, callback_on_step_end=watch)
    finally:
        torch.cuda.set_sync_debug_mode(0)
    assert len(steps) >= 6
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=0)
