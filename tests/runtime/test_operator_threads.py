"""The number of threads of operators is set for one thread alone, and comes back."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from strop.runtime.run.operator_threads import set_here, with_threads
from tests.runtime.test_threads import in_threads


def numbers() -> tuple[int, int]:
    """Those of OpenMP, which torch says, and of MKL, where there is one."""
    library = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    count = torch.get_num_threads()
    has_mkl = hasattr(library, "MKL_Get_Max_Threads")
    return count, library.MKL_Get_Max_Threads() if has_mkl else count


@pytest.fixture(autouse=True)
def three_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_it_holds_while_the_work_is_done() -> None:
    assert with_threads(2, numbers) == (2, 2)
    assert with_threads(1, lambda: (numbers(), with_threads(2, numbers), numbers())) == (
        (1, 1),
        (2, 2),
        (1, 1),
    )
    assert numbers() == (3, 3)


def test_it_ends_with_an_error() -> None:
    def fails() -> None:
        raise ValueError("within")

    with pytest.raises(ValueError, match="within"):
        with_threads(1, fails)
    assert numbers() == (3, 3)


def test_other_threads_keep_theirs() -> None:
    found = list[tuple[int, int]]()

    def work(number: int) -> None:
        if not number:
            set_here(1)
        found.append(numbers())

    in_threads(work, 1)
    in_threads(lambda number: found.append(numbers()), 1)
    assert found == [(1, 1), (3, 3)]
    assert numbers() == (3, 3)
