"""Settings of a module that a user turns: eager's values, and one further graph for all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn

import strop
from strop.bench.pipelines import twins
from strop.bench.pipelines.all import PIPELINES
from tests.e2e import tiny

X = torch.linspace(-2, 3, 12).reshape(2, 6)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.5
        self.scales = [1.0, 2.0]
        self.by_name = {"a": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            if scale != 0:
                x = x + scale * torch.sin(x)
        return x * self.scale + sum(self.by_name.values())


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Part(), Part()

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        return self.second(self.first(x)) + shift


def set_scale(module: Any, value: float) -> None:
    module.first.scale = value


def set_items(module: Any, value: float) -> None:
    for part in (module.first, module.second):
        part.scales[0] = value


def set_new_list(module: Any, value: float) -> None:
    module.second.scales = [value, -value]


def set_by_name(module: Any, value: float) -> None:
    module.first.by_name["a"] = value


SETTING: dict[str, Callable[[Any, float], None]] = {
    "a float": set_scale,
    "items": set_items,
    "a new list": set_new_list,
    "a dict": set_by_name,
}
VALUES = (0.25, -3.0, 1.5, 0.1, 2.0)


def assert_as_eager(fast: Any, eager: Any, *args: Any) -> None:
    with torch.no_grad():
        torch.testing.assert_close(fast(X, *args), eager(X, *args), rtol=1e-6, atol=1e-6)
    assert fast.forward.counters.eager_calls == 0


def pair(tmp_path: Path) -> tuple[Any, Any]:
    eager = Whole().eval()
    fast = strop.optimize(copy.deepcopy(eager), options=tiny.options(cache_dir=str(tmp_path)))
    assert_as_eager(fast, eager)
    return fast, eager


@pytest.mark.parametrize("name", SETTING)
def test_two_graphs_for_all_values(name: str, tmp_path: Path) -> None:
    fast, eager = pair(tmp_path)
    for value in VALUES:
        for module in (fast, eager):
            SETTING[name](module, value)
        assert_as_eager(fast, eager)
        assert_as_eager(fast, eager)  # and without a change
    assert len(fast.forward.variants.all) == 2


def test_code_that_branches_has_a_graph_for_each_side(tmp_path: Path) -> None:
    fast, eager = pair(tmp_path)
    for value in (0.3, 0.0, 0.4, 0.0, 0.7):
        for module in (fast, eager):
            set_new_list(module, value)
        assert_as_eager(fast, eager)
    assert len(fast.forward.variants.all) == 3


def test_settings_of_one_value_are_one_input(tmp_path: Path) -> None:
    fast, eager = pair(tmp_path)
    for value in VALUES:
        for module in (fast, eager):
            set_items(module, value)
        assert_as_eager(fast, eager)
    (turned,) = (v for v in fast.forward.variants.all if len(v.specs) > 1)
    assert len(turned.specs) == 3  # x; the value that was set; the 2.0 behind it in both lists


def test_beside_floats_of_the_call(tmp_path: Path) -> None:
    fast, eager = pair(tmp_path)
    for value in VALUES:
        for module in (fast, eager):
            set_scale(module, value)
        for shift in (0.5, value, 0.7):
            assert_as_eager(fast, eager, shift)
    assert len(fast.forward.variants.all) <= 5


FORMS: dict[str, Callable[[Any], None]] = {
    "longer": lambda m: m.first.scales.append(3.0),
    "shorter": lambda m: m.second.scales.pop(),
    "of whole numbers": lambda m: setattr(m.first, "scales", [1, 2]),
    "a part is another": lambda m: setattr(m, "second", Part()),
    "a tuple": lambda m: setattr(m.first, "scales", (0.1, 0.2)),
    "gone": lambda m: setattr(m.first, "scales", []),
    "another module's": lambda m: setattr(m, "first", copy.deepcopy(m.second)),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_setting_that_takes_another_form(name: str, tmp_path: Path) -> None:
    fast, eager = pair(tmp_path)
    for value in (0.3, 0.6):
        for module in (fast, eager):
            set_items(module, value)
        assert_as_eager(fast, eager)
    for module in (fast, eager):
        FORMS[name](module)
    assert_as_eager(fast, eager)
    for value in (0.4, 0.8):
        for module in (fast, eager):
            set_scale(module, value)
        assert_as_eager(fast, eager)


class Sized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.5

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + torch.ones(int(self.factor * 4)).sum()


def test_code_that_needs_the_number_has_a_graph_for_each(tmp_path: Path) -> None:
    eager = Sized().eval()
    fast: Any = strop.optimize(Sized().eval(), options=tiny.options(cache_dir=str(tmp_path)))
    for value in (1.5, 2.5, 3.5, 1.5):
        fast.factor = eager.factor = value
        assert_as_eager(fast, eager)
        assert_as_eager(fast, eager)


def test_a_stored_graph_serves_every_value(tmp_path: Path) -> None:
    for captures in (2, 0):
        fast, eager = pair(tmp_path)
        for value in VALUES:
            for module in (fast, eager):
                set_items(module, value)
            assert_as_eager(fast, eager)
        assert fast.forward.variants.num_captures == captures


def _pictures(name: str, change: Callable[[Any, float], None], values: Any) -> Any:
    case = {case.name: case for case in PIPELINES}[name]
    eager, fast = case.made(), case.made()
    strop.optimize(fast, options=tiny.options())
    for value in values:
        for pipe in (eager, fast):
            change(pipe, value)
        wanted, found = (twins.drawn(case, pipe) for pipe in (eager, fast))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert fast.unet.forward.counters.eager_calls == 0
    return fast


def test_scales_of_an_ip_adapter() -> None:
    values = (0.6, 0.3, 0.9, 0.1)
    fast = _pictures("sd15-ip-adapter", lambda pipe, v: pipe.set_ip_adapter_scale(v), values)
    assert len(fast.unet.forward.variants.all) <= 2


def _with_adapter() -> Any:
    unet = tiny.unet()
    torch.manual_seed(1)
    unet.add_adapter(
        LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, target_modules=["to_q", "to_v"]),
        "style",
    )
    return unet.eval()


def test_weights_of_a_lora(tmp_path: Path) -> None:
    eager, fast = _with_adapter(), _with_adapter()
    strop.optimize(fast, options=tiny.options(cache_dir=str(tmp_path)))
    sample, prompt = torch.randn(2, 4, 8, 8), torch.randn(2, 5, tiny.PROMPT_DIM)
    for weight in (1.0, 0.5, 0.0, 1.5, -0.3):
        for unet in (eager, fast):
            unet.set_adapters(["style"], [weight])
        with torch.no_grad():
            found, wanted = (unet(sample, 7, prompt).sample for unet in (fast, eager))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert fast.forward.counters.eager_calls == 0
    assert len(fast.forward.variants.all) == 1  # they are data
