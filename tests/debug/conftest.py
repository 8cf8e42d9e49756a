"""A dump that several files of tests read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.debug import broken


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """Of the model while nothing was broken."""
    return broken.dumped(tmp_path_factory.mktemp("dump"), cache)
