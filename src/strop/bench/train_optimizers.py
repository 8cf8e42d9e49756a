"""Do what a contender does between ``backward`` and the next batch: clip, update, average."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from strop.bench.train_work import Setup, Work
from strop.train import EMASchedule, FusedAdamW, GradScaler
from strop.train.averaged_gradients import AveragedGradients
from strop.train.ranks import ALONE, Ranks
from strop.train.sharded_gradients import ShardedGradients
from strop.train.sharded_parameters import ShardedParameters

MAX_NORM, DECAY = 1.0, 0.9999
ARGUMENTS: dict[str, Any] = {"lr": 1e-5, "weight_decay": 1e-2}
Act = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Stepping:
    """Hold the parts of an update, with the names of the split. ``norm``: of the gradients of the
    last step. ``averaged``: what gives each rank the gradients that it steps, if they are shared
    out; ``summed``: what takes them in the backward pass, if no rank keeps all."""

    optimizer: torch.optim.Optimizer
    scaler: Any
    parts: tuple[tuple[str, Act], ...]
    norm: Callable[[], Tensor | None]
    leaves: tuple[Tensor, ...] = ()  # what gets gradients
    averaged: AveragedGradients | None = None
    summed: ShardedGradients | None = None

    def scaled(self, loss: Tensor) -> Tensor:
        found: Tensor = loss if self.scaler is None else self.scaler.scale(loss)
        return found


def stepping_of(
    work: Work, setup: Setup, params: Sequence[nn.Parameter], ranks: Ranks = ALONE
) -> Stepping:
    device = params[0].device
    if setup.optimizer == "strop":
        return _fused(work, setup, params, ranks)
    how: dict[str, Any] = {"fused": True} if setup.optimizer == "fused" else {}
    optimizer = torch.optim.AdamW(params, **ARGUMENTS, **how)
    scaler = torch.amp.GradScaler(device.type) if setup.precision == "fp16" else None
    norms: list[Tensor] = []

    def clip() -> None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        norms[:] = [nn.utils.clip_grad_norm_(params, MAX_NORM)]

    def update() -> None:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    parts = (("clip", clip), ("update", update), *_average(work, setup, params))
    return Stepping(optimizer, scaler, parts, lambda: norms[0] if norms else None, tuple(params))


def _average(
    work: Work, setup: Setup, params: Sequence[nn.Parameter]
) -> tuple[tuple[str, Act], ...]:
    if not work.has_ema:
        return ()
    if setup.ema == "loop":
        from diffusers.training_utils import EMAModel

        ema = EMAModel(params, decay=DECAY)
        return (("EMA", lambda: ema.step(params)),)
    averages = [p.detach().clone() for p in params]
    schedule, steps = EMASchedule(DECAY), itertools.count(1)

    @torch.no_grad()
    def average() -> None:
        torch._foreach_lerp_(averages, list(params), 1 - schedule.decay_at(next(steps)))

    return (("EMA", average),)


def _fused(
    work: Work, setup: Setup, params: Sequence[nn.Parameter], ranks: Ranks = ALONE
) -> Stepping:
    """Do clip, update and average in one call; of this rank's share of the parameters alone, if
    moments are sharded. Then the others' are gathered."""
    shards = None
    if setup.parallel in ("zero1", "zero2") and ranks.count > 1:
        keeps_rooms = setup.parallel == "zero1"
        shards = ShardedParameters(params, ranks.rank, ranks.count, keeps_rooms=keeps_rooms)
    optimizer = FusedAdamW(
        params if shards is None else shards.own,
        **ARGUMENTS,
        max_grad_norm=MAX_NORM,
        ema_decay=DECAY if work.has_ema else None,
        shadow_dtype=torch.bfloat16 if setup.is_shadow else None,
        process_group=None if shards is None else torch.distributed.group.WORLD,
    )
    scaler = GradScaler(params[0].device.type) if setup.precision == "fp16" else None

    def update() -> None:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    parts: tuple[tuple[str, Act], ...] = (("update", update),)
    leaves = tuple(params)
    stepping = Stepping(optimizer, scaler, parts, lambda: optimizer.grad_norm, leaves)
    return stepping if shards is None else _shared_out(stepping, setup, shards, ranks)


def _shared_out(
    stepping: Stepping, setup: Setup, shards: ShardedParameters, ranks: Ranks
) -> Stepping:
    """Give each rank the gradients that it steps, and all ranks the stepped weights."""
    parts = (*stepping.parts, ("gather", lambda: ranks.gather(shards)))
    if setup.parallel == "zero1":
        return replace(stepping, parts=parts, averaged=ranks.averaged_sharded(shards))
    summed = ranks.summed(shards)

    def end() -> None:
        summed.end_pass()
        ranks.finish(summed)

    return replace(stepping, parts=(("sync", end), *parts), summed=summed)
