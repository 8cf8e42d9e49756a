"""The denoisers of a pipeline share a budget for weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import ControlNetModel, StableDiffusionControlNetPipeline
from torch import nn

import strop
from strop.diffusion.pipeline import options_of_parts
from strop.errors import OptionError
from tests.budgeted import CountedMemory, lend_memory
from tests.diffusion.test_changes_captured import CHANGES, assert_near, draw, pipeline
from tests.e2e import tiny

# of diffusers
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> CountedMemory:
    return lend_memory(monkeypatch)


def size_of(module: nn.Module) -> int:
    return sum(w.nbytes for w in module.parameters())


def test_pictures_within_a_budget(memory: CountedMemory) -> None:
    eager, fast = pipeline(), pipeline()
    budget_bytes = int(0.6 * size_of(fast.unet))
    options = tiny.options(strict=True, weights_budget_bytes=budget_bytes)
    strop.optimize(fast, options=options)
    served = strop.api.dispatchers_of(fast)
    budgets = {name: d.options.weights_budget_bytes for name, d in served.items()}
    assert budgets == {"unet": budget_bytes, "vae.encoder": 0, "vae.decoder": 0}
    assert_near(draw(fast), draw(eager), 1e-4)
    for name, (change, _, _) in CHANGES.items():
        for pipe in (eager, fast):
            change(pipe)
        wanted = draw(eager)
        for _ in range(2):
            assert_near(draw(fast), wanted, 1e-4, name)
    assert memory.most <= budget_bytes
    assert {d.counters.eager_calls for d in served.values()} == {0}
    strop.optimize(fast, options=options)
    assert strop.api.dispatchers_of(fast)["unet"] is served["unet"], "it is as it is to be"
    strop.restore(fast)
    assert torch.equal(draw(fast), draw(eager))


def test_denoisers_share_a_budget_by_their_sizes() -> None:
    pipe: Any = tiny.pipeline()
    control = ControlNetModel.from_unet(pipe.unet)
    both = StableDiffusionControlNetPipeline(
        **{**pipe.components, "controlnet": control}, requires_safety_checker=False
    )
    strop.optimize(both, options=tiny.options(weights_budget_bytes=1_000_000))
    served = strop.api.dispatchers_of(both)
    own = [served[name].options.weights_budget_bytes for name in ("unet", "controlnet")]
    total = size_of(pipe.unet) + size_of(control)
    assert own[0] == 1_000_000 * size_of(pipe.unet) // total
    assert own[1] == 1_000_000 * size_of(control) // total


def test_a_pipeline_without_denoisers_has_no_budget() -> None:
    options = replace(tiny.options(), weights_budget_bytes=1000)
    with pytest.raises(OptionError, match="is for the denoisers"):
        options_of_parts({"vae.decoder": nn.Linear(2, 2)}, options)
