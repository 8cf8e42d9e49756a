"""Key-value caches of transformers as arguments: read, written to, and given back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import strop
from tests.e2e import tiny

transformers = pytest.importorskip("transformers")


def _gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=50,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).eval().requires_grad_(False)


def _decoded(model: Any, cache: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    found = []
    for token in tokens.unbind(1):
        result = model(input_ids=token[:, None], past_key_values=cache, use_cache=True)
        assert result.past_key_values is cache
        found.append(result.logits)
    return found


@pytest.mark.parametrize("batch", [1, 3])
def test_decoding_with_a_cache_is_one_graph(batch: int, tmp_path: Path) -> None:
    eager = _gpt2()
    options = tiny.options(cache_dir=str(tmp_path), strict=True)
    fast = strop.optimize(copy.deepcopy(eager), options=options)
    tokens = torch.randint(3, 50, (batch, 9), generator=torch.Generator().manual_seed(0))
    caches = []
    for model in (eager, fast):
        cache = transformers.DynamicCache()
        with torch.no_grad():
            model(input_ids=tokens[:, :4], past_key_values=cache, use_cache=True)
            caches.append((cache, _decoded(model, cache, tokens[:, 4:])))
    (wanted, logits), (found, own) = caches
    # fp32 through two layers
    torch.testing.assert_close(own, logits, rtol=1e-4, atol=1e-5)
    assert found.get_seq_length() == wanted.get_seq_length() == 9
    for a, b in zip(found.layers, wanted.layers, strict=True):
        torch.testing.assert_close((a.keys, a.values), (b.keys, b.values), rtol=1e-4, atol=1e-5)
    assert len(fast.forward.variants.all) == 2  # the prompt, and every further token
    assert not fast.forward.counters.fallbacks


def test_generate_from_stored_plans(tmp_path: Path) -> None:
    eager = _gpt2()
    prompt = torch.randint(3, 50, (2, 5), generator=torch.Generator().manual_seed(1))
    for from_disk in (False, True):
        options = tiny.options(cache_dir=str(tmp_path), strict=True)
        fast = strop.optimize(copy.deepcopy(eager), options=options)
        given = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(fast.generate(prompt, **given), eager.generate(prompt, **given))
        variants = fast.forward.variants
        assert (variants.num_captures == 0) == from_disk
