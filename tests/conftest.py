"""Options of the test suite, and fixtures of several folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden")


NIGHTLY = Path(__file__).with_name("nightly.txt")


def nightly_tests() -> list[str]:
    lines = NIGHTLY.read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.hookimpl(tryfirst=True)  # before those are left out that have the mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    names = tuple(nightly_tests())
    for item in items:
        if item.nodeid.startswith(names):
            item.add_marker(pytest.mark.nightly)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Let torch.compile begin anew, and leave nothing behind for the tests that follow."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A diffusers folder in the format of the shipped weights, with random weights."""
    pytest.importorskip("diffusers")
    from strop.models.sprites import network, settings, vocabulary

    folder = tmp_path_factory.mktemp("model")
    built = network.parts(settings.TINY)
    network.pipeline(built, settings.TINY.noise).save_pretrained(folder)
    vocabulary.write(folder / "tokenizer")
    return folder
