"""Read all runs of ``strop bench train`` in a folder, of this machine and of others, and say how
they stand to each other."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.bench import train_log
from strop.errors import OptionError
from strop.wording import counted

Result = Mapping[str, Any]
Lines = tuple[Mapping[str, Any], ...]  # of a log
_OLD_AGAINST = "diffusers"  # in results of earlier versions


@dataclass(frozen=True)
class Run:
    """Hold what one contender has found with so many processes. ``batch`` is that of one process,
    ``img_s`` the pictures a second of all, ``series`` the same of each series of steps;
    ``peak_bytes`` the most of any GPU. Without ``img_s`` there is a ``reason``."""

    machine: str
    row: str
    title: str
    unit: str
    must: float | None
    stretch: float | None
    against: str
    any_batch: bool
    is_tiny: bool
    contender: str
    compiler: str
    processes: int
    is_on_gpu: bool
    batch: int
    img_s: float | None
    series: tuple[float, ...]
    p20_ms: float
    p50_ms: float
    p80_ms: float
    peak_bytes: int | None
    split_ms: Mapping[str, float]
    decode_ms: float | None
    is_right: bool
    reason: str
    note: str
    date: str
    file: Path | None
    log: Lines = field(default=(), repr=False)

    @property
    def key(self) -> tuple[object, ...]:
        """Tell what another run must have in common to be the same, measured again."""
        names = (self.machine, self.row, self.contender)
        return (*names, self.processes, self.batch, self.is_tiny)

    @property
    def spread(self) -> float:
        """Return how far apart the series are, or where there is one, the middle of the steps, as
        a share of the median."""
        if len(self.series) > 1:
            return (max(self.series) - min(self.series)) / statistics.median(self.series)
        return (self.p80_ms - self.p20_ms) / self.p50_ms if self.p50_ms else 0.0


@dataclass(frozen=True)
class Runs:
    """Hold the newest run of each kind in a folder, how many older ones there are, and files that
    hold something else."""

    runs: tuple[Run, ...]
    older: int
    others: tuple[Path, ...]

    def twin(self, run: Run, **changes: object) -> Run | None:
        """Return the measured run that differs from this one in these fields alone."""
        wanted = {
            name: changes.get(name, getattr(run, name))
            for name in ("machine", "row", "contender", "processes", "batch", "is_tiny")
        }
        for other in self.runs:
            if other.img_s and all(getattr(other, k) == v for k, v in wanted.items()):
                return other
        return None

    def speed_up(self, run: Run) -> float | None:
        """Return how many times as fast it is as the peer of its row on as many GPUs."""
        peer = self.twin(run, contender=run.against)
        return run.img_s / peer.img_s if run.img_s and peer and peer.img_s else None

    def scaling(self, run: Run) -> float | None:
        """Return how many times as fast it is as the same contender on one GPU."""
        alone = self.twin(run, processes=1)
        return run.img_s / alone.img_s if run.img_s and alone and alone.img_s else None

    def efficiency(self, run: Run) -> float | None:
        """Return the share of N times one GPU's speed that N GPUs reach."""
        found = self.scaling(run)
        return None if found is None else found / run.processes

    def groups(self) -> dict[tuple[str, str], list[Run]]:
        """Return the runs by row ("P12", or "P12 tiny") and machine, in the order of the files."""
        found: dict[tuple[str, str], list[Run]] = {}
        for run in self.runs:
            row = f"{run.row} tiny" if run.is_tiny else run.row
            found.setdefault((row, run.machine), []).append(run)
        return found


def verdicts(group: Sequence[Run], runs: Runs) -> list[str]:
    """Return where Strop stands in a row on a machine, one sentence for each number of GPUs. A tiny
    row stands nowhere."""
    first = group[0]
    if first.must is None or first.is_tiny:
        return []
    said = []
    for count in sorted({run.processes for run in group}):
        mine = [
            run
            for run in group
            if run.compiler == "strop" and run.processes == count and run.img_s and run.is_right
        ]
        values = {run.contender: _value(run, runs) for run in mine}
        found = {name: value for name, value in values.items() if value is not None}
        if found:
            said.append(_sentence(first, count, found))
    return said


def _value(run: Run, runs: Runs) -> float | None:
    if run.unit == "x":
        return runs.speed_up(run)
    if run.unit == "x 1 GPU":
        return runs.scaling(run) if run.processes > 1 else None
    if run.unit == "ms":
        return run.p50_ms
    return (run.img_s or 0.0) / (run.processes if run.unit == "img/s a GPU" else 1)


def _sentence(row: Run, count: int, values: Mapping[str, float]) -> str:
    sign = -1 if row.unit == "ms" else 1
    name = max(values, key=lambda name: sign * values[name])
    value, reached = values[name], f"must {row.must} missed"
    for word, target in (("must", row.must), ("stretch", row.stretch)):
        if target is not None and sign * value >= sign * target:
            reached = f"{word} {target} reached"
    return f"{counted(count, 'GPU')}: {name} {value:.2f} {row.unit}, {reached}"


# ---- reading -----------------------------------------------------------------------------------


def read(folder: Path) -> Runs:
    """Read all JSON files below a folder, and the logs beside them. Raises OptionError where the
    folder is missing or holds no training, for damaged files, and for rows in mixed units."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise OptionError(f"the folder {folder} {what}; give the one of strop bench train -o")
    found: list[Run] = []
    others: list[Path] = []
    for path in sorted(folder.rglob("*.json")):
        result = read_result(path)
        if result.get("kind") == "train":
            found += runs_of(result, path)
        else:
            others.append(path)
    if not found:
        raise OptionError(
            f"{folder} holds no result of strop bench train; run it with -o {folder} first"
        )
    _check_units(found)
    newest: dict[tuple[object, ...], Run] = {}
    for run in sorted(found, key=lambda run: (run.img_s is not None, run.date)):
        newest[run.key] = run
    kept = {id(run) for run in newest.values()}
    runs = tuple(run for run in found if id(run) in kept)
    return Runs(runs, len(found) - len(runs), tuple(others))


def read_result(path: Path) -> dict[str, Any]:
    """Read a result. Raises OptionError where it is missing, damaged, or no object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(
            f"{path} cannot be read ({error}): measure it again, or take it away"
        ) from error
    if not isinstance(found, dict):
        raise OptionError(f"{path} holds a {type(found).__name__}, and no result of strop bench")
    return found


def machine_of(result: Result) -> str:
    """Return the GPU, or the processor, torch's version, and options that were switched: as if they
    were machines of their own."""
    place = result.get("environment") or {}
    name = place.get("gpu") or place.get("cpu") or "unknown machine"
    switches = "".join(f", {key}={value}" for key, value in (place.get("switches") or {}).items())
    return f"{name}, torch {place.get('torch', 'unknown')}{switches}"


def of_results(results: Iterable[Result]) -> Runs:
    """Return the runs of results that have just been measured, without their logs."""
    return Runs(tuple(run for result in results for run in runs_of(result, None)), 0, ())


def runs_of(result: Result, path: Path | None) -> list[Run]:
    """Return the runs of one file. Raises OptionError where something is missing."""
    try:
        logs = {} if path is None else _logs(path.parent)
        return [
            _run(result, name, found, path, logs) for name, found in result["contenders"].items()
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise OptionError(
            f"{path} lacks {error} of a result of strop bench train: measure it again, or take it "
            "away"
        ) from error


def _run(
    result: Result,
    name: str,
    found: Result,
    path: Path | None,
    logs: Mapping[tuple[object, ...], Lines],
) -> Run:
    work, img_s = found["work"], found.get("img_s")
    processes = found.get("processes") or result.get("processes", 1)
    right = found.get("loss_ok", True) and found.get("weights_agree", True)
    peaks = [rank.get("peak_bytes") for rank in found.get("ranks", [found])]
    log_key = (result["row"], name, processes, work["batch"])
    return Run(
        machine=machine_of(result),
        row=result["row"],
        title=result["title"],
        unit=result["unit"],
        must=result["must"] if result.get("batch") is None else None,
        stretch=result["stretch"],
        against=result.get("against", _OLD_AGAINST),
        any_batch=result.get("any_batch", False),
        is_tiny=result["is_tiny"],
        contender=name,
        compiler=_compiler(name, found),
        processes=processes,
        is_on_gpu=bool((result.get("environment") or {}).get("gpu")),
        batch=work["batch"],
        img_s=img_s,
        series=tuple(found.get("img_s_series", [img_s] if img_s else [])),
        p20_ms=found.get("p20_ms", 0.0),
        p50_ms=found.get("p50_ms", 0.0),
        p80_ms=found.get("p80_ms", 0.0),
        peak_bytes=max((peak for peak in peaks if peak), default=None),
        split_ms=found.get("split_ms", {}),
        decode_ms=found.get("decode_ms"),
        is_right=right,
        reason=str(found.get("skipped") or found.get("failed") or ""),
        note=found.get("note", ""),
        date=str(found.get("date") or result["environment"]["date"]),
        file=path,
        log=logs.get(log_key, ()),
    )


def _compiler(name: str, found: Result) -> str:
    made_by = str(found.get("setup", {}).get("compiler", "")).partition("-")[0]
    return made_by or name.partition("-")[0]


def _logs(folder: Path) -> dict[tuple[object, ...], Lines]:
    """Return the lines of all logs of a folder, by what was run."""
    found: dict[tuple[object, ...], Lines] = {}
    for path in sorted(folder.glob("*.jsonl")):
        try:
            texts = path.read_text(encoding="utf-8").splitlines()
            # the last line of a run that was killed may be half a line
            whole = texts[:-1] + [text for text in texts[-1:] if text.endswith("}")]
            lines = [json.loads(text) for text in whole]
        except (OSError, ValueError) as error:
            raise OptionError(f"{path} cannot be read ({error}): take it away") from error
        head = lines[0] if lines and isinstance(lines[0], dict) else {}
        if head.get("kind") == train_log.KIND:
            names = ("row", "contender", "processes", "batch")
            found[tuple(head.get(name) for name in names)] = tuple(lines[1:])
    return found


def _check_units(runs: Iterable[Run]) -> None:
    units: dict[str, Run] = {}
    for run in runs:
        first = units.setdefault(run.row, run)
        if first.unit != run.unit:
            raise OptionError(
                f"{run.row} is in {first.unit} in {first.file} and in {run.unit} in {run.file}: "
                "they come from other versions; keep one of them"
            )
