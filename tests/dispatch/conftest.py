"""Fixtures of tests of calls that are replayed from a graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from strop.dispatch import replayed_calls
from strop.dispatch.native_look import native_look
from tests.diffusion.replayed import Pool, replayed_first


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks at modules is compiled before the first call goes on."""
    monkeypatch.setattr(replayed_calls, "look_if_ready", native_look)


@pytest.fixture
def pool(compiled: None) -> Iterator[Pool]:
    """Stand for the graphs of a GPU."""
    with replayed_first() as found:
        yield found
