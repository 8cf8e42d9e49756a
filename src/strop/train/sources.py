"""Make the kernels of the parameter step as sources: text, types and constants."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from strop.ir.dims import const, symbol
from strop.ir.source import KernelSource

KINDS = {
    torch.float32: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.float64: 4,
    torch.uint8: 5,
    None: 0,
}

_I32, _I64, _F32, _F64 = torch.int32, torch.int64, torch.float32, torch.float64
_LISTS = (_I64, _I64, _I64)  # blocks, grads, numels


@dataclass(frozen=True, slots=True)
class Tuning:
    """Hold elements of a program, elements at a time, and warps: the two sweeps have one each."""

    block: int
    tile: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class Tunings:
    gradient: Tuning = Tuning(16384, 4096, 8)
    update: Tuning = Tuning(4096, 2048, 8)
    quantized: Tuning = Tuning(4096, 1024, 8)  # updates of 8-bit states: tiles of whole blocks

    def update_of(self, form: TensorForm) -> Tuning:
        return self.quantized if form.quantized else self.update


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Tell the kernels of two tensors apart."""

    grad: torch.dtype
    param: torch.dtype
    num_states: int
    ema: bool
    shadow: torch.dtype | None
    random: bool  # stochastic rounding
    aligned: bool  # to 16 bytes, every array but the gradient
    grad_aligned: bool  # a part of a bucket may not be
    quantized: bool = False  # states in 8 bits

    @property
    def wide(self) -> bool:
        """Tell whether it is computed in fp64."""
        return self.param == torch.float64


def gradient_sweep(form: TensorForm, tuning: Tuning) -> KernelSource:
    constants = {
        "BLOCK": tuning.block,
        "TILE": tuning.tile,
        "GRAD": KINDS[form.grad],
        "WIDE": int(form.grad == torch.float64),
        "ALIGNED": int(form.grad_aligned),
    }
    types = (*_LISTS, _F32, _F64, _I32)
    return _source("gradient_sweep", types, 1, constants, tuning.num_warps)


@lru_cache(maxsize=64)
def settle(
    *,
    measured: bool,
    clip: bool,
    amp: bool,
    ema: bool,
    adam: bool,
    tile: int = 4096,
    rows: int = 512,
) -> KernelSource:
    flags = {"MEASURED": measured, "CLIP": clip, "AMP": amp, "EMA": ema, "ADAM": adam}
    constants = {**{name: int(value) for name, value in flags.items()}, "TILE": tile, "ROWS": rows}
    counts = (_I64, _I64, _F32, _I64, _I64)  # groups, slots, steps, counters, keys
    types = (_F64, _I32, _F32, _F32, _F64, *counts, _F64, _F64, _F32, _F32)
    return _source("settle", types, 2, constants, 16, programs=1)


def update_sweep(form: TensorForm, tuning: Tuning) -> KernelSource:
    constants = {
        "BLOCK": tuning.block,
        "TILE": tuning.tile,
        "GRAD": KINDS[form.grad],
        "PARAM": KINDS[form.param],
        "STATES": form.num_states,
        "QUANTIZED": int(form.quantized),
        "EMA": int(form.ema),
        "SHADOW": KINDS[form.shadow],
        "WIDE": int(form.wide),
        "RANDOM": int(form.random),
        "ALIGNED": int(form.aligned),
        "GRAD_ALIGNED": int(form.grad_aligned),
    }
    types = (*_LISTS, _I64, _I64, _F64, _I64, _F64)
    return _source("update_sweep", types, 2, constants, tuning.num_warps)


def _source(
    name: str,
    types: tuple[torch.dtype, ...],
    num_sizes: int,
    constants: dict[str, int],
    num_warps: int,
    programs: int | None = None,
) -> KernelSource:
    """Make the source. ``s0`` is the number of programs, unless that is given."""
    return KernelSource(
        name,
        "triton",
        _text(),
        types,
        (1,) * num_sizes,
        grid=(symbol("s0") if programs is None else const(programs),),
        constants=tuple(constants.items()),
        num_warps=num_warps,
    )


@lru_cache(maxsize=1)
def _text() -> str:
    return (Path(__file__).parent / "kernels.py").read_text()
