"""Write a Report as one page that needs nothing else."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from html import escape

from strop.debug import drawing, roofline_page
from strop.debug.report import ComponentRow, GraphRow, KernelRow, Report
from strop.wording import counted

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
       color: #1c1c1c; background: #fdfdfc; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; border-bottom: 1px solid #ccc; }
h3 { font-size: 1rem; }
table { border-collapse: collapse; margin: .6rem 0; width: 100%; }
th, td { text-align: left; padding: .2rem .6rem; border-bottom: 1px solid #e4e4e0;
         vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: #f3f3ef; padding: .8rem; overflow-x: auto; font-size: 13px; line-height: 1.35; }
summary { cursor: pointer; } .bad { color: #a02010; }
.bar { display: flex; height: 1.4rem; margin: .5rem 0; font-size: 12px; color: #1c1c1c; }
.bar div { overflow: hidden; white-space: nowrap; padding: 0 .3rem; border-right: 1px solid #fff; }
.add { color: #1a7f37; } .del { color: #a02010; } .at { color: #777; }
@media (prefers-color-scheme: dark) {
  body { color: #e8e8e4; background: #191917; } pre { background: #242421; }
  th, td { border-color: #3a3a36; } .bad, .del { color: #ff8a70; } .add { color: #7ee787; }
  .plan { background: #cfcfca; } }
"""
_HUES = ("#f9cb9c", "#d9ead3", "#cfe2f3", "#ead1dc", "#fff2cc", "#d9d2e9")
_TOP = 40  # steps in the table of costs
_STAGES = ("capture", "passes", "fusion", "lowering", "codegen")


def page(report: Report) -> str:
    """Return the whole page."""
    counts = report.summary()
    facts = [(name, counts[name]) for name in counts if isinstance(counts[name], int | float)]
    body = [
        "<h1>strop.explain</h1>",
        f"<p>{escape(report.device)}; times are bytes over {report.bandwidth / 1e9:.0f} GB/s.</p>",
        _table(("count", "value"), ((escape(n), _number(v)) for n, v in facts)),
        *(f"<p>{escape(note)}</p>" for note in report.notes),
        *(_component(component) for component in report.components),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>strop.explain</title>'
        f"<style>{_STYLE}{drawing.STYLE}{roofline_page.STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _component(c: ComponentRow) -> str:
    rows = [(f"eager {count}x", escape(why)) for why, count in c.fallbacks.items()]
    rows += [(f"traced by torch {n}x", escape(why)) for why, n in c.traced_by_torch.items()]
    rows += [("not finite", escape(text)) for text in c.nonfinite]
    rows += [("check", escape(text)) for text in c.findings]
    troubles = "".join(f'<p class="bad">{what}: {why}</p>' for what, why in rows)
    head = (
        f"<h2>{escape(c.name)}</h2><p>{counted(c.num_calls, 'call')}, {c.num_eager_calls} of them"
        f" eager, {counted(c.num_replays, 'graph replay')}; {counted(c.num_shapes, 'shape')},"
        f" {counted(len(c.graphs), 'graph')}, {counted(c.num_recompiles, 'recompile')};"
        f" {counted(c.num_launches, 'launch')} in the latest call.</p>"
    )
    profile = roofline_page.profile_section(c.profile, _table) if c.profile else ""
    return head + troubles + _derived(c) + profile + "".join(map(_graph, c.graphs))


def _derived(c: ComponentRow) -> str:
    """Show what is read in the place of weights and arguments."""
    if not c.derived:
        return ""
    rows = (
        (
            escape(row.kind),
            counted(row.count, row.unit),
            f"{row.size_bytes / 1e6:.2f}",
            f"{row.beside_bytes / 1e6:.2f}",
            _number(row.num_made),
            _number(row.num_reuses),
            escape(row.remade),
            escape(row.detail),
        )
        for row in c.derived
    )
    return "<h3>Derived inputs</h3>" + _table(
        (
            *("derived input", "", "MB", "MB beside the weights"),
            *("made", "used again", "anew when", ""),
        ),
        rows,
    )


def _graph(g: GraphRow) -> str:
    sizes = ", ".join(f"{k} = {v}" for k, v in g.sizes.items())
    guards = "\n".join(g.guards) or "none"
    kernels = sorted(g.kernels, key=lambda k: -k.bytes_moved)
    calls = ((escape(op), _number(n)) for op, n in g.calls.items())
    kind = "Ragged graph" if g.is_ragged else "Graph"
    parts = [
        f"<h3>{kind} at {escape(sizes or 'fixed sizes')}</h3>",
        _stages(g),
        "<h3>Fusion plan</h3>",
        drawing.plan_svg(g),
        "<h3>Where the time must go</h3>",
        f"<p>At least {_number(g.bound_us)} us: each step at the bandwidth or the peak of the"
        " device, whichever takes longer.</p>",
        _table(("step", "", "MB", "MFLOP", "bound us", "share", "bound by", "origin"), _costs(g)),
        "<h3>Kernels</h3>",
        _table(("kernel", "launches", "MB", "MFLOP", "us", "share", "from"), map(_kernel, kernels)),
        _table(("call", "count"), calls),
        _choices(g),
        _table(("opaque call, run by torch", "MB", "in"), _opaque(g)),
        _patterns(g),
        _refusals(g),
        _graphs(g),
        _folded("Guards", guards),
        _folded("Plan", g.plan),
    ]
    return "".join(parts)


def _choices(g: GraphRow) -> str:
    """List which kernel runs each call, what it beat, and who cannot."""
    if not g.choices:
        return ""
    rows = (
        (
            escape(f"{row.count}x {row.op}"),
            escape(" . ".join("x".join(map(str, shape)) for shape in row.shapes)),
            escape(row.kernel),
            _us(row.us),
            escape("; ".join(f"{name} {_us(us)}" for name, us in row.beaten)),
            escape("; ".join(f"{name} {reason}" for name, reason in row.unable)),
        )
        for row in g.choices
    )
    heads = ("call", "sizes", "runs by", "estimate, us", "beat", "cannot")
    return "<h3>Kernels of calls</h3>" + _table(heads, rows)


def _us(us: float | None) -> str:
    if us is None:
        return "not at these sizes"
    return f"{us:.1f}" if us else "measured as the fastest"


def _stages(g: GraphRow) -> str:
    if g.from_disk:
        return "<p>From the disk cache: no stage ran.</p>"
    names = [n for n in _STAGES if n in g.seconds] + [n for n in g.seconds if n not in _STAGES]
    rows: list[tuple[str, str, str]] = []
    for name in names:
        rows.append((escape(name), _number(g.seconds[name]), ""))
        if name == "passes":
            rows += [
                (
                    f"&nbsp;&nbsp;{escape(p)}",
                    _number(s),
                    f"{before} &rarr; {counted(after, 'node')}",
                )
                for p, s, before, after in g.passes
            ]
    return _bar([(name, g.seconds[name]) for name in names]) + _table(
        ("stage", "seconds", ""), rows
    )


def _bar(parts: Sequence[tuple[str, float]]) -> str:
    """Draw stages as long as they take."""
    cells = (
        f'<div style="flex: {seconds:.4f} 1 0; background: {_HUES[n % len(_HUES)]}"'
        f' title="{escape(name)} {seconds:.3f} s">{escape(name)}</div>'
        for n, (name, seconds) in enumerate(parts)
    )
    return f'<div class="bar">{"".join(cells)}</div>'


def _costs(g: GraphRow) -> Iterable[tuple[str, ...]]:
    total = g.bound_us or 1.0
    for step in sorted(g.steps, key=lambda s: -s.bound_us)[:_TOP]:
        yield (
            f"{step.number}",
            escape(step.title),
            _number(step.bytes_moved / 1e6),
            _number(step.flops / 1e6),
            _number(step.bound_us),
            f"{step.bound_us / total:.1%}",
            step.bound_by,
            escape(step.origin or "the module itself"),
        )


def _opaque(g: GraphRow) -> Iterable[tuple[str, ...]]:
    for step in g.steps:
        if step.kind == "opaque":
            yield escape(step.title), _number(step.bytes_moved / 1e6), escape(step.origin)


def _patterns(g: GraphRow) -> str:
    """List where replacements run, and every near miss underneath."""
    parts = []
    for p in g.patterns:
        rows = [("runs", escape(origin or "the module itself"), "") for origin in p.origins]
        rows += [("not", escape(o or "the module itself"), escape(why)) for o, why in p.misses]
        title = (
            f"{p.name}: {counted(len(p.origins), 'match')}, {counted(len(p.misses), 'near miss')}"
        )
        table = _table(("", "in", "because"), rows)
        parts.append(f"<details><summary>{escape(title)}</summary>{table}</details>")
    return f"<h3>Patterns</h3>{''.join(parts)}" if parts else ""


def _refusals(g: GraphRow) -> str:
    """List the reasons with their counts, and every edge of each underneath."""
    parts = []
    for reason, count in sorted(g.refusals.items(), key=lambda item: -item[1]):
        edges = (
            (escape(e.producer), escape(e.consumer), escape(e.origin or "the module itself"))
            for e in g.edges
            if e.reason == reason
        )
        table = _table(("producer", "consumer", "in"), edges)
        parts.append(f"<details><summary>{count} x {escape(reason)}</summary>{table}</details>")
    return f"<h3>Not fused</h3>{''.join(parts)}" if parts else ""


def _graphs(g: GraphRow) -> str:
    """Show the graph as imported, then after each pass: what changed, and the whole."""
    if not g.texts:
        return ""
    parts = [_folded("imported", g.texts[0][1])]
    for (_, before), (name, after) in zip(g.texts, g.texts[1:], strict=False):
        changed = _diff(before, after)
        what = f"<pre>{changed}</pre>" if changed else "<p>Nothing changed.</p>"
        label = f"after {name}{'' if changed else ' (no change)'}"
        parts.append(
            f"<details><summary>{escape(label)}</summary>{what}"
            f"{_folded('the whole graph', after)}</details>"
        )
    return f"<h3>Graph after each pass</h3>{''.join(parts)}"


def _diff(before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2)
    classes = {"+": "add", "-": "del", "@": "at"}
    return "\n".join(
        f'<span class="{classes[line[0]]}">{escape(line)}</span>'
        if line[0] in classes
        else escape(line)
        for line in list(lines)[2:]
    )


def _kernel(k: KernelRow) -> tuple[str, ...]:
    source = _folded(k.name, k.source)
    origins = "<br>".join(escape(o or "the module itself") for o in k.origins[:3])
    more = f"<br>and {len(k.origins) - 3} more" if len(k.origins) > 3 else ""
    return (
        source,
        _number(k.num_launches),
        _number(k.bytes_moved / 1e6),
        _number(k.flops / 1e6),
        _number(k.estimated_us),
        f"{k.share:.1%}",
        origins + more,
    )


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Make a table of cells in HTML; numbers are set to the right. Without rows the text is
    empty."""
    lines = []
    for row in rows:
        cells = (f"<td{_align(c)}>{c}</td>" for c in row)
        lines.append(f"<tr>{''.join(cells)}</tr>")
    if not lines:
        return ""
    titles = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f"<table><tr>{titles}</tr>{''.join(lines)}</table>"


def _align(cell: str) -> str:
    return (
        ' class="n"'
        if cell[:1].isdigit() and cell.replace(",", "").replace(".", "").isdigit()
        else ""
    )
