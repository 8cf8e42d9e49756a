"""The cases of ``strop bench kernel``: their shapes are those of the models, and they run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from strop.bench import kernel_cases, models
from strop.bench.kernel_cases import kernel_cases as cases_for
from strop.bench.kernel_cases import make

CPU, META = torch.device("cpu"), torch.device("meta")


def group_norms(model: nn.Module, *args: object, **kwargs: object) -> dict[int, set[int]]:
    """Side of the image -> channels of every GroupNorm of a call."""
    found: dict[int, set[int]] = {}

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        channels, tokens = inputs[0].shape[1], inputs[0].flatten(2).shape[2]
        found.setdefault(round(tokens**0.5), set()).add(channels)

    for module in model.modules():
        if isinstance(module, nn.GroupNorm):
            module.register_forward_pre_hook(note)
    model(*args, **kwargs)
    return found


def as_sets(table: dict[int, tuple[int, ...]]) -> dict[int, set[int]]:
    return {side: set(channels) for side, channels in table.items()}


def test_the_group_norms_are_those_of_the_unets_and_the_vae():
    pytest.importorskip("diffusers")
    fewer = {"transformer_layers_per_block": [1, 1, 1]}  # they have no GroupNorm
    half, prompt = torch.float16, torch.empty(2, 77, 2048, device=META, dtype=torch.float16)
    latents = torch.empty(2, 4, 64, 64, device=META, dtype=half)
    sd15 = models.make_unet(models.SD15_UNET, META, half)
    assert group_norms(sd15, latents, 1, prompt[..., :768]) == as_sets(kernel_cases.SD15)
    sdxl = models.make_unet(models.SDXL_UNET | fewer, META, half)
    added = {"text_embeds": prompt[:, 0, :1280], "time_ids": prompt[:, 0, :6]}
    assert group_norms(sdxl, latents, 1, prompt, added_cond_kwargs=added) == as_sets(
        kernel_cases.SDXL
    )
    vae = models.make_vae(models.SD_VAE, META, half)
    picture = torch.empty(1, 3, 512, 512, device=META, dtype=half)
    assert group_norms(vae, picture) == as_sets(kernel_cases.VAE)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_names_differ_and_sizes_are_within_the_limit(device_type: str):
    cases = cases_for(device_type, torch.float16)
    assert len({case.name for case in cases}) == len(cases)
    families = {family.name for family in kernel_cases.ROW_FAMILIES}
    assert {case.family for case in cases} == families | {"group_norm_silu"}
    limit = kernel_cases.LIMIT_BYTES[device_type]
    for case in cases:
        module, inputs = make(case, META, torch.float16)
        results = module(*inputs)
        tensors = [*inputs, *(results if isinstance(results, tuple) else (results,))]
        assert sum(t.numel() * t.element_size() for t in tensors) == case.bytes_moved(torch.float16)
        assert case.bytes_moved(torch.float16) <= limit


def test_images_are_channels_last():
    case = next(c for c in cases_for("cpu", torch.float32) if c.family == "group_norm_silu")
    _, (x,) = make(case, CPU, torch.float32)
    assert x.is_contiguous(memory_format=torch.channels_last)
