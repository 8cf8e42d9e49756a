"""Sum up what many threads got from one model, and say which musts hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from strop.bench.load_threads import LoadWindow
from strop.wording import counted

LEAST_OF_FEWER = 0.95  # of the throughput of few threads
MOST_OF_SERIAL = 1.2  # times as many serial calls as there are threads, for the 99th percentile
MOST_GROWN_BYTES = 32 << 20  # of the process, from the end of the first round to that of the last
MOST_LEAKED_BYTES = 1 << 20  # of what is allocated, likewise
HEADER = (
    *("contender", "threads", "calls/s", "p20..p80", "p50 ms", "p99 ms", "wrong"),
    *("MB more", "MB held more"),
)


@dataclass(slots=True)
class MeasuredContender:
    """This is what was measured of a model that is called, by the number of threads."""

    name: str
    windows: dict[int, list[LoadWindow]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Must:
    """Say what has to hold: ``value`` is at least or at most ``bound``."""

    what: str
    value: float
    bound: float
    is_least: bool

    @property
    def holds(self) -> bool:
        return self.value >= self.bound if self.is_least else self.value <= self.bound

    def __str__(self) -> str:
        sign, verdict = ">=" if self.is_least else "<=", "holds" if self.holds else "misses"
        return f"{self.what}: {self.value:.3g} (must be {sign} {self.bound:g}): {verdict}"


def rank(values: Sequence[float], share: float) -> float:
    """Return a percentile by nearest rank."""
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))]


def result_of(
    workload: str, made: Sequence[MeasuredContender], threads: int, fewer: int
) -> dict[str, Any]:
    """Return the result, as JSON has it, without the environment."""
    contenders = {
        one.name: {str(count): _summary(found) for count, found in one.windows.items()}
        for one in made
    }
    musts = musts_of(contenders, threads, fewer)
    return {
        "kind": "load",
        "workload": workload,
        "threads": threads,
        "baseline_threads": fewer,
        "contenders": contenders,
        "musts": [asdict(must) | {"holds": must.holds} for must in musts],
    }


def _summary(windows: Sequence[LoadWindow]) -> dict[str, Any]:
    latencies = [latency for window in windows for latency in window.latencies_ms]
    rates = [window.calls_a_second for window in windows]
    return {
        "calls": sum(window.calls for window in windows),
        "calls_a_second": {
            "p20": round(rank(rates, 0.2), 3),
            "p50": round(rank(rates, 0.5), 3),
            "p80": round(rank(rates, 0.8), 3),
            "samples": [round(rate, 3) for rate in rates],
        },
        "latency_ms": {
            "mean": round(_mean(latencies), 3),
            **{f"p{n}": round(rank(latencies, n / 100), 3) for n in (20, 50, 80, 99)},
            "most": round(max(latencies), 3),
            "mean_samples": [round(_mean(window.latencies_ms), 3) for window in windows],
            "p99_samples": [round(rank(window.latencies_ms, 0.99), 3) for window in windows],
        },
        "num_wrong": sum(len(window.wrong) for window in windows),
        "memory_mb": [
            [[count, round(size / 1e6, 2)] for count, size in window.memory_bytes]
            for window in windows
        ],
        "held_mb": [round(window.held_bytes / 1e6, 2) for window in windows],
        "held_more_mb": round((windows[-1].held_bytes - windows[0].held_bytes) / 1e6, 2),
        "grown_mb": round(_growth([window.settled_bytes for window in windows]) / 1e6, 2),
    }


def _growth(rounds: Sequence[Sequence[int]]) -> int:
    """Return by how much memory is larger at the end of the last round than at that of the first,
    in which each thread and each size allocates what it needs."""
    return rounds[-1][-1] - rounds[0][-1]


def musts_of(contenders: Mapping[str, Any], threads: int, fewer: int) -> list[Must]:
    """Return what has to hold of Strop. Ratios are the medians of those of each round, whose
    contenders took turns."""
    if "strop" not in contenders:
        return []
    own = contenders["strop"]
    all_threads, few, alone = own[str(threads)], own[str(fewer)], own["1"]
    wrong = sum(found["num_wrong"] for found in own.values())
    found = [
        Must("results that are not the bits of a serial call", wrong, 0, is_least=False),
        Must(
            f"throughput of {threads} threads over that of {fewer}",
            _median_ratio(all_threads, few),
            LEAST_OF_FEWER,
            is_least=True,
        ),
        Must(
            f"p99 over the time of {counted(threads, 'serial call')}",
            _median(
                one / other / threads
                for one, other in zip(
                    all_threads["latency_ms"]["p99_samples"],
                    alone["latency_ms"]["mean_samples"],
                    strict=True,
                )
            ),
            MOST_OF_SERIAL,
            is_least=False,
        ),
        Must(
            "growth of the process's memory from the end of the first round to the last, MB",
            all_threads["grown_mb"],
            MOST_GROWN_BYTES / 1e6,
            is_least=False,
        ),
        Must(
            "growth of what is allocated and not freed, likewise, MB",
            all_threads["held_more_mb"],
            MOST_LEAKED_BYTES / 1e6,
            is_least=False,
        ),
    ]
    if "eager" in contenders:
        ratio = _median_ratio(all_threads, contenders["eager"][str(threads)])
        found.append(Must(f"throughput over eager's at {threads} threads", ratio, 1, is_least=True))
    return found


def _median_ratio(above: Mapping[str, Any], below: Mapping[str, Any]) -> float:
    pairs = zip(above["calls_a_second"]["samples"], below["calls_a_second"]["samples"], strict=True)
    return _median(one / other for one, other in pairs)


def _median(values: Iterable[float]) -> float:
    return rank([*values], 0.5)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def rows_of(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the table, its header first."""
    rows: list[tuple[str, ...]] = [HEADER]
    for name, by_threads in result["contenders"].items():
        for threads, found in by_threads.items():
            rates, latency = found["calls_a_second"], found["latency_ms"]
            rows.append(
                (
                    name,
                    threads,
                    f"{rates['p50']:.1f}",
                    f"{rates['p20']:.1f}..{rates['p80']:.1f}",
                    f"{latency['p50']:.1f}",
                    f"{latency['p99']:.1f}",
                    str(found["num_wrong"]),
                    f"{found['grown_mb']:+.1f}",
                    f"{found['held_more_mb']:+.2f}",
                )
            )
    return rows


def verdicts(result: Mapping[str, Any]) -> list[str]:
    """Return one line for each must."""
    names = ("what", "value", "bound", "is_least")
    return [str(Must(**{name: must[name] for name in names})) for must in result["musts"]]
