"""Every component of a Stable Diffusion pipeline: one graph for all sizes, as accurate as eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.testing import assert_as_accurate_as_eager
from tests.e2e import tiny

Args = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    module: Callable[[], nn.Module]
    args: Callable[..., Args]
    sizes: Sequence[tuple[int, ...]]


def _latents(batch: int, height: int, width: int, dtype: torch.dtype) -> Args:
    return (torch.randn(batch, 4, height, width, generator=torch.manual_seed(1)).to(dtype),)


def _images(batch: int, height: int, width: int, dtype: torch.dtype) -> Args:
    return (torch.rand(batch, 3, height, width, generator=torch.manual_seed(1)).to(dtype) * 2 - 1,)


def _tokens(batch: int, length: int, dtype: torch.dtype) -> Args:
    return (torch.randint(0, tiny.VOCABULARY, (batch, length), generator=torch.manual_seed(1)),)


CASES = {
    "unet": Case(
        tiny.unet,
        tiny.unet_args,
        [(2, 8, 8, 7), (1, 8, 12, 5), (3, 6, 4, 9), (2, 16, 8, 7), (1, 4, 4, 1), (2, 10, 14, 11)],
    ),
    "vae_decoder": Case(
        lambda: tiny.vae().decoder,
        _latents,
        [(2, 8, 8), (1, 8, 12), (3, 5, 7), (1, 3, 3), (2, 6, 9), (1, 16, 4)],
    ),
    "vae_encoder": Case(
        lambda: tiny.vae().encoder,
        _images,
        [(2, 16, 16), (1, 16, 24), (3, 10, 6), (1, 8, 8), (2, 12, 20), (1, 32, 8)],
    ),
    "clip": Case(tiny.clip, _tokens, [(2, 24), (1, 24), (3, 7), (2, 5), (1, 9), (4, 16)]),
}


def first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def channels_last(args: Args) -> Args:
    """Eager in the memory order that Strop runs in: oneDNN rounds otherwise in the other one."""
    return tuple(
        a.contiguous(memory_format=torch.channels_last) if a.dim() == 4 else a for a in args
    )


def doubled(args: Args) -> Args:
    return tuple(a.double() if a.is_floating_point() else a for a in args)


@pytest.fixture
def exact_fp32(monkeypatch: pytest.MonkeyPatch):
    """TF32 convolutions, on by default, hide what is asked here."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("device", tiny.DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_one_graph_for_all_sizes_as_accurate_as_eager(
    name: str, dtype: torch.dtype, device: str, exact_fp32: None
):
    case = CASES[name]
    eager = case.module().to(device, dtype)
    exact = copy.deepcopy(eager).double()
    module = strop.optimize(copy.deepcopy(eager), options=tiny.options(strict=True))
    eager.to(memory_format=torch.channels_last)
    results = []
    for size in case.sizes:
        args = tuple(a.to(device) for a in case.args(*size, dtype=dtype))
        with torch.no_grad():
            actual = first(module(*args))
            results.append(
                (actual, first(eager(*channels_last(args))), first(exact(*doubled(args))))
            )
            assert torch.equal(actual, first(module(*args))), "a second run differs"
    # One judgement over all sizes: the smallest have a few hundred values, whose errors hang
    # together too much for an RMS of their own.
    assert_as_accurate_as_eager(
        *(torch.cat([t.flatten() for t in column]) for column in zip(*results, strict=True))
    )
    dispatcher = module.forward
    assert len(dispatcher.variants.all) == 1
    assert dispatcher.variants.num_captures <= 1  # 0 when the plan came from the disk cache
    assert dispatcher.counters.eager_calls == 0
    assert not dispatcher.counters.nonfinite


def test_restore_gives_back_the_module():
    module = tiny.unet()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    args = tiny.unet_args(2, 8, 8, 7)
    with torch.no_grad():
        expected = module(*args)
        strop.optimize(module, options=tiny.options())(*args)
        assert list(module.state_dict()) == list(before)
        strop.restore(module)
        assert "forward" not in vars(module)
        assert torch.equal(module(*args).sample, expected.sample)
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_training_works_after_restore():
    module = strop.optimize(tiny.unet(), options=tiny.options())
    args = tiny.unet_args(2, 8, 8, 7)
    with torch.inference_mode():
        module(*args)
    strop.restore(module)
    module(*args).sample.sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_save_pretrained_of_an_optimized_module(tmp_path):
    module = strop.optimize(tiny.unet(), options=tiny.options())
    with torch.no_grad():
        module(*tiny.unet_args(2, 8, 8, 7))
    module.save_pretrained(tmp_path)
    again = type(module).from_pretrained(tmp_path)
    for key, value in again.state_dict().items():
        assert torch.equal(value, module.state_dict()[key]), key


def test_result_classes_and_named_arguments_are_those_of_diffusers():
    eager, module = tiny.unet(), strop.optimize(tiny.unet(), options=tiny.options(strict=True))
    sample, _, prompt = tiny.unet_args(2, 8, 8, 7)
    with torch.no_grad():
        for timestep in (7, torch.tensor(7), torch.tensor([7, 7])):
            expected = eager(sample, timestep, encoder_hidden_states=prompt)
            actual = module(sample, timestep, encoder_hidden_states=prompt)
            assert type(actual) is type(expected)
            # fp32 sums in another order; eager itself is 1e-6 from the fp64 result here
            torch.testing.assert_close(actual.sample, expected.sample, rtol=1e-4, atol=1e-5)
    assert len(module.forward.variants.all) == 1
