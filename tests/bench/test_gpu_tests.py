"""The rest of an earlier run of all GPU tests can be run alone."""

from __future__ import annotations

import multiprocessing
import signal
import time
from pathlib import Path

import pytest

from benchmarks import gpu_tests


def test_what_was_not_green_is_read_from_what_a_run_has_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = {"tests/a.py::one": "PASSED", "tests/a.py::two[x-y z]": "FAILED"}
    results |= {"tests/b.py::broken": "ERROR", "tests/b.py::left out": "SKIPPED"}
    cut_off = "tests/c.py::Class::cut_off"
    gpu_tests.summary({*results, cut_off}, results, 1.0)
    printed = "trainer3  exit 1\n  FAILED tests/d.py::of the details\n" + capsys.readouterr().out
    found = {test for tests in gpu_tests.listed(printed, ["tests"]).values() for test in tests}
    assert found == {"tests/a.py::two[x-y z]", "tests/b.py::broken", cut_off}
    assert gpu_tests.listed(printed, ["tests/b"]) == {}
    assert gpu_tests.listed(printed, ["tests/c.py::Class"]) == {"tests/c.py": [cut_off]}
    assert gpu_tests.listed(printed, ["tests/"]).keys() == {
        "tests/a.py",
        "tests/b.py",
        "tests/c.py",
    }
    collected = {"tests/a.py": ["tests/a.py::one", "tests/a.py::two[x-y z]"], "tests/d.py": ["x"]}
    assert gpu_tests.among(collected, found) == {"tests/a.py": ["tests/a.py::two[x-y z]"]}


def test_what_processes_have_shown_as_green_is_left_out() -> None:
    shown = "tests/a.py::one PASSED   [ 50%]\ntests/a.py::two[x-y z] FAILED   [100%]\n"
    every = {"tests/a.py::one", "tests/a.py::two[x-y z]", "tests/b.py::three"}
    assert gpu_tests.left_of(shown, every) == every - {"tests/a.py::one"}


def test_all_processes_are_ended_at_the_deadline() -> None:
    """Twenty that would wait for a minute end at once: not one second after another."""
    context = multiprocessing.get_context("fork")
    workers = []
    for _ in range(20):
        process = context.Process(target=time.sleep, args=(60,))
        process.start()
        workers.append(gpu_tests.Worker(Path(), process, None))
    start = time.monotonic()
    gpu_tests.end_all(workers, start + 0.5)
    assert 0.5 <= time.monotonic() - start < 10
    assert all(worker.process.exitcode == -signal.SIGKILL for worker in workers)
