"""A tiny sprites model with random weights, and a command line to call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from strop.cli import app

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Invoke]:
    """Run ``strop`` with these words in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STROP_CACHE_DIR", str(cache_folder))
    monkeypatch.setenv("COLUMNS", "200")
    threads = torch.get_num_threads()
    yield lambda *words: CliRunner().invoke(app, list(words))
    torch.set_num_threads(threads)  # a command takes fewer on a busy machine


@pytest.fixture
def as_sprites(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny model in place of the shipped one."""
    from strop.models import sprites

    monkeypatch.setattr(sprites, "WEIGHTS", tiny_model)
    return tiny_model


def said(result: Result) -> str:
    """Everything that was printed, on one line and without frames."""
    return " ".join(result.output.replace("│", " ").split())
