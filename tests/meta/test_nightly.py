"""What 'make test' leaves out is there, and is run by 'make nightly'."""

from __future__ import annotations

import re

import pytest

from tests.conftest import NIGHTLY, nightly_tests

ROOT = NIGHTLY.parents[1]


@pytest.mark.parametrize("name", nightly_tests())
def test_a_test_of_every_night_exists(name: str) -> None:
    file, _, test = name.partition("::")
    function = re.escape(test.partition("[")[0])
    assert re.search(rf"^ *def {function}\b", (ROOT / file).read_text(), re.MULTILINE)


def test_the_list_is_in_order_and_has_each_once() -> None:
    lines = [line for line in NIGHTLY.read_text().splitlines() if not line.startswith("#")]
    assert lines == sorted(lines)
    assert len(lines) == len(nightly_tests())
