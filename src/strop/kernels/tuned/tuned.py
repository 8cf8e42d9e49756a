"""The type of a file of fitted numbers."""

from __future__ import annotations

from dataclasses import dataclass

from strop.ir.device import Device
from strop.kernels.attention.cases import Cases
from strop.kernels.attention.times import AttentionTimes
from strop.kernels.gemm.times import GemmTimes


@dataclass(frozen=True, slots=True)
class Tuned:
    """Hold what was measured on one card, whose record it keeps. ``cases`` of attention choose
    among libraries and kernels of ours."""

    device: Device
    gemm: GemmTimes
    attention: AttentionTimes
    cases: Cases = ()
