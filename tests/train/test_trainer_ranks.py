"""Two ranks with b pictures each train as one with 2 b does, and end together."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strop.errors import OptionError, TrainingError
from strop.train import GradScaler, checkpoint, flat_gradients, given_settings
from strop.train.loop import Outcome, TrainingLoop
from strop.train.optimizers import FusedAdamW
from strop.train.ranks import LostRanksError, Ranks
from strop.train.scaler import update
from tests.train import trainer
from tests.train.pair import Pair, train
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
        reason="needs gloo",
    ),
    pytest.mark.filterwarnings("ignore:__array__ implementation"),  # of diffusers
]
GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

# Five pictures in batches of four: the second one of an epoch has one row, and a rank without any.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "text to image": (
        "text-to-image",
        {
            "use_ema": True,
            "gradient_accumulation_steps": 2,
            "max_grad_norm": 0.05,
            "random_flip": True,
            "proportion_empty_prompts": 0.3,
            "noise_offset": 0.1,
            "input_perturbation": 0.1,
            "snr_gamma": 5.0,
            "scale_lr": True,
            "learning_rate": 1e-4,
            "lr_scheduler": "cosine",
            "lr_warmup_steps": 1,
            "train_text_encoder": True,
            "dataloader_num_workers": 1,
        },
    ),
    "lora of drawings": (
        "lora",
        {"dataset_name": "sprites", "proportion_empty_prompts": 0.5, "use_ema": True},
    ),
    "dreambooth": (
        "dreambooth",
        {
            "with_prior_preservation": True,
            "num_class_images": 4,
            "class_prompt": "a ring",
            "instance_prompt": "a sks ring",
            "cache_latents": True,
            "center_crop": True,
            "pre_compute_text_embeddings": True,
            "prior_loss_weight": 0.5,
        },
    ),
}
STEPS = 4


def given_for(name: str, model: Path, pictures: Path, output: Path, **more: Any) -> dict[str, Any]:
    task, given = RUNS[name]
    data = {} if "dataset_name" in given else {"train_data_dir": str(pictures)}
    if task == "dreambooth":
        data = {"instance_data_dir": str(pictures), "class_data_dir": str(output / "class")}
    common = {"model": str(model), "output_dir": str(output), "max_train_steps": STEPS}
    return {**common, "checkpointing_steps": 2, **data, **given, **more}


def _both(
    pair: Pair, task: str, change: Callable[[TrainingLoop], None] | None = None, **given: Any
) -> list[tuple[Outcome, trainer.Watch]]:
    found = pair.run(partial(train, task=task, given=given, change=change))
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found


def _metrics(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def _kinds(state: dict[str, Tensor]) -> dict[str, list[str]]:
    """The names of weights, and of each kind of state."""
    found: dict[str, list[str]] = {}
    for name in state:
        kind = "weights" if name.startswith("weights/") else name.rsplit("/", 1)[-1]
        found.setdefault(kind, []).append(name)
    return found


def _assert_near(one: Path, two: Path, start: Path) -> None:
    """Weights, moments and averages of ``one`` and ``two`` differ by less than 1e-4 of how
    far they have moved since ``start``."""
    ours, theirs, before = map(trainer.checkpoint_tensors, (one, two, start))
    assert ours.keys() == theirs.keys()
    kinds = _kinds(ours)
    assert kinds.keys() >= {"weights", "step", "exp_avg", "exp_avg_sq"}
    for kind, names in kinds.items():
        gap = sum(float((ours[n] - theirs[n]).double().square().sum()) for n in names)
        moved = sum(float((ours[n] - before[n]).double().square().sum()) for n in names)
        assert gap <= 1e-8 * moved, (kind, gap, moved)
        assert moved > 0


@pytest.fixture(scope="module")
def outputs(
    pair: Pair, tiny_model: Path, pictures: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    """What one process has written, and what two have."""
    return _compared("text to image", pair, tiny_model, pictures, tmp_path_factory.mktemp("out"))


def _compared(name: str, pair: Pair, tiny_model: Path, pictures: Path, folder: Path) -> list[Path]:
    outputs = [folder / "one", folder / "two"]
    task = RUNS[name][0]
    given = partial(given_for, name, tiny_model, pictures)
    trainer.train(task, **given(outputs[0], train_batch_size=4))
    found = _both(pair, task, **given(outputs[1], train_batch_size=2))
    assert [outcome for outcome, _ in found] == [Outcome(STEPS, STEPS)] * 2
    for alone, together in zip(*map(_metrics, outputs), strict=True):
        assert (alone["step"], alone["epoch"]) == (together["step"], together["epoch"])
        assert together["lr"] == alone["lr"]
        assert together["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert together["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)
    ends = [output / f"checkpoint-{STEPS}" for output in outputs]
    _assert_near(*ends, outputs[0] / "checkpoint-2")
    return outputs


def test_two_ranks_are_one_of_twice_the_batch(outputs: list[Path]) -> None:
    assert len(_metrics(outputs[1])) == STEPS


@pytest.mark.parametrize("name", list(RUNS)[1:])
def test_two_ranks_of_other_trainings(
    name: str, pair: Pair, tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    _compared(name, pair, tiny_model, pictures, tmp_path)


def _sigterm_in_second_step(loop: TrainingLoop) -> None:
    """Only rank 1 gets the signal, in the middle of its second step."""
    compute = loop.runs.objective

    def computed(batch: Any, number: int) -> Tensor:
        if loop.ranks.rank == 1 and number == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return compute(batch, number)

    loop.runs.objective = computed  # type: ignore[assignment]


def test_a_signal_for_one_rank_stops_all_and_a_resume_has_the_same_bits(
    pair: Pair, outputs: list[Path], tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    straight, broken = outputs[1], tmp_path / "broken"
    given = partial(given_for, "text to image", tiny_model, pictures, checkpointing_steps=STEPS)
    found = _both(pair, "text-to-image", _sigterm_in_second_step, **given(broken))
    assert [outcome for outcome, _ in found] == [Outcome(1, STEPS, signal.SIGTERM)] * 2
    assert [step for step, _ in checkpoint.numbered(broken)] == [1]
    resumed = _both(pair, "text-to-image", **given(broken, resume_from_checkpoint="latest"))
    assert not any(watch.warnings for _, watch in resumed)
    last = f"checkpoint-{STEPS}"
    assert trainer.checkpoint_sums(broken / last) == trainer.checkpoint_sums(straight / last)
    keys = ("step", "loss", "lr", "grad_norm")
    rows = [[[row[k] for k in keys] for row in _metrics(o)] for o in (straight, broken)]
    assert rows[0] == rows[1]


def test_a_resume_on_another_number_of_ranks(
    pair: Pair, outputs: list[Path], tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    one, two = outputs
    given = partial(given_for, "text to image", tiny_model, pictures)
    watch, last = trainer.Watch(), f"checkpoint-{STEPS}"
    middle = {"resume_from_checkpoint": str(two / "checkpoint-2"), "train_batch_size": 4}
    trainer.train("text-to-image", watch, **given(tmp_path / "two-one", **middle))
    assert "2 processes then, 1 process now" in watch.warnings[0]
    _assert_near(one / last, tmp_path / "two-one" / last, one / "checkpoint-2")
    middle = {"resume_from_checkpoint": str(one / "checkpoint-2"), "train_batch_size": 2}
    _both(pair, "text-to-image", **given(tmp_path / "one-two", **middle))
    _assert_near(one / last, tmp_path / "one-two" / last, one / "checkpoint-2")
    middle["train_batch_size"] = 1
    with pytest.raises(OptionError, match=r"of all ranks together was 4 and is 1"):
        trainer.train("text-to-image", **given(tmp_path / "other", **middle))


def test_only_rank_0_writes(pair: Pair, tiny_model: Path, tmp_path: Path) -> None:
    given = {
        "model": str(tiny_model),
        "dataset_name": "sprites",
        "output_dir": str(tmp_path),
        "max_train_steps": 1,
        "validation_prompt": ["a ring"],
        "num_validation_images": 1,
        "validation_inference_steps": 1,
    }
    (_, first), (_, second) = _both(pair, "lora", **given)
    assert {"drawing validation pictures", "saving the model"} <= set(first.stages)
    assert not {"drawing validation pictures", "saving the model"} & set(second.stages)
    assert (tmp_path / "validation" / "step-000001.png").is_file()
    assert len(_metrics(tmp_path)) == 1


# ---- what the ranks agree on ---------------------------------------------------------------------


def _scaled(ranks: Ranks) -> tuple[list[float], float, float]:
    """A gradient of rank 1 is not finite: nobody steps."""
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    optimizer = FusedAdamW(model.parameters(), lr=0.1, max_grad_norm=1.0)
    scaler = GradScaler("cpu", init_scale=4.0)
    averaged, norms = ranks.averaged(list(model.parameters())), []
    for worst in (1.0, float("inf")):
        scaler.scale(model(torch.ones(1, 3)).sum() * (worst if ranks.rank else 3.0)).backward()
        averaged.finish()
        update(optimizer, scaler)
        norms.append(float(optimizer.grad_norm))
    return model.weight.flatten().tolist(), scaler.get_scale(), norms[0]


def test_a_gradient_that_is_not_finite_stops_the_step_of_all(pair: Pair) -> None:
    first, second = pair.run(_scaled)
    assert first == second
    weights, scale, norm = first
    assert scale == 2.0
    assert weights == pytest.approx([0.9 - 0.1 * 0.01] * 6, abs=1e-4)  # one step, not two
    assert norm == pytest.approx(2.0 * 8**0.5)  # of the mean of gradients 1 and 3


def _averaged(ranks: Ranks) -> list[Any]:
    """Gradients of two types and of a channels-last weight, in buckets of two or three; one has
    none, and later another one."""
    flat_gradients.BUCKET_BYTES = 64
    shapes = [(3,), (2, 3, 2, 2), (5, 1), (), (7,), (4, 4)]
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    parameters[1].data = parameters[1].data.to(memory_format=torch.channels_last)
    parameters[2].data = parameters[2].data.double()
    found: list[Any] = []
    averaged = ranks.averaged(parameters)
    for idle in (0, 0, 4, 4):
        for place, parameter in enumerate(parameters):
            values = torch.arange(parameter.numel()).reshape(parameter.shape) * (
                1.0 + 2 * ranks.rank
            )
            parameter.grad = None if place == idle else values.to(parameter.dtype)
        averaged.finish()
        grads = [p.grad for p in parameters]
        found.append([None if g is None else g.flatten().tolist() for g in grads])
        assert grads[1] is not None
        assert grads[1].stride() == parameters[1].stride()
        assert all(g is None or g.data_ptr() % 16 == 0 for g in grads)
    assert averaged._sent is not None
    return [found, len(averaged._sent.buckets)]


def test_gradients_are_averaged_in_buckets(pair: Pair) -> None:
    first, second = pair.run(_averaged)
    assert first == second
    rows, buckets = first
    sizes = (3, 12 * 2, 5, 1, 7, 16)
    whole = [[2.0 * i for i in range(size)] for size in sizes]
    for idle, row in zip((0, 0, 4, 4), rows, strict=True):
        assert row == [None if place == idle else values for place, values in enumerate(whole)]
    assert buckets > 2


def _agreements(ranks: Ranks) -> list[Any]:
    found: list[Any] = [
        ranks.most(5 if ranks.rank else 0),
        float(ranks.mean(torch.tensor(2.0 * ranks.rank))),
    ]
    ranks.check_same("sizes", lambda: [1, 2])
    try:
        ranks.check_same("sizes", lambda: ranks.rank)
    except TrainingError as error:
        found.append(str(error))
    try:
        ranks.alone(lambda: [][0])
    except (IndexError, LostRanksError) as error:
        found.append(str(error))
    return found


def test_what_ranks_tell_each_other(pair: Pair) -> None:
    first, second = pair.run(_agreements)
    assert first[:2] == second[:2] == [5, 1.0]
    assert first[2] == second[2]
    assert "ranks do not have the same sizes: 0 on rank 0, 1 on rank 1" in first[2]
    assert (first[3], second[3]) == (
        "list index out of range",
        "rank 0 failed: list index out of range",
    )


def _drifts(loop: TrainingLoop) -> None:
    compute = loop.runs.objective

    def computed(batch: Any, number: int) -> Tensor:
        if loop.ranks.rank == 1 and number == 1:
            with torch.no_grad():
                loop.learner.parameters[0].flatten()[0].nextafter_(torch.tensor(9.0))
        return compute(batch, number)

    loop.runs.objective = computed  # type: ignore[assignment]


def _nan_on_rank_1(loop: TrainingLoop) -> None:
    compute = loop.runs.objective
    worst = float("nan") if loop.ranks.rank == 1 else 1.0
    loop.runs.objective = lambda batch, number: compute(batch, number) * worst  # type: ignore[assignment]


def _raises_on_rank_1(loop: TrainingLoop) -> None:
    compute = loop.runs.objective

    def computed(batch: Any, number: int) -> Tensor:
        if loop.ranks.rank == 1 and number == 1:
            raise TrainingError("a picture is gone")
        return compute(batch, number)

    loop.runs.objective = computed  # type: ignore[assignment]


def _hangs_on_rank_1(loop: TrainingLoop) -> None:
    compute = loop.runs.objective

    def computed(batch: Any, number: int) -> Tensor:
        if loop.ranks.rank == 1 and number == 1:
            time.sleep(20)
        return compute(batch, number)

    loop.runs.objective = computed  # type: ignore[assignment]


FAULTS: dict[str, tuple[Callable[[TrainingLoop], None], tuple[str, str]]] = {
    "raises": (_raises_on_rank_1, ("rank 0 of 2 got no answer.*in step 2", "a picture is gone")),
    "drifts": (_drifts, ("ranks do not have the same weights after step 2", "same weights")),
    "has NaN": (_nan_on_rank_1, ("the loss of step 1 is nan", "the loss of step 1 is nan")),
    "hangs": (
        _hangs_on_rank_1,
        (r"in step 2 \(--rank_timeout 5\): rank 1 began step 2.*all ranks$", "got no answer"),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_rank_that_fails_ends_all(name: str, tiny_model: Path, tmp_path: Path) -> None:
    change, said = FAULTS[name]
    given = {
        "model": str(tiny_model),
        "dataset_name": "sprites",
        "output_dir": str(tmp_path / "out"),
        "max_train_steps": 6,
        "checkpointing_steps": 2,
    }
    pair = Pair(tmp_path, timeout_s=5 if name == "hangs" else 60)
    try:
        found = pair.run(partial(train, task="text-to-image", given=given, change=change))
    finally:
        pair.stop()
    for error, text in zip(found, said, strict=True):
        with pytest.raises(TrainingError, match=text):
            raise error
    if name == "hangs":
        waiting, sleeping = (
            (tmp_path / "stuck/step-2" / f"rank-{n}.txt").read_text() for n in (0, 1)
        )
        assert "step 2: average of gradients has waited" in waiting
        assert "thread MainThread:" in sleeping
        assert "time.sleep(20)" in sleeping
        assert "step 2: agreement of hosts took" in sleeping


# ---- from a shell --------------------------------------------------------------------------------

_FLAGS = "--train_batch_size 2 --resolution 32 --device cpu --checkpointing_steps 2"


def _started(way: str, words: list[str], port: int) -> list[subprocess.Popen[str]]:
    """Start two processes in one of the ways of docs/training.md."""
    python, spoken = [sys.executable], {"text": True, "stderr": subprocess.PIPE}
    mine = os.environ | {"OMP_NUM_THREADS": "1"}
    if way == "num_processes":
        words = [*python, "-m", "strop", *words, "--num_processes", "2"]
        return [subprocess.Popen(words, env=mine, **spoken)]  # type: ignore[call-overload]
    if way == "torchrun":
        run = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
        words = [*python, *run, "-m", "strop", *words]
        return [subprocess.Popen(words, env=mine, **spoken)]  # type: ignore[call-overload]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    more = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if way == "srun":
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
        more = {"SLURM_STEP_ID": "0", "SLURM_NNODES": "1", "SLURM_JOB_ID": str(port)}
    found = []
    for rank in ("0", "1"):
        given = mine | more | dict(zip(names, (rank, "2", rank), strict=True))
        found.append(subprocess.Popen([*python, "-m", "strop", *words], env=given, **spoken))  # type: ignore[call-overload]
    return found


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


@pytest.mark.parametrize("way", ["num_processes", "torchrun", "variables", "srun"])
def test_from_a_shell(way: str, tiny_model: Path, pictures: Path, tmp_path: Path) -> None:
    data = ["--model", str(tiny_model), "--train_data_dir", str(pictures)]
    words = ["train", "lora", *data, *_FLAGS.split(), "--max_train_steps", "2"]
    words += ["--output_dir", str(tmp_path)]
    for process in _started(way, words, _free_port()):
        said = process.communicate(timeout=240)[1]
        assert process.returncode == 0, said
    assert [row["epoch"] for row in _metrics(tmp_path)] == [0, 0]  # five pictures, four a step
    assert checkpoint.load(tmp_path / "checkpoint-2")[1]["ranks"] == 2
    assert (tmp_path / "pytorch_lora_weights.safetensors").is_file()


def test_sigterm_from_a_shell(tiny_model: Path, pictures: Path, tmp_path: Path) -> None:
    data = ["--model", str(tiny_model), "--train_data_dir", str(pictures)]
    words = ["train", "lora", *data, *_FLAGS.split(), "--max_train_steps", "100000"]
    words += ["--output_dir", str(tmp_path), "--checkpoints_total_limit", "2"]
    (process,) = _started("num_processes", words, 0)
    wait_until(lambda: process.poll() is not None or checkpoint.numbered(tmp_path), 200)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=200)[1]
    assert process.returncode == 143, said
    last, folder = checkpoint.numbered(tmp_path)[-1]
    checkpoint.verify(folder)
    assert _metrics(tmp_path)[-1]["step"] == last


# A rank that is killed before its fourth step, in the first attempt.
KILLED = """
import os, signal, sys
from strop.train.loop import TrainingLoop

def killed(loop, reader):
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and loop.ranks.rank == 1 and loop.step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return usual(loop, reader)

usual, TrainingLoop._one = TrainingLoop._one, killed
from strop.cli import app
app()
"""


@pytest.mark.parametrize("way", ["num_processes", "torchrun"])
def test_a_rank_that_is_killed_has_all_go_on_from_the_last_checkpoint(
    way: str, outputs: list[Path], tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    """The end has the bits of a training that nothing has disturbed."""
    given = given_for("text to image", tiny_model, pictures, tmp_path / "out", train_batch_size=2)
    config, script = tmp_path / "given.yaml", tmp_path / "killed.py"
    config.write_text(json.dumps({**trainer.COMMON, **given}))
    script.write_text(KILLED)
    words = [str(script), "train", "text-to-image", "--config", str(config)]
    more = os.environ | {"OMP_NUM_THREADS": "1"}
    if way == "torchrun":
        run = ["torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
        words = ["-m", *run, "--master-port", str(_free_port()), *words]
    else:
        start = f"launch.launch([sys.executable, *{words}], 2, 1, print)"
        words = ["-c", f"import sys; from strop.train import launch; sys.exit({start})"]
    done = subprocess.run(
        [sys.executable, *words], env=more, capture_output=True, text=True, timeout=400, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "all processes were started again, and go on from checkpoint-2" in said
    last = f"checkpoint-{STEPS}"
    ours, theirs = (trainer.checkpoint_sums(o / last) for o in (tmp_path / "out", outputs[1]))
    assert ours == theirs
    rows = [[row["step"] for row in _metrics(o)] for o in (tmp_path / "out", outputs[1])]
    assert rows[0] == rows[1]


# ---- on GPUs -------------------------------------------------------------------------------------

GPU_RUNS = {
    "fp32": {},
    "fp16": {"mixed_precision": "fp16"},
    "compiled": {"compile_unet": True, "mixed_precision": "bf16"},
    "sharded": {"shard_optimizer": True},
    "summed": {"shard_gradients": True},
    "summed compiled": {
        "shard_gradients": True,
        "compile_unet": True,
        "mixed_precision": "bf16",
    },
    "bf16 travels": {"gradient_sync": "bf16"},
    "sharded fp16": {"shard_optimizer": True, "mixed_precision": "fp16"},
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=GPUS) for name in GPU_RUNS])
def test_two_gpus_are_one_of_twice_the_batch(
    name: str, tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    pair = Pair(tmp_path, device="cuda")
    given = partial(
        given_for,
        "text to image",
        tiny_model,
        pictures,
        device="cuda",
        deterministic=True,
        **GPU_RUNS[name],
    )
    outputs = [tmp_path / "one", tmp_path / "two"]
    try:
        trainer.train("text-to-image", **given(outputs[0], train_batch_size=4))
        _both(pair, "text-to-image", **given(outputs[1], train_batch_size=2))
        again = tmp_path / "again"
        middle = {"resume_from_checkpoint": str(outputs[1] / "checkpoint-2")}
        _both(pair, "text-to-image", **given(again, train_batch_size=2, **middle))
    finally:
        pair.stop()
    near = 1e-3 if name in ("fp32", "sharded", "summed") else 0.05
    for alone, together in zip(*map(_metrics, outputs), strict=True):
        assert together["loss"] == pytest.approx(alone["loss"], rel=near)
    last = f"checkpoint-{STEPS}"
    assert trainer.checkpoint_sums(again / last) == trainer.checkpoint_sums(outputs[1] / last)


def test_a_group_that_contradicts_a_flag_is_refused() -> None:
    from strop.train.places import GroupPlace
    from strop.train.ranks import joined

    made = given_settings.make("lora", {"model": "sprites", "num_processes": 3})
    with (
        pytest.raises(OptionError, match="--num_processes 3 in a group of 2 processes"),
        joined(made, GroupPlace(0, 2, 0, "tcp://127.0.0.1:1")),
    ):
        pass
