"""An operator on a CPU has as many threads as the thread that calls it has been told.

torch, its libraries and our kernels ask OpenMP for that number, and MKL keeps one of its own.
``torch.set_num_threads`` changes both, but also what threads have that begin later.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

T = TypeVar("T")
_LIBRARY = "libtorch_cpu.so"


class _Setters(NamedTuple):
    openmp: Callable[[int], None]
    mkl: Callable[[int], int]  # it returns the number before; 0 where the process's is taken


def _no_mkl(count: int) -> int:
    return 0


@cache
def _setters() -> _Setters:
    """Find them in what torch itself has loaded. Whoever calls them keeps the interpreter's lock,
    as they only store a number."""
    library = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / _LIBRARY))
    openmp = library.omp_set_num_threads
    openmp.argtypes, openmp.restype = (ctypes.c_int,), None
    mkl = getattr(library, "MKL_Set_Num_Threads_Local", None)
    if mkl is None:  # as on ARM
        return _Setters(openmp, _no_mkl)
    mkl.argtypes, mkl.restype = (ctypes.c_int,), ctypes.c_int
    return _Setters(openmp, mkl)


def set_here(count: int) -> None:
    """Give operators that this thread calls so many threads from now on."""
    torch.get_num_threads()  # the first look of a thread sets the number that the process has
    setters = _setters()
    setters.openmp(count)
    setters.mkl(count)


def with_threads(count: int, work: Callable[[], T]) -> T:
    """Return what some work gives if each of its operators has so many threads."""
    before = torch.get_num_threads()
    if before == count:
        return work()
    setters = _setters()
    mkl_before = setters.mkl(count)
    setters.openmp(count)
    try:
        return work()
    finally:
        setters.openmp(before)
        setters.mkl(mkl_before)
