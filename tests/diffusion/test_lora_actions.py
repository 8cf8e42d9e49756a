"""All that users do with LoRAs to one tiny pipeline, one action after the other: each picture is
that of an eager pipeline, on the CPU and on the GPU."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import strop
from strop.api import dispatchers_of
from strop.bench.pipelines import actions_adapters, actions_loras
from strop.bench.pipelines.actions import ACTIONS, JOINT, Action
from strop.bench.pipelines.all import PIPELINES
from strop.bench.pipelines.tiny import TinyPipeline, drawn
from strop.bench.pipelines.twins import CLEARLY, SEEN, nearness
from tests.e2e import tiny

SD15 = next(case for case in PIPELINES if case.name == "sd15")
OTHERS = ("textual_inversion", "ip_adapter", "free_u", "fuse_qkv", "other_ip_adapter")
LEAST = {"cpu": 100.0, "cuda": 80.0}  # decibels from eager's
LORAS = [
    action
    for action in ACTIONS
    if action.do.__module__ in (actions_adapters.__name__, actions_loras.__name__)
    and not action.name.startswith(OTHERS)
    and action.on != JOINT
]
# A row has its adapter beside the weights, in a graph of its own.
TRACING = ("lora_of_a_row",)


@pytest.fixture(autouse=True)
def exact_and_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("diffusers"), "disabled", True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@contextmanager
def acted(pipe: Any, action: Action) -> Iterator[dict[str, Any]]:
    """Give what the next call is given, in the context that an action makes."""
    told = action.do(action.target(pipe))
    around = told if isinstance(told, AbstractContextManager) else nullcontext()
    with around:
        yield dict(told) if isinstance(told, Mapping) else {}


def without_adapters(pipe: Any, states: Mapping[str, dict[str, Tensor]]) -> None:
    for name, state in states.items():
        part = getattr(pipe, name)
        if hasattr(part, "unload_lora"):
            part.unload_lora()
        if getattr(part, "peft_config", None):
            pipe.unload_lora_weights()
            part.__dict__.pop("peft_config", None)
            part._hf_peft_config_loaded = False
        part.load_state_dict(state)  # what was fused is in them


def num_graphs(pipe: Any) -> dict[str, int]:
    return {name: found.variants.num_captures for name, found in dispatchers_of(pipe).items()}


def draw(case: TinyPipeline, pipe: Any, **more: Any) -> list[Tensor]:
    return [tensor.cpu() for tensor in drawn(case, pipe, **more)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["merged", "unmerged"])
@pytest.mark.parametrize("device", tiny.DEVICES)
def test_all_actions_with_loras(device: str, mode: str) -> None:
    eager, fast = SD15.made().to(device), SD15.made().to(device)
    strop.optimize(fast, options=tiny.options(lora=mode))
    states = {
        name: {key: value.clone() for key, value in getattr(eager, name).state_dict().items()}
        for name in ("unet", "text_encoder")
    }
    before = draw(SD15, eager)
    assert nearness(draw(SD15, fast), before) >= LEAST[device]
    assert len(LORAS) >= 20
    for action in LORAS:
        graphs = num_graphs(fast)
        with acted(eager, action) as more:
            wanted = draw(SD15, eager, **more)
        with acted(fast, action) as more:
            found = [draw(SD15, fast, **more) for _ in range(2)]  # the second one finds nothing new
        near = min(nearness(one, wanted) for one in found)
        assert near >= LEAST[device], (action.name, near)
        change = nearness(wanted, before)
        assert (change < SEEN) == action.is_seen, (action.name, change)
        assert not action.is_seen or change + CLEARLY < near, (action.name, change, near)
        for pipe in (eager, fast):
            without_adapters(pipe, states)
        assert nearness(draw(SD15, eager), before) == math.inf, action.name
        assert nearness(draw(SD15, fast), before) >= LEAST[device], action.name
        if mode == "merged" and action.name not in TRACING:
            assert num_graphs(fast) == graphs, action.name
    assert not any(d.counters.eager_calls for d in dispatchers_of(fast).values())
