"""Adapters on every kind of layer that peft wraps: folded where a sum can stand for them, and right
where none can, with the reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import strop
from strop.dispatch.effective_weights import EffectiveWeights
from tests.e2e import tiny

pytestmark = [
    pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups"),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`"),
]


class Net(nn.Module):
    """A layer that may be wrapped, and one that may not."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.end = layer, nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.end(self.layer(x))
        return found


class Attention(Net):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.end(self.layer(x, x, x, need_weights=False)[0])
        return found


def numbers(*shape: int) -> Tensor:
    return torch.linspace(-1, 2, torch.Size(shape).numel()).sin().reshape(shape)


Case = tuple[Callable[[], nn.Module], Tensor, dict[str, Any]]
BIAS = {"lora_bias": True}
FOLDED: dict[str, Case] = {
    "linear, bias": (lambda: Net(nn.Linear(12, 20)), numbers(3, 12), BIAS),
    "2-d, bias": (lambda: Net(nn.Conv2d(4, 6, 3, padding=1)), numbers(2, 4, 6, 6), BIAS),
    "1-d": (lambda: Net(nn.Conv1d(4, 6, 3, stride=2)), numbers(2, 4, 9), {}),
    "1-d, bias": (lambda: Net(nn.Conv1d(4, 6, 3, padding=1)), numbers(2, 4, 9), BIAS),
    "3-d": (lambda: Net(nn.Conv3d(4, 6, 3, padding=1)), numbers(2, 4, 5, 6, 6), {}),
    "1-d, DoRA": (lambda: Net(nn.Conv1d(4, 6, 3)), numbers(2, 4, 9), {"use_dora": True}),
    "3-d, DoRA": (lambda: Net(nn.Conv3d(4, 6, 3)), numbers(2, 4, 5, 6, 6), {"use_dora": True}),
    "table": (lambda: Net(nn.Embedding(30, 12)), torch.arange(14).reshape(2, 7), {}),
}
OTHERS: dict[str, tuple[Case, str]] = {
    "groups": (
        (lambda: Net(nn.Conv2d(4, 8, 3, groups=2)), numbers(2, 4, 6, 6), {"r": 4}),
        "a convolution of groups, which its adapter does not have",
    ),
    "Conv1D": (
        (lambda: Net(Conv1D(20, 12)), numbers(3, 12), {"fan_in_fan_out": True}),
        "the layer is a Conv1D",
    ),
    "attention": (
        (lambda: Attention(nn.MultiheadAttention(16, 2, batch_first=True)), numbers(2, 5, 16), {}),
        "no rule for adapters of the kind peft.tuners.lora.layer.MultiheadAttention",
    ),
    "table with a norm": (
        (lambda: Net(nn.Embedding(30, 12, max_norm=1.0)), torch.arange(14).reshape(2, 7), {}),
        "a variant, padding or dilation of the adapter's own",
    ),
}


def added(net: Any, name: str, seed: int, **more: Any) -> Any:
    given = {"r": 3, "lora_alpha": 5, "init_lora_weights": False, "target_modules": ["layer"]}
    torch.manual_seed(seed)
    return inject_adapter_in_model(LoraConfig(**(given | more)), net, name).eval()


def written(net: Any) -> None:
    """Write through ``.data``, which nobody counts."""
    for name, value in net.named_parameters():
        if "base_layer" not in name and ".a" in name:
            value.data.mul_(-1.25)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "both": lambda net: net.layer.set_adapter(["a", "b"]),
    "a scale": lambda net: net.layer.set_scale("a", 0.6),
    "another": lambda net: net.layer.set_scale("b", 1.7),
    "off": lambda net: net.layer.enable_adapters(False),
    "on": lambda net: net.layer.enable_adapters(True),
    "tensors written": written,
    "merged": lambda net: net.layer.merge(),
    "taken out": lambda net: net.layer.unmerge(),
    "one deleted": lambda net: net.layer.delete_adapter("b"),
}


def twins(case: Case, tmp_path: Path) -> tuple[Any, Any, Callable[[str], Tensor]]:
    torch.manual_seed(0)
    eager: Any = case[0]().eval()
    fast = strop.optimize(copy.deepcopy(eager), options=tiny.options(cache_dir=str(tmp_path)))

    def check(name: str) -> Tensor:
        with torch.no_grad():
            wanted, found = eager(case[1]), fast(case[1])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, msg=lambda m: name + m)
        return wanted.clone()

    return eager, fast, check


@pytest.mark.parametrize("name", FOLDED)
def test_one_graph_serves_all_that_is_done(name: str, tmp_path: Path) -> None:
    case = FOLDED[name]
    eager, fast, check = twins(case, tmp_path)
    results = [check("plain")]
    for model in (eager, fast):
        added(added(model, "a", 1, **case[2]), "b", 2, **case[2])
    results.append(check("added"))
    assert len(fast.forward.state.effective) == 1
    for change, act in CHANGES.items():
        if change == "merged" and case[2].get("use_dora"):
            break  # peft merges one by one, which gives another sum
        for model in (eager, fast):
            act(model)
        results.append(check(change))
    assert fast.forward.variants.num_captures == 1
    assert fast.forward.counters.eager_calls == 0
    assert len({f"{result.double().sum():.4f}" for result in results}) >= 6


def test_a_bias_comes_and_goes(tmp_path: Path) -> None:
    """The layer's own bias is read unless an adapter that is there adds to it."""
    eager, fast, check = twins(FOLDED["linear, bias"], tmp_path)
    own = eager.layer.bias.clone()
    for model in (eager, fast):
        added(model, "a", 1)
    results = [check("without a bias")]
    for model in (eager, fast):
        added(model, "b", 2, lora_bias=True)
        model.layer.set_adapter(["a", "b"])
    results.append(check("with one"))
    for model in (eager, fast):
        model.layer.base_layer.bias.data.add_(0.5)
    results.append(check("the layer's own written through .data"))
    for model in (eager, fast):
        with torch.no_grad():
            model.layer.base_layer.bias.sub_(0.5)
        model.layer.delete_adapter("b")
    results.append(check("deleted"))
    torch.testing.assert_close(fast.layer.base_layer.bias, own)
    torch.testing.assert_close(results[0], results[-1], rtol=1e-4, atol=1e-5)
    assert (results[1] - results[0]).abs().max() > 1e-2
    assert (results[2] - results[1]).abs().max() > 1e-2
    assert fast.forward.variants.num_captures == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [n for n in FOLDED if "DoRA" not in n])
def test_sums_are_rounded_once(name: str, dtype: torch.dtype) -> None:
    make, _, more = FOLDED[name]
    net = added(added(make(), "a", 1, **more), "b", 2, **more).to(dtype)
    net.layer.set_adapter(["a", "b"])
    exact = copy.deepcopy(net).double()
    exact.layer.merge()
    weights = EffectiveWeights()
    weights.scan(net, list(net.modules()))
    weights.refresh(1.0)
    (table,) = weights.tables.values()
    for key in ("weight", "bias") if more else ("weight",):
        wanted = getattr(exact.layer.base_layer, key)
        error = (table[key].double() - wanted).abs()
        bound = torch.finfo(dtype).eps * wanted.abs() / 2
        assert bool((error <= bound * 1.01 + 1e-6 * wanted.abs().amax()).all())


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_folded_is_right_and_says_why(name: str, tmp_path: Path) -> None:
    case, reason = OTHERS[name]
    eager, fast, check = twins(case, tmp_path)
    results = [check("plain")]
    for model in (eager, fast):
        added(model, "a", 1, **case[2])
    results.append(check("added"))
    assert not fast.forward.state.effective
    for scale in (0.3, 0.9):
        for model in (eager, fast):
            model.layer.set_scale("a", scale)
        results.append(check(f"a scale of {scale}"))
    for model in (eager, fast):
        model.layer.enable_adapters(False)
    torch.testing.assert_close(check("off"), results[0])
    assert len({f"{result.double().sum():.4f}" for result in results}) == 4
    assert reason in str(strop.explain(fast))
