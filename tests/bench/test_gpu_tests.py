"""The rest of an earlier run of all GPU tests can be run alone."""

from __future__ import annotations

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
    found = gpu_tests.not_green(printed)
    assert found == {"tests/a.py::two[x-y z]", "tests/b.py::broken", cut_off}
    collected = {"tests/a.py": ["tests/a.py::one", "tests/a.py::two[x-y z]"], "tests/d.py": ["x"]}
    assert gpu_tests.among(collected, found) == {"tests/a.py": ["tests/a.py::two[x-y z]"]}
    assert gpu_tests.among(collected, None) == collected
