"""An output folder belongs to one training at a time, and to nobody once that has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from strop.errors import OptionError, TrainingError
from strop.train.lock import HOLDER, NAME, Hold
from strop.train.loop import TrainingLoop
from tests.train import trainer

HOLDS = """
import sys, time
from pathlib import Path
from strop.train.lock import Hold
hold = Hold(Path(sys.argv[1]), print)
print("held", flush=True)
time.sleep(100)
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """Another process, which holds the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(folder)], text=True, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def values(model: Path, pictures: Path, output: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "train_data_dir": str(pictures),
        "output_dir": str(output),
        "max_train_steps": 1,
        **more,
    }


def test_a_second_training_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        try:
            with pytest.raises(TrainingError, match=f"process {process.pid} on "):
                Hold(tmp_path, print)
            with pytest.raises(TrainingError, match="--output_dir"):  # who is there is still known
                Hold(tmp_path, print)
        finally:
            process.kill()


def test_a_training_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert (tmp_path / NAME).exists()
    Hold(tmp_path, print).release()


def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(lock: Any) -> None:
        raise NotImplementedError("no flock here")

    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    warnings: list[str] = []
    Hold(tmp_path, warnings.append).release()
    assert "has no locks" in warnings[0]


def test_a_training_holds_its_folder_until_it_ends(
    tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    given = values(tiny_model, pictures, tmp_path / "out")
    session = trainer.holding("text-to-image", **given)
    with pytest.raises(TrainingError, match="another training writes"):
        trainer.holding("text-to-image", **given)
    TrainingLoop(session, trainer.Watch()).run()
    assert not (tmp_path / "out" / HOLDER).exists()
    Hold(tmp_path / "out", print).release()


def test_a_training_that_cannot_begin_holds_nothing(
    tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    given = values(tiny_model, pictures, tmp_path, train_batch_size=2, resolution=4096)
    with pytest.raises(OptionError, match="smaller than 4096"):
        trainer.holding("text-to-image", **given)
    Hold(tmp_path, print).release()
