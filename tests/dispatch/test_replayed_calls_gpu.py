"""The short way to a graph's replay on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dispatch.test_replayed_calls import (
    CHANGES,
    assert_same,
    given,
    pair,
    short_of,
)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.usefixtures("compiled")
def test_a_gpu_sees_it(change: Callable[[Any], Any], tmp_path: Path) -> None:
    plain, fast = (net.to("cuda") for net in pair(tmp_path))
    with torch.no_grad():
        for _ in range(6):
            assert_same(plain, fast, pixels=given().to("cuda"), return_dict=False)
        seen = short_of(fast)
        assert seen > 0
        for net in (plain, fast):
            change(net)
        for _ in range(3):
            assert_same(plain, fast, pixels=given().to("cuda"), return_dict=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.usefixtures("compiled")
def test_a_gpu_waits_between_streams(tmp_path: Path) -> None:
    """A replay on one stream begins late, and the next one, on another, reads another argument."""
    plain, fast = (net.to("cuda") for net in pair(tmp_path))
    x, y, stream = given().to("cuda"), given(1).to("cuda"), torch.cuda.Stream()
    with torch.no_grad():
        for _ in range(6):
            assert_same(plain, fast, x)
        seen = short_of(fast)
        expected = [plain(value)["last"] for value in (x, y)]
        torch.cuda.synchronize()  # from here on either stream may read all of these
        for _ in range(6):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(10_000_000)  # cycles: some 5 ms
                there = fast(x)["last"]
            here = fast(y)["last"]
            torch.cuda.synchronize()
            torch.testing.assert_close([there, here], expected, rtol=1e-5, atol=1e-5)
    assert short_of(fast) > seen
