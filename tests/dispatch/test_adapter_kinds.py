"""Every kind of adapter that adds to a weight is folded into it, with eager's values."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

import strop
from strop.dispatch.effective_weights import EffectiveWeights
from tests.e2e import tiny

TARGETS = ["wide", "square", "point"]


class Net(nn.Module):
    """A linear layer, a convolution of windows, and one of points."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(12, 20)
        self.square = nn.Conv2d(4, 6, 3, padding=1)
        self.point = nn.Conv2d(6, 8, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(torch.tanh(self.point(torch.tanh(self.square(x)))))


X = torch.linspace(-1, 2, 2 * 4 * 3 * 12).reshape(2, 4, 3, 12)
Make = Callable[..., Any]


def lora(**more: Any) -> Any:
    return LoraConfig(
        **{"r": 3, "lora_alpha": 5, "init_lora_weights": False, "target_modules": TARGETS} | more
    )


def dora() -> Any:
    return lora(use_dora=True)


def rs_lora() -> Any:
    return lora(use_rslora=True, rank_pattern={"wide": 2}, alpha_pattern={"square": 11})


def loha(**more: Any) -> Any:
    return LoHaConfig(r=2, alpha=3, init_weights=False, target_modules=TARGETS, **more)


def loha_by_windows() -> Any:
    return loha(use_effective_conv2d=True)


def lokr(**more: Any) -> Any:
    return LoKrConfig(**{"r": 2, "alpha": 3} | more, init_weights=False, target_modules=TARGETS)


def lokr_by_windows() -> Any:
    return lokr(r=1, decompose_both=True, use_effective_conv2d=True)


def lokr_whole() -> Any:
    return lokr(r=64)


KINDS = (lora, dora, rs_lora, loha, loha_by_windows, lokr, lokr_by_windows, lokr_whole)


def added(net: Any, config: Any, name: str, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")
        net = inject_adapter_in_model(config, net, name).eval()
    with torch.no_grad():  # DoRA begins with lengths that change nothing
        for key, value in net.named_parameters():
            if "magnitude" in key and f".{name}." in key:
                value.mul_(torch.linspace(0.5, 1.5, value.numel()).reshape(value.shape))
    return net


def layers(net: Any) -> list[Any]:
    return [part for part in net.modules() if hasattr(type(part), "scale_layer")]


def each(method: str, *args: Any) -> Callable[[Any], None]:
    def change(net: Any) -> None:
        for layer in layers(net):
            getattr(layer, method)(*args)

    return change


def reactivated(net: Any) -> None:
    for layer in layers(net):
        layer.set_adapter(["b"])
        layer.set_scale("b", 0.4)


def written(net: Any) -> None:
    """Write through ``.data``, which nobody counts."""
    for name, value in net.named_parameters():
        if "base_layer" not in name and ".a" in name:
            value.data.mul_(-1.25)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "both": each("set_adapter", ["a", "b"]),
    "a scale": each("set_scale", "a", 0.6),
    "all by a scale": each("scale_layer", 0.5),
    "and back": each("unscale_layer", 0.5),
    "off": each("enable_adapters", False),
    "on": each("enable_adapters", True),
    "tensors written": written,
    "merged": each("merge"),
    "taken out": each("unmerge"),
    "the second alone": reactivated,
}


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_one_graph_serves_a_kind(make: Make, tmp_path: Path) -> None:
    torch.manual_seed(0)
    eager: Any = Net().eval()
    fast = strop.optimize(copy.deepcopy(eager), options=tiny.options(cache_dir=str(tmp_path)))
    state, counters = fast.forward.state, fast.forward.counters

    def check(name: str) -> Tensor:
        with torch.no_grad():
            wanted, found = eager(X), fast(X)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, msg=lambda m: name + m)
        return wanted

    results = [check("plain")]
    for model in (eager, fast):
        added(added(model, make(), "a", 1), make(), "b", 2)
    results.append(check("two adapters"))
    assert len(state.effective) == len(TARGETS)
    rebinds = counters.rebinds
    for name, change in CHANGES.items():
        for model in (eager, fast):
            change(model)
        results.append(check(name))
    assert fast.forward.variants.num_captures == 1
    assert counters.rebinds == rebinds
    assert counters.eager_calls == 0
    different = {f"{result.double().sum():.4f}" for result in results}
    assert len(different) >= 7, "changes that change nothing test nothing"


def test_kinds_lie_beside_each_other() -> None:
    """DoRA multiplies what the adapters before it have made, by lengths that ignore these."""
    for first, second in ((lora, dora), (dora, lora), (dora, dora)):
        net = added(added(Net(), first(), "a", 1), second(), "b", 2)
        each("set_adapter", ["a", "b"])(net)
        exact = copy.deepcopy(net).double()
        with torch.no_grad():
            wanted = exact(X.double())
            found = folded(net)(X).double()
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def folded(net: Any) -> Any:
    """Return a net of plain layers with the weights that stand for those of wrapped ones."""
    weights = EffectiveWeights()
    weights.scan(net, list(net.modules()))
    weights.refresh(1.0)
    assert len(weights) == len(TARGETS)
    plain = copy.deepcopy(net)
    for name in TARGETS:
        base = getattr(net, name).base_layer
        twin = copy.deepcopy(base)
        twin.weight = weights.tables[id(base)]["weight"]
        setattr(plain, name, twin)
    return plain


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_it_is_no_further_from_fp64_than_eager(make: Make, dtype: torch.dtype) -> None:
    net = added(added(Net(), make(), "a", 1), make(), "b", 2).to(dtype)
    each("set_adapter", ["a", "b"])(net)
    exact, plain = copy.deepcopy(net).double(), folded(net)
    total, ours = 0.0, 0.0
    for name, shape in (("wide", (64, 12)), ("square", (4, 4, 9, 9)), ("point", (4, 6, 9, 9))):
        x = torch.linspace(-1, 1, torch.Size(shape).numel()).sin_().reshape(shape).to(dtype)
        with torch.no_grad():
            wanted = getattr(exact, name)(x.double())
            total += (getattr(net, name)(x).double() - wanted).square().mean().item()
            ours += (getattr(plain, name)(x).double() - wanted).square().mean().item()
    slack = 1.0 if dtype is not torch.float32 else 2.0  # sums of products in another order
    assert ours <= total * slack


# what is not folded runs as peft computes it


def circular(net: Any) -> None:
    net.square.base_layer.padding_mode = "circular"


def dilated(net: Any) -> None:
    net.square.base_layer.dilation = (2, 2)
    net.square.base_layer.padding = (2, 2)


def with_cache(net: Any) -> None:
    import peft.tuners.lora.dora as peft_dora

    peft_dora.ENABLE_DORA_CACHING = True


@pytest.mark.parametrize(
    ("make", "change"), [(loha, circular), (lokr, circular), (lora, circular), (dora, with_cache)]
)
def test_what_a_plain_layer_cannot_stand_for(
    make: Make, change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peft.tuners.lora.dora.ENABLE_DORA_CACHING", False)
    torch.manual_seed(0)
    eager = added(Net(), make(), "a")
    change(eager)
    fast = strop.optimize(copy.deepcopy(eager), options=tiny.options())
    with torch.no_grad():
        torch.testing.assert_close(fast(X), eager(X), rtol=1e-4, atol=1e-5)
    num_left = len(TARGETS) if change is with_cache else 1
    assert len(fast.forward.state.effective) == len(TARGETS) - num_left


def test_a_dilation_that_peft_does_not_pass_on() -> None:
    torch.manual_seed(0)
    net = Net()
    net.square = nn.Conv2d(4, 6, 3, padding=1, dilation=1)
    net = added(net, lora(), "a")
    dilated(net)
    weights = EffectiveWeights()
    weights.scan(net, list(net.modules()))
    assert len(weights) == len(TARGETS) - 1
