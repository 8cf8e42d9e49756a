"""Whatever road a LoRA takes into a pipeline of diffusers, it compiles nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn

import strop
from tests.e2e import tiny

State = dict[str, Tensor]
Road = Callable[[Any], Any]
PROMPT = torch.linspace(-1, 1, 5 * tiny.PROMPT_DIM).reshape(1, 5, tiny.PROMPT_DIM)


def layers() -> dict[str, nn.Linear]:
    """Return the layers that files have adapters for, by their names in the UNet."""
    parts = tiny.unet().named_modules()
    ends = ("to_q", "to_k", "to_v", "to_out.0")
    return {
        name: part for name, part in parts if isinstance(part, nn.Linear) and name.endswith(ends)
    }


def factors(rank: int, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    found = layers()
    torch.manual_seed(seed)
    return {
        name: (torch.randn(rank, layer.in_features) / 3, torch.randn(layer.out_features, rank) / 3)
        for name, layer in found.items()
    }


def file(rank: int, seed: int) -> State:
    """Return what a file of diffusers holds."""
    found: State = {}
    for name, (first, second) in factors(rank, seed).items():
        found[f"unet.{name}.lora_A.weight"] = first
        found[f"unet.{name}.lora_B.weight"] = second
    return found


def kohya_file(rank: int, seed: int, alpha: float) -> State:
    """Return what a file of kohya's tools holds, with an alpha that is not the rank."""
    found: State = {}
    for name, (first, second) in factors(rank, seed).items():
        start = f"lora_unet_{name.replace('.', '_')}"
        found[f"{start}.lora_down.weight"] = first
        found[f"{start}.lora_up.weight"] = second
        found[f"{start}.alpha"] = torch.tensor(alpha)
    return found


def draw(pipe: Any, **more: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        found: Tensor = pipe(
            prompt_embeds=PROMPT,
            negative_prompt_embeds=-PROMPT,
            height=16,
            width=16,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(3),
            output_type="latent",
            **more,
        ).images
    return found


def assert_close(found: Tensor, wanted: Tensor, name: str = "") -> None:
    torch.testing.assert_close(
        found, wanted, rtol=1e-3, atol=1e-3, msg=lambda text: f"{name}: {text}"
    )


def pipes(tmp_path: Path) -> tuple[Any, Any]:
    eager, fast = tiny.pipeline(), tiny.pipeline()
    for pipe in (eager, fast):  # scales of a call are for text encoders too
        pipe.register_modules(text_encoder=tiny.clip())
    return eager, strop.optimize(fast, options=tiny.options(cache_dir=str(tmp_path)))


def loaded(name: str, state: Callable[[], State]) -> Road:
    def load(pipe: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")
            pipe.load_lora_weights(state(), adapter_name=name)

    return load


def by_block(pipe: Any) -> None:
    pipe.set_adapters("one", {"unet": {"down": 0.2, "mid": 0.9, "up": {"block_0": 1.2}}})


def scaled(scale: float) -> Road:
    return lambda pipe: {"cross_attention_kwargs": {"scale": scale}}


# Each follows those before it. A road gives what the next call is given by name, if anything.
ROADS: dict[str, Road] = {
    "a file": loaded("one", lambda: file(4, 1)),
    "its weight": lambda pipe: pipe.set_adapters("one", 0.4),
    "weights by block": by_block,
    "a file of kohya's": loaded("two", lambda: kohya_file(3, 2, alpha=7.5)),
    "both": lambda pipe: pipe.set_adapters(["one", "two"], [0.7, -0.3]),
    "a scale of the call": scaled(0.5),
    "another": scaled(1.5),
    "off": lambda pipe: pipe.disable_lora(),
    "on": lambda pipe: pipe.enable_lora(),
    "fused": lambda pipe: pipe.fuse_lora(lora_scale=0.8),
    "unfused": lambda pipe: pipe.unfuse_lora(),
    "one fused": lambda pipe: pipe.fuse_lora(adapter_names=["two"]),
    "unfused again": lambda pipe: pipe.unfuse_lora(),
    "one deleted": lambda pipe: pipe.delete_adapters("one"),
    "unloaded": lambda pipe: pipe.unload_lora_weights(),
    "loaded again": loaded("one", lambda: file(6, 5)),
}
# Layers read other memory then, which no program was bound to before: weights that stand for their
# own. Unloading gives back their own.
BINDING = ("a file", "loaded again")


def test_all_roads_share_one_graph(tmp_path: Path) -> None:
    eager, fast = pipes(tmp_path)
    assert_close(draw(fast), draw(eager))
    dispatcher, results = fast.unet.forward, [draw(eager)]
    for name, road in ROADS.items():
        rebinds = dispatcher.counters.rebinds
        more = [road(pipe) or {} for pipe in (eager, fast)]
        wanted = draw(eager, **more[0])
        for _ in range(2):  # the second one finds nothing new
            found = draw(fast, **more[1])
            assert_close(found, wanted, name)
        assert dispatcher.counters.rebinds == rebinds + (name in BINDING), name
        assert dispatcher.variants.num_captures == 1, name
        results.append(wanted)
    assert dispatcher.counters.eager_calls == 0
    assert len({f"{result.double().sum():.5f}" for result in results}) >= 10


# hot swaps


def swapped(pipe: Any, state: State) -> None:
    pipe.load_lora_weights(state, adapter_name="one", hotswap=True)


@pytest.mark.parametrize("is_prepared", [False, True])
def test_hot_swaps_write_weights_alone(is_prepared: bool, tmp_path: Path) -> None:
    """Prepared ones may have another rank, and their scales are tensors that are written to."""
    eager, fast = pipes(tmp_path)
    for pipe in (eager, fast):
        if is_prepared:
            pipe.enable_lora_hotswap(target_rank=8)
        pipe.load_lora_weights(kohya_file(4, 1, alpha=6.0), adapter_name="one")
    assert_close(draw(fast), draw(eager))
    counters, results = fast.unet.forward.counters, [draw(eager)]
    rebinds = counters.rebinds
    swaps = [(4, 2, 6.0), (4, 2, 2.0)] + [(6, 3, 5.0), (2, 4, 1.0)] * is_prepared
    for rank, seed, alpha in swaps:
        for pipe in (eager, fast):
            swapped(pipe, kohya_file(rank, seed, alpha))
        wanted = draw(eager)
        assert_close(draw(fast), wanted)
        results.append(wanted)
    assert fast.unet.forward.variants.num_captures == 1
    assert counters.rebinds == rebinds
    assert counters.eager_calls == 0
    assert len({f"{result.double().sum():.5f}" for result in results}) == len(swaps) + 1


def test_a_scale_that_is_a_tensor_is_watched(tmp_path: Path) -> None:
    eager, fast = pipes(tmp_path)
    for pipe in (eager, fast):
        pipe.enable_lora_hotswap(target_rank=4)
        pipe.load_lora_weights(file(4, 1), adapter_name="one")
    before = draw(fast)
    for pipe in (eager, fast):
        for part in pipe.unet.modules():
            if hasattr(type(part), "scale_layer"):
                part.scale_layer(0.25)  # in place: no setting is another object
    wanted = draw(eager)
    assert (wanted - before).abs().max() > 1e-2
    assert_close(draw(fast), wanted)


# other models


def test_a_text_encoder(tmp_path: Path) -> None:
    eager, fast = tiny.clip(), tiny.clip()
    strop.optimize(fast, options=tiny.options(cache_dir=str(tmp_path)))
    tokens = torch.arange(2 * 7).reshape(2, 7)

    def check() -> Tensor:
        with torch.no_grad():
            wanted, found = (model(tokens).last_hidden_state for model in (eager, fast))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        return wanted

    results = [check()]
    for model in (eager, fast):
        torch.manual_seed(4)
        targets = ["q_proj", "v_proj", "fc1"]
        config = LoraConfig(r=2, lora_alpha=9, init_lora_weights=False, target_modules=targets)
        model.add_adapter(config)
        model.eval()
    results.append(check())
    for model in (eager, fast):
        model.disable_adapters()
    results.append(check())
    assert not torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert fast.forward.variants.num_captures == 1
