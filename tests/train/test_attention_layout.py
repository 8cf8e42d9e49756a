"""Attention in a training step lies as the library leaves it: nothing is copied, and its backward
gets what its plan was made for."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from tests.train.compiled import Block, block_args, options

HEADS, WIDTH = 4, 64
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


pytestmark = pytest.mark.usefixtures("fresh")


class Heads(nn.Module):
    """Cross attention; ``lay`` says how the heads lie that the library gets."""

    def __init__(self, lay: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.lay = lay
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return self.lay(y.unflatten(-1, (HEADS, -1)).transpose(1, 2))

        y = F.scaled_dot_product_attention(
            heads(self.q(x)), heads(self.k(text)), heads(self.v(text))
        )
        return self.out(y.transpose(1, 2).flatten(2))


LAYS = {
    "as_projected": lambda y: y,
    "contiguous": lambda y: y.contiguous(),
    "scaled": lambda y: y * 2,
}


def test_nothing_is_copied() -> None:
    ours = strop.optimize(Block(), train=True, options=options())
    for n in range(2):
        ours(*block_args(n)).sum().backward()
    records = ours.forward.log.records
    assert {record.role for record in records} == {"forward", "backward"}
    for record in records:
        nodes = record.compiled.graph.nodes
        assert [n.origin for n in nodes if n.op == "copy"] == []
        laid = [n.order for n in nodes if n.op == "item" and len(n.shape) == 4]
        assert laid
        assert set(laid) == {(0, 2, 1, 3)}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("eager_first", [False, True])
@pytest.mark.parametrize("lay", LAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_in_half_precision(dtype: torch.dtype, lay: str, eager_first: bool) -> None:
    """cuDNN's plans are shared by the process, eager's and ours."""
    torch.manual_seed(0)
    eager = Heads(LAYS[lay]).cuda()
    sizes = ((2, 256, 77), (3, 64, 77), (1, 1024, 1024), (4, 33, 5))
    given = [
        tuple(torch.randn(b, n, WIDTH, device="cuda") for n in lengths) for b, *lengths in sizes
    ]
    ours = strop.optimize(copy.deepcopy(eager), train=True, options=options())
    judge = copy.deepcopy(eager).double()
    for args in given:
        exact = _gradients(judge, tuple(a.double() for a in args), None)
        contestants = [eager, ours] if eager_first else [ours, eager]
        found = {id(net): _gradients(net, args, dtype) for net in contestants}
        for name, true in exact.items():
            if name == "k.bias":
                continue  # moves all scores alike: its gradient is rounding
            off, eagers = (
                float((found[id(net)][name].double() - true).norm()) for net in (ours, eager)
            )
            # wrong plans made it 5 to 300 times; a bias of 64 numbers is up to 2 times by chance
            assert off <= 3 * eagers, (name, tuple(args[0].shape), off / float(true.norm()))


def _gradients(
    net: nn.Module, args: tuple[Tensor, ...], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    net.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype, enabled=dtype is not None):
        y = net(*args)
    weights = torch.linspace(-1, 1, y.numel(), device="cuda", dtype=args[0].dtype).view(y.shape)
    (y.to(args[0].dtype).square() * weights).mean().mul(1e3).backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
