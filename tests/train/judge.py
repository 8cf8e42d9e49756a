"""A training loop with everything in it, for a judge in fp64 and for two contestants."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from strop import train
from strop.train.ema import EMASchedule

SHAPES = ((70, 9), (), (0, 3), (300,), (5,), (2, 3, 4, 5))
LR, DECAY, EPS, MAX_NORM = 3e-3, 0.05, 1e-8, 1.0
SCHEDULE = EMASchedule(decay=0.95)
INFINITE = {3, 4, 11, 40, 77}  # steps with a gradient that overflows


@dataclass
class Run:
    """What a loop ends with: in fp64 on the CPU."""

    params: list[Tensor] = field(default_factory=list)
    averages: list[Tensor] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)


def parameters(dtype: torch.dtype, device: str, seed: int = 0) -> list[torch.nn.Parameter]:
    """Some of zeros, as the last layers of diffusion models are, the others random."""
    generator = torch.Generator().manual_seed(seed)
    values = [
        torch.randn(shape, generator=generator) * (0.5 if i % 2 else 0.02)
        for i, shape in enumerate(SHAPES)
    ]
    values[3].zero_()
    return [torch.nn.Parameter(v.to(torch.bfloat16).to(device, dtype)) for v in values]


def gradients(step: int) -> list[Tensor]:
    """fp32 on the CPU, of quite different sizes, representable in bf16."""
    generator = torch.Generator().manual_seed(1000 + step)
    sizes = (1.0, 1e-3, 1.0, 1e-6, 30.0, 0.1)
    found = [
        torch.randn(shape, generator=generator) * size
        for shape, size in zip(SHAPES, sizes, strict=True)
    ]
    return [g.bfloat16().float() for g in found]


def judge(steps: int, skip: Callable[[int], bool]) -> Run:
    """AdamW by its formula, clip and EMAModel's schedule, in fp64."""
    run = Run()
    p = [x.detach().double() for x in parameters(torch.float32, "cpu")]
    m, v = ([torch.zeros_like(x) for x in p] for _ in range(2))
    s = [x.clone() for x in p]
    done = 0
    for step in range(steps):
        g = [x.double() for x in gradients(step)]
        norm = torch.cat([x.flatten() for x in g]).norm()
        run.norms.append(float(norm))
        if not skip(step):
            done += 1
            factor = min(1.0, MAX_NORM / (float(norm) + 1e-6))
            for i in range(len(p)):
                m[i] = 0.9 * m[i] + 0.1 * g[i] * factor
                v[i] = 0.999 * v[i] + 0.001 * (g[i] * factor) ** 2
                root = (v[i] / (1 - 0.999**done)).sqrt() + EPS
                p[i] = p[i] * (1 - LR * DECAY) - LR * (m[i] / (1 - 0.9**done)) / root
        decay = SCHEDULE.decay_at(step + 1)
        s = [decay * old + (1 - decay) * new for old, new in zip(s, p, strict=True)]
    run.params, run.averages = p, s
    return run


def scaler(kind: type[torch.amp.GradScaler], device: str) -> torch.amp.GradScaler:
    return kind(device, init_scale=2.0**10, growth_interval=4)


def set_gradients(params: Sequence[Tensor], step: int, scale: float, dtype: torch.dtype) -> None:
    found = [(g * scale).to(p.device, dtype) for g, p in zip(gradients(step), params, strict=True)]
    if step in INFINITE:
        found[step % 2 * 3].view(-1)[0] = float("inf") if step % 3 else float("nan")
    for p, g in zip(params, found, strict=True):
        p.grad_dtype = dtype
        p.grad = g


def strop_run(
    steps: int,
    device: str,
    *,
    kind: type[torch.amp.GradScaler] = train.GradScaler,
    dtype: torch.dtype = torch.float32,
    grads: torch.dtype = torch.float32,
    **arguments: Any,
) -> tuple[Run, train.FusedAdamW]:
    """Strop's optimizer, which does everything."""
    params = parameters(dtype, device)
    given = {"max_grad_norm": MAX_NORM, "ema_decay": SCHEDULE} | arguments
    optimizer = train.FusedAdamW(params, lr=LR, weight_decay=DECAY, eps=EPS, **given)
    amp, run = scaler(kind, device), Run()
    amp.scale(torch.zeros((), device=device))
    for step in range(steps):
        run.scales.append(amp.get_scale())
        set_gradients(params, step, run.scales[-1], grads)
        amp.step(optimizer)
        amp.update()
        run.norms.append(float(optimizer.grad_norm))
    assert optimizer.ema is not None
    run.params = [p.detach().double().cpu() for p in params]
    run.averages = [s.double().cpu() for s in optimizer.ema.shadow_params]
    return run, optimizer


def torch_run(steps: int, device: str) -> Run:
    """torch's fused AdamW with unscale_, clip_grad_norm_ and an average by foreach."""
    params = parameters(torch.float32, device)
    optimizer = torch.optim.AdamW(params, lr=LR, weight_decay=DECAY, eps=EPS, fused=True)
    averages = [p.detach().clone() for p in params]
    amp, run = scaler(torch.amp.GradScaler, device), Run()
    amp.scale(torch.zeros((), device=device))
    for step in range(steps):
        run.scales.append(amp.get_scale())
        set_gradients(params, step, run.scales[-1], torch.float32)
        amp.unscale_(optimizer)
        run.norms.append(float(torch.nn.utils.clip_grad_norm_(params, MAX_NORM)))
        amp.step(optimizer)
        amp.update()
        with torch.no_grad():
            weight = 1 - SCHEDULE.decay_at(step + 1)
            torch._foreach_lerp_(averages, list(params), weight)
    run.params = [p.detach().double().cpu() for p in params]
    run.averages = [s.double().cpu() for s in averages]
    return run


def errors(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """RMS difference of each tensor that has elements."""
    pairs = zip(found, expected, strict=True)
    return [float((a - b).square().mean().sqrt()) for a, b in pairs if a.numel()]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
