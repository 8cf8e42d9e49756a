"""Keep moments of Adam in 8 bits: a code for each value, and a scale for each block of 256.

After Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise Quantization"
(arXiv:2110.02861). What is coded is a value over the largest of its block. Seven decades below 1
are cut into pieces, each decade into half as many as the one above it; a code stands for the middle
of a piece, and two more for 0 and for 1. The first moment has codes for both signs, the second one,
which is never negative, twice as many pieces.

In two things this is not the paper's. A scale has the sign of the largest value of its block, which
is therefore kept as it is; there is no code for -1. And a second moment that is positive never
becomes 0: as a divisor, that would make a huge step of a gradient that is small in its block.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from strop.errors import OptionError
from strop.wording import counted

BLOCK = 256  # values of a scale, in the order of memory
LEAST = 4096  # elements of a parameter; smaller ones keep fp32 states
SIGNED = {"exp_avg": True, "exp_avg_sq": False}  # states that can be coded
_CODES, _SCALES = "_codes", "_scales"
_ORDER = "block_order"  # the parameter's dims, as memory had them when blocks were made
KEYS = (*(name + part for name in SIGNED for part in (_CODES, _SCALES)), _ORDER)
_ZEROS = {True: 127, False: 0}  # the codes of 0, by whether there are signs
_DECADES = 7
_ROWS = 4096  # blocks at a time, so that temporary arrays stay small
_TINY = torch.finfo(torch.float32).tiny  # a block below it has no reciprocal, and counts as zero

State = MutableMapping[str, Any]


@lru_cache(maxsize=16)
def book(signed: bool, device: torch.device | str = "cpu") -> Tensor:
    """Return what the codes stand for, ascending. A decade has pieces 2^n to 2 * 2^n - 1."""
    bits = _bits(signed)
    pieces = [(q, q.bit_length() - 1) for q in range(1 << bits - _DECADES, 1 << bits)]
    # The kernel computes in fp32 and in this order, too.
    middles = torch.tensor([float(18 * q + 9 - (16 << n)) for q, n in pieces])
    middles = middles * torch.tensor([5.0**n for _, n in pieces]) * (0.5 * 10.0**-bits)
    negative = -middles.flip(0) if signed else middles[:0]
    zero, one = torch.zeros(1), torch.ones(1)
    return torch.cat((negative, zero, middles, one)).to(device)


def quantize(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Encode fp32 values in a row as codes and scales. NaN and infinities make their block NaN."""
    count = len(values)
    if count % BLOCK:
        values = torch.nn.functional.pad(values, (0, -count % BLOCK))
    parts = [_quantize(rows, signed) for rows in values.view(-1, BLOCK).split(_ROWS)]
    codes, scales = (torch.cat(arrays) for arrays in zip(*parts, strict=True))
    return codes.view(-1)[:count], scales


def _quantize(blocks: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Encode as the kernel does it: the number of a piece is the least of seven lines."""
    bits = _bits(signed)
    low, high = blocks.aminmax(dim=1)
    largest = torch.where(-low >= high, low, high)
    is_zero = largest.abs() < _TINY
    share = blocks * torch.where(is_zero, 0.0, 1.0 / largest)[:, None]
    size = share.abs()
    place = torch.full_like(size, torch.inf)
    for n in range(bits - _DECADES, bits):
        line = (size * (2**n * 10 ** (bits - n) / 9)).add_(2**n * 8 / 9)
        place = torch.minimum(place, line, out=place)
    last = 1 << bits
    piece = torch.where(place >= last - 0.25, last, place.floor_())
    if signed:
        code = torch.where(share < 0.0, 127 - piece.clamp(max=127), 127 + piece)
    else:
        code = torch.where(share > 0.0, piece.clamp_(min=2) - 1, 0.0)
    return code.to(torch.uint8), torch.where(is_zero, 0.0, largest)


def dequantize(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Decode fp32 values in a row."""
    values = book(signed, codes.device).index_select(0, codes.int())
    return values.mul_(scales.repeat_interleave(BLOCK)[: len(codes)])


def _bits(signed: bool) -> int:
    """Return the bits of a size: the sign takes one."""
    return 7 if signed else 8


# ---- states of a parameter -----------------------------------------------------------------------


def applies(param: Tensor) -> bool:
    """Tell whether the states of a parameter are coded."""
    return param.numel() >= LEAST and param.dtype != torch.float64


def is_packed(state: Mapping[str, Any]) -> bool:
    return _ORDER in state


def pack(
    state: State, names: Sequence[str], param: Tensor
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return codes and scales in the order of ``param``: those of the state, or made from what it
    has."""
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
            zero = _ZEROS[SIGNED[name]]
            codes = torch.full((param.numel(),), zero, dtype=torch.uint8, device=param.device)
            scales = torch.zeros(-(-param.numel() // BLOCK), device=param.device)
        state[name + _CODES] = _fitting(codes, param.numel(), param.device)
        state[name + _SCALES] = _fitting(scales, -(-param.numel() // BLOCK), param.device)
    every_codes = tuple(state[name + _CODES] for name in names)
    return every_codes, tuple(state[name + _SCALES] for name in names)


def unpack(state: State, param: Tensor) -> State:
    """Return the state with fp32 tensors in the place of codes, where it has codes."""
    if not is_packed(state):
        return state
    order = state.pop(_ORDER).tolist()
    for name, signed in SIGNED.items():
        codes, scales = state.pop(name + _CODES, None), state.pop(name + _SCALES, None)
        if codes is not None and scales is not None and name not in state:
            codes = _fitting(codes, param.numel(), codes.device)
            scales = _fitting(scales, -(-param.numel() // BLOCK), codes.device)
            values = dequantize(codes, scales, signed).view([param.shape[dim] for dim in order])
            rank = sorted(range(len(order)), key=order.__getitem__)
            state[name] = values.permute(rank).reshape(param.shape)
    return state


def load(codes: Sequence[Tensor], scales: Sequence[Tensor], param: Tensor) -> tuple[Tensor, ...]:
    """Load both moments as fp32 tensors beside their parameter."""
    return tuple(
        dequantize(c, s, signed).as_strided(param.shape, param.stride())
        for c, s, signed in zip(codes, scales, SIGNED.values(), strict=True)
    )


def store(moments: Sequence[Tensor], codes: Sequence[Tensor], scales: Sequence[Tensor]) -> None:
    """Store what ``load`` gave, into the same arrays."""
    for value, c, s, signed in zip(moments, codes, scales, SIGNED.values(), strict=True):
        for array, new in zip((c, s), quantize(flat(value), signed), strict=True):
            array.copy_(new)


def flat(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor without gaps, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _order_of(param: Tensor) -> tuple[int, ...]:
    """Return its dims from the outermost in memory to the innermost, but for those of one
    element."""
    dims = [dim for dim, size in enumerate(param.shape) if size > 1]
    return tuple(sorted(dims, key=param.stride, reverse=True))


def _fitting(array: Tensor, size: int, device: torch.device) -> Tensor:
    if array.shape != (size,):
        raise OptionError(
            f"8-bit states of shape {tuple(array.shape)} where {counted(size, 'element')} should"
            " be: the state dict belongs to other parameters"
        )
    return array.to(device)
