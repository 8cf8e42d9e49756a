"""Small models whose linears are computed in 8 bits, and the same in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor, nn

from strop.ir.eight_bit import eight_bit_linear

WIDTH = 64


class Block(nn.Module):
    """Attention and a network, as in any transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm_ff = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        heads = [own(h).unflatten(-1, (4, -1)).transpose(1, 2) for own in (self.q, self.k, self.v)]
        mixed = nn.functional.scaled_dot_product_attention(*heads)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm_ff(x))))


class Net(nn.Module):
    """A transformer of two blocks, with a time that shifts them."""

    def __init__(self, width: int = WIDTH, num_blocks: int = 2) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, width), nn.Linear(width, 16)
        self.time = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(x) + self.time(time)[:, None]
        for block in self.blocks:
            y = block(y)
        return self.last(y)


def net(dtype: torch.dtype = torch.float32, **how: int) -> Net:
    torch.manual_seed(0)
    return Net(**how).to(dtype).eval().requires_grad_(False)


def given(rows: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, ...]:
    source = torch.Generator().manual_seed(rows)
    x, time = torch.randn(2, rows, 16, generator=source), torch.randn(2, 16, generator=source)
    return x.to(device, dtype), time.to(device, dtype)


def in_torch(module: nn.Module, numerics: str, layers: Collection[str]) -> nn.Module:
    """Return a copy that shares all weights, in which these linears follow the rule of 8 bits."""
    made = copy.deepcopy(module, {id(t): t for t in (*module.parameters(), *module.buffers())})
    for path, part in made.named_modules():
        if path in layers:
            part.forward = partial(_linear, part, numerics)
    return made


def _linear(part: nn.Linear, numerics: str, x: Tensor) -> Tensor:
    return eight_bit_linear(x, part.weight, part.bias, numerics)


def off(found: Tensor, wanted: Tensor) -> float:
    """Return the size of an error over that of the result."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())
