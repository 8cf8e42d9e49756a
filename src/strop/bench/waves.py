"""Prepare several rows at once, each in a process of its own, and time one after another.

Most of a row's time goes to compilers, which take one core each; what is timed wants the GPU for
itself. So the processes of a wave meet: nobody is timed before all are ready, or have ended.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from strop.bench.worker import Task, Worker

LOOK_S = 0.1  # between looks at processes
LEAST_S = 10.0  # that a process takes to say anything
TAIL_S = 3.0  # of a process, to write down what it has
Left = Callable[[], float]


def in_waves(
    tasks: Sequence[Task],
    texts: Sequence[str],
    jobs: int,
    left: Left,
    step: Callable[[str, int], None],
) -> Iterator[dict[str, Any]]:
    """Yield the answer to each task, in their order, as soon as it is there. ``jobs`` of them are
    prepared at a time; ``left`` gives the seconds of the budget; ``step`` hears what is being done,
    by the ``texts`` of tasks, and how much is behind it."""
    for start in range(0, len(tasks), jobs):
        wave = tasks[start : start + jobs]
        if left() < LEAST_S:
            yield from ({"skipped": f"{max(left(), 0):.0f} s left of the budget"} for _ in wave)
            continue
        with contextlib.ExitStack() as stack:
            workers = [stack.enter_context(Worker(_variables(len(wave)))) for _ in wave]
            step(f"preparing {len(wave)} at a time, from {texts[start]}", start)
            _prepare(wave, workers, left)
            for place, worker in enumerate(workers, start):
                step(texts[place], place)
                worker.give_turn()
                while not worker.is_over and left() > 0:
                    time.sleep(LOOK_S)
                yield worker.answer() if worker.is_over else worker.cut(max(left(), 0))
                worker.close()  # the next one finds the memory of the GPU given back


def _prepare(wave: Sequence[Task], workers: Sequence[Worker], left: Left) -> None:
    """Have all processes of a wave get ready. Who is not ready by the end of the budget is cut in
    its turn."""
    until = time.time() + left() - TAIL_S
    for worker, task in zip(workers, wave, strict=True):
        worker.begin({**task, "until": until, "has_turn": True})
    while not all(worker.is_ready or worker.is_over for worker in workers) and left() > 0:
        time.sleep(LOOK_S)


def _variables(jobs: int) -> dict[str, str]:
    """Return an environment in which all processes together have a compiler for each core."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    mine = os.environ  # noqa: TID251 (processes get what this one has)
    return {"TORCHINDUCTOR_COMPILE_THREADS": str(threads), **mine}
