"""What docs/limits.md says of models in which the values of a tensor decide a size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import strop
from strop.api import dispatchers_of
from strop.bench.pipelines.all import PIPELINES

PAGE = Path(__file__).parents[2] / "docs" / "limits.md"


def made(name: str) -> Any:
    (case,) = (case for case in PIPELINES if case.name == name)
    return case.made()


def lumina2_call(config: Any, length: int, tokens: int = 7) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(length)
    mask = (torch.arange(tokens) < length)[None].int()
    return {
        "hidden_states": torch.randn(1, config.in_channels, 8, 8, generator=generator),
        "timestep": torch.tensor([0.5]),
        "encoder_hidden_states": torch.randn(1, tokens, config.cap_feat_dim, generator=generator),
        "encoder_attention_mask": mask,
        "return_dict": False,
    }


def test_the_blocks_of_lumina2_are_compiled(tmp_path: Path) -> None:
    options = strop.Options(cache_dir=str(tmp_path))
    pipe, eager = made("lumina2"), made("lumina2").transformer
    strop.optimize(pipe, options=options)
    part = pipe.transformer
    blocks = [*part.noise_refiner, *part.context_refiner, *part.layers]
    for length in (3, 5, 6):
        call = lumina2_call(part.config, length)
        with torch.no_grad():
            torch.testing.assert_close(part(**call), eager(**call), rtol=1e-4, atol=1e-4)
    assert "such a transformer runs in eager around its blocks" in PAGE.read_text()
    counters = [block.forward.counters for block in blocks]
    assert [each.eager_calls for each in counters] == [0] * len(blocks)
    assert {each.calls for each in counters} == {3}
    (store,) = {block.forward.variants for block in blocks}
    assert len(store.all) == 2  # the block that refines text has no modulation
    (reason,) = dispatchers_of(pipe)["transformer"].counters.fallbacks
    assert "rope_embedder" in reason
    assert "a number or a size that the values of a tensor decide" in reason
