"""Code that asks how its arguments lie in memory, compiled with gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from tests.e2e import tiny


class Asks(nn.Module):
    def __init__(self, body: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.body = nn.Linear(8, 8), body

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.body(self.linear(x), other)


BODIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "stride": lambda y, t: y * t.stride(0),
    "storage_offset": lambda y, t: y * (1 + t.storage_offset()),
    "is_contiguous": lambda y, t: y * (3 if t.is_contiguous() else 1),
    "as_strided": lambda y, t: y * t.as_strided((4, 1), (2, 1)),
}
DENSE = torch.linspace(-1, 1, 32).reshape(4, 8)
OTHERS = {
    "gaps": torch.linspace(-2, 1, 64).reshape(4, 16)[:, :8],
    "order": torch.linspace(-2, 1, 32).reshape(8, 4).t(),
    "offset": torch.linspace(-2, 1, 40)[8:].reshape(4, 8),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", BODIES)
def test_other_memory_has_eagers_answer(name: str, other: str) -> None:
    """Calls with arguments that lie otherwise are traced by torch."""
    torch.manual_seed(0)
    plain, x = Asks(BODIES[name]), torch.randn(4, 8)
    fast: Any = strop.optimize(copy.deepcopy(plain), train=True, options=tiny.options())
    for given in (DENSE, OTHERS[other], DENSE):
        for module in (plain, fast):
            module.zero_grad()
            module(x, given).square().sum().backward()
        torch.testing.assert_close(fast(x, given), plain(x, given))
        for ours, theirs in zip(fast.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("other", OTHERS)
def test_who_asks_nothing_is_compiled_for_any_order(other: str) -> None:
    """Tracers ask for strides, too: each call whose arguments are not dense was left to torch."""
    torch.manual_seed(0)
    plain, x = Asks(lambda y, t: y * t), torch.randn(4, 8)
    fast: Any = strop.optimize(copy.deepcopy(plain), train=True, options=tiny.options())
    for module in (plain, fast):
        module(x, OTHERS[other]).square().sum().backward()
    assert not fast.forward.traced_by_torch
    for ours, theirs in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_pictures_of_a_unet_in_channels_last_order_are_compiled() -> None:
    fast: Any = strop.optimize(tiny.unet(), train=True, options=tiny.options())
    sample = torch.randn(2, 4, 8, 8).contiguous(memory_format=torch.channels_last)
    _, steps, prompts = tiny.unet_args(2, 8, 8, 7)
    fast(sample, steps, prompts).sample.sum().backward()
    assert not fast.forward.traced_by_torch
