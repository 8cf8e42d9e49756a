"""Who is in a group, which rows a rank has, and how processes start and end together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from strop.errors import OptionError, TrainingError
from strop.train import launch, messages
from strop.train.messages import FAILED, LostRanksError, Messages
from strop.train.places import GroupPlace, place_in
from strop.train.share import BatchShare
from strop.train.stuck import GpuSteps

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "41007",
    "SLURM_NNODES": "1",
}


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({}, GroupPlace()),
        (TORCHRUN, GroupPlace(3, 4, 1, "tcp://node7:29500")),
        (TORCHRUN | SRUN, GroupPlace(3, 4, 1, "tcp://node7:29500")),
        (TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}, GroupPlace()),
        (SRUN, GroupPlace(1, 2, 1, "tcp://127.0.0.1:21007")),
        (
            TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"},
            GroupPlace(3, 4, 1, "tcp://node7:29500", attempt=2),
        ),
        (SRUN | {"MASTER_ADDR": "n", "MASTER_PORT": "1"}, GroupPlace(1, 2, 1, "tcp://n:1")),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, GroupPlace()),
        ({k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"}, GroupPlace()),  # a batch script
    ],
)
def test_a_launcher_is_recognised(given: dict[str, str], place: GroupPlace) -> None:
    assert place_in(given) == place


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (TORCHRUN | {"RANK": "4"}, "RANK is 4 and WORLD_SIZE is 4"),
        (TORCHRUN | {"RANK": "one"}, "RANK is 'one': it must be a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n"}, "MASTER_PORT is not set"),
        (SRUN | {"SLURM_NNODES": "2"}, "scontrol show hostnames"),
    ],
)
def test_half_a_group_is_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(OptionError) as caught:
        place_in(given)
    assert said in str(caught.value)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("total", [1, 2, 4, 7])
def test_shares_make_up_the_batch(total: int, count: int, blocks: int) -> None:
    rows = torch.arange(total * blocks, dtype=torch.float64)
    shares = [BatchShare.of(total, rank, count, blocks) for rank in range(count)]
    found: list[float] = []
    for share in shares:
        own = share.rows(rows)
        assert own.tolist() == share.pick(rows.tolist())
        assert len(own) == blocks * len(share) > 0
        found += own.tolist() if share.weight else []
    assert sorted(found) == rows.tolist()
    means = [share.rows(rows).mean() * share.weight for share in shares]
    assert float(sum(means)) / count == pytest.approx(float(rows.mean()))


# ---- processes -----------------------------------------------------------------------------------

_MEET = "import os, sys, time, signal, pathlib; rank = int(os.environ['RANK'])\n"


def _launched(script: str, count: int = 2) -> int:
    return launch.launch([sys.executable, "-c", _MEET + script], count)


def test_ranks_know_their_places_and_rank_0_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    script = (
        "names = 'WORLD_SIZE LOCAL_RANK MASTER_ADDR'.split()\n"
        "print(rank, *(os.environ[name] for name in names), flush=True)"
    )
    assert _launched(script, 3) == 0
    assert capfd.readouterr().out == "0 3 0 127.0.0.1\n"


def test_the_rank_that_fails_is_named_and_quoted() -> None:
    script = f"time.sleep(0.3 * (1 - rank)); sys.exit('no room' if rank else {launch.LOST})"
    with pytest.raises(TrainingError, match=r"rank 1 failed.*\nno room"):
        _launched(script)


def test_a_rank_that_is_killed_is_named() -> None:
    script = f"os.kill(os.getpid(), 9) if rank else time.sleep(0.5); sys.exit({launch.LOST})"
    with pytest.raises(TrainingError, match="rank 1 ended by signal 9"):
        _launched(script)


def test_a_failure_of_rank_0_is_its_own() -> None:
    assert _launched(f"sys.exit({launch.LOST} if rank else 1)") == 1


def test_a_killed_rank_has_all_started_again(capfd: pytest.CaptureFixture[str]) -> None:
    script = (
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print('attempt', attempt, 'of rank', rank, flush=True)\n"
        "if attempt == '1': sys.exit(0)\n"
        f"os.kill(os.getpid(), 9) if rank else sys.exit({launch.LOST})"
    )
    warned: list[str] = []
    words = [sys.executable, "-c", _MEET + script]
    assert launch.launch(words, 2, 2, warned.append) == 0
    assert capfd.readouterr().out.splitlines() == ["attempt 0 of rank 0", "attempt 1 of rank 0"]
    assert len(warned) == 1
    assert "rank 1 ended by signal 9" in warned[0]
    assert "started again (1 of 2)" in warned[0]


@pytest.mark.parametrize(("ended", "tries"), [(f"sys.exit({launch.LOST})", 3), ("sys.exit(1)", 1)])
def test_what_would_fail_again_is_not_tried_again(ended: str, tries: int, tmp_path: Path) -> None:
    """A rank that fails by itself has said why; ranks that have lost each other may meet again."""
    script = f"pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()\n{ended}"
    words = [sys.executable, "-c", _MEET + script]
    launch.launch(words, 1, 2)
    assert len(list(tmp_path.iterdir())) == tries


def test_ranks_that_do_not_notice_a_failure_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_GRACE_S", 0.2)
    start = time.monotonic()
    with pytest.raises(TrainingError, match="rank 1 failed"):
        _launched(f"sys.exit('gone') if rank else time.sleep(60); sys.exit({launch.LOST})")
    assert time.monotonic() - start < 30


def test_a_signal_reaches_all(tmp_path: Path) -> None:
    """The launcher gets it once, and so does every rank."""
    script = (
        _MEET + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        f"pathlib.Path({str(tmp_path)!r}, str(rank)).touch()\ntime.sleep(60)"
    )
    outer = (
        "import sys; from strop.train import launch\n"
        f"sys.exit(launch.launch([sys.executable, '-c', {script!r}], 2))"
    )
    process = subprocess.Popen([sys.executable, "-c", outer], env=dict(os.environ))
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143


# ---- what a rank knows of the others -------------------------------------------------------------


def _two(timeout_s: int = 60) -> list[Messages]:
    store = torch.distributed.HashStore()
    return [Messages(rank, 2, store, timeout_s) for rank in range(2)]


def test_texts_are_waited_for_and_failures_raised() -> None:
    first, second = _two()
    second.post("turn", "done")
    assert first.read("turn", 1) == "done"
    second.post("other turn", f"{FAILED}no room")
    with pytest.raises(LostRanksError, match="rank 1 failed: no room"):
        first.read("other turn", 1)


def test_a_rank_that_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "BEAT_S", 0.01)
    first, second = _two()
    second.post("end", f"{FAILED}a picture is gone")
    with pytest.raises(LostRanksError, match="rank 1 failed: a picture is gone"):
        first.read("turn", 1)


def test_a_rank_without_a_sign_of_life_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "BEAT_S", 0.01)
    first, second = _two(timeout_s=1)
    second.begin(7)
    second.post("beat", "1")
    with pytest.raises(LostRanksError, match=r"no sign of life for 1 s.*rank 1 began step 7"):
        first.read("turn", 1)
    stop = threading.Event()
    stop.set()
    with pytest.raises(LostRanksError, match="does not wait"):
        first.read("turn", 1, stop)


class _Event:
    """Stands for a moment on a GPU."""

    def __init__(self) -> None:
        self.has_passed = False

    def query(self) -> bool:
        return self.has_passed


def test_a_gpu_that_does_not_end_a_step_is_named() -> None:
    gpu, events = GpuSteps(), [_Event(), _Event()]
    for step, event in enumerate(events, 5):
        gpu.begin(step, event)
    assert gpu.overdue(1000.0) is None
    assert gpu.overdue(-1.0) == 4
    events[0].has_passed = True
    assert gpu.overdue(-1.0) == 5
    events[1].has_passed = True
    assert gpu.overdue(-1.0) is None
