"""Write down what each rank was doing when one has waited too long for the others.

A thread of each rank shows that it lives, and when a rank asks for it, writes the stacks of all
threads and the last calls to other ranks; on GPUs also torch's flight recorder, which knows the
collectives of NCCL. It also notices a GPU that does not end a step, for which the host waits.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from strop.train.launch import LOST
from strop.train.messages import BEAT_S, LostRanksError, Messages

_PATIENCE_S = 5.0  # for the other ranks to write
_KEPT = 20  # calls


@dataclass
class _Call:
    what: str
    step: int
    start: float
    end: float | None = None

    def __str__(self) -> str:
        now = time.monotonic() if self.end is None else self.end
        state = "has waited" if self.end is None else "took"
        return f"step {self.step}: {self.what} {state} {now - self.start:.3f} s"


class Calls:
    """Keep the last calls in which this rank has met the others."""

    def __init__(self) -> None:
        self._last: deque[_Call] = deque(maxlen=_KEPT)

    @contextmanager
    def noted(self, what: str, step: int) -> Iterator[_Call]:
        """Note a call, and that it has ended unless it raises."""
        call = _Call(what, step, time.monotonic())
        self._last.append(call)
        yield call
        call.end = time.monotonic()

    def lines(self) -> list[str]:
        """Return a line for each call, the last one last."""
        return [str(call) for call in list(self._last)]


@dataclass(eq=False)
class Witness:
    """Write what this rank does into a folder of ``folder``, with those of the others."""

    messages: Messages
    calls: Calls
    folder: Path

    def ask(self) -> str:
        """Write, have the others write as well, and return a phrase that says where."""
        name = f"step-{self.messages.step}"
        self.messages.post("stuck", name)
        self.write(name)
        deadline, missing = time.monotonic() + _PATIENCE_S, self.messages.others
        while missing and time.monotonic() < deadline:
            time.sleep(0.05)
            missing = [r for r in missing if self.messages.find("written", r) is None]
        late = f", but for {', '.join(f'rank {rank}' for rank in missing)}" if missing else ""
        return f"{self.folder / name} has the stacks of all ranks{late}"

    def asked(self) -> str | None:
        """Return the name of the folder that another rank wants this one to write into."""
        found = (self.messages.find("stuck", rank) for rank in self.messages.others)
        return next((name for name in found if name is not None), None)

    def write(self, name: str) -> None:
        """Write the stacks and the last calls of this rank, and what NCCL does."""
        place, rank = self.folder / name, self.messages.rank
        place.mkdir(parents=True, exist_ok=True)
        (place / f"rank-{rank}.txt").write_text(self._text())
        if (recorded := _flight_recorder()) is not None:
            (place / f"rank-{rank}.nccl.json").write_bytes(recorded)
        self.messages.post("written", name)

    def _text(self) -> str:
        named = {thread.ident: thread.name for thread in threading.enumerate()}
        head = f"rank {self.messages.rank} of {self.messages.count}, step {self.messages.step}"
        lines = [head, "", "last calls to other ranks:", *self.calls.lines()]
        for ident, frame in sys._current_frames().items():
            stack = "".join(traceback.format_stack(frame)).rstrip()
            lines += ["", f"thread {named.get(ident, ident)}:", stack]
        return "\n".join(lines) + "\n"


def _flight_recorder() -> bytes | None:
    """Return what torch knows of the collectives of NCCL, as JSON; None without NCCL."""
    found = getattr(torch._C, "_distributed_c10d", None)
    record: Any = getattr(found, "_dump_nccl_trace_json", None)
    if record is None or not torch.distributed.is_nccl_available():
        return None
    content = record(includeCollectives=True, onlyActive=False)
    return content if isinstance(content, bytes) else str(content).encode()


@dataclass(eq=False)
class GpuSteps:
    """Know which steps the GPU has not ended, and since when the host is done with them."""

    _open: deque[tuple[int, float, Any]] = field(default_factory=deque)

    def begin(self, step: int, ended: Any) -> None:
        """Note that the host begins ``step``; the event ``ended`` is that of the step before."""
        self._open.append((step - 1, time.monotonic(), ended))

    def overdue(self, limit_s: float) -> int | None:
        """Return the oldest step that is not ended after ``limit_s``, or None."""
        while self._open and self._open[0][2].query():
            self._open.popleft()
            if self._open:  # it could not begin before
                step, _, ended = self._open[0]
                self._open[0] = (step, time.monotonic(), ended)
        late = self._open and time.monotonic() - self._open[0][1] > limit_s
        return self._open[0][0] if late else None


class Pulse:
    """Show that this rank lives, and write when another rank asks, in a thread of its own."""

    def __init__(self, witness: Witness, gpu: GpuSteps | None) -> None:
        self._witness, self._gpu = witness, gpu
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="strop-pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        messages, beats, has_written = self._witness.messages, 0, False
        try:
            while not self._ended.wait(BEAT_S if beats else 0.0):
                beats += 1
                messages.post("beat", str(beats))
                if not has_written and (name := self._witness.asked()) is not None:
                    self._witness.write(name)
                    has_written = True
                self._judge_gpu()
        except LostRanksError:
            return  # the store is gone: the main thread learns that by itself

    def _judge_gpu(self) -> None:
        """End a process whose GPU hangs in a collective: its main thread waits for that, so that
        it cannot raise."""
        limit = self._witness.messages.timeout_s
        step = None if self._gpu is None else self._gpu.overdue(limit)
        if step is None:
            return
        messages = self._witness.messages
        where = ", ".join(messages.where(rank) for rank in messages.others)
        print(
            f"error: rank {messages.rank} of {messages.count}: its GPU did not end step {step} "
            f"within {limit} s (--rank_timeout): {where}; {self._witness.ask()}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(LOST)
