"""A compiled backward that runs again gives the same bits: no atomics, no memory read unwritten."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from tests.e2e.tiny import DEVICES
from tests.train.compiled import Args, Resnet, options, resnet_args, roles

pytestmark = pytest.mark.usefixtures("fresh")


class Transformer(nn.Module):
    """Attention over itself and over a text, and a GEGLU."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers.models.attention import BasicTransformerBlock

        self.block = BasicTransformerBlock(64, 2, 32, cross_attention_dim=48)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        return self.block(x, encoder_hidden_states=text)


class Reductions(nn.Module):
    """Of rows, of columns and of everything, long enough to be split between programs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.group, self.rms = nn.LayerNorm(64), nn.GroupNorm(4, 64), nn.RMSNorm(64)
        self.lift = nn.Linear(64, 64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        lifted = F.silu(self.lift(self.layer(x)))
        rows = self.rms(lifted.float()).to(lifted.dtype)
        pictures = self.group(rows.transpose(1, 2)).softmax(-1)
        whole = rows.logsumexp((0, 1)) + rows.amax(1).mean(0) + pictures.var((0, 2))
        return F.mse_loss(rows, y) + (pictures.norm(dim=2) * whole).sum() + (rows * y).std(0).sum()


def _transformer_args(n: int) -> Args:
    return torch.randn(2 + n, 24 + 8 * n, 64), torch.randn(2 + n, 7 + n, 48)


def _reductions_args(n: int) -> Args:
    x, y = torch.randn(2, 3 + n, 700 + 333 * n, 64).unbind()
    return x, y


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Args]]] = {
    "resnet": (Resnet, resnet_args),
    "transformer": (Transformer, _transformer_args),
    "reductions": (Reductions, _reductions_args),
}


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library's part."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def _gradients(module: nn.Module, args: Args, autocast: bool) -> list[list[Tensor]]:
    """Of parameters and arguments, by two backward passes of one forward."""
    taken = [a.detach().clone().requires_grad_() for a in args]
    with torch.autocast(args[0].device.type, torch.bfloat16, enabled=autocast):
        loss = module(*taken).float().square().mean()
    wanted = [*module.parameters(), *taken]
    return [
        [g.clone() for g in torch.autograd.grad(loss, wanted, retain_graph=True)] for _ in range(2)
    ]


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_equal_bits(name: str, device: str, autocast: bool) -> None:
    """In one backward pass after another, and after other sizes and NaN were in the memory."""
    make, args = MODELS[name]
    ours = strop.optimize(make().train().to(device), train=True, options=options())
    first, other = (tuple(a.to(device) for a in args(n)) for n in (1, 3))
    found = _gradients(ours, first, autocast)
    _gradients(ours, other, autocast)
    del other
    torch.full((1 << 22,), torch.nan, device=device)
    products = set[int]()
    if name == "reductions" and not autocast:  # others have products, which threads cut
        torch.set_num_threads(3)
        products = {[n for n, _ in ours.named_parameters()].index("lift.weight")}
    found += _gradients(ours, first, autocast)
    assert roles(ours.forward.log) == ["backward", "forward"]
    for turn, again in enumerate(found[1:], start=1):
        for number, (a, b) in enumerate(zip(found[0], again, strict=True)):
            is_cut = turn > 1 and number in products  # otherwise, and on some CPUs to other sums
            assert is_cut or torch.equal(a, b), (number, tuple(a.shape))
