"""Processes that are ranks of one group, two as a rule, to run functions in."""

from __future__ import annotations

import faulthandler
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from strop.train import given_settings
from strop.train.loop import Outcome, TrainingLoop
from strop.train.places import GroupPlace
from strop.train.ranks import Ranks, open_channel
from strop.train.session import prepare_session
from tests.train import trainer

COUNT, PATIENCE_S, STACKS_S = 2, 240.0, 100.0
Work = Callable[[Ranks], Any]


def _work(
    rank: int, count: int, meeting: str, device: str, timeout_s: int, end: Connection
) -> None:
    """A process: runs what it is handed, and ends where that raises, as a real one would."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    place, output = GroupPlace(rank, count, rank, f"file://{meeting}"), Path(meeting).parent
    with open_channel(place, device, timeout_s, output) as ranks:
        while (asked := end.recv()) is not None:
            faulthandler.dump_traceback_later(STACKS_S)  # says where a rank hangs
            try:
                found = asked(ranks)
            except Exception as error:
                traceback.print_exc()
                end.send(error)
                raise
            finally:
                faulthandler.cancel_dump_traceback_later()
            end.send(found)


class Pair:
    """Two processes that have met, or ``count``."""

    def __init__(
        self, folder: Path, device: str = "cpu", timeout_s: int = 120, count: int = COUNT
    ) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.ends, self.processes = [], []
        for rank in range(count):
            mine, theirs = context.Pipe()
            given = (rank, count, str(folder / "meeting"), device, timeout_s, theirs)
            process = context.Process(target=_work, args=given, daemon=True)
            process.start()
            self.ends.append(mine)
            self.processes.append(process)

    def run(self, work: Work) -> list[Any]:
        """What ``work`` gives, or the error that it raises, in each process."""
        for end in self.ends:
            end.send(work)
        deadline, found = time.monotonic() + PATIENCE_S, []
        for rank, end in enumerate(self.ends):
            assert end.poll(max(deadline - time.monotonic(), 0)), f"rank {rank} hangs"
            found.append(end.recv())
        return found

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def train(
    ranks: Ranks, task: str, given: dict[str, Any], change: Callable[[TrainingLoop], None] | None
) -> tuple[Outcome, trainer.Watch]:
    """Train as one of these ranks; ``change`` gets the loop before it runs."""
    made, watch = given_settings.make(task, {**trainer.COMMON, **given}), trainer.Watch()
    loop = TrainingLoop(prepare_session(made, watch.stage, watch.warn, ranks), watch)
    if change is not None:
        change(loop)
    return loop.run(), watch
