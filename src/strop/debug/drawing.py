"""Draw the fusion plan as an SVG: a box for each step, below the steps whose results it reads.

A box lists what happens inside by scheme: values in registers (local), results of reductions
(regional), values that go through memory (global). Every line between boxes is such a value.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from html import escape

from strop.debug.report import GraphRow, StepRow
from strop.wording import counted

WIDTH, LINE, PAD, GAP_X, GAP_Y, MOST_LINES = 250, 15, 6, 14, 34, 3
STYLE = """
.plan { overflow: auto; max-height: 44rem; border: 1px solid #ccc; }
.plan text { font: 11px ui-monospace, monospace; fill: #1c1c1c; }
.plan .head { font-weight: bold; } .plan path { fill: none; stroke: #888; opacity: .55; }
.plan rect { stroke: #555; rx: 4; } .kernel { fill: #d9ead3; background: #d9ead3; }
.call { fill: #cfe2f3; background: #cfe2f3; } .opaque { fill: #f4cccc; background: #f4cccc; }
.plan g:hover rect { stroke-width: 3; }
.key span { padding: .1rem .5rem; margin-right: .6rem; border-radius: 4px; color: #1c1c1c; }
"""
HEAD = ' class="head"'
KEY = (
    '<p class="key"><span class="kernel">generated kernel</span><span class="call">library call'
    '</span><span class="opaque">opaque call in torch</span> LOCAL: in registers &middot;'
    " REGIONAL: a reduction's result inside one kernel &middot; GLOBAL: through memory, a line to"
    " each reader &middot; hover for origin and costs</p>"
)


def plan_svg(graph: GraphRow) -> str:
    """Return the key and the drawing, or nothing for no steps."""
    if not graph.steps:
        return ""
    levels = _levels(graph.steps)
    lines = {step.number: _lines(step) for step in graph.steps}
    place, width, height = _places(levels, lines)
    total = graph.bound_us or 1.0
    edges = "".join(
        _edge(place[source], place[step.number], lines[source])
        for step in graph.steps
        for source in step.reads
    )
    boxes = "".join(
        _box(step, lines[step.number], *place[step.number], total) for step in graph.steps
    )
    svg = f'<svg width="{width}" height="{height}" role="img">{edges}{boxes}</svg>'
    return f'{KEY}<div class="plan">{svg}</div>'


def _levels(steps: Sequence[StepRow]) -> list[list[StepRow]]:
    """Put each step just above its first reader, the longest chain in the first column."""
    soonest: dict[int, int] = {}
    for step in steps:
        soonest[step.number] = 1 + max((soonest[n] for n in step.reads), default=-1)
    latest = dict.fromkeys(soonest, max(soonest.values()))
    rows: dict[int, list[StepRow]] = defaultdict(list)
    for step in reversed(steps):
        level = latest[step.number]
        for number in step.reads:
            latest[number] = min(latest[number], level - 1)
        rows[level].insert(0, step)
    return [
        sorted(rows[level], key=lambda s: latest[s.number] - soonest[s.number])
        for level in sorted(rows)
    ]


def _places(
    levels: Sequence[Sequence[StepRow]], lines: dict[int, list[str]]
) -> tuple[dict[int, tuple[int, int]], int, int]:
    place: dict[int, tuple[int, int]] = {}
    y = PAD
    for level in levels:
        for column, step in enumerate(level):
            place[step.number] = (PAD + column * (WIDTH + GAP_X), y)
        y += max(_height(lines[step.number]) for step in level) + GAP_Y
    widest = max(len(level) for level in levels)
    return place, 2 * PAD + widest * (WIDTH + GAP_X), y


def _height(lines: Sequence[str]) -> int:
    return len(lines) * LINE + 2 * PAD


def _lines(step: StepRow) -> list[str]:
    """Return the text of a box: its name, then its values by scheme."""
    lines = [f"{step.number} {step.title}"]
    for scheme in ("local", "regional"):
        ops = Counter(v.text.split()[0] for v in step.values if v.scheme == scheme)
        if ops:
            names = (op if count == 1 else f"{count} {op}" for op, count in ops.items())
            lines.append(f"{scheme.upper()} {' '.join(names)}")
    stored = [v.text for v in step.values if v.scheme == "global"]
    lines += [f"GLOBAL {text}" for text in stored[:MOST_LINES]]
    if len(stored) > MOST_LINES:
        lines.append(f"and {len(stored) - MOST_LINES} more")
    return [line if len(line) < 38 else line[:36] + "…" for line in lines]


def _box(step: StepRow, lines: Sequence[str], x: int, y: int, total: float) -> str:
    texts = "".join(
        f'<text x="{x + PAD}" y="{y + PAD + 11 + row * LINE}"'
        f"{HEAD if row == 0 else ''}>{escape(line)}</text>"
        for row, line in enumerate(lines)
    )
    values = "\n".join(f"{v.scheme}: {v.text}" for v in step.values)
    cost = f"{counted(step.bytes_moved, 'byte', ',')}, {counted(step.flops, 'FLOP', ',')}"
    about = (
        f"{step.number} {step.title}\n{step.origin or 'the module'}\n{cost}\n"
        f"at least {step.bound_us} us ({step.bound_us / total:.1%}), bound by {step.bound_by}\n"
        f"{values}"
    )
    return (
        f"<g><title>{escape(about)}</title>"
        f'<rect class="{step.kind}" x="{x}" y="{y}" width="{WIDTH}" height="{_height(lines)}"/>'
        f"{texts}</g>"
    )


def _edge(source: tuple[int, int], target: tuple[int, int], lines: Sequence[str]) -> str:
    if source[0] == target[0] and target[1] - source[1] - _height(lines) > 2 * GAP_Y:
        side, y1, y2 = source[0] + WIDTH, source[1] + _height(lines) - PAD, target[1] + PAD
        out = side + GAP_X - 1  # past the boxes between
        return (
            f'<path d="M{side} {y1} Q{out} {y1} {out} {y1 + GAP_X} L{out} {y2 - GAP_X}'
            f' Q{out} {y2} {side} {y2}"/>'
        )
    x1, y1 = source[0] + WIDTH // 2, source[1] + _height(lines)
    x2, y2 = target[0] + WIDTH // 2, target[1]
    bend = max((y2 - y1) // 2, 10)
    return f'<path d="M{x1} {y1} C{x1} {y1 + bend} {x2} {y2 - bend} {x2} {y2}"/>'
