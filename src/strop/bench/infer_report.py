"""Make the tables of ``strop bench infer`` from its JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from strop.bench import accuracy
from strop.bench.infer_contenders import LOOP_CALLS, Found, is_there
from strop.bench.infer_rows import FAMILY_ROWS, ROWS
from strop.bench.report import Rows, newest_rows, title_of
from strop.errors import OptionError
from strop.wording import counted

Result = Mapping[str, Any]
# These take a process of their own; each has the part that only a whole run has.
APART = {"random": "summary", "switches": "switches"}
INDUCTOR_GRAPHS = ("inductor-graph", "inductor-blocks-graph")
INDUCTORS = ("inductor", "inductor-graph", "inductor-blocks", "inductor-blocks-graph")
MOST_MEMORY = 1.0  # of eager's
MOST_S = 0.5  # that no call of a step may take once its shape has run
HEADER = (
    *("row", "run", "p20", "p50", "p80", "of eager", "first s"),
    *("peak GiB, with weights", "launches", "note"),
)


def load(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the results in the order of the table: for each row the newest with the default
    options that has eager beside it, if there is one, because a result that was measured alone
    compares with nothing. Random shapes and switches, which take a process of their own, come from
    the newest run that has them, and say on which GPU that was if it is another one."""
    files, names = [*paths], [row.name for row in (*ROWS, *FAMILY_ROWS)]
    found = newest_rows(files, "infer", names, _compares)
    for key, part in APART.items():
        for other in newest_rows(files, "infer", names, partial(_has, key, part)):
            (result,) = (result for result in found if result["row"] == other["row"])
            if _has(key, part, other) and not _has(key, part, result):
                result[key] = {"from": other["environment"]["date"], **other[key]}
                if (gpu := _gpu_of(other)) != _gpu_of(result):
                    result[key]["on"] = gpu
    return found


def _gpu_of(result: Result) -> str:
    return result["environment"].get("gpu") or "a CPU"


def _compares(result: Result) -> bool:
    """Tell whether eager was measured beside it, in samples as long as by default."""
    return "eager" in result["contenders"] and result.get("calls", LOOP_CALLS) == LOOP_CALLS


def _has(key: str, part: str, result: Result) -> bool:
    return bool(result.get(key, {}).get(part))


def rows_of(results: Sequence[Result]) -> Rows:
    """Return the header, then a line for each contender of each row."""
    table: Rows = [HEADER]
    for result in results:
        label = f"{result['row']} {result['unit']}"
        for why in ("skipped", "failed"):
            if why in result:
                table.append((label, why, *[""] * 7, str(result[why])))
        for name, found in result["contenders"].items():
            table.append((label, name, *_cells(result, name, found)))
            label = ""
        table += [("", name, *[""] * 7, text) for name, text in _extras(result)]
    return table


def _cells(result: Result, name: str, found: Found) -> tuple[str, ...]:
    if not is_there(found):
        return (*[""] * 7, str(found.get("skipped") or found.get("failed")))
    times = [
        _in_unit(result, found[p]) if p in found else "" for p in ("p20_ms", "p50_ms", "p80_ms")
    ]
    profile = found.get("profile", {})
    launches = f"{profile['launches']:.0f}" if "launches" in profile else ""
    if launches and name == "strop":
        launches += f" ({profile['generated']:.0f} generated)"
    first, peak = f"{found['first_s']:.2f}", gib(found.get("peak_bytes"))
    return (*times, _of_eager(result, found), first, peak, launches, _note(result, name, found))


def _in_unit(result: Result, ms: float) -> str:
    return f"{ms:.3f}" if result["unit"] == "ms" else f"{ms / 1e3:.3f}"


def _of_eager(result: Result, found: Found) -> str:
    """Return how many times as fast as eager; for a row of peaks, the share of eager's."""
    eager = result["contenders"].get("eager", {})
    key = "peak_bytes" if result["measures"] == "memory" else "p50_ms"
    if not eager.get(key) or not found.get(key):
        return ""
    if key == "peak_bytes":
        return f"{found[key] / eager[key]:.2f} of it"
    return f"{eager[key] / found[key]:.2f}x"


def gib(count: int | None) -> str:
    return "" if count is None else f"{count / 2**30:.2f}"


def _note(result: Result, name: str, found: Found) -> str:
    if "from" in found:
        return f"measured {found['from'][:10]}"
    if name != "strop":
        return ""
    said = (verdict(result), _error_text(result), _busy_text(result, found))
    return ", ".join(filter(None, said))


def _busy_text(result: Result, found: Found) -> str:
    """Return how long a picture's kernels run, of the time that it takes."""
    busy_us = found.get("profile", {}).get("busy_us")
    if result["measures"] != "picture" or busy_us is None:
        return ""
    return f"GPU busy {busy_us / 1e3 / found['p50_ms']:.0%}"


def memory_text(result: Result) -> str:
    """Return Strop's peak beside eager's, weights included in both, or nothing."""
    ours, eager = (result["contenders"].get(name, {}) for name in ("strop", "eager"))
    if not ours.get("peak_bytes") or not eager.get("peak_bytes"):
        return ""
    share = ours["peak_bytes"] / eager["peak_bytes"]
    weights = eager.get("weights_bytes")
    known = f", of which weights {gib(weights)}" if weights else ""
    verdict = "" if share <= MOST_MEMORY else f", more than {MOST_MEMORY}"
    peaks = f"{gib(ours['peak_bytes'])} GiB, eager's {gib(eager['peak_bytes'])}"
    return f"{peaks}{known}: {share:.3f} of eager's{verdict}"


def value_of(result: Result) -> float | None:
    """Return Strop's number in the unit of the row."""
    ours, kind = result["contenders"].get("strop", {}), result["measures"]
    if kind == "memory":
        eager = result["contenders"].get("eager", {})
        peaks = [found.get("peak_bytes") for found in (ours, eager)]
        return peaks[0] / peaks[1] if all(peaks) else None
    value: float | None = ours.get("first_s" if kind == "start" else "p50_ms")
    return value / 1e3 if value is not None and kind == "picture" else value


def verdict(result: Result) -> str:
    """Return where the row stands. A tiny row stands nowhere."""
    value = value_of(result)
    must, stretch = targets(result)
    if value is None or must is None or stretch is None or result["is_tiny"]:
        return ""
    if value <= stretch:
        return f"stretch {stretch} reached"
    if value <= must:
        return f"must {must} reached"
    return f"{value / must:.2f} x the must of {must}"


def targets(result: Result) -> tuple[float | None, float | None]:
    """Return must and stretch in the unit of the row. Shares are of what Inductor takes in a CUDA
    graph, whole or by blocks, whichever is faster; they are unknown where neither was measured."""
    if not result.get("must_share"):
        return result["must"], result["stretch"]
    times = [result["contenders"].get(name, {}).get("p50_ms") for name in INDUCTOR_GRAPHS]
    least = min((ms for ms in times if ms), default=None)
    if least is None:
        return None, None
    must, stretch = (round(least * result[key], 3) for key in ("must_share", "stretch_share"))
    return must, stretch


def target_text(result: Result) -> str:
    if result.get("must_share"):
        return f"{result['must_share']} / {result['stretch_share']} of Inductor in a graph"
    return "-" if result["must"] is None else f"{result['must']} / {result['stretch']}"


def _error_text(result: Result) -> str:
    error = result.get("error")
    if not error:
        why = result.get("references", {}).get("failed")
        return f"no reference: {why}" if why else ""
    if "rms_to_eager" in error:
        return f"rms {error['rms_to_eager']:.2e} to eager"
    if "rms" not in error:
        return f"{error['psnr_to_eager_db']:.1f} dB to eager"
    if not accuracy.has_signal(error):
        return accuracy.without_signal(error)
    good = result.get("numerics") or ("ok" if error["is_good"] else "BAD")
    return f"{good} rms {error['rms']:.2e} (eager {error['rms_eager']:.2e})"


def _extras(result: Result) -> list[tuple[str, str]]:
    """Return peaks, random shapes, the split of a start and the ladder, one line each."""
    found = []
    if memory := memory_text(result):
        found.append(("peak memory", memory))
    if "random" in result:
        found.append(("random shapes", random_text(result)))
    if "split_s" in result:
        split = ", ".join(f"{name} {s:.2f}" for name, s in result["split_s"].items())
        found.append(("split s", split))
    for name, switch in result.get("switches", {}).get("switches", {}).items():
        found.append((f"  {name}", _switch_text(result, switch)))
    if "cut" in result:
        found.append(("cut", str(result["cut"]["failed"])))
    return found


def random_text(result: Result) -> str:
    random = result["random"]
    summary = random.get("summary")
    if not summary:
        return str(random.get("skipped") or random.get("failed") or "none")
    height, width, batch = summary["worst_shape"]
    said = [
        f"{summary['count']}: {summary['median']:.2f}x of {random['peer']} in the median, worst"
        f" {summary['worst']:.2f}x at {width}x{height} b{batch}"
    ]
    said.append(f"RMS to its results at most {summary['rms_to_peer']:.1e}")
    if summary["first_s"] is not None:
        said.append(f"longest first call {summary['first_s']:.2f} s")
    is_over = result["measures"] == "step" and summary["longest_s"] > MOST_S
    over = f", over {MOST_S} s" if is_over else ""
    said.append(f"longest call after it {summary['longest_s']:.2f} s{over}")
    if summary.get("to_best"):
        said.append(f"at most {summary['to_best'] - 1:.1%} slower than the fastest variant")
    if random.get("left_out"):
        said.append(f"{len(random['left_out'])} left out: {random['left_out'][0]['skipped']}")
    if "from" in random:
        said.append(f"measured {random['from'][:10]}, in another run{_place_of(random)}")
    return "; ".join([*said, *([random["failed"]] if "failed" in random else [])])


def _place_of(apart: Found) -> str:
    """Say where something was measured, if not where the row was."""
    return f" on {apart['on']}" if "on" in apart else ""


def _switch_text(result: Result, switch: Found) -> str:
    if not is_there(switch):
        return str(switch.get("skipped") or switch.get("failed"))
    if "p50_ms" not in switch:
        return "not timed"
    said = [
        f"{_in_unit(result, switch['p50_ms'])} {result['unit']}",
        counted(switch["num_launches"], "launch"),
        _error_text(switch),
    ]
    return ", ".join(filter(None, said))


def markdown(results: Sequence[Result]) -> str:
    """Return the table for a page, with a line per row; what was measured at another time is
    marked."""
    names = [
        name
        for name in ("eager", "eager-graph", *INDUCTORS)
        if any(name in result["contenders"] for result in results)
    ]
    header = ("", "", "Strop", *names, "must / stretch", "random shapes: worst (median)")
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for result in results:
        cells = [_value_text(result, result["contenders"].get(name, {})) for name in names]
        target = target_text(result)
        summary = result.get("random", {}).get("summary")
        random = f"{summary['worst']:.2f}x ({summary['median']:.2f}x) of" if summary else "-"
        random += f" {result['random']['peer']}" if summary else ""
        if summary and summary.get("to_best"):
            random += f", at most {summary['to_best'] - 1:.1%} behind the fastest variant"
        if "from" in result.get("random", {}):
            random += f", another run{_place_of(result['random'])}"
        ours = _value_text(result, result["contenders"].get("strop", {}))
        title = title_of(result, results[0])
        lines.append(
            f"| {result['row']} | {title} | **{ours}** | {' | '.join(cells)}"
            f" | {target} | {random} |"
        )
    return "\n".join(lines)


def _naive_text(result: Result, found: Found) -> str:
    naive = result["contenders"].get("eager-naive", {})
    if found is not result["contenders"].get("eager") or not naive.get("peak_bytes"):
        return ""
    return f", naive attention {gib(naive['peak_bytes'])} GiB"


def _value_text(result: Result, found: Found) -> str:
    date = f" ({found['from'][:10]})" if "from" in found else ""
    if result["measures"] == "memory" and found.get("peak_bytes"):
        return f"{gib(found['peak_bytes'])} GiB{date}{_naive_text(result, found)}"
    if result["measures"] == "start" and "first_s" in found:
        return f"{found['first_s']:.1f} s{date}"
    if "p50_ms" not in found:
        return "-"
    if result["unit"] == "ms":
        return f"{found['p50_ms']:.2f} ms{date}"
    peak = f", {gib(found['peak_bytes'])} GiB" if found.get("peak_bytes") else ""
    return f"{found['p50_ms'] / 1e3:.3f} s{peak}{date}"


def write_into(page: Path, text: str, mark: str = "infer") -> None:
    """Write ``text`` between <!-- mark --> and <!-- /mark -->, which the page must have."""
    first, last = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    before, begin, rest = page.read_text(encoding="utf-8").partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise OptionError(f"{page} lacks {first} and {last}: put them where the table should be")
    page.write_text(f"{before}{first}\n{text}\n{last}{after}", encoding="utf-8")
