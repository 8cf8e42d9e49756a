"""``strop bench load``: what it counts as wrong, which musts hold, and that it runs."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from strop.bench.load import LoadPlan
from strop.bench.load_contenders import Contender, ContenderProcess
from strop.bench.load_report import MeasuredContender, result_of, rows_of, verdicts
from strop.bench.load_threads import LoadWindow, called
from strop.bench.load_workloads import LOAD_WORKLOADS, cases_of, sized
from strop.cli import app
from strop.errors import OptionError, StropError

CPU = torch.device("cpu")


def window(
    threads: int, calls: int, seconds: float, ms: float, more: int = 0, held: int = 0
) -> LoadWindow:
    memory = [(1, 0), (threads, 10**7), (threads + calls, 10**8 + more), (3 * threads + calls, 0)]
    every = calls + 3 * threads
    return LoadWindow(threads, every, every / calls * seconds, [ms] * calls, [], memory, held)


def contender(
    name: str, rates: dict[int, tuple[float, float]], more: int = 0, held: int = 0
) -> MeasuredContender:
    """One whose threads make so many calls a second, each of which takes so long; two rounds. Its
    process is larger by ``more`` in the second one, and has allocated ``held`` more."""
    windows = {
        threads: [
            window(threads, 100, 100 / rate, ms, number * more, 10**8 + number * held)
            for number in range(2)
        ]
        for threads, (rate, ms) in rates.items()
    }
    return MeasuredContender(name, windows)


GOOD = {1: (100.0, 10.0), 8: (190.0, 42.0), 200: (185.0, 1100.0)}
EAGER = {1: (50.0, 20.0), 8: (80.0, 100.0), 200: (70.0, 2900.0)}


def held(*made: MeasuredContender) -> list[bool]:
    return [must["holds"] for must in result_of("sprites", made, 200, 8)["musts"]]


def test_all_musts_hold() -> None:
    assert held(contender("strop", GOOD), contender("eager", EAGER)) == [True] * 6


@pytest.mark.parametrize(
    ("place", "changes", "grown"),
    [
        (1, {200: (180.0, 1100.0)}, (0, 0)),  # 0.947 of the throughput of 8 threads
        (2, {200: (185.0, 2401.0)}, (0, 0)),  # 1.2 times 200 calls of 10 ms are 2400 ms
        (3, {}, (40 << 20, 0)),
        (4, {}, (0, 2 << 20)),
        (5, {200: (69.0, 2000.0), 8: (70.0, 42.0)}, (0, 0)),
    ],
)
def test_a_must_is_missed(
    place: int, changes: dict[int, tuple[float, float]], grown: tuple[int, int]
) -> None:
    found = held(contender("strop", GOOD | changes, *grown), contender("eager", EAGER))
    assert found == [n != place for n in range(6)]


def test_what_is_kept_is_seen() -> None:
    """The process may have had the memory of it before: what is allocated says that it is kept.

    Others allocate and free a little beside it, so the bounds leave a tenth of it for them.
    """
    kept, one = list[bytes](), torch.zeros(1)

    def call(number: int) -> Tensor:
        kept.append(bytes(100_000))
        return one

    first, second = (called(call, [one], [0] * 30, 3, CPU) for _ in range(2))
    assert 2_700_000 < second.held_bytes - first.held_bytes < 3_300_000


def test_one_wrong_result_is_a_miss() -> None:
    made = contender("strop", GOOD)
    made.windows[8][1].wrong.append(3)
    result = result_of("sprites", [made, contender("eager", EAGER)], 200, 8)
    assert [must["holds"] for must in result["musts"]] == [False, True, True, True, True, True]
    assert verdicts(result)[0].endswith("1 (must be <= 0): misses")
    assert rows_of(result)[2][6] == "1"
    assert json.loads(json.dumps(result)) == result


def test_each_call_is_made_once_and_compared() -> None:
    """Of three cases one gives other bits when another thread is there as well."""
    expected = [torch.tensor([float(n)]) for n in range(3)]
    expected[2] = torch.tensor([0.0])
    seen, inside, lock = list[int](), set[int](), threading.Lock()

    def call(number: int) -> Tensor:
        with lock:
            seen.append(number)
            inside.add(threading.get_ident())
        time.sleep(0.001)
        return expected[number] if number < 2 else torch.tensor([-0.5])

    order = [0, 1, 2, 1, 0, 2] * 5
    found = called(call, expected, order, 6, CPU)
    assert sorted(seen) == sorted(order)
    assert len(inside) == 6
    assert found.wrong == [2] * 10
    assert len(found.latencies_ms) == len(order)
    counts = [count for count, _ in found.memory_bytes]
    assert sorted(counts) == [1, 6, len(order)]  # threads note them, in any order
    assert found.memory_bytes[0][1] > 0


def test_a_call_that_fails_ends_the_measurement() -> None:
    def call(number: int) -> Tensor:
        raise ValueError("no such number")

    with pytest.raises(StropError, match="a call of 3 threads failed: no such number"):
        called(call, [torch.zeros(1)], [0] * 9, 3, CPU)


def test_sizes() -> None:
    sprites, whisper = LOAD_WORKLOADS["sprites"], LOAD_WORKLOADS["whisper"]
    assert sized(sprites, "32x48,16x16x2") == [(32, 48), (16, 16, 2)]
    assert sized(sprites, "") == [*sprites.sizes]
    assert sized(whisper, "1,3") == [(1,), (3,)]
    for workload, text in ((sprites, "32"), (sprites, "32xa"), (whisper, "1x3"), (whisper, "0")):
        with pytest.raises(OptionError, match="are no sizes of"):
            sized(workload, text)


def test_calls_differ_in_size_prompt_and_scale() -> None:
    workload = LOAD_WORKLOADS["sprites"]
    module = workload.build(CPU, torch.float32)
    cases = cases_of(workload, module, [(32, 32), (16, 32, 2)], CPU, with_adapter=True)
    looks = {
        (
            c["sample"].shape,
            c["encoder_hidden_states"].shape[1],
            c["cross_attention_kwargs"]["scale"],
        )
        for c in cases
    }
    assert len(cases) == 16
    assert len(looks) == 8
    assert cases[0]["sample"].shape == (1, 4, 8, 8)


def test_a_plan_says_what_is_wrong_with_it() -> None:
    with pytest.raises(OptionError, match="less than two for each of 200 threads in 5 rounds"):
        LoadPlan(calls=1999).check()
    with pytest.raises(OptionError, match="seen over two rounds or more"):
        LoadPlan(rounds=1).check()
    with pytest.raises(OptionError, match="300 threads to compare with are more than 200"):
        LoadPlan(baseline_threads=300).check()
    with pytest.raises(OptionError, match="whisper takes no adapters"):
        LoadPlan("whisper", with_adapter=True).check()


def test_contenders_are_processes_whose_memory_is_their_own() -> None:
    """One of them takes 200 MB more, and the other's memory does not grow by it."""
    plan = Contender("eager", "whisper", [(1,)], 2, 1, False, CPU)
    with ContenderProcess(plan) as one, ContenderProcess(plan) as other:
        one.measure([0, 1, 2, 3])
        more = torch.ones(50_000_000)
        other.measure([0, 1, 2, 3])
        one.measure([3, 2, 1, 0])
        assert more.nbytes == 200_000_000
        first, second = one.measured.windows[2]
        assert first.memory_bytes[-1][1] > 10_000_000
        assert second.memory_bytes[-1][1] - first.memory_bytes[-1][1] < 100_000_000
        assert not first.wrong + second.wrong
        assert one.num_cases == len(other.measured.windows[1][0].latencies_ms) == 4


def test_a_contender_that_cannot_be_built_says_why() -> None:
    wrong = Contender("eager", "sprites", [(24, 24)], 2, 1, False, torch.device("cpu"))
    with pytest.raises(StropError, match="ended with exit code 1"):
        ContenderProcess(replace(wrong, workload="none"))


def test_the_command(tmp_path: Path) -> None:
    words = "bench load whisper --device cpu --threads 4 --calls 24 --rounds 2 --baseline-threads 2"
    done = CliRunner().invoke(app, [*words.split(), "--sizes", "1,2", "-o", str(tmp_path)])
    assert done.exit_code == 0, done.output
    (file,) = tmp_path.glob("load-whisper_cpu_*.json")
    result = json.loads(file.read_text())
    assert (result["kind"], result["num_cases"], result["calls"]) == ("load", 8, 24)
    assert result["musts"][0]["holds"], "a result is not the serial one"
    assert result["contenders"]["strop"]["4"]["calls"] == 24
    assert "must be >= 0.95" in done.output
