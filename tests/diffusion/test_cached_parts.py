"""Caches of diffusers around blocks and attention of an optimised model: their hooks decide as they
do in eager, and what stands inside of them is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.api import dispatchers_of, with_cached_parts
from strop.errors import UnsupportedError
from strop.options import Options

diffusers = pytest.importorskip("diffusers")

NAME, STEPS = "FluxTransformer2DModel", 4
RANGES = {
    "spatial_attention_block_skip_range": 2,
    "spatial_attention_timestep_skip_range": (0, 1000),
    "current_timestep_callback": lambda: 500,
}
RATIOS = {"retention_ratio": 0.1, "num_inference_steps": STEPS, "mag_ratios": [1.0] * STEPS}
# cache -> its settings, and how many classes its six parts have, all of which are of two structures
CACHES: dict[str, tuple[Callable[[], Any], int]] = {
    "First Block Cache": (lambda: diffusers.FirstBlockCacheConfig(threshold=0.5), 2),
    "MagCache": (lambda: diffusers.MagCacheConfig(threshold=10.0, max_skip_steps=2, **RATIOS), 2),
    "TaylorSeer": (
        lambda: diffusers.TaylorSeerCacheConfig(
            cache_interval=2, disable_cache_before_step=1, max_order=1
        ),
        1,
    ),
    "Pyramid Attention Broadcast": (lambda: diffusers.PyramidAttentionBroadcastConfig(**RANGES), 1),
}


def made() -> nn.Module:
    torch.manual_seed(0)
    return diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=3,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 6, 6),
    ).eval()


def inputs(model: nn.Module, height: int, width: int, step: int = 0) -> dict[str, Any]:
    source = torch.Generator().manual_seed(height)
    places = torch.cartesian_prod(torch.arange(height), torch.arange(width)).float()
    given = {
        "hidden_states": torch.randn(1, len(places), 16, generator=source) * (1 - 0.05 * step),
        "encoder_hidden_states": torch.randn(1, 7, 32, generator=source),
        "pooled_projections": torch.randn(1, 32, generator=source),
        "timestep": torch.full((1,), 0.9 - 0.01 * step),
        "img_ids": nn.functional.pad(places, (1, 0)),
        "txt_ids": torch.zeros(7, 3),
    }
    weight = next(model.parameters())
    return {name: tensor.to(weight) for name, tensor in given.items()} | {"return_dict": False}


@torch.no_grad()
def picture(model: Any, height: int, width: int) -> Tensor:
    model._reset_stateful_cache()
    steps = []
    for step in range(STEPS):
        with model.cache_context("cond"):
            steps.append(model(**inputs(model, height, width, step))[0].clone())
    return torch.stack(steps)


def served(model: nn.Module) -> dict[str, Any]:
    return with_cached_parts(dispatchers_of(model))


@pytest.mark.parametrize("cache", CACHES)
def test_parts_inside_of_a_cache_are_compiled(cache: str, tmp_path: Any) -> None:
    config, num_classes = CACHES[cache]
    plain, fast = made(), strop.optimize(made(), options=Options(cache_dir=str(tmp_path)))
    for model in (plain, fast):
        model.enable_cache(config())
    for size in ((8, 8), (6, 8)):
        torch.testing.assert_close(picture(fast, *size), picture(plain, *size), rtol=0, atol=1e-4)
    found = served(fast)
    whole = found.pop(NAME)
    assert len(found) == 6
    assert all(path.startswith(f"{NAME}.") for path in found)
    assert not whole.counters.eager_calls
    (reason,) = whole.counters.fallbacks
    assert reason.startswith(f"what stands inside of its hooks is compiled: {cache} is on")
    assert not any(part.counters.fallbacks for part in found.values())
    assert all(part.counters.calls for part in found.values())
    stores = {id(part.variants): part.variants for part in found.values()}
    assert len(stores) == num_classes
    assert sum(store.num_captures for store in stores.values()) == 2
    assert f"{NAME}.transformer_blocks.0" in str(strop.explain(fast))


def test_a_cache_that_ends_gives_the_whole_model_back(tmp_path: Any) -> None:
    plain, fast = made(), strop.optimize(made(), options=Options(cache_dir=str(tmp_path)))
    for model in (plain, fast):
        model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.5))
        picture(model, 4, 4)
        model.disable_cache()
    parts = {path: part for path, part in served(fast).items() if path != NAME}
    with torch.no_grad():
        found, expected = (model(**inputs(model, 4, 4))[0] for model in (fast, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert len(parts) == 6
    assert all(part.has_left for part in parts.values())
    (whole,) = served(fast).values()
    assert whole.variants.num_captures == 1


def test_restored_under_a_cache_it_is_as_before(tmp_path: Any) -> None:
    model = made()
    before = picture_with_cache(model)
    block = model.transformer_blocks[1]
    kept = block._diffusers_hook._fn_refs[0].original_forward
    strop.optimize(model, options=Options(cache_dir=str(tmp_path)))
    torch.testing.assert_close(picture(model, 4, 4), before, rtol=0, atol=1e-4)
    assert block._diffusers_hook._fn_refs[0].original_forward is not kept
    strop.restore(model)
    assert block._diffusers_hook._fn_refs[0].original_forward is kept
    assert torch.equal(picture(model, 4, 4), before)


def picture_with_cache(model: Any) -> Tensor:
    model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.5))
    return picture(model, 4, 4)


def test_a_block_with_a_cache_around_it_is_optimised_by_itself(tmp_path: Any) -> None:
    model = made()
    before = picture_with_cache(model)
    block = model.transformer_blocks[0]
    strop.optimize(block, options=Options(cache_dir=str(tmp_path), strict=True))
    torch.testing.assert_close(picture(model, 4, 4), before, rtol=0, atol=1e-4)
    (only,) = dispatchers_of(block).values()
    assert only.counters.calls
    assert not only.counters.eager_calls


@pytest.mark.parametrize("is_first", [True, False])
def test_a_block_that_the_user_optimises_is_left_to_that(is_first: bool, tmp_path: Any) -> None:
    model = made()
    before = picture_with_cache(model)
    options = Options(cache_dir=str(tmp_path))
    if not is_first:
        picture(strop.optimize(model, options=options), 4, 4)
    strop.optimize(model.transformer_blocks[0], options=options)
    if is_first:
        strop.optimize(model, options=options)
    for _ in range(2):
        torch.testing.assert_close(picture(model, 4, 4), before, rtol=0, atol=1e-4)
    assert f"{NAME}.transformer_blocks.0" not in served(model)
    assert len(served(model)) == 6  # the model and five parts
    (only,) = dispatchers_of(model.transformer_blocks[0]).values()
    assert only.counters.calls
    assert not only.counters.eager_calls


def test_weights_that_change_are_seen(tmp_path: Any) -> None:
    plain, fast = made(), strop.optimize(made(), options=Options(cache_dir=str(tmp_path)))
    for model in (plain, fast):
        picture_with_cache(model)
        with torch.no_grad():
            model.transformer_blocks[0].attn.to_q.weight.mul_(-1)
    torch.testing.assert_close(picture(fast, 4, 4), picture(plain, 4, 4), rtol=0, atol=1e-4)


@pytest.mark.gpu
def test_graphs_of_parts_keep_what_hooks_hold(tmp_path: Any) -> None:
    """Hooks hold results of earlier steps, which no replay may write over."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    plain, fast = (made().cuda().bfloat16() for _ in range(2))
    strop.optimize(fast, options=Options(cache_dir=str(tmp_path)))
    for model in (plain, fast):
        model.enable_cache(CACHES["MagCache"][0]())
    for size in ((8, 8), (6, 8), (8, 8)):
        torch.testing.assert_close(picture(fast, *size), picture(plain, *size), rtol=0, atol=0.05)
    assert all(part.counters.replays for path, part in served(fast).items() if path != NAME)


def test_strict_refuses_it(tmp_path: Any) -> None:
    model = strop.optimize(made(), options=Options(cache_dir=str(tmp_path), strict=True))
    model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.5))
    with pytest.raises(UnsupportedError, match="First Block Cache is on"):
        picture(model, 4, 4)
