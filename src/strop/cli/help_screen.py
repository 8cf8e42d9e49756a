"""Lay out ``--help``: paragraphs fill the terminal, options keep their names, commands paste.

A help text is made of blocks with a blank line between them. The lines of a block flow together
into one paragraph, wherever they end in the source. Two kinds of lines do not: one that starts
with "$ " is a command and keeps its line, and one that starts with "- " begins an item of a list.
Typer's own screen keeps the line ends of all paragraphs but the first, and cuts off what does not
fit into its six columns: at 80 characters the longer flags of ``strop train`` have no ends.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import typer
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

_INDENT = "  "
_FRAME = 4  # characters of a panel's sides
_NAMES_SHARE = 3  # names take at most one of so many parts of a panel
_FLAG = r"(?<![\w-])--?[a-zA-Z][\w-]*"
# A flag stays with its value, and quoted words stay together.
_WORDS = re.compile(r'-\S+ (?:"[^"]*"|[^\s"-]\S*)|(?:[^\s"]|"[^"]*")+')
Entry = tuple[str, Text]
Command = TypeVar("Command", bound=Callable[..., Any])


class _Screen:
    """Replaces typer's screen; goes before its class in the bases of a command."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the screen: typer expects it on standard output, not in ``formatter``."""
        screen = Console(highlight=False)
        before: RenderableType = ""
        for part in _parts(self, ctx, screen.width):
            if before and not (isinstance(before, Panel) and isinstance(part, Panel)):
                screen.print()
            screen.print(part, crop=False)
            before = part


class _Command(_Screen, TyperCommand):
    """Show the help of a verb."""


class _Group(_Screen, TyperGroup):
    """Show the help of a verb with verbs below it."""


class App(typer.Typer):
    """Make a ``Typer`` whose commands, and itself, show their help on this module's screen."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=_Group, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Command], Command]:
        return super().command(name, cls=_Command, **settings)


def _parts(command: Any, ctx: Any, width: int) -> Iterator[RenderableType]:
    usage = " ".join(command.get_usage(ctx).split())
    yield Text(usage, "bold")
    yield from _blocks(command.help, width)
    panels: dict[str, list[Entry]] = {"Arguments": [], "Options": []}
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is not None:  # not a hidden one
            plain = "Arguments" if param.param_type_name == "argument" else "Options"
            title = getattr(param, "rich_help_panel", None) or plain
            name = record[0].replace(" range>", ">")
            panels.setdefault(title, []).append((name, _about(param.help or "", record[1])))
    children = getattr(command, "commands", {}).values()
    panels["Commands"] = [(c.name, _flowing(_first(c.help))) for c in children if not c.hidden]
    for title, entries in panels.items():
        if entries:
            yield Panel(
                Group(*_rows(entries, width - _FRAME)),
                title=title,
                title_align="left",
                border_style="dim",
            )
    yield from _blocks(command.epilog, width)


def _blocks(text: str | None, width: int) -> Iterator[RenderableType]:
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text or "")):
        if block:
            yield Group(*_block(block.splitlines(), width))


def _block(lines: list[str], width: int) -> Iterator[RenderableType]:
    """Yield the paragraph of a block, its items and its commands, in their order."""
    flowing: list[str] = []
    for line in (*lines, ""):
        is_command = line.startswith("$ ")
        if flowing and (is_command or not line or line.startswith("- ")):
            yield _paragraph(" ".join(flowing))
            flowing = []
        if is_command:
            yield from _pasted(line[2:].strip(), width)
        elif line:
            flowing.append(line.strip())


def _paragraph(text: str) -> RenderableType:
    if not text.startswith("- "):
        return _flowing(text)
    item = Table.grid(padding=(0, 1, 0, 0))
    item.add_row("-", _flowing(text[2:]))
    return item


def _flowing(text: str) -> Text:
    """Return one paragraph with markup, without the line ends of its source."""
    shown = Text.from_markup(" ".join(text.split()), emoji=False)
    shown.highlight_regex(_FLAG, "cyan")
    return shown


def _pasted(line: str, width: int) -> Iterator[Text]:
    """Yield a command that can be copied to a shell: a long one goes on after a backslash, and the
    note behind it stands above."""
    if len(_INDENT + line) <= width:
        shown = Text(_INDENT + line)
        shown.highlight_regex(r"# .*$", "dim")
        yield shown
        return
    command, _, note = (part.strip() for part in line.partition(" # "))
    for part in textwrap.wrap(note, width - len(_INDENT) - 2):
        yield Text(f"{_INDENT}# {part}", "dim")
    current = _INDENT
    for word in _WORDS.findall(command):
        if current.strip() and len(f"{current} {word} \\") > width:
            yield _uncut(f"{current} \\")
            current = _INDENT * 3 + word
        else:
            current += f" {word}" if current.strip() else word
    yield _uncut(current)


def _uncut(line: str) -> Text:
    """Let a word that is longer than the line go on behind its end: terminals wrap it unchanged."""
    return Text(line, no_wrap=True, overflow="ignore")


def _about(text: str, record: str) -> Text:
    """Return what an option does, and in dim letters what typer adds: its default and its range."""
    shown = _flowing(text)
    extra = record.removeprefix(text).strip()
    extra = re.sub(r"([\d.]+)<=x<=([\d.]+)", r"\1 to \2", extra).replace("x>=", "at least ")
    return Text.assemble(shown, " " if text and extra else "", (extra, "dim"))


def _first(text: str | None) -> str:
    """Return the first paragraph: what a list of commands says of each."""
    return inspect.cleandoc(text or "").split("\n\n")[0]


def _rows(entries: Iterable[Entry], width: int) -> Iterator[RenderableType]:
    """Yield names on the left, texts on the right; a name that is too long has a line for
    itself."""
    entries = list(entries)
    most = width // _NAMES_SHARE
    room = max((len(name) for name, _ in entries if len(name) <= most), default=len(_INDENT))
    for name, text in entries:
        shown = Text(name, "bold cyan", overflow="fold")
        shown.highlight_regex(r"(?<=\s)(?!-|/).+$", "not bold yellow")
        if len(name) > room:
            yield shown
        row = Table.grid(padding=(0, len(_INDENT), 0, 0))
        row.add_column(width=room)
        row.add_column(overflow="fold")
        row.add_row(shown if len(name) <= room else "", text)
        yield row
