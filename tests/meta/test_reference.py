"""docs/options.md and docs/commands.md say what the code says."""

from __future__ import annotations

import importlib.util
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from strop import Options

DOCS = Path(__file__).parents[2] / "docs"


def _reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REFERENCE = _reference()


@pytest.mark.parametrize("name", REFERENCE.PAGES)
def test_a_page_is_what_the_code_says(name: str) -> None:
    written = (DOCS / name).read_text(encoding="utf-8")
    assert written == REFERENCE.PAGES[name](), "run python docs/reference.py"


def test_the_page_of_options_has_every_option() -> None:
    lines = REFERENCE.options_page().splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert len(rows) == len(fields(Options))
    for row, knob in zip(rows, fields(Options), strict=True):
        assert row.startswith(f"| `{knob.name}` | `{knob.metadata['env']}` | ")
        assert knob.metadata["doc"] in row


@pytest.mark.parametrize("knob", fields(Options), ids=lambda knob: knob.name)
def test_an_option_is_told_in_a_sentence(knob) -> None:
    text = knob.metadata["doc"]
    assert text[0].isupper()
    assert text.endswith(".")


def test_the_page_of_commands_has_defaults_and_ranges() -> None:
    page = REFERENCE.commands_page()
    assert "## `strop bench infer`" in page
    assert (
        "| `--steps <int>` | Draw in this many denoising steps. [default: 20; 1 to 1000] |" in page
    )
    assert "| `--device <auto\\|cpu\\|cuda>` |" in page
