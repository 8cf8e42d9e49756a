"""LoRA is data: one graph for all adapters, ranks and scales, with eager's values."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoraConfig
from torch import Tensor, nn

import strop
from strop.dispatch.derived_inputs import EFFECTIVE
from strop.dispatch.effective_weights import EffectiveWeights
from strop.frontend.adapted_layers import scale_argument
from strop.runtime.run.cuda_graphs import pool_of
from tests.e2e import tiny

LAYERS = ("to_q", "to_k", "to_v", "to_out.0", "proj_in", "conv1", "conv_shortcut")
SAMPLE = torch.linspace(-1, 1, 2 * 4 * 8 * 8).reshape(2, 4, 8, 8)
PROMPT = torch.linspace(1, -1, 2 * 5 * tiny.PROMPT_DIM).reshape(2, 5, tiny.PROMPT_DIM)


def add(unet: Any, name: str = "a", rank: int = 2, seed: int = 1, **more: Any) -> None:
    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank, lora_alpha=3, init_lora_weights=False, target_modules=[*LAYERS], **more
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")
        unet.add_adapter(config, name)
    unet.eval()


def unets(tmp_path: Path) -> tuple[Any, Any]:
    eager = tiny.unet()
    fast = strop.optimize(copy.deepcopy(eager), options=tiny.options(cache_dir=str(tmp_path)))
    return eager, fast


def assert_as_eager(eager: Any, fast: Any, **more: Any) -> None:
    with torch.no_grad():
        wanted, found = (unet(SAMPLE, 7, PROMPT, **more).sample for unet in (eager, fast))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def second(unet: Any) -> None:
    add(unet, "b", rank=5, seed=2)


def negated(unet: Any) -> None:
    """Write factors as a hot swap does: nothing counts it."""
    for name, weight in unet.named_parameters():
        if "lora_B" in name:
            weight.data.mul_(-1)


def written(unet: Any) -> None:
    with torch.no_grad():
        for name, weight in unet.named_parameters():
            if "base_layer.weight" in name:
                weight.mul_(0.9)


def replaced_by_data(unet: Any) -> None:
    for name, weight in unet.named_parameters():
        if "base_layer.weight" in name:
            weight.data = weight.data * 1.1


def patterns(unet: Any) -> None:
    unet.unload_lora()
    add(unet, rank_pattern={"to_q": 4}, alpha_pattern={"to_k": 7})


# Each follows the ones before it: adapters come, change and go again.
CHANGES: dict[str, Callable[[Any], None]] = {
    "an adapter": add,
    "its scale": lambda unet: unet.set_adapters(["a"], [0.3]),
    "a negative scale": lambda unet: unet.set_adapters(["a"], [-1.5]),
    "a second one of another rank": second,
    "both": lambda unet: unet.set_adapters(["a", "b"], [0.3, 0.7]),
    "both the other way round": lambda unet: unet.set_adapters(["b", "a"], [0.4, 0.6]),
    "scales by block": lambda unet: unet.set_adapters(["a"], [{"mid": 0.2, "down": 0.9, "up": 1}]),
    "off": lambda unet: unet.disable_adapters(),
    "on": lambda unet: unet.enable_adapters(),
    "factors by .data": negated,
    "W0 written": written,
    "W0 by .data": replaced_by_data,
    "fused": lambda unet: unet.fuse_lora(),
    "unfused": lambda unet: unet.unfuse_lora(),
    "fused safely, by half": lambda unet: unet.fuse_lora(lora_scale=0.5, safe_fusing=True),
    "unfused again": lambda unet: unet.unfuse_lora(),
    "one deleted": lambda unet: unet.delete_adapters(["b"]),
    "ranks by pattern": patterns,
    "unloaded": lambda unet: unet.unload_lora(),
}


def test_one_graph_for_all_that_users_do(tmp_path: Path) -> None:
    eager, fast = unets(tmp_path)
    assert_as_eager(eager, fast)
    for name, change in CHANGES.items():
        for unet in (eager, fast):
            change(unet)
        assert_as_eager(eager, fast)
        assert fast.forward.variants.num_captures == 1, name
    assert fast.forward.counters.eager_calls == 0


# After these nothing is another that a program is bound to: the weights that it reads lie where
# they lay, with other values.
KEEPING = (
    "its scale",
    "a second one of another rank",
    "both",
    "scales by block",
    "off",
    "on",
    "factors by .data",
    "W0 by .data",
    "fused",
    "unfused",
    "fused safely, by half",
    "unfused again",
    "one deleted",
)


def test_what_is_bound_stays_bound_while_adapters_change(tmp_path: Path) -> None:
    eager, fast = unets(tmp_path)
    for unet in (eager, fast):
        add(unet)
    assert_as_eager(eager, fast)
    counters, (entry,) = fast.forward.counters, fast.forward.shapes.entries
    rebinds, bounds = counters.rebinds, dict(entry.bounds)
    for name in KEEPING:
        for unet in (eager, fast):
            CHANGES[name](unet)
        assert_as_eager(eager, fast)
        assert counters.rebinds == rebinds, name
    assert list(fast.forward.shapes.entries) == [entry]
    assert entry.bounds == bounds
    assert fast.forward.variants.num_captures == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_graphs_stay_captured_while_adapters_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    eager, fast = (unet.cuda() for unet in unets(tmp_path))
    given = [SAMPLE.cuda(), 7, PROMPT.cuda()]
    for unet in (eager, fast):
        add(unet)
        unet.cuda()
    pool = pool_of(torch.device("cuda", torch.cuda.current_device()))
    with torch.no_grad():
        for _ in range(3):  # a graph is captured at the second use
            fast(*given)
        captures, replays = pool.num_captures, fast.forward.counters.replays
        for number, name in enumerate(KEEPING):
            for unet in (eager, fast):
                CHANGES[name](unet)
                unet.cuda()
            wanted, found = eager(*given).sample, fast(*given).sample
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
            assert pool.num_captures == captures, name
            assert fast.forward.counters.replays == replays + number + 1, name


def test_the_first_call_with_adapters_takes_the_plain_graph_from_the_disk(tmp_path: Path) -> None:
    eager, fast = unets(tmp_path)
    assert_as_eager(eager, fast)
    eager, fast = unets(tmp_path)
    for unet in (eager, fast):
        add(unet)
    assert_as_eager(eager, fast)
    assert fast.forward.variants.num_captures == 0


def test_adapters_that_were_there_before(tmp_path: Path) -> None:
    eager = tiny.unet()
    add(eager)
    fast = strop.optimize(copy.deepcopy(eager), options=tiny.options(cache_dir=str(tmp_path)))
    assert_as_eager(eager, fast)
    for unet in (eager, fast):
        unet.unload_lora()
    assert_as_eager(eager, fast)
    assert fast.forward.variants.num_captures == 1


def test_nothing_is_written_where_nothing_has_changed(tmp_path: Path) -> None:
    eager, fast = unets(tmp_path)
    for unet in (eager, fast):
        add(unet)
    assert_as_eager(eager, fast)
    rebinds = fast.forward.counters.rebinds
    for weight, writes in ((1.0, 1), (0.5, 2), (0.5, 2), (1.0, 3)):
        for unet in (eager, fast):
            unet.set_adapters(["a"], [weight])
        assert_as_eager(eager, fast)
        assert fast.forward.state.effective.num_writes == writes
    assert fast.forward.counters.rebinds == rebinds
    (row,) = strop.explain(fast).components
    found = row.derived_of(EFFECTIVE)
    assert found is not None
    assert found.count == sum("lora_A.a" in n for n, _ in fast.named_parameters())
    assert (found.num_made, found.num_reuses) == (3, 0)
    assert f"{found.count} layers" in str(strop.explain(fast))


def test_parameters_stay_bit_by_bit(tmp_path: Path) -> None:
    _, fast = unets(tmp_path)
    before = {name: value.clone() for name, value in fast.state_dict().items()}
    with torch.no_grad():
        plain = fast(SAMPLE, 7, PROMPT).sample
        add(fast)
        given = {name: value.clone() for name, value in fast.state_dict().items()}
        fast(SAMPLE, 7, PROMPT)
        assert all(torch.equal(given[name], value) for name, value in fast.state_dict().items())
        fast.unload_lora()
        after = fast.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], value) for name, value in after.items())
        assert torch.equal(fast(SAMPLE, 7, PROMPT).sample, plain)


# the scale of a call


def test_the_scale_of_a_call(tmp_path: Path) -> None:
    eager, fast = unets(tmp_path)
    for unet in (eager, fast):
        add(unet)
    for scale in (0.5, 0.5, 2, 1.0, -0.25):  # the first call sees both, adapters and scale
        assert_as_eager(eager, fast, cross_attention_kwargs={"scale": scale})
    captures = fast.forward.variants.num_captures
    assert captures == 1
    assert_as_eager(eager, fast, cross_attention_kwargs=None)
    assert fast.forward.variants.num_captures == captures
    assert fast.forward.counters.eager_calls == 0


def test_diffusers_may_be_imported_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else may have been optimised before."""
    unet = tiny.unet()
    with monkeypatch.context() as patched:
        patched.delitem(sys.modules, "diffusers.utils.peft_utils")
        assert scale_argument(unet) == ""
    assert scale_argument(unet) == "cross_attention_kwargs"


def test_a_scale_of_zero_runs_in_eager_and_says_so(tmp_path: Path) -> None:
    """It has diffusers forget what ``set_adapters`` has set."""
    eager, fast = unets(tmp_path)
    for unet in (eager, fast):
        add(unet)
        unet.set_adapters(["a"], [0.5])
    assert_as_eager(eager, fast, cross_attention_kwargs={"scale": 0.0})
    assert_as_eager(eager, fast)
    (reason,) = fast.forward.counters.fallbacks
    assert "disable_lora()" in reason


# what is not folded


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
def test_an_adapter_with_a_bias_on_layers_without(tmp_path: Path) -> None:
    eager, fast = unets(tmp_path)
    for unet in (eager, fast):
        torch.manual_seed(1)
        config = LoraConfig(
            r=2, lora_alpha=3, init_lora_weights=False, lora_bias=True, target_modules=["to_q"]
        )
        unet.add_adapter(config)
        unet.eval()
    assert_as_eager(eager, fast)
    assert not fast.forward.state.effective
    assert "an adapter adds a bias to a layer that has none" in str(strop.explain(fast))
    assert_as_eager(eager, fast, cross_attention_kwargs={"scale": 0.5})
    (reason,) = fast.forward.counters.fallbacks
    assert "a scale for all adapters" in reason


def test_the_scale_of_a_call_is_not_lost_on_layers_that_are_not_folded(tmp_path: Path) -> None:
    eager, fast = unets(tmp_path)
    for unet in (eager, fast):
        torch.manual_seed(1)
        unet.conv_in.padding_mode = "circular"
        unet.add_adapter(LoHaConfig(r=2, alpha=3, init_weights=False, target_modules=["conv_in"]))
        unet.eval()
    assert_as_eager(eager, fast)
    assert_as_eager(eager, fast, cross_attention_kwargs={"scale": 0.3})


class Wrapped(nn.Module):
    """A user's model that turns its adapters while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        before = dict(self.linear.scaling)  # type: ignore[arg-type]
        for name in before:
            self.linear.scaling[name] = before[name] * 2  # type: ignore[index]
        try:
            return self.linear(x)
        finally:
            self.linear.scaling.update(before)  # type: ignore[union-attr]


def test_a_model_that_acts_on_its_adapters() -> None:
    from peft import inject_adapter_in_model

    torch.manual_seed(0)
    config = LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, target_modules=["linear"])
    eager: Any = inject_adapter_in_model(config, Wrapped()).eval()
    fast = strop.optimize(copy.deepcopy(eager), options=tiny.options())
    x = torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), eager(x))
    assert not fast.forward.state.effective


# numerics


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_are_rounded_once(dtype: torch.dtype) -> None:
    unet: Any = tiny.unet().to(dtype)
    add(unet)
    add(unet, "b", rank=5, seed=2)
    unet.set_adapters(["a", "b"], [0.3, -0.7])
    weights = EffectiveWeights()
    weights.scan(unet, list(unet.modules()))
    weights.refresh(1.0)
    assert len(weights) > 20
    for number, table in weights.tables.items():
        layer = next(m for m in unet.modules() if id(getattr(m, "base_layer", None)) == number)
        wanted = layer.base_layer.weight.double()
        for name in ("a", "b"):
            first, last = (f[name].weight.double() for f in (layer.lora_A, layer.lora_B))
            delta = last.flatten(1) @ first.flatten(1)
            wanted = wanted + layer.scaling[name] * delta.reshape(wanted.shape)
        error = (table["weight"].double() - wanted).abs()
        bound = torch.finfo(dtype).eps * wanted.abs() / 2
        assert bool((error <= bound * 1.01 + 1e-6 * wanted.abs().amax()).all())
