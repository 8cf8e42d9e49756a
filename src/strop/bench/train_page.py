"""Write the runs of a folder as one HTML page that needs nothing beside itself."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from strop.bench import train_charts
from strop.bench.train_runs import Run, Runs, verdicts
from strop.wording import counted

PAGE = "report.html"
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1180px; margin: 2em auto; padding: 0 1em;
  color: #1d1d1f; }
h1 { font-size: 1.6em; } h2 { font-size: 1.2em; margin-top: 2.2em; border-top: 1px solid #ddd;
  padding-top: 1em; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { padding: .25em .8em; text-align: right; border-bottom: 1px solid #e4e4e4; }
th { font-weight: 600; background: #f5f6f8; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
td.bad { color: #b00020; } p.verdict { font-weight: 600; margin: .2em 0; }
p.place { color: #666; margin: 0; } img { max-width: 100%; display: block; margin: .6em 0; }
"""
_HEADER = (
    *("run", "GPUs", "batch a GPU", "img/s", "spread", "p50 ms", "speed-up", "efficiency"),
    *("peak GiB", "decode ms", "note"),
)


def write(runs: Runs, folder: Path, title: str) -> list[Path]:
    """Write the page and its PNG files into ``folder``; returns the page first."""
    sections, drawn = [], []
    for (row, machine), group in runs.groups().items():
        pictures = train_charts.draw(group, runs, folder)
        drawn += pictures
        sections.append(_section(row, machine, group, runs, pictures))
    body = "\n".join([f"<h1>{escape(title)}</h1>", _summary(runs), *sections])
    page = folder / PAGE
    folder.mkdir(parents=True, exist_ok=True)
    page.write_text(
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body>\n</html>\n",
        encoding="utf-8",
    )
    return [page, *drawn]


def _summary(runs: Runs) -> str:
    machines = sorted({run.machine for run in runs.runs})
    left = [f"{counted(runs.older, 'older run')} of the same kind"] if runs.older else []
    left += [f"{counted(len(runs.others), 'file')} of other kinds"] if runs.others else []
    lines = [
        f"<p>{counted(len(runs.runs), 'run')} of training on {escape('; '.join(machines))}. "
        "A speed is of all GPUs together, a batch that of one. Speed-up is to the peer of the row "
        "on as many GPUs, efficiency the share of N times one GPU. The spread is that of the "
        "series, or of the middle steps of one.</p>"
    ]
    if left:
        lines.append(f"<p>Not drawn: {' and '.join(left)}.</p>")
    if any(run.is_tiny for run in runs.runs):
        lines.append("<p>Tiny models show that the code runs; their speeds say nothing.</p>")
    rows = [
        (row, machine, text)
        for (row, machine), group in runs.groups().items()
        for text in verdicts(group, runs)
    ]
    if rows:
        lines.append(_table(("row", "machine", "where Strop stands"), rows, text_from=0))
    return "\n".join(lines)


def _section(
    row: str, machine: str, group: Sequence[Run], runs: Runs, pictures: Iterable[Path]
) -> str:
    said = [f'<p class="verdict">{escape(text)}</p>' for text in verdicts(group, runs)]
    return "\n".join(
        [
            f"<h2>{escape(row)}: {escape(group[0].title)}</h2>",
            f'<p class="place">{escape(machine)}</p>',
            *said,
            _table(_HEADER, [_cells(run, runs) for run in group], text_from=len(_HEADER) - 1),
            *(_picture(path) for path in pictures),
        ]
    )


def _cells(run: Run, runs: Runs) -> tuple[str, ...]:
    head = (run.contender, str(run.processes), str(run.batch))
    if not run.img_s:
        return (*head, *[""] * 7, run.reason or "not measured")
    wrong = "" if run.is_right else "BAD: the loss, or ranks' weights, differ from eager's. "
    ratio = runs.speed_up(run)
    share = runs.efficiency(run) if run.processes > 1 else None
    return (
        *head,
        f"{run.img_s:.1f}",
        f"{run.spread:.1%}",
        f"{run.p50_ms:.1f}",
        "" if ratio is None else f"{ratio:.2f} x",
        "" if share is None else f"{share:.0%}",
        f"{run.peak_bytes / 2**30:.2f}" if run.peak_bytes else "",
        "" if run.decode_ms is None else f"{run.decode_ms:.1f}",
        f"{wrong}{run.note}{'; ' + run.reason if run.reason else ''}",
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], *, text_from: int) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        made = []
        for place, cell in enumerate(cells):
            kind = ' class="text"' if place >= text_from else ""
            kind = ' class="text bad"' if cell.startswith("BAD") else kind
            made.append(f"<{tag}{kind}>{escape(cell)}</{tag}>")
        return f"<tr>{''.join(made)}</tr>"

    lines = [line("th", header), *(line("td", row) for row in rows)]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _picture(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{escape(path.stem)}" src="data:image/png;base64,{data}">'
