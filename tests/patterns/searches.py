"""Searches, and modules that use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.patterns.pattern import Pattern


class Kernel:
    """A replacement that runs torch and notes each call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, list[tuple[Any, ...]]()

    def __call__(self, *tensors: Tensor, **attributes: Any) -> Any:
        self.calls.append((*(tuple(t.shape) for t in tensors), *attributes.values()))
        return self.function(*tensors, **attributes)


def norm_silu(x: Tensor, w: Tensor, b: Tensor, *, eps: float = 1e-5) -> Tensor:
    return F.silu(F.group_norm(x, 4, w, b, eps))


def rms_by_hand(x: Tensor, w: Tensor, *, eps: float = 1e-6) -> Tensor:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1) @ v


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.softmax(-1), x.sum(-1)


SIZES = {
    norm_silu: ((2, 8, 4, 4), (8,), (8,)),
    rms_by_hand: ((2, 8), (8,)),
    unit: ((2, 8),),
    swiglu: ((2, 8), (2, 8)),
    attention: ((2, 4, 8, 16),) * 3,
    statistics: ((2, 8),),
}


def declare(
    search: Callable[..., Any], replace: Callable[..., Any] | None = None, **more: Any
) -> tuple[Pattern, Kernel]:
    kernel = Kernel(replace or search)
    example = [torch.empty(shape) for shape in SIZES[search]]
    return strop.pattern(search, kernel, example=example, **more), kernel


def optimized(module: nn.Module, cache: str, **more: Any) -> Any:
    options = strop.Options(cache_dir=cache, strict=True, **more)
    return strop.optimize(module.eval().requires_grad_(False), options=options)


def matched(module: Any, number: int = 0) -> list[str]:
    """The names in the calls of a graph."""
    steps = module.forward.variants.all[number].program.call_steps
    return [dict(step.attrs)["name"] for step in steps if step.op == "pattern"]


def reasons(module: Any) -> list[str]:
    compiled = module.forward.variants.all[-1].compiled
    return [miss.reason for miss in compiled.patterns.misses]


class Block(nn.Module):
    """Two norms with another eps each, and one with another activation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 16, 3, padding=1)
        self.first, self.second = nn.GroupNorm(4, 16, eps=1e-6), nn.GroupNorm(4, 16, eps=1e-3)
        self.third = nn.GroupNorm(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.second(F.silu(self.first(self.conv(x)))))
        return F.gelu(self.third(y))
