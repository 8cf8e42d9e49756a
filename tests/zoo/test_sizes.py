"""Thirteen random sizes of each model: one graph, no kernel is built behind the first, and values
are eager's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop import Options, explain
from strop.dispatch.variants import library_for
from tests.zoo.sized import MODELS, controlled, controlnet, latents, leaves, pixels, unet, vit

DAILY = ("wan", "qwen-image")  # the others: of the nightly target
NUM_SIZES = 13
# Sums are taken in another order: 5e-6 of the largest value was measured at the worst model.
NEAR = 1e-4


def assert_near(found: list[Tensor], wanted: list[Tensor], shape: Any) -> None:
    for ours, eager in zip(found, wanted, strict=True):
        assert ours.shape == eager.shape, shape
        assert (ours - eager).abs().max() <= NEAR * eager.abs().max(), shape


def num_built(options: Options) -> int:
    return library_for(torch.device("cpu"), options).counts[0]


def check_sizes(name: str, folder: Path) -> None:
    case, options = MODELS[name], Options(cache_dir=str(folder), strict=True)
    eager = case.made()
    fast = strop.optimize(copy.deepcopy(eager), options=options)
    variants, built = fast.forward.variants, dict[int, int]()
    for number, shape in enumerate(case.shapes(NUM_SIZES)):
        torch.manual_seed(number)
        given = case.inputs(*shape)
        with torch.no_grad():
            assert_near(leaves(fast(**given)), leaves(eager(**given)), shape)
        variants.wait()  # for kernels that other sizes may choose, built behind the first call
        built.setdefault(len(variants.all), num_built(options))
        assert built[len(variants.all)] == num_built(options), "a further size has built a kernel"
    assert 1 <= len(variants.all) == variants.num_captures <= case.most_graphs
    assert fast.forward.counters.eager_calls == 0


@pytest.mark.parametrize("name", DAILY)
def test_sizes(name: str, tmp_path: Path) -> None:
    check_sizes(name, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(MODELS.keys() - set(DAILY)))
def test_sizes_of_every_model(name: str, tmp_path: Path) -> None:
    check_sizes(name, tmp_path)


def beside(eager: nn.Module, control: nn.Module, given: Any, picture: Tensor) -> Tensor:
    down, mid = control(**given, controlnet_cond=picture, return_dict=False)
    found: Tensor = eager(
        **given, down_block_additional_residuals=down, mid_block_additional_residual=mid
    ).sample
    return found


@pytest.mark.nightly
def test_a_controlnet_beside_its_unet(tmp_path: Path) -> None:
    options = Options(cache_dir=str(tmp_path), strict=True)
    torch.manual_seed(0)
    eager = [made().eval().requires_grad_(False) for made in (unet, controlnet)]
    for layer in eager[1].controlnet_down_blocks:
        nn.init.normal_(layer.weight, std=0.1)  # they begin as zeros
    fast = [strop.optimize(copy.deepcopy(part), options=options) for part in eager]
    built = set[int]()
    for number, shape in enumerate(MODELS["controlnet"].shapes(NUM_SIZES)):
        torch.manual_seed(number)
        given = controlled(*shape)
        picture = given.pop("controlnet_cond")
        with torch.no_grad():
            ours, wanted = (beside(*pair, given, picture) for pair in (fast, eager))
        assert_near([ours], [wanted], shape)
        built.add(num_built(options))
    for part in fast:
        assert part.forward.variants.num_captures == len(part.forward.variants.all) == 1
        assert part.forward.counters.eager_calls == 0
    assert len(built) == 1


def test_the_least_latent_is_one_of_many(tmp_path: Path) -> None:
    """One pixel is left where the UNet is deepest. Torch's rules for memory ask whether it is."""
    module = strop.optimize(unet().eval(), options=Options(cache_dir=str(tmp_path), strict=True))
    with torch.no_grad():
        for height, width in ((1, 1), (3, 2), (1, 3), (2, 1)):
            module(**latents(2, 7, height, width))
    assert module.forward.variants.num_captures == 1


def test_a_size_that_the_model_checks_stays_fixed(tmp_path: Path) -> None:
    """ViT refuses pictures that are not as large as its setting says: the line is told."""
    module = strop.optimize(vit().eval(), options=Options(cache_dir=str(tmp_path)))
    with torch.no_grad():
        report = str(explain(module, **pixels(2, 32, 32)))
        assert "its code fixes the size d0_2 at 32: Eq(" in report
        assert "at modeling_vit.py:" in report
        with pytest.raises(ValueError, match="doesn't match model"):
            module(**pixels(2, 48, 32))
        module(**pixels(3, 32, 32))
    assert len(module.forward.variants.all) == 1
