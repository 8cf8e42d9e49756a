"""Build what is trained, with random weights, and the batches of its first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import strop
from strop.bench import models
from strop.bench.train_loader import TOKENS
from strop.bench.train_work import MODELS, TINY_PIXELS, Setup, TrainModel, Work
from strop.options import Options
from strop.train.ranks import ALONE, Ranks

RANK = 16
TIMES = 1000
FLUX_TOKENS, FLUX_CHANNELS = 512, 64  # of a prompt; of a token
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
    make = _make_flux if model.kind == "flux" else models.make_unet
    unet = make(model.unet, device, torch.float32).train()
    if work.trained == "lora":
        _add_adapters(unet)
    else:
        unet.requires_grad_(True)
    vae = text = None
    if not work.is_cached:
        vae = models.make_vae(model.vae, device, torch.float32)
        text = models.make_text_encoder(model.clip, device, torch.float32)
    return Network(unet, vae, text, [p for p in unet.parameters() if p.requires_grad])


def _make_flux(config: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """Build a transformer in bf16: in fp32 its weights alone would fill a GPU."""
    from diffusers import FluxTransformer2DModel

    with models.made_on(device, torch.bfloat16):
        return FluxTransformer2DModel(**config).requires_grad_(False)


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
    for parameter in unet.parameters():
        if parameter.requires_grad:  # peft takes the type of the weights beside them
            parameter.data = parameter.data.float()


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


def compile_modules(network: Network, setup: Setup, options: Options, ranks: Ranks = ALONE) -> None:
    """Compile all modules of the step in place. With several ranks and torch's way of putting
    gradients together, ``network.unet`` becomes the module around it, compiled as a whole."""
    is_around = setup.parallel == "ddp" and ranks.count > 1
    for part in modules_of(network):
        if setup.compiler == "strop":
            strop.optimize(part, train=part is network.unet, options=options)
        elif setup.compiler and not (is_around and part is network.unet):
            part.forward = torch.compile(part.forward, dynamic=False, mode=_mode(setup))
    if is_around:
        network.unet = _distributed(network.unet)
        if setup.compiler:
            network.unet = torch.compile(network.unet, dynamic=False, mode=_mode(setup))


def _mode(setup: Setup) -> str | None:
    return "reduce-overhead" if setup.compiler == "inductor-graphs" else None


def _distributed(unet: nn.Module) -> nn.Module:
    is_on_gpu = next(unet.parameters()).device.type == "cuda"
    own = [torch.cuda.current_device()] if is_on_gpu else None
    return nn.parallel.DistributedDataParallel(unet, device_ids=own, gradient_as_bucket_view=True)


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


def first_batch(work: Work, device: torch.device, ranks: Ranks = ALONE) -> Batch:
    """Return this rank's part of the first batch, which is the same on every device; all parts
    together are what one rank has of so many pictures."""
    model = MODELS[work.model]
    width = model.unet.get("cross_attention_dim") or model.unet.get("joint_attention_dim", 4096)
    drawn = _drawn(work.batch, device, ranks)
    if work.is_cached:
        pictures = 4.0 * drawn(_latent_shape(model), 5)
        if model.kind == "unet":  # moments: means, and logarithms of tiny variances
            pictures = torch.cat([pictures, torch.full_like(pictures, -10.0)], dim=1)
        tokens = TOKENS if model.kind == "unet" else _flux_tokens(model)
        text = drawn((tokens, width), 6)
    else:
        pictures = drawn((3, model.pixels, model.pixels), 5).clamp(-1.0, 1.0)
        whole, own = _rows_of(work.batch, ranks)
        source = torch.Generator().manual_seed(6)
        text = torch.randint(model.clip["vocab_size"], (whole, TOKENS), generator=source)
        text = text[own].to(device)
    return Batch(pictures, text, _more(work, device, ranks))


def _rows_of(batch: int, ranks: Ranks) -> tuple[int, slice]:
    return batch * ranks.count, slice(batch * ranks.rank, batch * (ranks.rank + 1))


def _drawn(
    batch: int, device: torch.device, ranks: Ranks
) -> Callable[[tuple[int, ...], int], Tensor]:
    """Return a function that draws this rank's rows of normal numbers, by shape of a row and
    seed."""
    whole, own = _rows_of(batch, ranks)
    host = torch.device("cpu")

    def draw(shape: tuple[int, ...], seed: int) -> Tensor:
        rows = models.random_tensor((whole, *shape), host, torch.float32, seed)
        return rows[own].to(device)

    return draw


def _latent_shape(model: TrainModel) -> tuple[int, ...]:
    if model.kind == "flux":  # tokens of 2 x 2 latents
        edge = model.pixels // (2 * models.LATENT_FACTOR)
        return (edge * edge, model.unet.get("in_channels", FLUX_CHANNELS))
    side = model.pixels // models.LATENT_FACTOR
    return (4, side, side)


def _flux_tokens(model: TrainModel) -> int:
    return FLUX_TOKENS if model.pixels > TINY_PIXELS else 16


def _more(work: Work, device: torch.device, ranks: Ranks) -> tuple[Tensor, ...]:
    model = MODELS[work.model]
    drawn = _drawn(work.batch, device, ranks)
    if model.kind == "flux":
        edge = model.pixels // (2 * models.LATENT_FACTOR)
        rows, columns = torch.meshgrid(torch.arange(edge), torch.arange(edge), indexing="ij")
        places = torch.stack([torch.zeros_like(rows), rows, columns], -1).reshape(-1, 3)
        text_places = torch.zeros(_flux_tokens(model), 3, device=device)
        pooled = drawn((model.unet.get("pooled_projection_dim", 768),), 7)
        return (pooled, places.to(device, torch.float32), text_places)
    if "addition_embed_type" not in model.unet:
        return ()
    width = (
        model.unet["projection_class_embeddings_input_dim"]
        - 6 * model.unet["addition_time_embed_dim"]
    )
    ids = torch.tensor([[model.pixels, model.pixels, 0, 0, model.pixels, model.pixels]])
    return (drawn((width,), 7), ids.repeat(work.batch, 1).to(device, torch.float32))


def first_draws(work: Work, device: torch.device, ranks: Ranks = ALONE) -> Draws:
    """Return this rank's part of the first draws, which are the same on every device."""
    shape, drawn = _latent_shape(MODELS[work.model]), _drawn(work.batch, device, ranks)
    whole, own = _rows_of(work.batch, ranks)
    times = torch.randint(TIMES, (whole,), generator=torch.Generator().manual_seed(10))
    return Draws(drawn(shape, 8), drawn(shape, 9), times[own].to(device))


def later_draws(like: Draws) -> Draws:
    """Return new draws, made on the device."""
    return Draws(
        torch.randn_like(like.latents),
        torch.randn_like(like.noise),
        torch.randint_like(like.times, TIMES),
    )
