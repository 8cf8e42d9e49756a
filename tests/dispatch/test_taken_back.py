"""A run ahead of the look at a module is taken back with the marks of its lookups."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.errors import OutOfRangeError
from tests.diffusion.replayed import Pool, replayed_first
from tests.dispatch.test_tables import ROWS, Padded, Words, new_layer, new_parameter, pair

NEXT = 14  # rows of the next table


@pytest.fixture
def pool() -> Iterator[Pool]:
    with replayed_first() as made:
        yield made


def warm(kind: type[Words], folder: Path, device: str = "cpu") -> tuple[Any, Any]:
    eager, fast = pair(kind, folder, device, strict=True)
    for _ in range(6):
        assert_as_eager(eager, fast, ROWS - 1)
    assert fast.forward.counters.replays
    return eager, fast


def call(module: Any, index: int) -> torch.Tensor:
    ids = torch.tensor([[0, index, 1]], device=module.places.weight.device)
    with torch.no_grad():
        return module(ids)


def assert_as_eager(eager: Any, fast: Any, index: int) -> None:
    torch.testing.assert_close(call(fast, index), call(eager, index), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [Words, Padded])
@pytest.mark.parametrize("change", [new_parameter, new_layer])
@pytest.mark.parametrize("is_done", [True, False])
def test_an_index_of_the_next_table_is_none_outside_of_the_last_one(
    change: Callable[[Any, int], None],
    kind: type[Words],
    is_done: bool,
    tmp_path: Path,
    pool: Pool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    eager, fast = warm(kind, tmp_path)
    pool.done.is_done = is_done
    for module in (eager, fast):
        change(module, NEXT)
    for _ in range(4):
        assert_as_eager(eager, fast, NEXT - 1)
    gc.collect()
    assert not [each for each in caplog.records if each.name == "strop"]
    call(fast, NEXT)
    with pytest.raises(OutOfRangeError):
        call(fast, 1)


@pytest.mark.parametrize("change", [new_parameter, new_layer])
def test_a_mark_of_an_earlier_call_is_not_lost(
    change: Callable[[Any, int], None],
    tmp_path: Path,
    pool: Pool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """That call is still at work when the module changes and the next one begins. Its program ends
    with the change, and says so."""
    _, fast = warm(Words, tmp_path)
    call(fast, ROWS)
    pool.done.is_done = False
    change(fast, NEXT)
    for _ in range(3):
        call(fast, NEXT - 1)
    gc.collect()
    assert "index out of range" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("change", [new_parameter, new_layer])
def test_a_gpu_takes_marks_back(change: Callable[[Any, int], None], tmp_path: Path) -> None:
    eager, fast = warm(Padded, tmp_path, "cuda")
    for rows in (14, 400, 12, 300, 20):
        for module in (eager, fast):
            change(module, rows)
        for _ in range(3):
            assert_as_eager(eager, fast, rows - 1)
            torch.cuda.synchronize()
    call(fast, 400)
    torch.cuda.synchronize()
    with pytest.raises(OutOfRangeError, match="an earlier call"):
        call(fast, 1)
