"""Moments of Adam in 8 bits: a code for each value, and a scale for each block of 256.

After Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise Quantization"
(arXiv:2110.02861). What is coded is a value over the largest of its block. Seven decades below 1
are cut into pieces, each decade into half as many as the one above it; a code stands for the middle
of a piece, and two more for 0 and for 1. The first moment has codes for both signs, the second one,
which is never negative, twice as many pieces.

In one thing this is not the paper's: a second moment that is positive never becomes 0, which as a
divisor would make a huge step of a gradient that is small beside its neighbours'.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

BLOCK = 256  # values of a scale, in the order of memory
LEAST = 4096  # elements of a parameter; smaller ones keep fp32 states
SIGNED = {"exp_avg": True, "exp_avg_sq": False}  # states that can be coded
_CODES, _SCALES = "_codes", "_scales"
_ORDER = "block_order"  # the parameter's dims, as memory had them when blocks were made
KEYS = (*(name + part for name in SIGNED for part in (_CODES, _SCALES)), _ORDER)
_DECADES = 7
_TINY = torch.finfo(torch.float32).tiny  # a block below it has no reciprocal, and counts as zero

State = MutableMapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Book:
    """What the codes stand for. Code c is for values from ``edges[c - 1]`` to ``edges[c]``."""

    values: Tensor  # fp32, ascending
    edges: Tensor
    zero: int  # the code of 0


@lru_cache(maxsize=16)
def book(signed: bool, device: torch.device | str = "cpu") -> Book:
    """The code book of a moment. Piece q is one of the 2^n, from q = 2^n on, of its decade."""
    bits = 7 if signed else 8
    pieces = range(1 << bits - _DECADES, 1 << bits)
    places = [(q, q.bit_length() - 1) for q in pieces]
    # In fp32 and in this order, as in the kernel.
    middles = torch.tensor([float(18 * q + 9 - (16 << n)) for q, n in places])
    middles = middles * torch.tensor([5.0**n for _, n in places]) * (0.5 * 10.0**-bits)
    lower = torch.tensor([10.0 ** (n - bits) * (1 + 9 * (q / 2**n - 1)) for q, n in places])
    zero, one, last = (torch.tensor([x]) for x in (0.0, 1.0, 1 - 0.25 * 0.9 / 2 ** (bits - 1)))
    if signed:
        values, edges = (-middles.flip(0), zero, middles, one), (-lower.flip(0), lower, last)
    else:
        values, edges = (zero, middles, one), (torch.tensor([2.0**-149]), lower[1:], last)
    return Book(torch.cat(values).to(device), torch.cat(edges).to(device), 127 if signed else 0)


def quantize(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of fp32 values in a row. NaN and infinities make their block NaN."""
    count = len(values)
    blocks = torch.nn.functional.pad(values, (0, -count % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(1) if count else blocks.new_empty(0)
    is_zero = largest < _TINY
    inverse = torch.where(is_zero, 0.0, 1.0 / largest)
    edges = book(signed, values.device).edges
    codes = torch.bucketize(blocks * inverse[:, None], edges, out_int32=True, right=True)
    return codes.to(torch.uint8).view(-1)[:count], torch.where(is_zero, 0.0, largest)


def dequantize(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """fp32 values in a row."""
    values = book(signed, codes.device).values.index_select(0, codes.int())
    return values.mul_(scales.repeat_interleave(BLOCK)[: len(codes)])


# ---- states of a parameter -----------------------------------------------------------------------


def applies(param: Tensor) -> bool:
    """Whether the states of a parameter are coded."""
    return param.numel() >= LEAST and param.dtype != torch.float64


def is_packed(state: Mapping[str, Any]) -> bool:
    return _ORDER in state


def pack(
    state: State, names: Sequence[str], param: Tensor
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Codes and scales in the order of ``param``: those of the state, or made from what it has."""
    order = _order_of(param)
    if is_packed(state) and tuple(state[_ORDER].tolist()) != order:
        unpack(state, param)
    state[_ORDER] = torch.tensor(order, dtype=torch.int64)
    for name in names:
        codes, scales = state.get(name + _CODES), state.get(name + _SCALES)
        if name in state:  # from torch, or set by the user
            like = torch.empty_like(param, dtype=torch.float32).copy_(state.pop(name))
            codes, scales = quantize(flat(like), SIGNED[name])
        elif codes is None or scales is None:
            zero = book(SIGNED[name]).zero
            codes = torch.full((param.numel(),), zero, dtype=torch.uint8, device=param.device)
            scales = torch.zeros(-(-param.numel() // BLOCK), device=param.device)
        state[name + _CODES] = _fitting(codes, param.numel(), param.device)
        state[name + _SCALES] = _fitting(scales, -(-param.numel() // BLOCK), param.device)
    return tuple(tuple(state[name + part] for name in names) for part in (_CODES, _SCALES))  # type: ignore[return-value]


def unpack(state: State, param: Tensor) -> State:
    """The state with fp32 tensors in the place of codes, where it has codes."""
    if not is_packed(state):
        return state
    order = state.pop(_ORDER).tolist()
    for name, signed in SIGNED.items():
        codes, scales = state.pop(name + _CODES, None), state.pop(name + _SCALES, None)
        if codes is not None and scales is not None and name not in state:
            codes = _fitting(codes, param.numel(), codes.device)
            values = dequantize(codes, scales, signed).view([param.shape[dim] for dim in order])
            rank = sorted(range(len(order)), key=order.__getitem__)
            state[name] = values.permute(rank).reshape(param.shape)
    return state


def flat(tensor: Tensor) -> Tensor:
    """The elements of a tensor without gaps, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _order_of(param: Tensor) -> tuple[int, ...]:
    """Its dims from the outermost in memory to the innermost, but for those of one element."""
    dims = [dim for dim, size in enumerate(param.shape) if size > 1]
    return tuple(sorted(dims, key=lambda dim: -param.stride(dim)))


def _fitting(array: Tensor, size: int, device: torch.device) -> Tensor:
    if array.shape != (size,):
        raise ValueError(
            f"8-bit states of shape {tuple(array.shape)} where {size} elements are needed: the "
            "state dict belongs to other parameters"
        )
    return array.to(device)
