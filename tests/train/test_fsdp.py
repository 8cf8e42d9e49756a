"""Units of ``fully_shard`` (FSDP2) are compiled one by one, on two ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import strop
from strop.dispatch.training import TrainingDispatcher
from strop.frontend.sharded_units import innermost_units, is_sharded
from strop.train.ranks import Ranks
from tests.e2e import tiny
from tests.train.pair import Pair

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="needs gloo",
)
STEPS, WIDTH = 3, 32


class Block(nn.Module):
    """A transformer's block: norms, attention of two heads, a gated feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        value, gate = self.up(self.behind(x)).chunk(2, -1)
        return x + self.down(value * F.gelu(gate))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def sharded(**how: Any) -> Net:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net, mesh = Net(), init_device_mesh("cpu", (2,))
    for part in (*net.blocks, net):
        fully_shard(part, mesh=mesh, **how)
    return net


def trained(net: nn.Module, rank: int) -> list[Tensor]:
    """Train with batches of several sizes, and return losses and what this rank has of weights."""
    # Adam makes a whole step of a bias of keys, whose gradient is nothing but rounding.
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    source, losses = torch.Generator().manual_seed(rank), list[Tensor]()
    for step in range(STEPS):
        x = torch.randn(2 + step, 5 + 2 * step, 8, generator=source)
        loss = (net(x).float() - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    weights = [p.detach().to_local() for p in net.parameters()]  # type: ignore[operator]
    return [torch.stack(losses), *weights]


def _policy(name: str) -> dict[str, Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if name == "bf16":
        return {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    return {"reshard_after_forward": False} if name == "kept" else {}


def _compared(ranks: Ranks, name: str) -> dict[str, Any]:
    """What eager and compiled units of one rank come to, and what was compiled."""
    eager, fast = sharded(**_policy(name)), sharded(**_policy(name))
    assert strop.optimize(fast, train=True, options=tiny.options(strict=True)) is fast
    gaps = [
        float((a - b).double().norm() / a.double().norm().clamp_min(1e-3))
        for a, b in zip(trained(eager, ranks.rank), trained(fast, ranks.rank), strict=True)
    ]
    served = strop.api.dispatchers_of(fast)
    report = strop.explain(fast)
    found = {
        "gap": max(gaps),
        "names": list(served),
        "graphs": [len(d.log.records) for d in served.values()],  # type: ignore[attr-defined]
        "torch": [bool(d.traced_by_torch) for d in served.values()],  # type: ignore[attr-defined]
        "calls": [c.num_calls for c in report.components],
    }
    strop.restore(fast)
    found["left"] = [name for name, part in fast.named_modules() if "forward" in vars(part)]
    return found


@pytest.mark.parametrize("name", ["whole precision", "bf16", "kept"])
def test_units_are_compiled_once_for_all(name: str, pair: Pair) -> None:
    for found in pair.run(partial(_compared, name=name)):
        assert found["gap"] < (2e-2 if name == "bf16" else 1e-5)
        assert found["names"] == ["blocks.0", "blocks.1", "blocks.2"]
        assert sum(found["graphs"]) == 2, "one forward, and one backward for all units and sizes"
        assert not any(found["torch"])
        assert found["calls"] == [STEPS] * 3
        assert not found["left"]


def _late(ranks: Ranks) -> str:
    """A module that was optimised before ``fully_shard`` says what to do."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net, mesh = Net(), init_device_mesh("cpu", (2,))
    strop.optimize(net, train=True, options=tiny.options())
    for part in (*net.blocks, net):
        fully_shard(part, mesh=mesh)
    net(torch.randn(2, 5, 8)).sum().backward()
    (served,) = strop.api.dispatchers_of(net).values()
    assert isinstance(served, TrainingDispatcher)
    return " ".join((*served.traced_by_torch, *served.counters.fallbacks))


def test_optimised_too_early(pair: Pair) -> None:
    for text in pair.run(_late):
        assert "fully_shard" in text or "forward hooks" in text


def test_what_is_not_sharded_has_no_units(tmp_path: Path) -> None:
    net = Net()
    assert not any(map(is_sharded, net.modules()))
    assert not [*innermost_units(net)]
