"""A Report as one page that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from strop.debug.report import ComponentRow, GraphRow, KernelRow, Report

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
@media (prefers-color-scheme: dark) {
  body { color: #e8e8e4; background: #191917; } pre { background: #242421; }
  th, td { border-color: #3a3a36; } .bad { color: #ff8a70; } }
"""
_STAGES = ("capture", "passes", "fusion", "lowering", "codegen")


def page(report: Report) -> str:
    """The whole page."""
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
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _component(c: ComponentRow) -> str:
    rows = [(f"eager {count}x", escape(why)) for why, count in c.fallbacks.items()]
    rows += [("not finite", escape(text)) for text in c.nonfinite]
    troubles = "".join(f'<p class="bad">{what}: {why}</p>' for what, why in rows)
    head = (
        f"<h2>{escape(c.name)}</h2><p>{c.num_calls} calls, {c.num_eager_calls} of them eager,"
        f" {c.num_replays} graph replays; {c.num_shapes} shapes, {len(c.graphs)} graphs,"
        f" {c.num_recompiles} recompiles; {c.num_launches} launches in the latest call.</p>"
    )
    return head + troubles + "".join(map(_graph, c.graphs))


def _graph(g: GraphRow) -> str:
    sizes = ", ".join(f"{k} = {v}" for k, v in g.sizes.items())
    guards = "\n".join(g.guards) or "none"
    kernels = sorted(g.kernels, key=lambda k: -k.bytes_moved)
    calls = ((escape(op), _number(n)) for op, n in g.calls.items())
    refusals = sorted(g.refusals.items(), key=lambda item: -item[1])
    kind = "Ragged graph" if g.is_ragged else "Graph"
    parts = [
        f"<h3>{kind} at {escape(sizes or 'fixed sizes')}</h3>",
        _stages(g),
        _table(("kernel", "launches", "MB", "us", "from"), map(_kernel, kernels)),
        _table(("library call", "count"), calls),
        _table(("not fused because", "times"), ((escape(r), _number(n)) for r, n in refusals)),
        _folded("Guards", guards),
        _folded("Plan", g.plan),
    ]
    return "".join(parts)


def _stages(g: GraphRow) -> str:
    if g.from_disk:
        return "<p>From the disk cache: no stage ran.</p>"
    names = [n for n in _STAGES if n in g.seconds] + [n for n in g.seconds if n not in _STAGES]
    rows: list[tuple[str, str, str]] = []
    for name in names:
        rows.append((escape(name), _number(g.seconds[name]), ""))
        if name == "passes":
            rows += [(f"&nbsp;&nbsp;{escape(p)}", _number(s), f"{before} &rarr; {after} nodes")
                     for p, s, before, after in g.passes]  # fmt: skip
    return _table(("stage", "seconds", ""), rows)


def _kernel(k: KernelRow) -> tuple[str, ...]:
    source = _folded(k.name, k.source)
    origins = "<br>".join(escape(o or "the module itself") for o in k.origins[:3])
    more = f"<br>and {len(k.origins) - 3} more" if len(k.origins) > 3 else ""
    return (source, _number(k.num_launches), _number(k.bytes_moved / 1e6),
            _number(k.estimated_us), origins + more)  # fmt: skip


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML; numbers are set to the right. Nothing for no rows."""
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
