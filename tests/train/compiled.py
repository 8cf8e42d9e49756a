"""Models that are trained in tests, and the judge of their gradients."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from strop import Options
from strop.dispatch.dynamo import AotLog
from strop.testing import assert_as_accurate_together
from tests.e2e import tiny

Args = tuple[Tensor, ...]


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(32, 64), nn.LayerNorm(64)
        self.mid, self.down = nn.Linear(64, 64), nn.Linear(64, 8)
        self.dropout, self.is_checkpointed = nn.Dropout(dropout), False

    def _middle(self, x: Tensor) -> Tensor:
        return self.dropout(F.silu(self.mid(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(x))
        if self.is_checkpointed:
            y = checkpoint(self._middle, y, use_reentrant=False)
        else:
            y = self._middle(y)
        return self.down(self.dropout(y))


class Block(nn.Module):
    """LayerNorm, attention, GEGLU, as diffusers has them."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.norm1(x)
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (layer(y).view(split).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        x = x + self.out(attended.reshape(batch, length, width))
        value, gate = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(value * F.gelu(gate))


class Resnet(nn.Module):
    """GroupNorm, SiLU and convolutions, with the embedding of a time step."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers.models.resnet import ResnetBlock2D

        self.block = ResnetBlock2D(in_channels=16, out_channels=32, temb_channels=24, groups=4)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.block(x, time)


def unet() -> nn.Module:
    """One level, with attention in it."""
    return tiny.unet(
        block_out_channels=(16,),
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
    )


def mlp_args(n: int) -> Args:
    return (torch.randn(3 + n, 32),)


def block_args(n: int) -> Args:
    return (torch.randn(2 + n, 5 + 2 * n, 32),)


def resnet_args(n: int) -> Args:
    return torch.randn(2 + n, 16, 8 + 2 * (n % 3), 6 + 2 * n), torch.randn(2 + n, 24)


def unet_args(n: int) -> Args:
    sizes = [(2, 8, 8, 7), (3, 8, 12, 9), (2, 12, 8, 5), (4, 16, 8, 7), (3, 8, 16, 11)]
    return tiny.unet_args(*sizes[n], seed=n)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Args]]] = {
    "mlp": (Mlp, mlp_args),
    "block": (Block, block_args),
    "resnet": (Resnet, resnet_args),
    "unet": (unet, unet_args),
}


def options(**changes: Any) -> Options:
    return tiny.options(**({"strict": True} | changes))


def gradients(
    module: nn.Module, args: Args, autocast: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Of the parameters, for a loss that is a mean of squares."""
    module.zero_grad(set_to_none=True)
    with torch.autocast(args[0].device.type, autocast, enabled=autocast is not None):
        result = module(*args)
        result = result if isinstance(result, Tensor) else result.sample
        loss = result.float().square().mean() if autocast else result.square().mean()
    loss.backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def assert_gradients_as_accurate(
    ours: nn.Module,
    eager: nn.Module,
    inputs: Sequence[Args],
    autocast: torch.dtype | None = None,
    per_tensor: bool = True,
) -> None:
    """Each parameter's gradient over all inputs together, between which the weights change: of a
    few numbers that share the error of a few others chance decides (docs/numerics.md)."""
    exact = copy.deepcopy(eager).double()
    triples: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = defaultdict(list)
    for args in inputs:
        with torch.no_grad():
            for p, q, r in zip(
                eager.parameters(), ours.parameters(), exact.parameters(), strict=True
            ):
                p.mul_(1 + 0.1 * torch.randn_like(p))
                q.copy_(p)
                r.copy_(p)
        mine, theirs = gradients(ours, args, autocast), gradients(eager, args, autocast)
        wide = gradients(exact, tuple(a.double() for a in args))
        assert mine.keys() == theirs.keys() == wide.keys()
        for name, value in wide.items():
            triples[name].append((mine[name].clone(), theirs[name], value))
    together = [triple for found in triples.values() for triple in found]
    for name, found in {"all parameters": together, **(triples if per_tensor else {})}.items():
        try:
            assert_as_accurate_together(found)
        except AssertionError as error:
            raise AssertionError(f"gradient of {name}: {error}") from None


def roles(log: AotLog) -> list[str]:
    return sorted(record.role for record in log.records)
