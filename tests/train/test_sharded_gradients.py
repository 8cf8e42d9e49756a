"""Gradients are summed into the shares of ranks within the backward pass, and no full set of them
is kept (ZeRO-2)."""

from __future__ import annotations

import time
import weakref
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint as recomputed

import strop
from strop.bench.train_rows import LADDER
from strop.errors import OptionError, TrainingError
from strop.train import flat_gradients, given_settings
from strop.train.loop import Outcome, TrainingLoop
from strop.train.optimizers import FusedAdamW
from strop.train.ranks import Ranks
from strop.train.sharded_gradients import ShardedGradients
from strop.train.sharded_parameters import IN_FLIGHT, ShardedBucket, ShardedParameters
from tests.train import trainer
from tests.train.pair import Pair, train

pytestmark = [
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
        reason="needs gloo",
    ),
    pytest.mark.filterwarnings("ignore:__array__ implementation"),  # of diffusers
]
STEPS, WIDTH, DEPTH, PARTS = 3, 16, 64, 2
WEIGHT = WIDTH * WIDTH * 4  # bytes
BUCKETS_BESIDE = IN_FLIGHT + 4


class Net(nn.Module):
    """The last layers are registered in the middle, and one is not used in the first pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.early = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH // 2))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.late = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH // 2))
        self.side = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, uses_side: bool) -> Tensor:
        for layer in (*self.early, *self.late):
            x = torch.tanh(layer(x)) + x
        return self.last(x) + (torch.tanh(self.side(x)) if uses_side else 0.0)


def loss_of(net: nn.Module, step: int, part: int, rank: int) -> Tensor:
    source = torch.Generator().manual_seed(step * 100 + part * 10 + rank)
    x = torch.randn(5, WIDTH, generator=source)
    loss: Tensor = net(x, part > 0).square().mean() / PARTS
    return loss


class Counted:
    """Count the bytes of gradients and of the memory of buckets that live when a gradient comes.

    A thread of gloo lets go of a bucket some time after ``wait`` has returned. So a count above
    ``allowed`` is taken again for up to ten seconds.
    """

    def __init__(self, net: nn.Module, patch: pytest.MonkeyPatch) -> None:
        self.most, self.allowed, self._parameters = 0, 0, list(net.parameters())
        self._rooms: list[weakref.ref[Tensor]] = []
        made = ShardedBucket.room

        def room(bucket: ShardedBucket) -> Any:
            found = made(bucket)
            self._rooms.append(weakref.ref(found.memory))
            return found

        patch.setattr(ShardedBucket, "room", room)
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._look)

    def _look(self, _: Tensor) -> None:
        end = time.monotonic() + 10
        while (count := self._count()) > self.allowed and time.monotonic() < end:
            time.sleep(0.001)
        self.most = max(self.most, count)

    def _count(self) -> int:
        grads = (p.grad for p in self._parameters)
        rooms = (ref() for ref in self._rooms)
        tensors = [t for t in (*grads, *rooms) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)


class CountedStorage:
    """Count the memory of buckets, and of gradients that a compiled graph has handed on, whoever
    holds it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.most, self.allowed = 0, 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        room, put = ShardedBucket.room, ShardedGradients._put

        def made_room(bucket: ShardedBucket) -> Any:
            found = room(bucket)
            self._note(found.memory)
            return found

        def has_put(summed: ShardedGradients, parameter: Tensor, gradient: Tensor) -> None:
            self._note(gradient)
            put(summed, parameter, gradient)
            self._look()

        patch.setattr(ShardedBucket, "room", made_room)
        patch.setattr(ShardedGradients, "_put", has_put)

    def _note(self, tensor: Tensor) -> None:
        held = StorageWeakRef(tensor.untyped_storage())
        self._held[held.cdata] = held, tensor.untyped_storage().nbytes()

    def _look(self) -> None:
        end = time.monotonic() + 10
        while (count := self._count()) > self.allowed and time.monotonic() < end:
            time.sleep(0.001)
        self.most = max(self.most, count)

    def _count(self) -> int:
        return sum(size for held, size in self._held.values() if not held.expired())


def _stepped(ranks: Ranks, compiles: bool = False) -> dict[str, Any]:
    flat_gradients.BUCKET_BYTES = 4 * WEIGHT
    net = Net()
    parameters = list(net.parameters())
    if compiles:
        strop.optimize(net, train=True)
    with pytest.MonkeyPatch.context() as patch:
        counted = CountedStorage(patch) if compiles else Counted(net, patch)
        shards = ShardedParameters(parameters, ranks.rank, ranks.count, keeps_rooms=False)
        bucket = max(b.shape[0] * b.shape[1] * 4 for b in shards.buckets)
        beside = BUCKETS_BESIDE * bucket
        counted.allowed = beside + WEIGHT
        summed = ranks.summed(shards)
        optimizer = FusedAdamW(
            shards.own, lr=0.01, max_grad_norm=0.1, process_group=torch.distributed.group.WORLD
        )
        norms, grads = [], []
        for step in range(STEPS):
            for part in range(PARTS):
                loss = loss_of(net, step, part, ranks.rank)
                with summed.backward(loss) if compiles else nullcontext():
                    loss.backward()
                summed.end_pass()
                assert all(p.grad is None for p in parameters), "between passes none is kept"
            ranks.finish(summed)
            mine = {id(p) for p in shards.own}
            assert [p.grad is not None for p in parameters] == [id(p) in mine for p in parameters]
            grads.append({n: p.grad.clone() for n, p in net.named_parameters() if id(p) in mine})
            optimizer.step()
            optimizer.zero_grad()
            ranks.gather(shards)
            norms.append(float(optimizer.grad_norm))
    return {
        "weights": {n: p.detach() for n, p in net.named_parameters()},
        "grads": grads,
        "norms": norms,
        "most": counted.most,
        "peak": summed.peak_bytes,
        "own": sum(b.own.numel() * 4 for b in shards.buckets),
        "beside": beside,
        "order": summed._order,
        "all": sum(p.numel() * 4 for p in parameters),
    }


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_shares_are_summed_within_the_backward_pass(pair: Pair, compiles: bool) -> None:
    """Two ranks and two passes a step are one process that sees all; a parameter has no gradient in
    one of the passes."""
    found = pair.run(partial(_stepped, compiles=compiles))
    net, start = Net(), Net().state_dict()
    if compiles:  # Adam's steps are whole ones even where all of a gradient is rounding
        strop.optimize(net, train=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(STEPS):
        for part in range(PARTS):
            for rank in range(2):
                (loss_of(net, step, part, rank) / 2).backward()
        for one in found:
            for name, grad in one["grads"][step].items():
                expected = net.get_parameter(name).grad
                assert (grad - expected).norm() < 1e-4 * expected.norm(), (step, name)
        names = [{*one["grads"][step]} for one in found]
        assert not names[0] & names[1]
        assert names[0] | names[1] == {name for name, _ in net.named_parameters()}
        norm = float(nn.utils.clip_grad_norm_(net.parameters(), 0.1))
        assert [one["norms"][step] for one in found] == pytest.approx([norm, norm], rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    for name, weight in net.named_parameters():
        assert torch.equal(found[0]["weights"][name], found[1]["weights"][name])
        gap = (found[0]["weights"][name] - weight).norm()
        assert gap < 1e-3 * (weight - start[name]).norm(), name


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_no_full_set_of_gradients_is_kept(pair: Pair, compiles: bool) -> None:
    """What lives beside a rank's share is two buckets on their way, the halves that are received of
    them, the one that is filled, and two that wait: for the last layer's neighbours, which are
    early ones, and for the layer that is not used."""
    for found in pair.run(partial(_stepped, compiles=compiles)):
        assert found["own"] <= 0.55 * found["all"]
        beside = found["beside"]
        assert found["most"] <= beside + WEIGHT
        assert found["peak"] <= found["own"] + beside
        assert beside + WEIGHT < 0.4 * found["all"], "else there is no test here"
        order = found["order"]
        assert sorted(order) == list(range(len(order)))
        assert order != sorted(order), "the order is that of the pass, not of the modules"


def _reentrant(ranks: Ranks) -> str:
    """A checkpoint that is differentiated by itself gives a weight two gradients in a pass."""
    layer = nn.Linear(4, 4)
    shards = ShardedParameters(list(layer.parameters()), ranks.rank, ranks.count, keeps_rooms=False)
    ranks.summed(shards)
    x = torch.randn(2, 4, requires_grad=True)
    for _ in range(2):
        x = recomputed(layer, x, use_reentrant=True)
    try:
        x.sum().backward()
    except TrainingError as error:
        return str(error)
    return "nothing was said"


def _in_parts(ranks: Ranks) -> tuple[list[list[Tensor | None]], int]:
    """A penalty in eager adds to one weight, and a second call of a compiled layer to another: what
    a graph computes of these is not all."""
    flat_gradients.BUCKET_BYTES = 4 * WEIGHT
    net, taken = _layers(compiles=True), list[Tensor]()
    shards = ShardedParameters(list(net.parameters()), ranks.rank, ranks.count, keeps_rooms=False)
    summed, found = ranks.summed(shards), []
    take = summed.take
    summed.take = lambda leaf, gradient: taken.append(leaf) or take(leaf, gradient)  # type: ignore[method-assign, func-returns-value]
    for step in range(2):
        loss = _penalised(net, step, ranks.rank)
        with summed.backward(loss):
            loss.backward()
        summed.end_pass()
        ranks.finish(summed)
        found.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
        net.zero_grad()
    return found, len(taken)


def _layers(compiles: bool) -> nn.ModuleList:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    for layer in layers[:2] if compiles else ():
        strop.optimize(layer, train=True)
    return layers


def _penalised(layers: nn.ModuleList, step: int, rank: int) -> Tensor:
    once, twice, plain = layers
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    found: Tensor = plain(twice(torch.tanh(twice(once(x))))).square().mean()
    return found + once.weight.square().sum()


def test_of_a_gradient_in_parts_the_sum_is_taken(pair: Pair) -> None:
    first, second = pair.run(_in_parts)
    assert first[1] == second[1] == 2, "one bias has all of its gradient from one graph, in a step"
    for step, (mine, theirs) in enumerate(zip(first[0], second[0], strict=True)):
        layers = _layers(compiles=False)
        losses = [_penalised(layers, step, rank) for rank in range(2)]
        expected = torch.autograd.grad(sum(losses) / 2, list(layers.parameters()))  # type: ignore[arg-type]
        for a, b, right in zip(mine, theirs, expected, strict=True):
            assert (a is None) != (b is None)
            torch.testing.assert_close(b if a is None else a, right, rtol=1e-4, atol=1e-6)


def test_two_gradients_in_a_pass_are_refused(pair: Pair) -> None:
    for said in pair.run(_reentrant):
        assert "leave out" in said or "without --shard_gradients" in said


def test_settings() -> None:
    made = given_settings.make("lora", {"model": "sprites", "shard_gradients": True})
    assert made.shards_states
    with pytest.raises(OptionError, match="shard_gradients is built for Strop's AdamW"):
        given_settings.make(
            "lora", {"model": "sprites", "shard_gradients": True, "optimizer": "lion"}
        )
    with pytest.raises(OptionError, match="gradient_sync bf16 is built for gradients that all"):
        given_settings.make(
            "lora", {"model": "sprites", "shard_gradients": True, "gradient_sync": "bf16"}
        )
    assert next(c for c in LADDER.contenders if c.name == "zero2").setup.parallel == "zero2"


# ---- whole trainings -----------------------------------------------------------------------------


def _given(model: Path, output: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "dataset_name": "sprites",
        "output_dir": str(output),
        "max_train_steps": 2,
        "checkpointing_steps": 1,
        "train_batch_size": 2,
        "use_ema": True,
        "max_grad_norm": 0.05,
        **more,
    }


def _both(pair: Pair, **given: Any) -> list[trainer.Watch]:
    found = pair.run(partial(train, task="text-to-image", given=given, change=_small_buckets))
    for one in found:
        if isinstance(one, Exception):
            raise one
    assert [outcome for outcome, _ in found] == [Outcome(2, 2)] * 2
    return [watch for _, watch in found]


def _small_buckets(loop: TrainingLoop) -> None:
    assert loop.learner.is_sharded
    if loop.settings.shard_gradients:
        summed = loop.learner._summed
        assert isinstance(summed, ShardedGradients)
        assert not any(bucket.kept for bucket in summed._shards.buckets)


def _assert_near(one: Path, two: Path) -> None:
    ours, theirs = trainer.checkpoint_tensors(one), trainer.checkpoint_tensors(two)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        gap = float((value - theirs[name]).double().norm())
        assert gap <= 1e-4 * float(value.double().norm()) + 1e-7, name


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_a_training_has_the_bits_of_cut_states(
    pair: Pair, tiny_model: Path, tmp_path: Path, compiles: bool
) -> None:
    """With one pass a step the sums are the same. Each goes on from a checkpoint of the other, and
    says that the sums may differ."""
    given = partial(_given, tiny_model, compile_unet=compiles)
    _both(pair, **given(tmp_path / "states", shard_optimizer=True))
    watches = _both(pair, **given(tmp_path / "gradients", shard_gradients=True))
    assert not any("to the bit" in text for watch in watches for text in watch.warnings)
    middle = {"resume_from_checkpoint": str(tmp_path / "states" / "checkpoint-1")}
    watches = _both(pair, **given(tmp_path / "again", shard_gradients=True, **middle))
    assert "shard_gradients False then, True now" in watches[0].warnings[-1]
    states, gradients, again = (
        trainer.checkpoint_sums(tmp_path / name / "checkpoint-2")
        for name in ("states", "gradients", "again")
    )
    assert "optimizer-1.safetensors" in gradients
    assert states == gradients == again


def test_two_ranks_train_as_one(pair: Pair, tiny_model: Path, tmp_path: Path) -> None:
    """With two passes a step."""
    given = partial(_given, tiny_model, gradient_accumulation_steps=2)
    _both(pair, **given(tmp_path / "two", shard_gradients=True))
    trainer.train("text-to-image", **given(tmp_path / "one", train_batch_size=4))
    _assert_near(tmp_path / "one" / "checkpoint-2", tmp_path / "two" / "checkpoint-2")
