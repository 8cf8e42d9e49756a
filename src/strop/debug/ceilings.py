"""Measure what this machine reaches: bytes a second of a large copy, FLOPs a second of large
products.

Unlike ``costs.machine``, which knows a few devices by name, these are measured here and now, with
the threads and the settings of torch that the model runs with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from strop.bench import timer
from strop.debug.costs import HALF
from strop.ir.program import KernelStep, Program, Step

COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}  # out of every cache
SIDE = {"cuda": 8192, "cpu": 1024}  # of the matrices
TF32 = "tf32"
SAMPLES, SECONDS = 10, 0.5
GENERATED = "float32"  # kernels compute in it whatever they store


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Hold the ceilings. ``flops``: a second, by what multiplies: "float16", "float32", "tf32"."""

    bandwidth: float  # bytes a second, reads and writes together
    flops: Mapping[str, float]

    def bound_us(self, num_bytes: int, flops: int, unit: str) -> tuple[float, str]:
        """Return the microseconds, and what they are bound by: "memory" or "arithmetic"."""
        moving = num_bytes / self.bandwidth
        computing = flops / self.flops[unit] if flops else 0.0
        by = "arithmetic" if computing > moving else "memory"
        return max(moving, computing) * 1e6, by

    def __str__(self) -> str:
        rates = (f"{rate / 1e12:.3g} TFLOP/s ({unit})" for unit, rate in self.flops.items())
        return ", ".join([f"{self.bandwidth / 1e9:.4g} GB/s", *rates])


def unit_of(program: Program, step: Step) -> str:
    """Return what a step multiplies with, as torch is set."""
    if isinstance(step, KernelStep) or not step.inputs:
        return GENERATED
    dtype = program.buffers[step.inputs[0].buffer].dtype
    if dtype in HALF:
        return str(dtype).removeprefix("torch.")
    if program.device == "cuda" and dtype is torch.float32:
        cudnn: Any = torch.backends.cudnn
        settings = cudnn.conv if step.op == "conv2d" else torch.backends.cuda.matmul
        return TF32 if settings.fp32_precision == TF32 else GENERATED
    return GENERATED


def measure(device: torch.device, units: Iterable[str]) -> Ceilings:
    """Measure the copy, and a product for each unit. Operands are random: zeros multiply faster on
    a GPU."""
    return Ceilings(_bandwidth(device), {unit: _flops(device, unit) for unit in sorted({*units})})


def _bandwidth(device: torch.device) -> float:
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds(partial(target.copy_, source), device)


def _flops(device: torch.device, unit: str) -> float:
    side = SIDE[device.type]
    dtype = torch.float32 if unit == TF32 else getattr(torch, unit)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    with _float32_as(device, unit):
        return 2 * side**3 / _seconds(lambda: torch.mm(left, right, out=out), device)


@contextlib.contextmanager
def _float32_as(device: torch.device, unit: str) -> Iterator[None]:
    """Set products to full precision, or to that of matrix units, which is a setting on a GPU."""
    if device.type != "cuda" or unit not in (TF32, GENERATED):
        yield
        return
    settings = torch.backends.cuda.matmul
    before, settings.fp32_precision = settings.fp32_precision, TF32 if unit == TF32 else "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = before


def _seconds(call: timer.Call, device: torch.device) -> float:
    """Return the seconds of one call, the fastest in half a second: a ceiling is what can be
    reached."""
    call()
    times: list[float] = []
    while len(times) < SAMPLES or sum(times) < SECONDS:
        times.append(timer.elapsed_ms(call, device) / 1e3)
    return min(times)
