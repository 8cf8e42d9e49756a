"""DDIM's step by two kernels: nearer to fp64 than by six, and only where it is linear."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from strop.diffusion.linear_step import linear_step

diffusers = pytest.importorskip("diffusers")
SHAPE = (2, 4, 16, 16)
QUIET = {"eta": 0.0, "generator": None, "return_dict": False}
PREDICTIONS = ("epsilon", "v_prediction", "sample")


def scheduler(**config: Any) -> Any:
    found = diffusers.DDIMScheduler(
        **{
            "clip_sample": False,
            "beta_schedule": "scaled_linear",
            "set_alpha_to_one": False,
            **config,
        }
    )
    found.set_timesteps(50)
    return found


def operands(dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    output, sample = torch.randn(2, *SHAPE, generator=source).to(device, dtype)
    return output, sample


@torch.no_grad()
def ran(steps: Any, output: Any, sample: Any, place: int = 25, **more: Any) -> Any:
    return linear_step(steps.step, output, steps.timesteps[place], sample, {**QUIET, **more})


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_no_further_from_fp64_than_eager(prediction: str, dtype: torch.dtype) -> None:
    """Over all of a loop's steps: the rule for operators, for both results."""
    steps, (output, sample) = scheduler(prediction_type=prediction), operands(dtype)
    errors: list[list[Tensor]] = [[], []]
    for place, timestep in enumerate(steps.timesteps):
        found = ran(steps, output, sample, place)
        eager = steps.step(output, timestep, sample, **QUIET)
        right = steps.step(output.double(), timestep, sample.double(), **QUIET)
        assert len(found) == len(eager) == 2
        for one, other, exact in zip(found, eager, right, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            scale = exact.abs().clamp_min(torch.finfo(dtype).tiny) * torch.finfo(dtype).eps
            errors[0].append((one.double() - exact) / scale.mean())
            errors[1].append((other.double() - exact) / scale.mean())
    ours, theirs = (torch.stack(some) for some in errors)
    assert ours.square().mean().sqrt() <= 1.1 * theirs.square().mean().sqrt() + 0.5
    assert ours.abs().max() <= 2 * theirs.abs().max() + 2


class Counted(TorchDispatchMode):
    """Operators on whole pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor)]
        if any(x.shape == SHAPE for x in tensors):
            self.ops.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def test_it_is_a_product_and_a_sum() -> None:
    steps, (output, sample) = scheduler(), operands()
    with Counted() as counted:
        ran(steps, output, sample)
    assert counted.ops == ["_foreach_mul", "_foreach_add"]
    with Counted() as counted, torch.no_grad():
        steps.step(output, steps.timesteps[25], sample, **QUIET)
    assert len(counted.ops) == 6


def test_numbers_are_drawn_by_nobody() -> None:
    source = torch.Generator().manual_seed(3)
    before = source.get_state()
    assert ran(scheduler(), *operands(), generator=source) is not None
    assert torch.equal(source.get_state(), before)


NOT_LINEAR: dict[str, dict[str, Any]] = {
    "clips": {"clip_sample": True},
    "far off": {"clip_sample": True, "clip_sample_range": 1000.0},
    "thresholds": {"thresholding": True, "sample_max_value": 100.0},
}


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_what_is_not_linear_is_left_alone(name: str) -> None:
    assert ran(scheduler(**NOT_LINEAR[name]), *operands()) is None


def test_the_end_of_all_signal_is_left_alone() -> None:
    """Without any, DDIM divides by zero at the first step."""
    steps = scheduler(rescale_betas_zero_snr=True, timestep_spacing="trailing")
    steps.alphas_cumprod[-1] = 0
    assert ran(steps, *operands(), place=0) is None
    assert ran(steps, *operands(), place=1) is not None


@pytest.mark.parametrize(
    "more",
    [
        {"eta": 0.5},
        {"variance_noise": torch.zeros(SHAPE)},
        {"return_dict": True},
        {"other": 1},
    ],
)
def test_what_else_is_asked_for_is_the_schedulers(more: dict[str, Any]) -> None:
    def step(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    steps, (output, sample) = scheduler(), operands()
    with torch.no_grad():
        given = {**QUIET, **more}
        assert linear_step(step, output, steps.timesteps[3], sample, given) is None
        assert linear_step(step, output, steps.timesteps[3], sample, {"eta": 0.0}) is None


def test_operands_are_alike() -> None:
    steps, (output, sample) = scheduler(), operands()
    for other in (sample.half(), sample[:1], sample.int(), 3.0, None):
        assert ran(steps, output, other) is None
    assert linear_step(steps.step, output, steps.timesteps[3], sample, QUIET) is None, "gradients"


@torch.no_grad()
@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)])
def test_results_lie_as_in_eager(which: tuple[int, ...]) -> None:
    steps = scheduler()
    output, sample = (
        x.contiguous(memory_format=torch.channels_last) if n in which else x
        for n, x in enumerate(operands())
    )
    found = ran(steps, output, sample)
    eager = steps.step(output, steps.timesteps[25], sample, **QUIET)
    assert [x.stride() for x in found] == [x.stride() for x in eager]
    for mine, theirs in zip(found, eager, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_two_kernels_on_a_gpu(dtype: torch.dtype) -> None:
    from torch.profiler import ProfilerActivity, profile

    steps, (output, sample) = scheduler(), operands(dtype, "cuda")
    ran(steps, output, sample)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        found = ran(steps, output, sample)
        torch.cuda.synchronize()
    events = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(events) == 2
    right = steps.step(output.double(), steps.timesteps[25], sample.double(), **QUIET)
    for one, exact in zip(found, right, strict=True):
        torch.testing.assert_close(one.double(), exact, rtol=4e-3, atol=4e-3)
