"""What can happen to a training: a signal inside of a save, captions without words, many steps."""

from __future__ import annotations

import gc
import io
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.bench import timer
from strop.errors import TrainingError
from strop.train import checkpoint, files
from strop.train import model as models
from strop.train.data import Batch
from strop.train.loop import Outcome, TrainingLoop
from tests.e2e.tiny import DEVICES
from tests.train import trainer

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # of diffusers

# A process whose second checkpoint is cut off after a part of its first file, by two signals.
CUT_OFF = """
import json, signal, sys, time
from strop.train import checkpoint
from tests.train import trainer

def cut_off(tensors, path):
    whole(tensors, path)
    if path.parent.name.startswith("checkpoint-4"):
        path.write_bytes(path.read_bytes()[:1000])
        signal.raise_signal(signal.SIGTERM)
        while signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # the main thread notes it
            time.sleep(0.01)
        signal.raise_signal(signal.SIGTERM)

whole, checkpoint.save_file = checkpoint.save_file, cut_off
trainer.train("text-to-image", **json.loads(sys.argv[1]))
"""


def values(model: Path, pictures: Path, output: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "train_data_dir": str(pictures),
        "output_dir": str(output),
        "use_ema": True,
        "max_train_steps": 6,
        "checkpointing_steps": 2,
        "threads": 1,
        **more,
    }


@pytest.fixture
def one_thread() -> Any:
    """As in the process: sums depend on the number."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_sigterm_inside_of_a_save(
    tiny_model: Path,
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    one_thread: None,
) -> None:
    """Saves are ended, and the training with them; resumed, it is one that never stopped."""
    stopped, straight = tmp_path / "stopped", tmp_path / "straight"
    whole, saved = checkpoint.save_file, []

    def told_to_stop(tensors: dict[str, Tensor], path: Path) -> None:
        saved.append(path)
        if len(saved) == 1:  # a second signal would end the process
            signal.raise_signal(signal.SIGTERM)
        whole(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", told_to_stop)
        outcome = trainer.train("text-to-image", **values(tiny_model, pictures, stopped))
    assert outcome.stopped_by == signal.SIGTERM
    assert 2 <= outcome.step <= 4  # the save of step 4 waits for that of step 2
    check_it_goes_on(stopped, straight, tiny_model, pictures, f"checkpoint-{outcome.step}")


@pytest.mark.slow
def test_a_process_that_ends_inside_of_a_save(
    tiny_model: Path, pictures: Path, tmp_path: Path, one_thread: None
) -> None:
    """The second signal ends it at once: the checkpoint before is the newest one."""
    stopped, straight = tmp_path / "stopped", tmp_path / "straight"
    words = [sys.executable, "-c", CUT_OFF, json.dumps(values(tiny_model, pictures, stopped))]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        words, env=os.environ | {"PYTHONPATH": root}, check=False, capture_output=True, timeout=240
    )
    assert done.returncode == -signal.SIGTERM, done.stderr.decode()
    assert (stopped / f"checkpoint-4{files.PART}").is_dir()
    check_it_goes_on(stopped, straight, tiny_model, pictures, "checkpoint-2")


def check_it_goes_on(
    stopped: Path, straight: Path, model: Path, pictures: Path, newest: str
) -> None:
    assert checkpoint.find(stopped, "latest") == stopped / newest
    trainer.train(
        "text-to-image", **values(model, pictures, stopped), resume_from_checkpoint="latest"
    )
    assert not list(stopped.glob(f"*{files.PART}"))
    trainer.train("text-to-image", **values(model, pictures, straight))
    ours, theirs = (trainer.checkpoint_sums(f / "checkpoint-6") for f in (stopped, straight))
    assert ours == theirs


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """A write beyond so many bytes of a file fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with redirect_stderr(io.StringIO()):  # it may be a file
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# What a disk has no room for -> settings, the largest file, and what cannot be written.
FULL: dict[str, tuple[dict[str, Any], int, str]] = {
    "checkpoint": ({}, 100_000, "checkpoint-2"),
    "model": ({"checkpointing_steps": 99}, 100_000, ""),
    "cache": ({"cache_latents": True, "center_crop": True}, 100, "cache/moments-"),
}


@pytest.mark.parametrize("name", FULL)
def test_a_full_disk(name: str, tiny_model: Path, pictures: Path, tmp_path: Path) -> None:
    more, size, path = FULL[name]
    given = values(tiny_model, pictures, tmp_path / "out", **more)
    message = rf"cannot write .*out/?{path}.* File too large.*; make room"
    with files_up_to(size), pytest.raises(TrainingError, match=message):
        trainer.train("text-to-image", **given)
    assert not list((tmp_path / "out").glob("checkpoint-?"))
    outcome = trainer.train("text-to-image", **given, resume_from_checkpoint="latest")
    assert outcome == Outcome(6, 6)
    assert not list((tmp_path / "out").glob(f"*{files.PART}"))


@pytest.mark.parametrize("cached", [False, True], ids=["ids", "embeddings"])
def test_empty_captions(cached: bool, tiny_model: Path, tmp_path: Path) -> None:
    """They are the text that guidance subtracts, and no mistake."""
    place = trainer.draw_pictures(tmp_path / "p", 3, metadata=False)
    for number, text in enumerate(("", "  \n", "a ring")):
        (place / f"{number}.txt").write_text(text)
    given = values(
        tiny_model,
        place,
        tmp_path / "out",
        max_train_steps=3,
        train_batch_size=3,
        pre_compute_text_embeddings=cached,
    )
    made = trainer.session("text-to-image", **given)
    empty = models.token_ids(made.model, [""])
    if cached:
        empty = models.embeddings_of(made.model, empty)
    rows = next(iter(made.source.batch(0).text.tensors.values()))
    same = [torch.equal(row, next(iter(empty.tensors.values()))[0]) for row in rows]
    assert sorted(same) == [False, True, True]
    assert TrainingLoop(made, trainer.Watch()).run().step == 3


def test_latents_that_are_not_finite_are_not_cached(
    tiny_model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = models.moments_of

    def overflows(model: models.DiffusionModel, pixels: Tensor) -> Tensor:
        found = honest(model, pixels)
        found[2, 0, 0, 0] = torch.inf
        return found

    monkeypatch.setattr(models, "moments_of", overflows)
    with pytest.raises(TrainingError, match=r"latents of .*2\.png are not finite.*bf16 or no"):
        trainer.session(
            "text-to-image",
            **values(tiny_model, pictures, tmp_path),
            cache_latents=True,
            center_crop=True,
        )
    assert not list((tmp_path / "cache").iterdir())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def measured(loop: TrainingLoop, every: int, used: Callable[[], int]) -> list[tuple[int, int]]:
    """Run it to its end: tensors and bytes after each ``every`` steps, losses reported."""
    seen: list[tuple[int, int]] = []
    after = loop._after_step

    def measure() -> None:
        after()
        if loop.step % every == 0:
            loop._report()
            loop.saver.wait()  # its thread holds what it copies
            seen.append((tensors_alive(), used()))

    loop._after_step = measure  # type: ignore[method-assign]
    assert loop.run().stopped_by is None
    return seen


MOST_TENSORS = 20  # more than there were first; measured: 0
# Device -> what is measured, and how many bytes there may be. On a CPU 400 steps took 1.5 MB more.
MEMORY: dict[str, tuple[Callable[[], int], Callable[[int], float]]] = {
    "cpu": (resident_bytes, lambda first: first + 24e6),
    "cuda": (lambda: timer.allocated(torch.device("cuda")), lambda first: first * 1.02),
}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_memory_over_500_steps(
    device: str, tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    """Checkpoints, their deletion, and threads that read ahead are part of it."""
    made = trainer.session(
        "text-to-image",
        **values(
            tiny_model,
            pictures,
            tmp_path,
            max_train_steps=500,
            checkpointing_steps=50,
            checkpoints_total_limit=1,
            dataloader_num_workers=1,
            train_batch_size=1,
            device=device,
        ),
    )
    used, limit = MEMORY[device]
    counts, sizes = zip(*measured(TrainingLoop(made, trainer.Watch()), 100, used), strict=True)
    assert len(counts) == 5
    assert max(counts) - counts[0] <= MOST_TENSORS, counts
    assert max(sizes) <= limit(sizes[0]), sizes


def test_a_leak_would_be_seen(tiny_model: Path, pictures: Path, tmp_path: Path) -> None:
    """By the measure of the test above: losses that somebody keeps, whose graphs hold a step."""
    made = trainer.session(
        "text-to-image",
        **values(tiny_model, pictures, tmp_path, max_train_steps=50, checkpointing_steps=50),
    )
    loop, kept = TrainingLoop(made, trainer.Watch()), []
    honest = loop.runs.objective

    def leaky(batch: Batch, number: int) -> Tensor:
        kept.append(honest(batch, number))
        return kept[-1]

    loop.runs.objective = leaky  # type: ignore[assignment]
    counts = [count for count, _ in measured(loop, 25, resident_bytes)]
    assert counts[1] - counts[0] > MOST_TENSORS
