"""No pattern outlives its test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from strop.patterns import registry


@pytest.fixture(autouse=True)
def no_patterns() -> Iterator[None]:
    assert not registry.active()
    yield
    for pattern in registry.active():
        pattern.remove()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))
