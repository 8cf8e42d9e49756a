"""Print divisions of fp32 in Triton that are as exact as eager's, and quick.

Triton's own ``/`` is two ulps off. ``tl.div_rn`` is exact, but leaves its quick path where the
numerator is zero or the exponents are far apart, and a warp waits for its slowest lane. Sixteen
divisions of zeros, as masked lanes and masked attention have them, took 19.2 us of an H200, of ones
4.8. Most divisors are numbers that are known when the kernel is printed: they need no division.
"""

from __future__ import annotations

import math

import torch

# Products and rests of numerators that are not at the ends of fp32's range are then within it.
_MOST_EXPONENT = 60


def by_tensor(numerator: str, divisor: str) -> str:
    """Return the quotient of two values."""
    return f"quotient({numerator}, {divisor})"


def by_number(numerator: str, divisor: float) -> str:
    """Return the quotient of a value and a number. A power of two has an exact reciprocal. Any
    other quotient is the nearest one after one step of Newton's method, if the reciprocal is
    (P. Markstein, Computation of elementary functions on the IBM RISC System/6000, 1990)."""
    if not math.isfinite(divisor):
        return by_tensor(numerator, f'float("{divisor}")')
    mantissa, exponent = math.frexp(divisor)
    if divisor == 0 or abs(exponent) > _MOST_EXPONENT:
        return by_tensor(numerator, repr(divisor))
    if abs(mantissa) == 0.5:
        return numerator if divisor == 1 else f"{numerator} * {_signed(1 / divisor)}"
    exact = _rounded(divisor)
    return f"quotient_by({numerator}, {exact!r}, {_rounded(1 / exact)!r})"


def _signed(number: float) -> str:
    return f"({number!r})" if number < 0 else repr(number)


def _rounded(number: float) -> float:
    """Return the nearest number of fp32."""
    return torch.tensor(number, dtype=torch.float64).to(torch.float32).item()
