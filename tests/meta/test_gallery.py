"""docs/gallery.md shows what the commands on it draw."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

DOCS = Path(__file__).parents[2] / "docs"
MOST_OFF = 8  # of 255, on another processor, whose sums are ordered otherwise


def _gallery() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gallery", DOCS / "gallery.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gallery"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


GALLERY = _gallery()


def _pixels(file: Path) -> np.ndarray:
    return np.asarray(Image.open(file).convert("RGB"), dtype=np.int64)


def test_the_page_is_what_the_script_writes() -> None:
    written = (DOCS / "gallery.md").read_text(encoding="utf-8")
    assert written == GALLERY.page(), "run python docs/gallery.py"


def test_every_picture_is_there_in_its_size() -> None:
    names = {file.stem for file in (DOCS / "gallery").iterdir()}
    assert names == {one.name for one in GALLERY.PICTURES}
    for one in GALLERY.PICTURES:
        assert 2 * _pixels(DOCS / "gallery" / f"{one.name}.png").shape[1] == GALLERY.width(one)


def test_strop_draws_what_plain_torch_draws() -> None:
    """And another number of steps is another picture, so that the judge can fail."""
    ours, eager, large, few = (
        _pixels(DOCS / "gallery" / f"{name}.png")
        for name in ("first", "eager", "large", "few-steps")
    )
    assert np.abs(ours - eager).max() <= 1
    assert np.abs(large - few).max() > MOST_OFF


@pytest.mark.nightly
@pytest.mark.parametrize("one", GALLERY.PICTURES, ids=lambda one: one.name)
def test_a_command_draws_its_picture(one: ModuleType, tmp_path: Path) -> None:
    found = _pixels(one.draw(tmp_path))
    assert np.abs(found - _pixels(DOCS / "gallery" / f"{one.name}.png")).max() <= MOST_OFF
