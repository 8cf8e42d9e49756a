"""Make the tables of ``strop bench train`` from its JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.bench.infer_contenders import Found, is_there
from strop.bench.infer_report import gib
from strop.bench.report import Rows, newest_rows, title_of
from strop.bench.train_loop import PARTS
from strop.bench.train_rows import LADDER, ROWS
from strop.wording import counted

Result = Mapping[str, Any]
SCRIPT = "diffusers"
COLD_MUST_S, COLD_STRETCH_S = 60.0, 35.0  # cold compile of forward and backward
NORM_TOLERANCE = 0.03  # what rounding to half types costs
HEADER = (
    "row",
    "run",
    "img/s",
    "A100, published",
    "p20 ms",
    "p50",
    "p80",
    "of script",
    "peak GiB",
    "compile s",
    "note",
)


def load(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the results in the order of the table, for each row of one GPU the newest with the
    default options that has its peer beside it, if there is one."""
    names = [row.name for row in (*ROWS, LADDER)]
    return newest_rows(paths, "train", names, _compares, _is_usual)


def _compares(result: Result) -> bool:
    return result.get("against", SCRIPT) in result["contenders"]


def _is_usual(result: Result) -> bool:
    """Tell whether it is of one process and the row's batch."""
    return result.get("processes", 1) == 1 and result.get("batch") is None


def rows_of(results: Sequence[Result]) -> Rows:
    """Return the header, then a line for each contender of each row, and one that says where Strop
    stands."""
    table: Rows = [HEADER]
    for result in results:
        label = result["row"]
        for name, found in result["contenders"].items():
            table.append((label, name, *_cells(result, found)))
            label = ""
        for text in filter(None, (verdict(result), cold_text(result))):
            table.append(("", "->", *[""] * 8, text))
    return table


def _cells(result: Result, found: Found) -> tuple[str, ...]:
    published = f"{found['published']:.2f}" if found.get("published") else ""
    if "p50_ms" not in found:
        return ("", published, *[""] * 6, f"{reason(found)} ({found['note'] or found['does']})")
    times = [f"{found[p]:.2f}" for p in ("p20_ms", "p50_ms", "p80_ms")]
    ratio = ratio_to_script(result, found)
    rest = (gib(found.get("peak_bytes")), f"{compile_s(found):.1f}", _note(result, found))
    return (
        f"{speed_of(result, found):.2f}",
        published,
        *times,
        f"{ratio:.2f}x" if ratio else "",
        *rest,
    )


def reason(found: Result) -> str:
    return str(found.get("skipped") or found.get("failed") or "not measured")


def compile_s(found: Found) -> float:
    """Return the seconds of the first forward and backward, cold, or of the first whole step."""
    first: Mapping[str, float] = found["first_split_s"]
    return sum(first.get(part, 0.0) for part in ("forward", "backward", "whole step"))


def _note(result: Result, found: Found) -> str:
    said = (
        []
        if found["loss_ok"]
        else [f"BAD loss {found['loss']}, eager fp32 {found['loss_reference']}"]
    )
    said += _norm_text(result, found)
    said += [found["failed"]] if "failed" in found else []  # cut after it had its times
    if "loader" in found:
        loader = found["loader"]
        pinned = ", pinned" if loader["is_pinned"] else ""
        workers = counted(loader["workers"], "worker")
        said.append(f"{workers}{pinned}: waits {found['wait_ms']:.1f} ms")
    if found.get("tflops"):
        said.append(f"{found['tflops']:.0f} TFLOP/s")
    said += [f"left to torch: {name}" for name in found.get("graphs", {}).get("fallbacks", ())]
    return "; ".join([*([found["note"]] if found["note"] else []), *said])


def _norm_text(result: Result, found: Found) -> list[str]:
    """Tell, as far as their norm shows it, if the first gradients are not those of the script."""
    script = _script(result)
    norm, theirs = found.get("grad_norm"), script.get("grad_norm")
    same = all(script.get(key) == found.get(key) for key in ("work", "processes"))
    if not norm or not theirs or not same:  # other pictures
        return []
    is_near = abs(norm - theirs) <= NORM_TOLERANCE * theirs
    return [] if is_near else [f"norm of gradients {norm:.4g}, of the script's {theirs:.4g}"]


def _script(result: Result) -> Found:
    """Return what the row's numbers are relative to: the row's peer, or the first rung."""
    contenders = result["contenders"]
    found: Found = contenders.get(result.get("against", SCRIPT)) or next(
        iter(contenders.values()), {}
    )
    return found


def speed_of(result: Result, found: Found) -> float:
    """Return pictures a second: of all GPUs together, but in the ladder of one, as a rung may have
    more than the others."""
    per_gpu = found.get("img_s_a_gpu") if result["row"] == LADDER.name else None
    return float(per_gpu or found["img_s"])


def ratio_to_script(result: Result, found: Found) -> float | None:
    """Return how many times as many pictures per second as the script it makes."""
    script = _script(result)
    if not script.get("img_s") or not found.get("img_s"):
        return None
    return speed_of(result, found) / speed_of(result, script)


def best_of_ours(result: Result) -> tuple[str, Found] | None:
    """Return the fastest contender of Strop that does the same work as the others, with a right
    loss."""
    contenders = result["contenders"]
    is_any = result.get("any_batch", False)
    works = [_work_of(c, is_any) for c in contenders.values()]
    ours = [
        (name, c)
        for name, c in contenders.items()
        if name.startswith("strop")
        and c.get("img_s")
        and c["loss_ok"]
        and _work_of(c, is_any) == works[0]
    ]
    return max(ours, key=lambda pair: float(pair[1]["img_s"])) if ours else None


def _work_of(found: Found, is_any_batch: bool) -> dict[str, Any]:
    return {k: v for k, v in found["work"].items() if k != "batch" or not is_any_batch}


def value_of(result: Result) -> float | None:
    """Return Strop's number in the unit of the row; None for one that takes several results."""
    if result["unit"] == "x 1 GPU":
        return None
    best = best_of_ours(result)
    if best is None:
        return None
    if result["unit"] == "x":
        is_there_too = result.get("against", SCRIPT) in result["contenders"]
        return ratio_to_script(result, best[1]) if is_there_too else None
    key = {"ms": "p50_ms", "img/s a GPU": "img_s_a_gpu"}.get(result["unit"], "img_s")
    return float(best[1][key])


def verdict(result: Result) -> str:
    """Return where the row stands. A tiny row stands nowhere."""
    value, best = value_of(result), best_of_ours(result)
    is_judged = not result["is_tiny"] and result.get("batch") is None
    if value is None or best is None or result["must"] is None or not is_judged:
        return ""
    unit, sign = result["unit"], -1 if result["unit"] == "ms" else 1
    said = f"{best[0]}: {value:.2f} {unit}"
    for name in ("stretch", "must"):
        if result[name] is not None and sign * value >= sign * result[name]:
            return f"{said}, {name} {result[name]} {unit} reached"
    return f"{said}, must {result['must']} {unit} missed"


def cold_text(result: Result) -> str:
    """Return the cold compile of Strop's forward and backward."""
    found = result["contenders"].get("strop") or result["contenders"].get("compiled") or {}
    if "first_split_s" not in found or result["is_tiny"]:
        return ""
    seconds = compile_s(found)
    stands = (
        "stretch reached"
        if seconds <= COLD_STRETCH_S
        else "must reached"
        if seconds <= COLD_MUST_S
        else "must missed"
    )
    return (
        f"cold compile of forward and backward {seconds:.1f} s, {stands}"
        f" (must {COLD_MUST_S:.0f}, stretch {COLD_STRETCH_S:.0f})"
    )


def markdown(results: Sequence[Result]) -> str:
    """Return the table for a page: a line a row with Strop's best and its peers, then the
    ladder."""
    rows = [result for result in results if result["row"] != LADDER.name]
    header = ("", "", "Strop", SCRIPT, "torch", "must / stretch")
    lines = [_line(header), _line(["---"] * len(header))] if rows else []
    for result in rows:
        best = best_of_ours(result)
        ours = f"**{_speed_text(best[1])}** ({best[0]})" if best else "-"
        theirs = [_speed_text(result["contenders"].get(name, {})) for name in (SCRIPT, "torch")]
        stretch = "-" if result["stretch"] is None else result["stretch"]
        target = f"{result['must']} / {stretch} {result['unit']}"
        title = title_of(result, rows[0])
        lines.append(_line((result["row"], title, ours, *theirs, target)))
    for result in results:
        if result["row"] == LADDER.name:
            lines += ["", *_ladder_lines(result)] if lines else _ladder_lines(result)
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _speed_text(found: Result, img_s: float | None = None) -> str:
    if "img_s" not in found:
        return "-"
    peak = f", {gib(found['peak_bytes'])} GiB" if found.get("peak_bytes") else ""
    return f"{img_s or found['img_s']:.1f} img/s, {found['p50_ms']:.1f} ms{peak}"


def _ladder_lines(result: Result) -> list[str]:
    header = ("rung", "here", "published, A100", "")
    lines = [_line(header), _line(["---"] * len(header))]
    for name, found in result["contenders"].items():
        published = f"{found['published']:.2f}" if found["published"] else "-"
        said = (
            _speed_text(found, speed_of(result, found))
            if "img_s" in found
            else reason(found).partition(". ")[0]
        )
        lines.append(_line((name, said, published, found["note"])))
    return lines


def split_rows_of(results: Sequence[Result]) -> Rows:
    """Return the milliseconds of each part of a step, the published ones first."""
    table: Rows = [("row", "run", *PARTS)]
    for result in results:
        label = result["row"]
        lines = {
            name: found["split_ms"]
            for name, found in result["contenders"].items()
            if is_there(found) and "split_ms" in found
        }
        if result["published_split_ms"]:
            lines = {"A100, published, batch 8": result["published_split_ms"], **lines}
        for name, split in lines.items():
            table.append((label, name, *(f"{split[p]:.1f}" if p in split else "" for p in PARTS)))
            label = ""
    return table


def loader_rows_of(results: Sequence[Result]) -> Rows:
    """Return what a sweep of loaders has found."""
    table: Rows = [("row", "run", "workers", "pinned", "img/s", "mean ms", "waits ms", "note")]
    for result in results:
        for name, found in result["contenders"].items():
            for tried in found.get("loaders", ()):
                loader = tried["loader"]
                cells = [
                    f"{tried[k]:.2f}" if k in tried else "" for k in ("img_s", "mean_ms", "wait_ms")
                ]
                table.append(
                    (
                        result["row"],
                        name,
                        str(loader["workers"]),
                        "yes" if loader["is_pinned"] else "no",
                        *cells,
                        tried.get("skipped", ""),
                    )
                )
    return table
