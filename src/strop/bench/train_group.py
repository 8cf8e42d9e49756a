"""Run one task of ``strop bench train`` in several processes at once, each with a GPU of its own.

On one machine this process starts them all. Under a launcher such as torchrun there is one command
in each place of the group: that of rank 0 says what is to be done, and each starts a process for
its own place, so that a contender that fails costs no other there, too.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from strop.bench.worker import Task, Worker, stopped_by_exception
from strop.train.launch import variables_of
from strop.train.places import GroupPlace

Answer = dict[str, Any]
_POLL_S = 0.05
_GRACE_S = 15.0  # for ranks whose peer has failed, to say so themselves
_PATIENCE = timedelta(days=7)  # of a place that waits for the next task


def perform_in_group(task: Task, count: int, limit_s: float) -> Answer:
    """Run a task in ``count`` processes of this machine; return what rank 0 has found, or
    {"failed": why} with what it had by then."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ExitStack() as stack:
        stack.enter_context(stopped_by_exception())
        workers = [
            stack.enter_context(Worker(variables_of(rank, count, store.port)))
            for rank in range(count)
        ]
        for worker in workers:
            worker.begin(task)
        return _attended(workers, limit_s)


def _attended(workers: Sequence[Worker], limit_s: float) -> Answer:
    """Wait for all; the first that fails tells the reason, and ends the others after a while."""
    begun = time.monotonic()
    end, failed, open_ranks = begun + limit_s, "", set(range(len(workers)))
    while open_ranks and time.monotonic() < end:
        for rank in [rank for rank in open_ranks if workers[rank].is_over]:
            open_ranks.remove(rank)
            answer = workers[rank].answer()
            if "failed" in answer and not failed:
                failed = " ".join([f"rank {rank}: {answer['failed']}", *answer.get("log", [])[-1:]])
                end = min(end, time.monotonic() + _GRACE_S)
        time.sleep(_POLL_S)
    first = workers[0].cut(limit_s) if 0 in open_ranks else workers[0].answer()
    process_s = {"process_s": round(time.monotonic() - begun, 2)}
    return first | process_s | ({"failed": failed} if failed else {})


class Places:
    """Hold the place of this command in a group that a launcher has started. Rank 0 leads: what it
    performs, the others follow."""

    def __init__(self, place: GroupPlace) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.place = place
        host, _, port = place.address.removeprefix("tcp://").rpartition(":")
        self._host, self._turn = host, 0
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE")  # noqa: TID251 (torchrun tells so)
        self._store = TCPStore(
            host,
            int(port),
            is_master=place.rank == 0 and served != "True",
            wait_for_workers=False,
        )
        self._meeting: Any = None  # the store of the processes of this turn

    def perform(self, task: Task, limit_s: float) -> Answer:
        """Have a task done in all places, as rank 0; return what the process here has found."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._meeting = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        told = {"task": dict(task), "limit_s": limit_s, "port": self._meeting.port}
        self._store.set(self._key(), json.dumps(told))
        return self._run(told)

    def follow(self) -> None:
        """Do what rank 0 says, until it has no more."""
        while True:
            self._store.wait([self._key()], _PATIENCE)
            told = json.loads(self._store.get(self._key()))
            if told is None:
                break
            self._run(told)
        self._store.set(f"strop-bench/left/{self.place.rank}", "")

    def close(self) -> None:
        """Tell the others, as rank 0, that there is no more, and wait until they have heard it."""
        self._store.set(self._key(), json.dumps(None))
        left = [f"strop-bench/left/{rank}" for rank in range(1, self.place.count)]
        self._store.wait(left, timedelta(seconds=_GRACE_S))

    def _key(self) -> str:
        return f"strop-bench/turn/{self._turn}"

    def _run(self, told: Answer) -> Answer:
        self._turn += 1
        mine = {
            **variables_of(self.place.rank, self.place.count, told["port"]),
            "LOCAL_RANK": str(self.place.local_rank),
            "MASTER_ADDR": self._host,
        }
        limit_s = told["limit_s"]
        task = {**told["task"], "until": time.time() + limit_s}  # clocks of machines differ
        with stopped_by_exception(), Worker(mine) as worker:
            return worker.perform(task, limit_s)
