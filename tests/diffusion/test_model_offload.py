"""A pipeline whose models are offloaded is compiled, and nothing is copied to the host twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import strop
from strop.dispatch import model_offload
from strop.dispatch.model_offload import known_offload
from tests.e2e import tiny

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
