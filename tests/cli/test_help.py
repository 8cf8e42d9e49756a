"""The help of every command, at several widths of the terminal."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import typer.main
from rich.text import Text
from typer.testing import CliRunner

from strop.cli import app

WIDTHS = (60, 80, 100, 140)


def _paths(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from _paths(child, (*path, name))


COMMANDS = tuple(_paths(typer.main.get_command(app)))


def _command(path: tuple[str, ...]) -> Any:
    found: Any = typer.main.get_command(app)
    for name in path:
        found = found.commands[name]
    return found


@cache
def _shown(path: tuple[str, ...], width: int) -> list[str]:
    result = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.output
    return [line.rstrip() for line in result.output.splitlines()]


def _paragraphs(lines: list[str], width: int) -> Iterator[tuple[list[str], int]]:
    """Lines that belong together, and how wide they could be. Commands are none of them."""
    for is_panel, group in itertools.groupby(lines, lambda line: line.startswith("│")):
        if is_panel:
            inner = [line.strip("│")[1:].rstrip() for line in group]
            yield from ((found, width - 4) for found in _entries(inner))
            continue
        current: list[str] = []
        for line in (*group, ""):
            goes_on = bool(current) and current[0].startswith("- ") and line.startswith("  ")
            is_text = goes_on or not line.startswith(("╭", "╰", "Usage", "  "))
            if not line or not is_text or line.startswith("- "):
                yield current, width
                current = []
            if line and is_text:
                current.append(line)


def _entries(lines: list[str]) -> Iterator[list[str]]:
    """The texts of a panel, each with the room for its name before it."""
    indents = [len(line) - len(line.lstrip()) for line in lines if line.startswith(" ")]
    room = min(indents, default=0)
    current: list[str] = []
    for line in lines:
        if not line.startswith(" "):
            yield current
            current = []
        if line[max(room - 2, 0) : room].strip() == "":  # else a name that has no room
            current.append(line)
    yield current


def test_all_commands_are_known() -> None:
    assert len(COMMANDS) == 36
    assert ("bench", "infer") in COMMANDS


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_paragraphs_fill_the_terminal(path: tuple[str, ...], width: int) -> None:
    lines = _shown(path, width)
    assert all(len(line) <= width for line in lines if not line.startswith("  "))
    assert not any("…" in line for line in lines), "a name is cut off"
    for paragraph, room in _paragraphs(lines, width):
        for line, following in itertools.pairwise(paragraph):
            first = following.split()[0]
            assert len(line) + 1 + len(first) > room, f"{line!r} has room for {first!r}"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_nothing_is_lost(path: tuple[str, ...], width: int) -> None:
    shown = " ".join(" ".join(_shown(path, width)).replace("│", " ").split())
    command = _command(path)
    texts = [command.help, *(param.help for param in command.params if not param.hidden)]
    for text in texts:
        for block in re.split(r"\n\s*\n", str(text)):
            plain = " ".join(Text.from_markup(block).plain.split())
            if "$ " not in plain:
                assert plain in shown
    for param in command.params:
        assert param.hidden or all(name in shown for name in (*param.opts, *param.secondary_opts))


@pytest.mark.parametrize("width", [40, *WIDTHS])
@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_commands_can_be_pasted(path: tuple[str, ...], width: int) -> None:
    """A shell reads what is shown as it reads the source: same words, the note is a comment."""
    text = "\n".join(_shown(path, width)).replace("\\\n", " ")
    shown = [
        shlex.split(line, comments=True)
        for line in text.splitlines()
        if line.startswith("  ") and not line.startswith("  #")
    ]
    epilog = _command(path).epilog or ""
    for line in re.findall(r"^\s*\$ (.*)$", epilog, re.M):
        assert shlex.split(line, comments=True) in shown


def test_lists_keep_their_items() -> None:
    lines = _shown(("bench", "infer"), 80)
    assert "- P3: a step of SDXL's UNet at 1024x1024 and batch 2" in lines
    assert "- P4-512, P4-1024: the VAE's decoder" in lines
