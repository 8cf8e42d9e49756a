"""Call one library of torch's attention by name, where a measurement has chosen it.

These are the operators that ``scaled_dot_product_attention`` itself calls, without its choice among
them. What it does for a library's sake before is done here too: marks become numbers, and a mask is
spread over the scores. Operands that a library cannot take go to torch's own choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad

from strop.kernels.libraries import ATTENTION_LIBRARIES

Call = Callable[[Sequence[Tensor]], Any]
HALVES = (torch.float16, torch.bfloat16)
UNIT = 8  # elements of 16 bytes, which vectors of a library's kernel have
_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Attending:
    """Hold operands as a library takes them: (B, H, S, D), and the mask as numbers."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float | None

    @property
    def are_even(self) -> bool:
        """Tell whether operands are of half precision and one size of heads, lie in whole vectors,
        and heads of keys serve as many heads of queries each."""
        q, k, v = self.q, self.k, self.v
        return (
            all(x.dim() == 4 and x.dtype in HALVES and x.numel() > 0 for x in (q, k, v))
            and q.dtype == k.dtype == v.dtype
            and k.shape == v.shape
            and (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
            and q.shape[1] % k.shape[1] == 0
            and all(map(lies_in_vectors, (q, k, v)))
        )

    @property
    def is_ungrouped(self) -> bool:
        return self.q.shape[1] == self.k.shape[1]

    @property
    def has_fitting_mask(self) -> bool:
        mask = self.mask
        return mask is None or (mask.dtype in (torch.bool, self.q.dtype) and mask.dim() <= 4)


def lies_in_vectors(x: Tensor) -> bool:
    """Tell whether rows are dense, and begin at multiples of 16 bytes."""
    *some, last = x.stride()
    starts = (x.data_ptr(), *(stride * x.element_size() for stride in some))
    return last == 1 and all(start % 16 == 0 for start in starts)


def for_a_fused_kernel(
    inputs: Sequence[Tensor], is_causal: bool, scale: float | None
) -> Sequence[Tensor]:
    """Repeat heads of keys and values where torch would take attention apart for fewer of them:
    into twenty launches, and memory for all scores."""
    q, k, v, *mask = inputs
    if q.dim() != 4 or q.shape[1] == k.shape[1] or q.shape[1] % k.shape[1]:
        return inputs
    chosen = torch._fused_sdp_choice(
        q, k, v, mask[0] if mask else None, 0.0, is_causal, scale=scale, enable_gqa=True
    )
    if chosen != SDPBackend.MATH.value:
        return inputs
    times = q.shape[1] // k.shape[1]
    return (q, *(x.repeat_interleave(times, 1) for x in (k, v)), *mask)


def _numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a mask adds to scores."""
    if mask.dtype is not torch.bool:
        return mask
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill_(mask.logical_not(), float("-inf"))


def _spread(of: Attending) -> Tensor | None:
    """Return the mask over all scores; its rows begin at multiples of 16 bytes."""
    if of.mask is None:
        return None
    numbers = _numbers(of.mask, of.q.dtype)
    sizes = (*of.q.shape[:3], of.k.shape[2])
    if numbers.shape[-1] != sizes[-1]:
        numbers = numbers.expand(*numbers.shape[:-1], sizes[-1])
    if not lies_in_vectors(numbers):
        more = -sizes[-1] % UNIT
        numbers = pad(numbers, (0, more))[..., : sizes[-1]] if more else numbers.contiguous()
    return numbers.expand(sizes)


def _cudnn(of: Attending) -> Any:
    return _aten._scaled_dot_product_cudnn_attention(
        of.q, of.k, of.v, _spread(of), False, 0.0, of.is_causal, False, scale=of.scale
    )[0]


def _flash(of: Attending) -> Any:
    return _aten._scaled_dot_product_flash_attention(
        of.q, of.k, of.v, 0.0, of.is_causal, False, scale=of.scale
    )[0]


def _efficient(of: Attending) -> Any:
    return _aten._scaled_dot_product_efficient_attention(
        of.q, of.k, of.v, _spread(of), False, 0.0, of.is_causal, scale=of.scale
    )[0]


def _is_for_cudnn(of: Attending, most: int) -> bool:
    """cuDNN has no plan for a single key."""
    return of.q.shape[3] <= most and of.k.shape[2] > 1 and of.has_fitting_mask


def _is_for_flash(of: Attending, most: int) -> bool:
    """FlashAttention counts a causal order from the last query and key; torch from the first."""
    is_square = not of.is_causal or of.q.shape[2] == of.k.shape[2]
    return of.mask is None and of.q.shape[3] <= 256 and is_square


def _is_for_efficient(of: Attending, most: int) -> bool:
    return of.is_ungrouped and of.has_fitting_mask


@dataclass(frozen=True, slots=True)
class _Library:
    """A library, and torch's setting of whether it may be called at all."""

    is_allowed: Callable[[], bool]
    takes: Callable[[Attending, int], bool]
    call: Callable[[Attending], Any]


LIBRARIES: Mapping[str, _Library] = dict(
    zip(
        ATTENTION_LIBRARIES,
        (
            _Library(torch._C._get_cudnn_sdp_enabled, _is_for_cudnn, _cudnn),
            _Library(torch._C._get_flash_sdp_enabled, _is_for_flash, _flash),
            _Library(torch._C._get_mem_efficient_sdp_enabled, _is_for_efficient, _efficient),
        ),
        strict=True,
    )
)


def call_of(name: str, attrs: Mapping[str, Any], widest: int, otherwise: Call) -> Call:
    """Return the call of a library. ``widest``: the largest head that cuDNN takes on the device;
    ``otherwise`` takes the operands that the library cannot."""
    return partial(_run, LIBRARIES[name], attrs["causal"], attrs["scale"], widest, otherwise)


def _run(
    library: _Library,
    is_causal: bool,
    scale: float | None,
    widest: int,
    otherwise: Call,
    inputs: Sequence[Tensor],
) -> Any:
    q, k, v, *masks = inputs
    of = Attending(q, k, v, masks[0] if masks else None, is_causal, scale)
    if not (library.is_allowed() and of.are_even and library.takes(of, widest)):
        return otherwise(inputs)
    return library.call(of)
