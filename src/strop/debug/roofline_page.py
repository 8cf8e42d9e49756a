"""Show a profile on the page of ``strop explain``: the roofline as an SVG, and the tables beside
it.

Both axes are logarithmic: FLOPs a byte to the right, FLOPs a second upwards. A step under the
slanted line is bound by memory, under a level one by arithmetic; how far it stays below is what it
loses. Steps without FLOPs stand on the left edge, as far below the slanted line as their bandwidth
is below that of the copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from strop.debug.roofline import ABOVE, METHODS, ProfileRow, TimedStep, summary
from strop.ir.op import OTHER
from strop.wording import counted

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 440, 64, 150, 14, 40
RADIUS = (3.0, 14.0)  # of a point: its area is the share of the time
COLOURS = {
    "convolution": "#7d4fb0",
    "GEMM": "#d1782b",
    "attention": "#1f9aa3",
    "pointwise kernel": "#2f6fb3",
    "row kernel": "#c23b57",
    "column kernel": "#2f8f4e",
    OTHER: "#7a6a3a",
}
STYLE = """
.roof { max-width: 100%; height: auto; border: 1px solid #ccc; color: inherit; }
.roof text { font: 11px system-ui, sans-serif; fill: currentColor; }
.roof line, .roof polyline { stroke: currentColor; fill: none; }
.roof .grid { opacity: .12; } .roof .ceiling { stroke-width: 2; opacity: .7; }
.roof circle { fill-opacity: .55; stroke-width: 1; } .roof circle:hover { fill-opacity: 1; }
"""
Table = Callable[[Sequence[str], Iterable[Sequence[str]]], str]


@dataclass(frozen=True, slots=True)
class Scale:
    """Scale a logarithmic axis from ``low`` to ``high``, both powers of ten, over these pixels."""

    low: int
    high: int
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    @property
    def least(self) -> float:
        return float(10.0**self.low)

    @property
    def most(self) -> float:
        return float(10.0**self.high)

    @property
    def decades(self) -> range:
        return range(self.low, self.high + 1)


def scale(values: Iterable[float], start: float, end: float) -> Scale:
    """Choose an axis that has room for all of them."""
    logs = [math.log10(value) for value in values]
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    return Scale(low, max(high, low + 1), start, end)


def profile_section(p: ProfileRow, table: Table) -> str:
    """Make the section; ``table`` draws a table from its titles and rows of HTML."""
    notes = [
        _sentence(summary(p)),
        f"Ceilings measured here: {p.ceilings}.",
        f"Measured by {METHODS[p.method].format(counted(p.num_runs, 'run'))}.",
    ]
    is_above = any((step.share or 0.0) > 1.0 for step in p.steps)
    notes += [_sentence(ABOVE)] if is_above else []
    rest = ((escape(name), f"{us:,.1f}") for name, us in p.rest)
    unseen = ((f"{s.number}", escape(s.title), escape(_origin(s))) for s in p.unseen)
    return "".join(
        [
            "<h3>Roofline</h3>",
            *(f"<p>{escape(note)}</p>" for note in notes),
            plot(p),
            table(("kind", "steps", "us", "of the call", "bound us", "of the bound"), _kinds(p)),
            "<h3>Steps by time lost</h3>",
            table(
                (
                    "step",
                    "",
                    "kind",
                    "us",
                    "bound us",
                    "lost us",
                    "of the bound",
                    "bound by",
                    "MB",
                    "MFLOP",
                    "GB/s",
                    "GFLOP/s",
                    "origin",
                ),
                map(_cells, p.by_loss),
            ),
            table(("not attributed to a step", "us"), rest),
            table(("step without a kernel in the trace", "", "origin"), unseen),
        ]
    )


def _kinds(p: ProfileRow) -> Iterator[tuple[str, ...]]:
    for row in sorted(p.kinds, key=lambda row: -row.us):
        yield (
            escape(row.kind),
            f"{row.num_steps}",
            f"{row.us:,.1f}",
            f"{row.us / p.call_us:.1%}",
            f"{row.bound_us:,.1f}",
            f"{row.share:.1%}",
        )
    yield ("not attributed", "", f"{p.rest_us:,.1f}", f"{p.rest_us / p.call_us:.1%}", "", "")
    yield ("gaps", "", f"{p.gaps_us:,.1f}", f"{p.gaps_us / p.call_us:.1%}", "", "")
    yield (
        "the whole call",
        "",
        f"{p.call_us:,.1f}",
        "100.0%",
        f"{p.bound_us:,.1f}",
        f"{p.bound_us / p.call_us:.1%}",
    )


def _cells(s: TimedStep) -> tuple[str, ...]:
    once = ", once a denoise loop" if s.is_hoisted else ""
    return (
        f"{s.number}",
        escape(s.title),
        escape(s.kind),
        f"{s.us:,.2f}",
        f"{s.bound_us:,.2f}",
        f"{s.lost_us:,.2f}",
        f"{s.share:.1%}",
        f"{s.bound_by}, {s.unit}",
        f"{s.bytes_moved / 1e6:,.3f}",
        f"{s.flops / 1e6:,.3f}",
        f"{s.gb_per_s:,.1f}",
        f"{1e3 * (s.tflop_per_s or 0.0):,.1f}",
        escape(_origin(s)) + once,
    )


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _origin(s: TimedStep) -> str:
    return s.origin or "the module itself"


# the drawing


def plot(p: ProfileRow) -> str:
    """Draw the roofline, with a point for each step that has a time; nothing if none has."""
    steps = [s for s in p.steps if s.us]
    if not steps:
        return ""
    band, peaks = p.ceilings.bandwidth, p.ceilings.flops
    dense = [s.flops / s.bytes_moved for s in steps if s.flops and s.bytes_moved]
    edges = [min(dense, default=1.0) / 2, *dense, *(peak / band for peak in peaks.values())]
    x = scale(edges, LEFT, WIDTH - RIGHT)
    rates = [rate for s in steps if (rate := _height(s, x))]
    y = scale([*rates, *peaks.values()], HEIGHT - BOTTOM, TOP)
    found = dict.fromkeys(s.kind for s in steps)
    kinds = [kind for kind in {**COLOURS, **found} if kind in found]
    colour = {kind: COLOURS.get(kind, COLOURS[OTHER]) for kind in kinds}
    total = sum(s.us or 0.0 for s in steps)
    # the large ones first, so that the small ones can be pointed at
    points = (_point(s, x, y, colour[s.kind], total) for s in sorted(steps, key=lambda s: -s.us))  # type: ignore[operator]
    return (
        f'<svg class="roof" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">'
        f"<title>Roofline: FLOPs a second over FLOPs a byte</title>{_axes(x, y)}"
        f"{_ceilings(p, x, y)}{''.join(points)}{_key(colour)}</svg>"
    )


def _intensity(s: TimedStep, x: Scale) -> float:
    """Return the FLOPs per byte; without FLOPs the least that is drawn, without bytes the most."""
    if not s.flops:
        return x.least
    return s.flops / s.bytes_moved if s.bytes_moved else x.most


def _height(s: TimedStep, x: Scale) -> float:
    """Return the FLOPs per second, or what they would be at the least intensity."""
    moved = s.flops or s.bytes_moved * x.least
    return moved / ((s.us or 0.0) / 1e6)


def _axes(x: Scale, y: Scale) -> str:
    parts = []
    for decade in x.decades:
        at = x(10.0**decade)
        parts.append(
            f'<line class="grid" x1="{at}" x2="{at}" y1="{y.start}" y2="{y.end}"/>'
            f'<text x="{at}" y="{y.start + 16}" text-anchor="middle">{_power(decade)}'
            "</text>"
        )
    for decade in y.decades:
        at = y(10.0**decade)
        parts.append(
            f'<line class="grid" x1="{x.start}" x2="{x.end}" y1="{at}" y2="{at}"/>'
            f'<text x="{x.start - 6}" y="{at + 4}" text-anchor="end">'
            f"{_rate(10.0**decade)}</text>"
        )
    parts.append(
        f'<text x="{(x.start + x.end) / 2}" y="{HEIGHT - 8}" text-anchor="middle">FLOPs a'
        " byte (left edge: steps without FLOPs)</text>"
        f'<text x="4" y="{TOP - 2}">FLOP/s</text>'
    )
    return "".join(parts)


def _ceilings(p: ProfileRow, x: Scale, y: Scale) -> str:
    """Draw the slanted line up to the highest level one, and each level one from where they
    meet."""
    band, peaks = p.ceilings.bandwidth, p.ceilings.flops
    high, low = max(peaks.values()), max(x.least, y.least / band)
    parts = [
        f'<line class="ceiling memory" x1="{x(low)}" y1="{y(low * band)}" x2="{x(high / band)}"'
        f' y2="{y(high)}"><title>memory: {band / 1e9:,.1f} GB/s</title></line>'
    ]
    for unit, peak in peaks.items():
        parts.append(
            f'<line class="ceiling arithmetic" x1="{x(peak / band)}" y1="{y(peak)}"'
            f' x2="{x.end}" y2="{y(peak)}"><title>{escape(unit)}: {_rate(peak)}FLOP/s'
            f'</title></line><text x="{x.end + 4}" y="{y(peak) + 4}">{escape(unit)}'
            f" {_rate(peak)}</text>"
        )
    return "".join(parts)


def _point(s: TimedStep, x: Scale, y: Scale, colour: str, total: float) -> str:
    least, most = RADIUS
    rate = _height(s, x)
    if not rate:
        return ""  # neither bytes nor FLOPs: it has no place here, only in the table
    radius = max(least, most * math.sqrt((s.us or 0.0) / total))
    about = (
        f"{s.number} {s.title}\n{_origin(s)}\n{s.us:,.2f} us, bound {s.bound_us:,.2f} by"
        f" {s.bound_by}: {s.share:.1%}\n{counted(s.bytes_moved, 'byte', ',')},"
        f" {s.gb_per_s:,.1f} GB/s\n{counted(s.flops, 'FLOP', ',')},"
        f" {_rate(1e12 * (s.tflop_per_s or 0.0))}FLOP/s"
    )
    return (
        f'<circle cx="{x(_intensity(s, x))}" cy="{y(rate)}" r="{radius:.1f}" fill="{colour}"'
        f' stroke="{colour}"><title>{escape(about)}</title></circle>'
    )


def _key(colour: dict[str, str]) -> str:
    parts = []
    for row, (kind, value) in enumerate(colour.items()):
        at = HEIGHT - BOTTOM - 16 * (len(colour) - row)
        parts.append(
            f'<circle cx="{WIDTH - RIGHT + 20}" cy="{at}" r="5" fill="{value}"/>'
            f'<text x="{WIDTH - RIGHT + 30}" y="{at + 4}">{escape(kind)}</text>'
        )
    return "".join(parts)


def _power(decade: int) -> str:
    return f"{10**decade:,}" if decade >= 0 else f"{10.0**decade:.{-decade}f}"


def _rate(value: float) -> str:
    """Write a rate with the prefix of a thousand, as in "1.2 T"."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g} "
