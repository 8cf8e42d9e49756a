"""Start the processes of ``strop train --num_processes N`` on this machine, and end as they end.

torch's elastic launcher kills its processes 30 seconds after a signal, and a checkpoint of a large
model takes longer; so this one starts them, with the variables that torchrun sets, and hands
signals on without a limit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any

from strop.errors import TrainingError

_POLL_S = 0.05
_GRACE_S = 30.0  # for ranks whose peer has failed
_SHOWN_LINES = 20
_STOPPED = {128 + signal.SIGTERM, 128 + signal.SIGINT}
LOST = 75  # exit code of a rank that cannot go on without others (EX_TEMPFAIL)


def launch(
    words: Sequence[str],
    count: int,
    restarts: int = 0,
    warn: Callable[[str], None] = lambda text: None,
) -> int:
    """Run ``words`` as ``count`` processes of one group; returns the exit code of rank 0.

    What rank 0 prints is shown. Where a rank was killed or has crashed, or all have lost each
    other, all are started again, up to ``restarts`` times, and ``warn`` gets why; errors that would
    come again are not tried again. Raises TrainingError with the last lines of the rank that
    failed, if another one than rank 0 did.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    with _handing_on(ranks) as handed:
        for attempt in range(restarts + 1):
            failure = _attempt(words, count, attempt, ranks)
            if failure is None or handed:
                break
            if attempt < restarts and failure.may_pass:
                warn(f"{failure.text}\nall are started again ({attempt + 1} of {restarts})")
            elif failure.rank:
                raise TrainingError(failure.text)
            else:
                break
    code = ranks[0].returncode
    return code if code >= 0 else 128 - code


@dataclass(frozen=True)
class _Failure:
    """Say which rank has failed, how, and whether this may pass in another attempt."""

    rank: int
    text: str
    may_pass: bool


def _attempt(
    words: Sequence[str], count: int, attempt: int, ranks: list[subprocess.Popen[bytes]]
) -> _Failure | None:
    """Start all ranks, put them into ``ranks``, and wait until they have ended."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks.clear()
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(count - 1)]
        stack.callback(_kill, ranks)
        for rank, output in enumerate([None, *outputs]):
            ranks.append(_start(words, variables_of(rank, count, store.port, attempt), output))
        failed = _wait(ranks)
        if not failed:
            return None
        codes = [process.returncode for process in ranks]
        own = [rank for rank in failed if codes[rank] != LOST] or failed
        first = 0 if 0 in own else own[0]
        may_pass = any(codes[rank] < 0 or codes[rank] == LOST for rank in own)
        return _Failure(first, _report(first, codes[first], [None, *outputs][first]), may_pass)


def variables_of(rank: int, count: int, port: int, attempt: int = 0) -> dict[str, str]:
    """Return the environment of a rank of a group on this machine, whose store has this port, in
    the first attempt or a further one."""
    mine = os.environ  # noqa: TID251 (the processes get what this one has)
    threads = str(max(1, (os.cpu_count() or 1) // count))
    return {
        "OMP_NUM_THREADS": threads,
        **mine,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is in this process
    }


def _start(
    words: Sequence[str], variables: Mapping[str, str], output: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    """Start a rank; a terminal's Ctrl-C reaches it through this process alone, once."""
    to: Any = None if output is None else output
    return subprocess.Popen(
        list(words), env=dict(variables), stdout=to, stderr=to, start_new_session=True
    )


@contextmanager
def _handing_on(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Hand SIGTERM and SIGINT to all ranks, which agree on the step to stop after; gives the list
    of those that came."""
    handed: list[int] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        handed.append(number)
        for process in ranks:
            if process.poll() is None:
                process.send_signal(number)

    before = {kind: signal.signal(kind, hand_on) for kind in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield handed
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Wait until all have ended; returns those that failed, in the order in which they ended.

    The others get some time after a failure, to notice it and say so; then they are killed.
    """
    failed: list[int] = []
    deadline = float("inf")
    while True:
        codes = [process.poll() for process in ranks]
        new = [rank for rank, code in enumerate(codes) if _is_failure(code) and rank not in failed]
        if new and not failed:
            deadline = time.monotonic() + _GRACE_S
        failed += new
        if None not in codes:
            return failed
        if time.monotonic() > deadline:
            _kill(ranks)
            return failed
        time.sleep(_POLL_S)


def _is_failure(code: int | None) -> bool:
    return code not in (None, 0, *_STOPPED)


def _kill(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in ranks:
        if process.poll() is None:
            process.kill()
            process.wait()


def _report(rank: int, code: int, output: IO[bytes] | None) -> str:
    """Say how a rank ended, with its last lines where they were not shown."""
    lines: list[str] = []
    if output is not None:
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines()[-_SHOWN_LINES:]
    how = f"ended by signal {-code}" if code < 0 else "failed"
    return "\n".join([f"rank {rank} {how}, which ends the training of all:", *lines])
