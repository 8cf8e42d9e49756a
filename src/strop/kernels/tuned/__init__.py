"""Fitted numbers, a file for each card that was measured, and those of every other device.

A card without a file runs by the model of the nearest one, scaled by its own clock, rates,
bandwidth and number of multiprocessors. Attention is chosen by measured rules, which hold for the
architecture that they were measured on; elsewhere the library computes it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from strop.ir.device import Device
from strop.kernels.attention.times import NOT_MEASURED
from strop.kernels.tuned import h100
from strop.kernels.tuned.tuned import Tuned

FILES: tuple[Tuned, ...] = (h100.TUNED,)


@lru_cache(maxsize=64)
def tuned(device: Device) -> Tuned:
    """The numbers by which kernels are chosen on ``device``."""
    of = next((file for file in FILES if file.device.arch == device.arch), FILES[0])
    if device.name == of.device.name and device.arch == of.device.arch:
        return of
    gemm = of.gemm.on(device, of.device)
    if of.device.arch == device.arch:
        return replace(of, device=device, gemm=gemm)
    return replace(of, device=device, gemm=gemm, attention=NOT_MEASURED, cases=())
