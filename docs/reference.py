"""Write docs/options.md and docs/commands.md from the code: python docs/reference.py"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer.main
from rich.text import Text

from strop.cli import app
from strop.options import Options

DOCS = Path(__file__).resolve().parent
NOTE = "This page is generated from the code: run `python docs/reference.py` to write it again."


INTRODUCTION = """\
Give options in Python, `strop.optimize(obj, options=strop.Options(strict=True))`, or in the
environment, `STROP_STRICT=1`. An argument in Python wins over the environment. A switch takes `0`,
`1`, `true` or `false`; names in a list are separated by commas. An unknown name, or a value out of
range, raises `strop.errors.OptionError`. [The glossary](glossary.md) explains the words."""


def options_page() -> str:
    """Return docs/options.md: a row for each field of ``strop.Options``."""
    lines = [
        "# Options",
        "",
        NOTE,
        "",
        INTRODUCTION,
        "",
        "| option | environment variable | default | what it does |",
        "| --- | --- | --- | --- |",
    ]
    for knob in fields(Options):
        about = knob.metadata
        lines.append(
            f"| `{knob.name}` | `{about['env']}` | `{_default(knob.default)}` | {about['doc']} |"
        )
    return "\n".join(lines) + "\n"


def _default(value: Any) -> str:
    is_large = type(value) is int and value and value % 2**30 == 0
    return f"{value >> 30} GiB" if is_large else repr(value)


def commands_page() -> str:
    """Return docs/commands.md: a section for each command of ``strop``."""
    lines = ["# Commands", "", NOTE, ""]
    lines += ["`strop COMMAND --help` shows the same text in a terminal.", ""]
    for path, command in _commands(typer.main.get_command(app), "strop"):
        lines += _section(path, command)
    return "\n".join(lines).rstrip() + "\n"


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from _commands(child, f"{path} {name}")


def _section(path: str, command: Any) -> Iterator[str]:
    yield from (f"## `{path}`", "")
    context = command.context_class(command, info_name=path)
    if not hasattr(command, "commands"):
        usage = " ".join(command.get_usage(context).removeprefix("Usage: ").split())
        yield from ("```", usage, "```", "")
    yield from _blocks(command.help)
    children = [c for c in getattr(command, "commands", {}).values() if not c.hidden]
    if children:
        yield from ("| command | what it does |", "| --- | --- |")
        for child in children:
            first = inspect.cleandoc(child.help or "").split("\n\n")[0]
            name = f"{path} {child.name}"
            yield f"| [`{name}`](#{name.replace(' ', '-')}) | {_cell(_plain(first))} |"
        yield ""
    yield from _parameters(command, context)
    yield from _blocks(command.epilog)


def _parameters(command: Any, context: Any) -> Iterator[str]:
    rows = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and parameter.name != "help":  # None: a hidden one
            name = record[0].replace(" range>", ">").replace("|", "\\|")
            rows.append(f"| `{name}` | {_cell(_about(parameter.help or '', record[1]))} |")
    if rows:
        yield from ("| argument or option | what it does |", "| --- | --- |", *rows, "")


def _about(text: str, record: str) -> str:
    """Return the text of an option and what typer adds to it: its default and its range."""
    extra = record.removeprefix(text)
    extra = re.sub(r"([\d.]+)<=x<=([\d.]+)", r"\1 to \2", extra).replace("x>=", "at least ")
    return _plain(text) + extra


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _plain(text: str) -> str:
    return Text.from_markup(text, emoji=False).plain


def _blocks(text: str | None) -> Iterator[str]:
    """Yield the paragraphs of a help text; lines that begin with "$ " become a code block."""
    for block in re.split(r"\n\s*\n", inspect.cleandoc(_plain(text or ""))):
        lines = block.splitlines()
        prose = [line for line in lines if not line.startswith("$ ")]
        commands = [line.removeprefix("$ ").strip() for line in lines if line.startswith("$ ")]
        if any(prose):
            yield from (*prose, "")
        if commands:
            yield from ("```bash", *commands, "```", "")


PAGES = {"options.md": options_page, "commands.md": commands_page}


def main() -> None:
    """Write both pages."""
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
