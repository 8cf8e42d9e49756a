"""Prepare several rows at once, each in a process of its own, and time one after another.

Most of a row's time goes to compilers, which take one core each; what is timed wants the machine
for itself. So whoever is ready is timed at once, and all other processes are stopped meanwhile
(SIGSTOP, which compilers survive); then they go on, and the next row begins beside them. Nobody
waits for the slowest compiler. Seconds of first calls are those of a busy machine.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from strop.bench.worker import Task, Worker

LOOK_S = 0.1  # between looks at processes
LEAST_S = 10.0  # that a process takes to say anything
TAIL_S = 3.0  # of a process, to write down what it has
Left = Callable[[], float]
Step = Callable[[str, int], None]
Answer = tuple[int, dict[str, Any]]


def as_ready(
    tasks: Sequence[Task], texts: Sequence[str], jobs: int, left: Left, step: Step
) -> Iterator[Answer]:
    """Yield the place of each task and the answer to it, as soon as it is there. ``jobs`` of them
    are under way at a time; ``left`` gives the seconds of the budget; ``step`` hears what is being
    timed, by the ``texts`` of tasks, and how many are done. What is not ready at the end of the
    budget is cut, and what has not begun is skipped."""
    under_way: dict[int, Worker] = {}
    variables = _variables(min(jobs, len(tasks)))
    todo = iter(enumerate(tasks))
    done = 0
    with contextlib.ExitStack() as stack:
        while True:
            while len(under_way) < jobs and left() >= LEAST_S and (one := next(todo, None)):
                under_way[one[0]] = _begun(stack, one[1], variables, left)
            place = _first(under_way, left)
            if place is None:
                break
            worker = under_way.pop(place)
            step(texts[place], done)
            yield place, _timed(worker, [*under_way.values()], left)
            done += 1
    yield from ((n, {"skipped": f"{max(left(), 0):.0f} s left of the budget"}) for n, _ in todo)


def _begun(
    stack: contextlib.ExitStack, task: Task, variables: Mapping[str, str], left: Left
) -> Worker:
    worker = stack.enter_context(Worker(variables))
    worker.begin({**task, "until": time.time() + left() - TAIL_S, "has_turn": True})
    return worker


def _first(under_way: dict[int, Worker], left: Left) -> int | None:
    """Wait for a process that is ready or has ended, and return its place; at the end of the budget
    any one; None where there is none."""
    while under_way and left() > 0:
        for place, worker in under_way.items():
            if worker.is_ready or worker.is_over:
                return place
        time.sleep(LOOK_S)
    return next(iter(under_way), None)


def _timed(worker: Worker, others: Sequence[Worker], left: Left) -> dict[str, Any]:
    """Give a process its turn while all others stand still, and return its answer."""
    for other in others:
        other.pause()
    try:
        worker.give_turn()
        while not worker.is_over and left() > 0:
            time.sleep(LOOK_S)
        return worker.answer() if worker.is_over else worker.cut(max(left(), 0))
    finally:
        worker.close()  # the next one finds the memory of the GPU given back
        for other in others:
            other.resume()


def _variables(jobs: int) -> dict[str, str]:
    """Return an environment in which all processes together have a compiler for each core."""
    threads = max(1, (os.cpu_count() or 1) // max(jobs, 1))
    mine = os.environ  # noqa: TID251 (processes get what this one has)
    return {"TORCHINDUCTOR_COMPILE_THREADS": str(threads), **mine}
