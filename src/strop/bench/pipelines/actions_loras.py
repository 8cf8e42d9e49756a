"""List further roads of LoRAs: kinds of adapters and of files, scales by block, rows of a batch."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import strop
from strop.api import dispatchers_of, restore
from strop.bench.pipelines.actions_adapters import TARGETS, hot_swapped, lora_config, lora_loaded


def _added(model: Any, config: Any) -> None:
    """Add an adapter. Layers of LoHa and LoKr draw random numbers until they are in evaluation."""
    torch.manual_seed(4)
    model.add_adapter(config, "first")
    model.eval()


def add_dora(model: Any) -> None:
    from peft import LoraConfig

    config = LoraConfig(
        r=2, lora_alpha=4, target_modules=TARGETS, init_lora_weights=False, use_dora=True
    )
    _added(model, config)


def add_loha(model: Any) -> None:
    from peft import LoHaConfig

    _added(model, LoHaConfig(r=2, alpha=3, target_modules=TARGETS, init_weights=False))


def add_lokr(model: Any) -> None:
    from peft import LoKrConfig

    _added(model, LoKrConfig(r=2, alpha=3, target_modules=TARGETS, init_weights=False))


def add_to_text_encoder(encoder: Any) -> None:
    """Add an adapter to all linear layers, as they are called otherwise in CLIP and T5."""
    from peft import LoraConfig

    names = [name for name, part in encoder.named_modules() if type(part) is nn.Linear]
    _added(encoder, LoraConfig(r=2, target_modules=names, init_lora_weights=False))


def lora_by_block(pipe: Any) -> None:
    lora_loaded(pipe)
    pipe.set_adapters("one", {"unet": {"down": 0.2, "mid": 1.4, "up": 0.6}})


def lora_switched_on(pipe: Any) -> None:
    lora_loaded(pipe)
    pipe.disable_lora()
    pipe.enable_lora()


def lora_of_kohya(pipe: Any) -> None:
    """Load a file of kohya's tools, with an alpha that is not the rank."""
    pipe.load_lora_weights(_kohya_file(pipe.unet, rank=3, alpha=7.5), adapter_name="one")


def _kohya_file(unet: Any, rank: int, alpha: float) -> dict[str, Tensor]:
    plain = copy.deepcopy(unet)
    restore(plain)
    generator = torch.Generator().manual_seed(8)
    found: dict[str, Tensor] = {}
    for name, part in plain.named_modules():
        if type(part) is nn.Linear and name.endswith(tuple(TARGETS)):
            start = f"lora_unet_{name.replace('.', '_')}"
            for key, shape in (
                ("lora_down", (rank, part.in_features)),
                ("lora_up", (part.out_features, rank)),
            ):
                found[f"{start}.{key}.weight"] = torch.randn(shape, generator=generator) / 3
            found[f"{start}.alpha"] = torch.tensor(alpha)
    return found


def lora_swapped_as_prepared(pipe: Any) -> None:
    """Swap files where diffusers has been told to: scales are tensors, and ranks are padded."""
    pipe.enable_lora_hotswap(target_rank=4)
    lora_loaded(pipe)
    hot_swapped(pipe)


def lora_of_a_row(pipe: Any) -> AbstractContextManager[None]:
    """Give the only picture the only adapter, which an eager pipeline uses anyway."""
    lora_loaded(pipe)
    return strop.lora_rows(pipe, ["one"]) if dispatchers_of(pipe) else nullcontext()


def lora_by_joint_call(pipe: Any) -> dict[str, Any]:
    """Scale the adapter of a transformer in a call."""
    _added(pipe.transformer, lora_config())
    return {"joint_attention_kwargs": {"scale": 0.3}}
