"""torch's own transformers, whose code decides by the values of masks: one graph for all masks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.api import dispatchers_of
from strop.options import Options

TOKENS = 7
pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:.*nested tensor.*"),
]


class Within(nn.Module):
    """An encoder that is a part of the model that is optimised."""

    def __init__(self, encoder: nn.TransformerEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor, **masks: Any) -> Tensor:
        return self.encoder(x * 2, **masks) + 1


def encoder(norm: bool, **how: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    return nn.TransformerEncoder(layer, 2, nn.LayerNorm(32) if norm else None, **how).eval()


def paddings() -> dict[str, Tensor]:
    """By what they leave of two sequences."""
    left = torch.zeros(2, TOKENS, dtype=torch.bool)
    left[0, 4:] = True
    holes, empty = left.clone(), left.clone()
    holes[1, 2], empty[1] = True, True
    every = torch.zeros_like(left)
    return {"the first": left, "holes": holes, "none of one": empty, "all": every}


def added(padding: Tensor) -> Tensor:
    return torch.zeros(padding.shape).masked_fill(padding, float("-inf"))


@pytest.fixture(autouse=True)
def fast_paths() -> Iterator[None]:
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def fast_of(module: nn.Module, tmp_path: Path) -> nn.Module:
    options = Options(cache_dir=str(tmp_path))
    found: nn.Module = strop.optimize(copy.deepcopy(module), options=options)
    return found


def same(module: nn.Module, fast: nn.Module, *given: Any, **named: Any) -> Tensor:
    with torch.no_grad():
        expected, got = module(*given, **named), fast(*given, **named)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    return expected


def in_eager(fast: nn.Module) -> int:
    return sum(each.counters.eager_calls for each in dispatchers_of(fast).values())


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("mask_check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("is_within", [False, True], ids=["itself", "within"])
def test_left_out_tokens_are_zero_where_eager_packs(
    is_within: bool, mask_check: bool, kind: str, tmp_path: Path
) -> None:
    module: nn.Module = encoder(is_within, mask_check=mask_check)
    module = Within(module) if is_within else module  # type: ignore[arg-type]
    fast = fast_of(module, tmp_path)
    for name, padding in paddings().items():
        mask = padding if kind == "bool" else added(padding)
        found = same(module, fast, torch.randn(2, TOKENS, 32), src_key_padding_mask=mask)
        if not is_within and name == "the first":
            assert not found[0, 4:].any()
    assert strop.explain(fast).num_graphs == 1
    assert not in_eager(fast)


def test_other_sizes_and_whether_eager_may_pack(tmp_path: Path) -> None:
    module = encoder(norm=True)
    fast, padding = fast_of(module, tmp_path), paddings()["the first"]
    for batch, tokens in ((2, 7), (3, 9), (1, 4)):
        mask = torch.arange(tokens) >= torch.randint(1, tokens + 1, (batch, 1))
        same(module, fast, torch.randn(batch, tokens, 32), src_key_padding_mask=mask)
    assert strop.explain(fast).num_graphs == 1
    x = torch.randn(2, TOKENS, 32)
    for is_on in (False, True):
        torch.backends.mha.set_fastpath_enabled(is_on)
        same(module, fast, x, src_key_padding_mask=padding)
    module.use_nested_tensor = fast.use_nested_tensor = False
    same(module, fast, x, src_key_padding_mask=padding)
    assert not in_eager(fast)


def test_masks_that_are_causal_and_others(tmp_path: Path) -> None:
    module = encoder(norm=False)
    fast, x = fast_of(module, tmp_path), torch.randn(2, TOKENS, 32)
    causal = nn.Transformer.generate_square_subsequent_mask(TOKENS)
    other = causal.clone()
    other[3, 5] = 0
    for mask in (causal, other, causal):
        same(module, fast, x, mask=mask)
    assert strop.explain(fast).num_graphs == 1
    same(module, fast, x, mask=causal, src_key_padding_mask=added(paddings()["the first"]))
    same(module, fast, x, mask=causal, is_causal=True)
    assert not in_eager(fast)


def test_decoders_and_whole_transformers(tmp_path: Path) -> None:
    module = nn.Transformer(32, 4, 1, 2, 48, batch_first=True).eval()
    fast, causal = fast_of(module, tmp_path), nn.Transformer.generate_square_subsequent_mask(5)
    other = causal.clone()
    other[1, 3] = 0
    for mask in (causal, other):
        for name in ("the first", "holes"):
            padding = added(paddings()[name])
            masks = {"tgt_mask": mask, "src_key_padding_mask": padding}
            masks["memory_key_padding_mask"] = padding
            same(module, fast, torch.randn(2, TOKENS, 32), torch.randn(2, 5, 32), **masks)
    assert strop.explain(fast).num_graphs == 1
    assert not in_eager(fast)
