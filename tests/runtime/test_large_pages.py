"""Weights of a CPU on large pages, by name."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import strop
from strop.runtime.run import large_pages
from strop.runtime.run.large_pages import LargePages
from tests.e2e import tiny

PAGE = 4096


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Note what Linux is asked for; pages are small, so that weights are."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(large_pages, "page_bytes", lambda: PAGE)
    monkeypatch.setattr(large_pages, "_collapse", lambda *place: found.append(place) or "")
    return found


def test_whole_pages_of_each_piece_are_asked_for_once(asked: list[tuple[int, int]]) -> None:
    memory = torch.zeros(5 * PAGE, dtype=torch.uint8)
    pages, start = LargePages(), -(-memory.data_ptr() // PAGE) * PAGE
    pages.ask([memory, None, memory[3:].view(-1), torch.zeros(9), torch.zeros(0)])
    pages.ask([memory])
    end = (memory.data_ptr() + memory.nbytes) // PAGE * PAGE
    assert asked == [(start, end - start)]
    assert pages.num_bytes == end - start >= 4 * PAGE
    pages.ask([torch.zeros(5 * PAGE, dtype=torch.uint8)])
    assert len(asked) == 2
    assert "are on large pages" in str(pages)
    assert "small" not in str(pages)


def test_a_refusal_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = [torch.zeros(5 * PAGE, dtype=torch.uint8)]
    monkeypatch.setattr(large_pages, "page_bytes", lambda: 0)
    none = LargePages()
    none.ask(memory)
    assert "this system has no large pages" in str(none)
    monkeypatch.setattr(large_pages, "page_bytes", lambda: PAGE)
    monkeypatch.setattr(large_pages, "_collapse", lambda *place: os.strerror(errno.EINVAL))
    refused = LargePages()
    refused.ask(memory)
    assert refused.num_bytes == 0
    assert os.strerror(errno.EINVAL) in str(refused)


def _huge_bytes(start: int) -> int:
    """Return how much of the mapping at an address lies on large pages."""
    is_here, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and ":" not in first:
            low, high = (int(n, 16) for n in first.split("-"))
            is_here = low <= start < high
        elif is_here and first == "AnonHugePages:":
            found += int(rest[0]) << 10
    return found


@pytest.mark.skipif(sys.platform != "linux" or not large_pages.page_bytes(), reason="no such pages")
def test_memory_lies_there_and_holds_what_it_held() -> None:
    size = 4 * large_pages.page_bytes()
    memory = torch.arange(size // 8)
    start = -(-memory.data_ptr() // large_pages.page_bytes()) * large_pages.page_bytes()
    pages = LargePages()
    pages.ask([memory])
    if pages.refusal:
        pytest.skip(f"Linux says: {pages.refusal}")
    assert _huge_bytes(start) >= pages.num_bytes > 0
    assert torch.equal(memory, torch.arange(size // 8))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(1000, 16, mode="sum")

    def forward(self, ids: Any, offsets: Any) -> Any:
        return self.rows(ids, offsets) * 2


def test_by_its_option_alone(asked: list[tuple[int, int]]) -> None:
    module, args = Table().eval(), (torch.tensor([1, 2, 3]), torch.tensor([0, 2]))
    with torch.no_grad():
        wanted = module(*args)
        for is_on in (False, True):
            fast = strop.optimize(module, options=tiny.options(large_pages=is_on, strict=True))
            torch.testing.assert_close(fast(*args), wanted)
            assert bool(asked) == is_on
            assert ("large pages" in str(strop.explain(fast))) == is_on
            strop.restore(fast)
    (place,) = asked
    weight = module.rows.weight
    assert place[0] >= weight.data_ptr()
    assert sum(place) <= weight.data_ptr() + weight.nbytes
    assert place[1] >= weight.nbytes - 2 * PAGE
