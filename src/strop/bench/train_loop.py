"""Do a training step as a contender does it, in parts that can be timed one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop.train
from strop.bench import train_models, train_optimizers
from strop.bench.train_log import TrainLog
from strop.bench.train_models import Batch, Draws, Network
from strop.bench.train_work import MODELS, Setup, Work
from strop.options import Options
from strop.train.ranks import ALONE, Ranks

SCALE = 0.18215  # of latents
# These follow the order of a step; "other" is noise, timesteps, reading the loss, freeing
# gradients.
PARTS = (
    "data",  # reading and copying, in results of earlier versions
    "decode",  # to wait for the readers of pictures
    "copy",  # of pictures to the GPU
    "VAE",
    "text",
    "forward",
    "backward",
    "sync",  # of gradients over ranks, where it does not run within the backward pass
    "clip",
    "update",
    "gather",  # of weights that other ranks have stepped
    "EMA",
    "whole step",
    "other",
)
Part = tuple[str, Callable[[], None]]


def can_graph() -> bool:
    """Tell whether this version of Strop makes one graph of a whole step."""
    return hasattr(strop.train, "compile_step")


def _signal(device: torch.device) -> Tensor:
    """Return alphas_cumprod of Stable Diffusion's training."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, train_models.TIMES, dtype=torch.float64) ** 2
    return (1.0 - betas).cumprod(0).to(device, torch.float32)


@dataclass(frozen=True)
class Objective:
    """Compute the loss of predicted noise. ``half`` is the type of autocast, or None; ``is_cast``:
    the inputs are cast to bf16 instead, for weights in bf16."""

    unet: nn.Module
    signal: Tensor
    half: torch.dtype | None = None
    is_cast: bool = False

    def __call__(
        self, latents: Tensor, text: Tensor, noise: Tensor, times: Tensor, *more: Tensor
    ) -> Tensor:
        signal = self.signal[times][:, None, None, None]
        noisy = signal.sqrt() * latents + (1.0 - signal).sqrt() * noise
        if self.is_cast:
            noisy, text, more = noisy.bfloat16(), text.bfloat16(), tuple(t.bfloat16() for t in more)
        added: dict[str, Any] = {}
        if more:
            added["added_cond_kwargs"] = {"text_embeds": more[0], "time_ids": more[1]}
        with torch.autocast(
            latents.device.type, self.half or torch.bfloat16, enabled=self.half is not None
        ):
            guess: Tensor = self.unet(noisy, times, text, return_dict=False, **added)[0]
        return F.mse_loss(guess.float(), noise)


@dataclass(frozen=True)
class FlowObjective:
    """Compute the loss of the predicted way from latents to noise, as Flux.1 is trained, under
    guidance 1."""

    unet: nn.Module
    half: torch.dtype | None = None

    def __call__(
        self, latents: Tensor, text: Tensor, noise: Tensor, times: Tensor, *more: Tensor
    ) -> Tensor:
        share = (times.float() + 1.0) / train_models.TIMES
        weight = share[:, None, None]
        noisy = (1.0 - weight) * latents + weight * noise
        pooled, places, text_places = more
        half = self.half or torch.bfloat16  # its base is in it
        with torch.autocast(latents.device.type, half):
            guess: Tensor = self.unet(
                hidden_states=noisy.to(half),
                encoder_hidden_states=text.to(half),
                pooled_projections=pooled.to(half),
                timestep=share.to(half),
                img_ids=places,
                txt_ids=text_places,
                guidance=torch.ones_like(share),
                return_dict=False,
            )[0]
        return F.mse_loss(guess.float(), noise - latents)


class Loop:
    """Run steps: one step is ``parts`` in order. The first one has batch and draws that all
    contenders have; ``feed``, if any, gives the later batches."""

    def __init__(
        self, work: Work, setup: Setup, device: torch.device, ranks: Ranks = ALONE
    ) -> None:
        self.work, self.setup, self.device, self.ranks = work, setup, device, ranks
        self.network: Network = train_models.build(work, device)
        self.batch: Batch = train_models.first_batch(work, device, ranks)
        self.draws: Draws = train_models.first_draws(work, device, ranks)
        self.is_flow = MODELS[work.model].kind == "flux"
        self.log: TrainLog | None = None
        self.read: Sequence[Tensor] = ()  # pictures and tokens in the host's memory
        self.signal = _signal(device)
        self.feed: Iterator[list[Tensor]] | None = None
        self.waited_s = 0.0  # for data, by the host's clock
        self.num_steps = 0
        self.latents, self.text = self.batch.pictures, self.batch.text
        self.loss = torch.zeros((), device=device)
        self.parts: tuple[Part, ...] = ()

    @torch.no_grad()
    def reference_loss(self) -> float:
        """Return the loss of the first step by eager torch in fp32; a model whose base is in bf16
        computes in that. This comes before ``prepare``."""
        self._encode()
        self._read_text()
        unet = self.network.unet
        plain = FlowObjective(unet) if self.is_flow else Objective(unet, self.signal)
        return float(plain(*self._tensors()))

    def prepare(self, options: Options) -> None:
        """Set up and hand to the compiler what the setup wants; nothing runs yet."""
        torch.manual_seed(self.ranks.rank)  # of later draws, which ranks have different ones of
        train_models.set_up(self.network, self.setup, self.device)
        stepping = train_optimizers.stepping_of(
            self.work, self.setup, self.network.trained, self.ranks
        )
        if self.setup.is_shadow:
            self.network.unet = stepping.optimizer.shadow(self.network.unet)  # type: ignore[attr-defined]
        train_models.compile_modules(self.network, self.setup, options, self.ranks)
        self.stepping = stepping
        shadows = getattr(stepping.optimizer, "shadows", [])
        ranks = self.ranks if self.setup.parallel == "average" else ALONE
        self.averaged = stepping.averaged or ranks.averaged([*stepping.leaves, *shadows])
        half = None if self.setup.is_shadow else train_models.half_of(self.setup, self.device)
        unet = self.network.unet
        self.objective: Objective | FlowObjective
        self.objective = Objective(unet, self.signal, half, self.setup.is_shadow)
        if self.is_flow:
            self.objective = FlowObjective(unet, half)
        encode: tuple[Part, ...] = (("VAE", self._encode), ("text", self._read_text))
        if self.work.is_cached:
            encode = (("other", self._encode), ("other", self._read_text))
        head: tuple[Part, ...] = (
            ("decode", self._read),
            ("copy", self._copy),
            ("other", self._draw),
            *encode,
        )
        self.parts = (*head, *self._core(), ("other", self._end))

    def _core(self) -> tuple[Part, ...]:
        if not self.setup.graph:
            sync: tuple[Part, ...] = ()
            if self.averaged.count > 1:
                sync = (("sync", self.averaged.finish),)
            head = (("forward", self._forward), ("backward", self._backward))
            return (*head, *sync, *self.stepping.parts)
        compile_step: Any = strop.train.compile_step
        whole = compile_step(
            self.objective,
            self.stepping.optimizer,
            accumulate=1,
            scaler=None,
            graph=True,
            process_group=None if self.averaged.count == 1 else torch.distributed.group.WORLD,
        )

        def step() -> None:
            self.loss = whole(*self._tensors())

        return (("whole step", step),)

    def step(self) -> None:
        for _, part in self.parts:
            part()

    # ---- parts ---------------------------------------------------------------------------------

    def _read(self) -> None:
        if self.feed is None:
            return
        start = time.perf_counter()
        self.read = next(self.feed)
        self.waited_s += time.perf_counter() - start

    def _copy(self) -> None:
        if self.feed is None:
            return
        pixels, tokens = self.read
        self.batch = Batch(
            pixels.to(self.device, non_blocking=True),
            tokens.to(self.device, non_blocking=True),
            self.batch.more,
        )

    def _draw(self) -> None:
        if self.setup.compiler == "inductor-graphs":
            torch.compiler.cudagraph_mark_step_begin()
        if self.num_steps:
            self.draws = train_models.later_draws(self.draws)

    @torch.no_grad()
    def _encode(self) -> None:
        moments = self.batch.pictures
        if self.is_flow:
            self.latents = moments
            return
        if not self.work.is_cached:
            vae = self.network.vae
            moments = vae.encode(moments.to(vae.dtype)).latent_dist.parameters.float()
        mean, log_variance = moments.chunk(2, dim=1)
        spread = (0.5 * log_variance.clamp(-30.0, 20.0)).exp()
        self.latents = (mean + spread * self.draws.latents) * SCALE

    @torch.no_grad()
    def _read_text(self) -> None:
        text = self.batch.text
        if not self.work.is_cached:
            text = self.network.text_encoder(text, return_dict=False)[0].float()
        self.text = text

    def _forward(self) -> None:
        self.loss = self.objective(*self._tensors())

    def _backward(self) -> None:
        loss, summed = self.stepping.scaled(self.loss), self.stepping.summed
        with ExitStack() as travelling:
            if summed is None:
                travelling.enter_context(self.averaged.backward())
            elif self.setup.compiler == "strop":  # else they come by themselves
                travelling.enter_context(summed.backward(loss))
            loss.backward()

    def _end(self) -> None:
        if not self.setup.graph:
            self.stepping.optimizer.zero_grad()
        if self.setup.reads_loss:
            self.loss.item()
        self.num_steps += 1
        if self.log is not None:
            self.log.step(self.num_steps, self.loss)

    def _tensors(self) -> tuple[Tensor, ...]:
        return (self.latents, self.text, self.draws.noise, self.draws.times, *self.batch.more)
