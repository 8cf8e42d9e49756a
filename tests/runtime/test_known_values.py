"""Values are compared bit by bit, however tensors lie and whatever they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from strop.runtime.derived import known_values
from strop.runtime.derived.known_values import KnownValues
from tests.e2e import tiny


def tensors(device: str) -> list[Tensor]:
    """Tensors of several types, of sizes that are no whole words, and no two of them alike."""
    base = torch.arange(1.0, 41.0, device=device)
    return [
        base[:5].clone(),
        base[:33].half(),
        base[3:8],  # begins within a word
        base[:40].view(5, 8).t(),
        base[:40].view(5, 8)[:, ::2].bfloat16(),
        torch.tensor(float("nan"), device=device),
        base[:7].double(),
        torch.zeros(3, device=device),
        torch.empty(0, 4, device=device),
        base[8:24],
    ]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "the last number": lambda t: t.view(-1)[-1:].add_(1) if t.is_contiguous() else t[-1].add_(1),
    "a sign": lambda t: t.neg_(),
    "no number any longer": lambda t: t.fill_(float("nan")),
}


@pytest.mark.parametrize("share_bytes", [16, 1 << 20])
@pytest.mark.parametrize("device", tiny.DEVICES)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_any_bit_counts(
    change: Callable[[Tensor], object],
    device: str,
    share_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(known_values.SHARE_BYTES, device, share_bytes)
    given = tensors(device)
    for number, tensor in enumerate(given):
        known = KnownValues(given)
        for _ in range(2):
            known.begin()
            assert not known.differs()
        before = tensor.clone()
        change(tensor.data)
        is_same = torch.equal(bits(before), bits(tensor))
        known.begin()
        assert known.differs() == (not is_same), number
        assert KnownValues(given).differs() is False
        tensor.copy_(before)
        assert not known.differs()


def test_one_copy_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [torch.ones(16, 64) for _ in range(3)]
    assert KnownValues(given).size_bytes == 2 * 3 * 16 * 64 * 4, "and scratch for all at once"
    monkeypatch.setitem(known_values.SHARE_BYTES, "cpu", 16)
    assert KnownValues(given).size_bytes == 4 * 16 * 64 * 4, "and scratch for the largest"


class Copies(TorchDispatchMode):
    """Counts the operators that copy."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.cat, torch.ops.aten.copy_)
        return func(*args, **(kwargs or {}))


def test_edges_of_many_weights_are_copied_together() -> None:
    weights = [torch.randn(rows, depth) for rows, depth in ((64, 32), (96, 64), (32, 16)) * 4]
    known = KnownValues([edge for w in weights for edge in (w[:1], w[:, :4])])
    with Copies() as copies:
        assert not known.differs()
    assert copies.count == 2, "first rows, and first numbers of all rows"
    weights[7].data[50, 3] += 1
    assert known.differs()


def test_columns_alone_have_their_numbers_compared() -> None:
    columns = torch.randn(9, 7).t()[:, 3]
    known = KnownValues([columns, torch.randn(4, 6, 2).transpose(0, 1)])
    assert not known.differs()
    columns.data[6] = 0
    assert known.differs()
