"""Build the models that ``strop bench load`` calls from many threads, and what they are called
with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from strop.bench import models
from strop.bench.models import call_for_tensor, made_on, random_tensor
from strop.errors import OptionError

LoadSize = tuple[int, ...]
Given = Mapping[str, Any]
NUM_PROMPTS = 4
SCALES = (0.5, 1.0)  # of the adapter, by call
RANK = 4
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")


@dataclass(frozen=True, slots=True)
class LoadWorkload:
    """Describe a model under load. ``build`` makes the module; ``inputs`` makes the arguments of a
    call of one size, by a number that says which prompt or sound it is."""

    name: str
    build: Callable[[torch.device, torch.dtype], nn.Module]
    inputs: Callable[[Any, LoadSize, int, torch.device, torch.dtype], dict[str, Any]]
    sizes: Sequence[LoadSize]
    size_form: str  # what a size is, as the command line has it
    call: Callable[[Any, Given], Tensor] = call_for_tensor
    takes_adapters: bool = False
    dtypes: Mapping[str, torch.dtype] = field(
        default_factory=lambda: {"cpu": torch.float32, "cuda": torch.float16}
    )


def sized(workload: LoadWorkload, text: str) -> list[LoadSize]:
    """Read sizes such as "32x32,48x32x2". Raises OptionError."""
    found = [tuple(part.split("x")) for part in text.split(",") if part]
    counts = {2, 3} if len(workload.sizes[0]) > 1 else {1}
    if not all(number.isdecimal() and int(number) for size in found for number in size) or not all(
        len(size) in counts for size in found
    ):
        raise OptionError(f"{text!r} are no sizes of {workload.name}: each is {workload.size_form}")
    return [tuple(map(int, size)) for size in found] or [*workload.sizes]


def cases_of(
    workload: LoadWorkload,
    module: nn.Module,
    sizes: Sequence[LoadSize],
    device: torch.device,
    *,
    with_adapter: bool,
) -> list[dict[str, Any]]:
    """Return what calls are given: each size with each prompt, and with each scale of the
    adapter if there is one."""
    dtype = workload.dtypes[device.type]
    scales: Sequence[float | None] = SCALES if with_adapter else (None,)
    found = []
    for size, prompt, scale in itertools.product(sizes, range(NUM_PROMPTS), scales):
        given = workload.inputs(module, size, prompt, device, dtype)
        if scale is not None:
            given["cross_attention_kwargs"] = {"scale": scale}
        found.append(given)
    return found


def add_adapter(module: Any, device: torch.device) -> None:
    """Give a UNet a LoRA of its attentions, of which each call has its own scale."""
    from peft import LoraConfig

    module.add_adapter(LoraConfig(r=RANK, target_modules=list(_ATTENTION)), "load")
    source = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, factor in module.named_parameters():
            if "lora_" in name:
                factor.copy_(0.05 * torch.randn(factor.shape, generator=source).to(device))
    module.requires_grad_(False)


# UNets


def _unet_inputs(
    factor: int, lengths: Sequence[int]
) -> Callable[[Any, LoadSize, int, torch.device, torch.dtype], dict[str, Any]]:
    """Return a maker of steps: pictures of ``factor`` pixels a latent, prompts of these tokens."""

    def inputs(
        module: Any, size: LoadSize, prompt: int, device: torch.device, dtype: torch.dtype
    ) -> dict[str, Any]:
        height, width, *more = size
        batch, config = (more or [1])[0], module.config
        shape = (batch, config.in_channels, height // factor, width // factor)
        text = (batch, lengths[prompt % len(lengths)], config.cross_attention_dim)
        return {
            "sample": random_tensor(shape, device, dtype, seed=prompt),
            "timestep": torch.tensor(100 + 200 * prompt, device=device),
            "encoder_hidden_states": random_tensor(text, device, dtype, seed=100 + prompt),
        }

    return inputs


def _sprites(device: torch.device, dtype: torch.dtype) -> nn.Module:
    from diffusers import UNet2DConditionModel

    folder = Path(models.__file__).parents[1] / "models" / "sprites" / "weights"
    unet = UNet2DConditionModel.from_pretrained(folder, subfolder="unet", torch_dtype=dtype)
    made: nn.Module = unet.to(device).eval().requires_grad_(False)
    return made


def _sd15(device: torch.device, dtype: torch.dtype) -> nn.Module:
    made: nn.Module = models.make_unet(models.SD15_UNET, device, dtype)
    return made


# speech

WHISPER_SMALL: dict[str, Any] = {
    "d_model": 768,
    "encoder_layers": 12,
    "encoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "num_mel_bins": 80,
    "max_source_positions": 1500,  # 30 seconds of sound
}
# On a CPU: Whisper-tiny, for two seconds.
WHISPER_TINY = WHISPER_SMALL | {
    "d_model": 384,
    "encoder_layers": 4,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "max_source_positions": 100,
}


def _whisper(device: torch.device, dtype: torch.dtype) -> nn.Module:
    try:
        from transformers import WhisperConfig
        from transformers.models.whisper.modeling_whisper import WhisperEncoder
    except ImportError as error:
        raise OptionError("whisper needs transformers: pip install transformers") from error
    config = WHISPER_SMALL if device.type == "cuda" else WHISPER_TINY
    with made_on(device, dtype):
        made: nn.Module = WhisperEncoder(WhisperConfig(**config)).eval().requires_grad_(False)
    return made


def _sounds(
    module: Any, size: LoadSize, number: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    config = module.config
    shape = (size[0], config.num_mel_bins, 2 * config.max_source_positions)
    return {"input_features": random_tensor(shape, device, dtype, seed=number)}


LOAD_WORKLOADS: Mapping[str, LoadWorkload] = {
    found.name: found
    for found in (
        LoadWorkload(
            "sprites",
            _sprites,
            _unet_inputs(4, (8, 24)),
            ((32, 32, 1), (48, 32, 1), (32, 32, 2)),
            "HEIGHTxWIDTH in pixels, a multiple of 16 each, and xBATCH if you like",
            takes_adapters=True,
        ),
        LoadWorkload(
            "sd15",
            _sd15,
            _unet_inputs(8, (77,)),
            ((512, 512, 2), (512, 768, 2), (768, 512, 2)),
            "HEIGHTxWIDTH in pixels, a multiple of 64 each, and xBATCH if you like",
            takes_adapters=True,
        ),
        LoadWorkload("whisper", _whisper, _sounds, ((1,), (2,), (4,)), "a number of sounds"),
    )
}
