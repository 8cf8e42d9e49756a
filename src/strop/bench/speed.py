"""Time networks at full size beside Inductor in a CUDA graph (``strop bench models --speed``).

Rows are those of ``strop bench infer``, which measures them. They are kept in one file, so that a
long table can be measured in parts: what a file has is not measured again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from strop.bench import environment, infer, report
from strop.bench.accuracy import has_signal, without_signal
from strop.bench.infer_contenders import Found, Plan, is_there
from strop.bench.infer_report import INDUCTOR_GRAPHS, gib
from strop.bench.infer_rows import SPEED_ROWS, InferRow
from strop.bench.network_models import NETWORKS
from strop.errors import OptionError
from strop.wording import counted

PEERS = ("eager", "eager-graph", "inductor-graph")
MADE_BY = "strop bench models --speed"
KEPT = ("row", "model", "batch", "dtype", "is_tiny", "error")
TIMES = ("p20_ms", "p50_ms", "p80_ms", "first_s", "peak_bytes", "skipped", "failed")
NAMES = tuple(network.name for network in NETWORKS)
MUST, MUST_MEAN = 1.02, 0.95  # of Inductor in a graph: each row, and the geometric mean of all
WAITS = 1.2  # times what a GPU is busy: a call that takes longer is one of the host
HEADER = (
    *("network", "batch", "type", "Strop", *PEERS, "of Inductor"),
    *("peak GiB, with weights", "eager's", ""),
)
Row = dict[str, Any]


def chosen(names: Sequence[str], batches: Sequence[int], *, tiny: bool) -> tuple[InferRow, ...]:
    """Return the rows of these networks, of all where no name is given."""
    unknown = sorted({*names} - {*NAMES})
    if unknown:
        raise OptionError(f"no network {', '.join(unknown)}; there are {', '.join(NAMES)}")
    wanted = [
        row
        for row in SPEED_ROWS
        if (not names or row.model in names) and (not batches or row.batch in batches)
    ]
    if not wanted:
        known = ", ".join(map(str, dict.fromkeys(row.batch for row in SPEED_ROWS)))
        raise OptionError(f"no row of batch {', '.join(map(str, batches))}; batches are {known}")
    return tuple(row.tiny() if tiny else row for row in wanted)


def run(
    rows: Sequence[InferRow],
    plan: Plan,
    *,
    out: Path | None = None,
    budget_s: float = 3600.0,
    is_apart: bool = True,
    again: bool = False,
    jobs: int = 1,
    step: infer.Step = lambda text, done: None,
) -> dict[str, Any]:
    """Measure ``rows`` and return all that ``out`` has by then; it is written after each row.

    Rows that it has with all contenders, of this device and these versions, are measured anew only
    if ``again``. A peer that was not asked for stays, with its date. ``jobs``: so many networks are
    prepared at the same time; each is timed alone, and seconds of first calls are those of a busy
    machine.
    """
    described = environment.describe(plan.where)
    result = _begun(out, described)
    wanted = {"strop", *plan.peers}
    measured = {row["row"] for row in result["rows"] if wanted <= _known(row)}
    todo = [row for row in rows if again or row.name not in measured]

    def note(found: dict[str, Any]) -> None:
        _put(result, _row(found) | {"jobs": jobs})
        if out is not None:
            report.write_json(result, out)

    infer.run(todo, plan, budget_s=budget_s, is_apart=is_apart, jobs=jobs, step=step, note=note)
    return result


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise OptionError, with the file's name, where what is read of it is not there."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(f"{path} is no file of {MADE_BY}: {error!r}") from error


def _begun(out: Path | None, described: Found) -> dict[str, Any]:
    """Return what the file has. Raises OptionError where it is of another device or version."""
    empty: dict[str, Any] = {"kind": "speed", "environment": described, "rows": [], "summary": {}}
    if out is None or not out.exists():
        return empty
    with _reading(out):
        found = json.loads(out.read_text())
        here = found["kind"], [found["environment"].get(key) for key in infer.SAME]
    if here != ("speed", [described.get(key) for key in infer.SAME]):
        raise OptionError(
            f"{out} was measured on another device or with other versions: name another file"
        )
    return {**empty, **found, "environment": described}


def _known(row: Row) -> set[str]:
    return {name for name, contender in row["contenders"].items() if is_there(contender)}


def _row(found: Mapping[str, Any]) -> Row:
    """Return what is kept of a row of ``strop bench infer``."""
    contenders = {
        name: {key: contender[key] for key in TIMES if key in contender}
        for name, contender in found["contenders"].items()
    }
    why = {key: found[key] for key in ("skipped", "failed") if key in found}
    place = {key: found["environment"][key] for key in ("date", "commit")}
    counts = found.get("counts") or {}
    kept = {key: counts.get(key) for key in ("num_launches", "num_kernels", "fallbacks")}
    profile = found["contenders"].get("strop", {}).get("profile") or {}
    if "busy_us" in profile:
        kept["busy_ms"] = round(profile["busy_us"] / 1e3, 4)
    return {
        **{key: found.get(key) for key in KEPT},
        "size": [*found["size"]],
        **why,
        **place,
        **kept,
        "contenders": contenders,
    }


def _put(result: dict[str, Any], row: Row) -> None:
    """Put a row in, in the order of the table; contenders that it lacks stay as they were."""
    rows = {each["row"]: each for each in result["rows"]}
    before = rows.get(row["row"])
    for name, old in (before or {"contenders": {}})["contenders"].items():
        if is_there(old) and not is_there(row["contenders"].get(name, {"skipped": ""})):
            row["contenders"][name] = {"from": (before or {})["date"], **old}
    order = [each.name for each in SPEED_ROWS]
    rows[row["row"]] = row
    result["rows"] = sorted(rows.values(), key=lambda each: order.index(each["row"]))
    result["summary"] = summary(result["rows"])


def share(row: Row) -> float | None:
    """Return Strop's time as a share of Inductor's in a CUDA graph."""
    times = [row["contenders"].get(name, {}).get("p50_ms") for name in ("strop", *INDUCTOR_GRAPHS)]
    peers = [ms for ms in times[1:] if ms]
    return times[0] / min(peers) if times[0] and peers else None


def summary(rows: Sequence[Row]) -> Found:
    shares = {row["row"]: found for row in rows if (found := share(row))}
    if not shares:
        return {}
    worst = max(shares, key=lambda name: shares[name])
    mean = math.exp(sum(map(math.log, shares.values())) / len(shares))
    return {
        "count": len(shares),
        "mean": round(mean, 4),
        "worst": round(shares[worst], 4),
        "worst_row": worst,
        "over_must": [name for name, found in shares.items() if found > MUST],
    }


def load(folder: Path) -> Found:
    """Return the newest result among a folder's files, or nothing. Raises OptionError where it is
    none."""
    files = sorted(folder.glob("speed_*.json"), key=lambda path: path.stem.rpartition("_")[2])
    if not files:
        return {}
    with _reading(files[-1]):
        result: Found = json.loads(files[-1].read_text())
        rows_of(result)
    return result


def rows_of(result: Mapping[str, Any]) -> report.Rows:
    """Return the table, its header first; what was not measured says why."""
    return [HEADER, *map(_cells, result["rows"])]


def _cells(row: Row) -> tuple[str, ...]:
    contenders = row["contenders"]
    of_inductor = share(row)
    peaks = [gib(contenders.get(name, {}).get("peak_bytes")) for name in ("strop", "eager")]
    times = [_time(contenders.get(name, {})) for name in ("strop", *PEERS)]
    said = "" if of_inductor is None else f"{of_inductor:.2f}"
    return (row["model"], str(row["batch"]), row["dtype"], *times, said, *peaks, _note(row))


def _time(contender: Found) -> str:
    if "p50_ms" not in contender:
        return str(contender.get("skipped") or contender.get("failed") or "")
    date = f" ({contender['from'][:10]})" if "from" in contender else ""
    return f"{contender['p50_ms']:.3f}{date}"


def _note(row: Row) -> str:
    said = [str(row[why]) for why in ("skipped", "failed") if why in row]
    if row.get("error") and not has_signal(row["error"]):
        said.append(without_signal(row["error"]))
    elif row.get("error") and not row["error"].get("is_good", True):
        said.append(f"error {row['error']['rms']:.1e}, eager {row['error']['rms_eager']:.1e}")
    ours, busy = row["contenders"].get("strop", {}).get("p50_ms"), row.get("busy_ms")
    if ours and busy and ours > WAITS * busy:
        said.append(f"the GPU is busy for {busy:.3f} ms of it and waits for the host")
    said += [f"{count} x {why}" for why, count in (row.get("fallbacks") or {}).items()]
    peaks = [row["contenders"].get(name, {}).get("peak_bytes") for name in ("strop", "eager")]
    if all(peaks) and peaks[0] > peaks[1]:
        said.append(f"peak {peaks[0] / peaks[1]:.3f} of eager's")
    if (found := share(row)) and found > MUST:
        said.append(f"more than {MUST}")
    return "; ".join(said)


def verdict(result: Mapping[str, Any]) -> str:
    """Say how the rows stand to what they must be."""
    found = result["summary"]
    if not found:
        return "no row has Strop and Inductor in a graph"
    rows, over = counted(found["count"], "row"), len(found["over_must"])
    return (
        f"{rows}: geometric mean {found['mean']:.3f} of Inductor in a graph (must {MUST_MEAN}),"
        f" worst {found['worst']:.2f} ({found['worst_row']}), {over} over {MUST}"
    )


def markdown(result: Mapping[str, Any]) -> str:
    """Return the table for a page, in milliseconds."""
    header, *rows = rows_of(result)
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", verdict(result) + "."])
