"""Build what is trained, with random weights, and the batches of its first step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import strop
from strop.bench import models
from strop.bench.train_loader import TOKENS
from strop.bench.train_work import MODELS, Setup, Work
from strop.options import Options

RANK = 16
TIMES = 1000
AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class Network:
    """Hold the modules: ``unet`` is what runs; ``trained`` what a checkpoint would hold. VAE and
    text encoder are left out where their results are given."""

    unet: Any
    vae: Any
    text_encoder: Any
    trained: list[nn.Parameter]


@dataclass(frozen=True, slots=True)
class Batch:
    """Hold a batch. ``pictures``: pixels, or the moments of latents; ``text``: tokens, or states of
    them. ``more``: what SDXL is told beside (pooled text, sizes)."""

    pictures: Tensor
    text: Tensor
    more: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Draws:
    """Hold the random numbers of a step: of the latents, the noise and the timesteps."""

    latents: Tensor
    noise: Tensor
    times: Tensor


def half_of(setup: Setup, device: torch.device) -> torch.dtype | None:
    """Return the half type of autocast; None for fp32. CPUs have no fast fp16: bf16 stands in,
    GradScaler and all."""
    found = AUTOCAST.get(setup.precision)
    return torch.bfloat16 if found is not None and device.type == "cpu" else found


def build(work: Work, device: torch.device) -> Network:
    """Build the modules in fp32, in torch's layout, in eager."""
    model = MODELS[work.model]
    unet = models.make_unet(model.unet, device, torch.float32).train()
    if work.trained == "lora":
        _add_adapters(unet)
    else:
        unet.requires_grad_(True)
    vae = text = None
    if not work.is_cached:
        vae = models.make_vae(model.vae, device, torch.float32)
        text = models.make_text_encoder(model.clip, device, torch.float32)
    return Network(unet, vae, text, [p for p in unet.parameters() if p.requires_grad])


def _add_adapters(unet: Any) -> None:
    """Add adapters where diffusers' script puts them."""
    from peft import LoraConfig

    unet.add_adapter(
        LoraConfig(
            r=RANK,
            lora_alpha=RANK,
            init_lora_weights="gaussian",
            target_modules=["to_k", "to_q", "to_v", "to_out.0"],
        )
    )


def set_up(network: Network, setup: Setup, device: torch.device) -> None:
    """Set precision, layout and attention of modules that have been built. Nothing is compiled
    yet."""
    half = half_of(setup, device)
    parts = [part for part in (network.vae, network.text_encoder) if part is not None]
    if half is not None:
        for part in parts:
            part.to(half)
        _lower_frozen(network.unet, half)
    if setup.is_channels_last and device.type == "cuda":  # on CPUs its backward dies (torch 2.13)
        for part in (network.unet, *parts):
            part.to(memory_format=torch.channels_last)
    if setup.attention == "naive":
        from diffusers.models.attention_processor import AttnProcessor

        network.unet.set_attn_processor(AttnProcessor())
        if network.vae is not None:
            network.vae.set_attn_processor(AttnProcessor())
    if setup.recompute == "checkpoints":
        network.unet.enable_gradient_checkpointing()


def _lower_frozen(unet: nn.Module, half: torch.dtype) -> None:
    """Lower the base of adapters, which is not trained, to the half type, as scripts do."""
    for parameter in unet.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(half)


def modules_of(network: Network) -> list[Any]:
    """Return what a step calls, and a user would hand to a compiler."""
    frozen = [] if network.vae is None else [network.vae.encoder, network.text_encoder]
    return [network.unet, *frozen]


def compile_modules(network: Network, setup: Setup, options: Options) -> None:
    """Compile all modules of the step in place."""
    for part in modules_of(network):
        if setup.compiler == "strop":
            strop.optimize(part, train=part is network.unet, options=options)
        elif setup.compiler:
            mode = "reduce-overhead" if setup.compiler == "inductor-graphs" else None
            part.forward = torch.compile(part.forward, dynamic=False, mode=mode)


@contextmanager
def torch_set_for(setup: Setup, device: torch.device) -> Iterator[None]:
    """Switches of the whole process: TF32 products, and what Inductor keeps for the backward."""
    from torch._functorch import config

    before = torch.get_float32_matmul_precision()
    budget = 0.5 if setup.recompute == "budget" and setup.compiler != "strop" else 1.0
    with config.patch(activation_memory_budget=budget):
        if setup.precision == "tf32" and device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            if torch.get_float32_matmul_precision() != before:
                torch.set_float32_matmul_precision(before)


def first_batch(work: Work, device: torch.device) -> Batch:
    """Return the first batch, which is the same on every device."""
    model = MODELS[work.model]
    side, width = model.pixels // models.LATENT_FACTOR, model.unet["cross_attention_dim"]
    if work.is_cached:
        mean = 4.0 * models.random_tensor((work.batch, 4, side, side), device, torch.float32, 5)
        pictures = torch.cat([mean, torch.full_like(mean, -10.0)], dim=1)
        text = models.random_tensor((work.batch, TOKENS, width), device, torch.float32, 6)
    else:
        shape = (work.batch, 3, model.pixels, model.pixels)
        pictures = models.random_tensor(shape, device, torch.float32, 5).clamp(-1.0, 1.0)
        source = torch.Generator().manual_seed(6)
        size = (work.batch, TOKENS)
        text = torch.randint(model.clip["vocab_size"], size, generator=source).to(device)
    return Batch(pictures, text, _more(work, device))


def _more(work: Work, device: torch.device) -> tuple[Tensor, ...]:
    model = MODELS[work.model]
    if "addition_embed_type" not in model.unet:
        return ()
    pooled = (
        model.unet["projection_class_embeddings_input_dim"]
        - 6 * model.unet["addition_time_embed_dim"]
    )
    ids = torch.tensor([[model.pixels, model.pixels, 0, 0, model.pixels, model.pixels]])
    states = models.random_tensor((work.batch, pooled), device, torch.float32, 7)
    return (states, ids.repeat(work.batch, 1).to(device, torch.float32))


def first_draws(work: Work, device: torch.device) -> Draws:
    """Return the first draws, which are the same on every device."""
    side = MODELS[work.model].pixels // models.LATENT_FACTOR
    shape = (work.batch, 4, side, side)
    first, second = (models.random_tensor(shape, device, torch.float32, n) for n in (8, 9))
    source = torch.Generator().manual_seed(10)
    times = torch.randint(TIMES, (work.batch,), generator=source)
    return Draws(first, second, times.to(device))


def later_draws(like: Draws) -> Draws:
    """Return new draws, made on the device."""
    return Draws(
        torch.randn_like(like.latents),
        torch.randn_like(like.noise),
        torch.randint_like(like.times, TIMES),
    )
