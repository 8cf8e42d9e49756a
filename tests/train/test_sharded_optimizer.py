"""Each rank keeps the optimizer's state of a share of the weights, and trains what all would."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strop.errors import OptionError
from strop.train import GradScaler, checkpoint, flat_gradients
from strop.train.learner import Learner
from strop.train.loop import Outcome, TrainingLoop
from strop.train.optimizers import FusedAdamW
from strop.train.ranks import Ranks
from strop.train.scaler import update
from strop.train.sharded_parameters import ShardedParameters
from tests.train import trainer
from tests.train.pair import Pair, train

pytestmark = [
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
        reason="needs gloo",
    ),
    pytest.mark.filterwarnings("ignore:__array__ implementation"),  # of diffusers
]
STEPS = 4


# ---- shares of parameters ------------------------------------------------------------------------

SHAPES = [(3,), (2, 3, 2, 2), (5, 1), (), (70,), (4, 4), (9,)]


def _parameters() -> list[nn.Parameter]:
    found = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    found[1].data = found[1].data.to(memory_format=torch.channels_last)
    found[2].data = found[2].data.double()
    return found


def _stepped(ranks: Ranks) -> dict[str, Any]:
    """Gradients of rank 0 count up, those of rank 1 are three times as large; one parameter has
    none, and later another one. What a rank steps becomes its own number plus ten."""
    flat_gradients.BUCKET_BYTES = 128
    parameters = _parameters()
    shards = ShardedParameters(parameters, ranks.rank, ranks.count)
    averaged = ranks.averaged_sharded(shards)
    own = [any(p is mine for mine in shards.own) for p in parameters]
    grads, weights = [], []
    for idle in (0, 0, 5, None):
        for place, p in enumerate(parameters):
            values = torch.arange(p.numel()).reshape(p.shape) * (1.0 + 2 * ranks.rank)
            p.grad = None if place == idle else values.to(p.dtype)
        averaged.finish()
        grads.append([None if p.grad is None else p.grad.flatten().tolist() for p in parameters])
        for p in parameters:
            if p.grad is not None:
                assert p.grad.stride() == p.stride()
                assert p.grad.data_ptr() % 16 == 0
        with torch.no_grad():
            for p in shards.own:
                p.fill_(10 + ranks.rank)
        ranks.gather(shards)
        weights.append([{*p.flatten().tolist()} for p in parameters])
    sizes = [bucket.shape for bucket in shards.buckets]
    return {"own": own, "grads": grads, "weights": weights, "sizes": sizes}


def test_each_rank_has_the_mean_of_what_it_steps(pair: Pair) -> None:
    first, second = pair.run(_stepped)
    assert [a != b for a, b in zip(first["own"], second["own"], strict=True)] == [True] * 7
    assert first["sizes"] == second["sizes"]
    assert len(first["sizes"]) > 2
    numels = [torch.Size(shape).numel() for shape in SHAPES]
    for rank, found in enumerate((first, second)):
        for idle, row in zip((0, 0, 5, None), found["grads"], strict=True):
            assert row == [
                [2.0 * i for i in range(numel)] if is_own and place != idle else None
                for place, (numel, is_own) in enumerate(zip(numels, found["own"], strict=True))
            ]
        for row in found["weights"]:
            assert row == [{10.0 + (rank if mine else 1 - rank)} for mine in found["own"]]


def test_shares_are_even() -> None:
    sizes = 5 * [1280 * 1280, 1280, 320, 2560 * 1280, 640 * 640, 77, 1280 * 1280, 5]
    parameters = [nn.Parameter(torch.empty(size, device="meta")) for size in sizes]
    counts = [
        sum(p.numel() for p in ShardedParameters(parameters, rank, 2).own) for rank in range(2)
    ]
    assert sum(counts) == sum(sizes)
    assert max(counts) < 1.03 * min(counts)


def _clipped(ranks: Ranks) -> dict[str, Any]:
    """Parameters of both ranks count for the norm, and a gradient that is not finite on one rank
    stops the step of all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    shards = ShardedParameters(list(model.parameters()), ranks.rank, ranks.count)
    optimizer = FusedAdamW(
        shards.own, lr=0.1, max_grad_norm=0.5, process_group=torch.distributed.group.WORLD
    )
    averaged = ranks.averaged_sharded(shards)
    scaler, norms, weights = GradScaler("cpu", init_scale=4.0), [], []
    for worst in (1.0, float("inf")):
        loss = model(torch.ones(1, 3)).square().sum() * (worst if ranks.rank else 1.0)
        scaler.scale(loss).backward()
        averaged.finish()
        update(optimizer, scaler)
        ranks.gather(shards)
        norms.append(float(optimizer.grad_norm))
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return {"norm": norms[0], "weights": weights, "scale": scaler.get_scale()}


def test_norm_and_skipping_are_those_of_all(pair: Pair) -> None:
    first, second = pair.run(_clipped)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).square().sum().backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    for found in (first, second):
        assert found["norm"] == pytest.approx(norm, rel=1e-6)
        assert found["scale"] == 2.0
        assert torch.allclose(found["weights"][0], expected, rtol=1e-6, atol=1e-7)
        assert torch.equal(*found["weights"])


# ---- whole trainings -----------------------------------------------------------------------------


def _given(model: Path, output: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "dataset_name": "sprites",
        "output_dir": str(output),
        "max_train_steps": STEPS,
        "checkpointing_steps": 2,
        "train_batch_size": 2,
        "use_ema": True,
        "max_grad_norm": 0.05,
        "gradient_accumulation_steps": 2,
        "validation_prompt": ["a ring"],
        "num_validation_images": 1,
        "validation_inference_steps": 1,
        **more,
    }


def _count_states(loop: TrainingLoop) -> None:
    """Have each rank count the elements of its own states when a checkpoint is collected."""
    usual = Learner.states

    def states(learner: Learner, *kinds: Any) -> dict[str, Tensor]:
        own = learner.steps.optimizer.state.values()
        held = sum(t.numel() for state in own for t in state.values() if isinstance(t, Tensor))
        loop.watch.stages.append(f"holds {held}")  # type: ignore[attr-defined]
        return usual(learner, *kinds)

    loop.learner.states = partial(states, loop.learner)  # type: ignore[method-assign]


def _both(pair: Pair, task: str, **given: Any) -> list[trainer.Watch]:
    found = pair.run(partial(train, task=task, given=given, change=_count_states))
    for one in found:
        if isinstance(one, Exception):
            raise one
    assert [outcome for outcome, _ in found] == [Outcome(STEPS, STEPS)] * 2
    return [watch for _, watch in found]


def _held(watch: trainer.Watch) -> int:
    return int(next(s for s in reversed(watch.stages) if s.startswith("holds ")).split()[1])


def _assert_near(one: Path, two: Path) -> None:
    ours, theirs = trainer.checkpoint_tensors(one), trainer.checkpoint_tensors(two)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if value.is_floating_point():  # 8-bit codes may round to their neighbour
            gap = float((value - theirs[name]).double().norm())
            assert gap <= 1e-4 * float(value.double().norm()) + 1e-7, name


@pytest.mark.parametrize("more", [{}, {"use_8bit_adam": True}], ids=["fp32", "8 bits"])
def test_a_training_is_that_of_whole_states(
    more: dict[str, Any], pair: Pair, tiny_model: Path, tmp_path: Path
) -> None:
    task = "text-to-image" if not more else "lora"
    whole = _both(pair, task, **_given(tiny_model, tmp_path / "whole", **more))
    given = partial(_given, tiny_model, shard_optimizer=True, **more)
    cut = _both(pair, task, **given(tmp_path / "cut"))
    last = f"checkpoint-{STEPS}"
    _assert_near(tmp_path / "whole" / last, tmp_path / "cut" / last)
    counts, all_of_them = [_held(watch) for watch in cut], _held(whole[0])
    assert sum(counts) == all_of_them
    assert max(counts) < 0.52 * all_of_them
    middle = {"resume_from_checkpoint": str(tmp_path / "cut" / "checkpoint-2")}
    again = _both(pair, task, **given(tmp_path / "again", **middle))
    assert not any("not to the bit" in text for watch in again for text in watch.warnings)
    paths = [tmp_path / name / last for name in ("cut", "again")]
    assert trainer.checkpoint_sums(paths[0]) == trainer.checkpoint_sums(paths[1])


def test_a_checkpoint_goes_on_anywhere(pair: Pair, tiny_model: Path, tmp_path: Path) -> None:
    """What two ranks with shares have saved is taken over by one process, and by two without."""
    given = partial(_given, tiny_model)
    _both(pair, "lora", **given(tmp_path / "cut", shard_optimizer=True))
    middle = {"resume_from_checkpoint": str(tmp_path / "cut" / "checkpoint-2")}
    whole = _both(pair, "lora", **given(tmp_path / "whole", **middle))
    assert "shard_optimizer True then, False now" in whole[0].warnings[-1]
    alone, watch = {**middle, "train_batch_size": 4}, trainer.Watch()
    trainer.train("lora", watch, **given(tmp_path / "one", **alone, shard_optimizer=True))
    assert "2 processes then, 1 process now" in watch.warnings[-1]
    last = f"checkpoint-{STEPS}"
    for name in ("whole", "one"):
        _assert_near(tmp_path / "cut" / last, tmp_path / name / last)
    assert checkpoint.load(tmp_path / "cut" / last)[1]["shard_optimizer"] is True


MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "8 bits and cut": ("text-to-image", {"use_8bit_adam": True, "shard_optimizer": True}),
    "plain": ("text-to-image", {}),
    "adapters and cut": ("lora", {"shard_optimizer": True}),
    "cut": ("text-to-image", {"shard_optimizer": True}),
    "8 bits": ("text-to-image", {"use_8bit_adam": True}),
    "adapters": ("lora", {}),
}


def _save_again(loop: TrainingLoop) -> None:
    """Save what was loaded, before any step."""
    loop.saved = 0
    loop._save()
    loop.saver.wait()


@pytest.mark.parametrize("name", MODES)
def test_a_checkpoint_has_the_same_bits_on_any_number_of_ranks(
    name: str, pair: Pair, tiny_model: Path, tmp_path: Path
) -> None:
    """One process saves, two load that and save it, and one loads what they have saved."""
    task, more = MODES[name]
    given = partial(_given, tiny_model, max_train_steps=2, validation_prompt=[], **more)
    folders = [tmp_path / "one", tmp_path / "two", tmp_path / "back"]
    trainer.train(task, **given(folders[0], train_batch_size=4))
    middle = {"resume_from_checkpoint": str(folders[0] / "checkpoint-2")}
    work = partial(train, task=task, given=given(folders[1], **middle), change=_save_again)
    for found in pair.run(work):
        assert not isinstance(found, Exception), found
    middle = {"resume_from_checkpoint": str(folders[1] / "checkpoint-2"), "train_batch_size": 4}
    watch = trainer.Watch()
    loop = TrainingLoop(trainer.holding(task, watch, **given(folders[2], **middle)), watch)
    _save_again(loop)
    assert loop.run() == Outcome(2, 2)
    first, *others = (trainer.checkpoint_tensors(f / "checkpoint-2") for f in folders)
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.equal(other[key], value) for key, value in first.items())
    is_cut = (folders[1] / "checkpoint-2" / "optimizer-1.safetensors").is_file()
    assert is_cut == ("shard_optimizer" in more)
    assert any("_codes" in key for key in first) == (more.get("use_8bit_adam", False))


def test_fewer_weights_than_ranks() -> None:
    from strop.train.learner import _sharded

    with pytest.raises(OptionError, match="1 weight cannot be shared out among 2 processes"):
        _sharded([nn.Parameter(torch.zeros(3))], Ranks(0, 2))
