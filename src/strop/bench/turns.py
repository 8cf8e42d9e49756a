"""Prepare work in many processes at once, and time it in one after another.

Compilers take most of a benchmark's time and one core each; what is timed wants the device for
itself. A piece of work is a generator function: it yields once when it is ready to be timed, and
then its result.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from strop.errors import StropError

Work = Callable[[], Iterator[Any]]


def in_turns(works: Sequence[Work]) -> Iterator[Any]:
    """Yield results in order, each as soon as it is there. Raises StropError with the trace of work
    that failed."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for work in works:
            ours, theirs = context.Pipe()
            process = context.Process(target=_perform, args=(theirs, work), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            _answer(pipe)
        for pipe, process in zip(pipes, processes, strict=True):
            yield _timed(pipe, process)
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _timed(pipe: Connection, process: BaseProcess) -> Any:
    pipe.send("now")
    answer = _answer(pipe)
    process.terminate()
    process.join()  # the next one finds the device's memory given back
    return answer


def _answer(pipe: Connection) -> Any:
    try:
        error, value = pipe.recv()
    except EOFError:
        raise StropError("a process of the benchmark ended without an answer") from None
    if error:
        raise StropError(f"a process of the benchmark failed:\n{error}")
    return value


def _perform(pipe: Connection, work: Work) -> None:
    try:
        steps = work()
        pipe.send(("", next(steps)))
        pipe.recv()
        pipe.send(("", next(steps)))
    except Exception:
        pipe.send((traceback.format_exc(), None))
