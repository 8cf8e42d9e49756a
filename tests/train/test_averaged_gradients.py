"""Gradients of a compiled module are averaged over ranks while its backward pass goes on."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.errors import TrainingError
from strop.train import compile_step, flat_gradients
from strop.train.optimizers import FusedAdamW
from strop.train.ranks import Ranks
from strop.train.sharded_parameters import ShardedParameters
from tests.train.pair import Pair

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="needs gloo",
)
WIDTH, DEPTH = 16, 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = Pair(tmp_path_factory.mktemp("pair"))
    yield found
    found.stop()


def _rows(rank: int, step: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def _loss(net: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = net(x).square().mean()
    return found


def _small_buckets() -> Any:
    patch = pytest.MonkeyPatch()
    patch.setattr(flat_gradients, "BUCKET_BYTES", 2 * WIDTH * WIDTH * 4)
    return patch


def _trained(ranks: Ranks) -> tuple[list[list[Tensor]], list[int], int]:
    """Gradients of three steps, of sizes that differ between ranks, and what was sent early."""
    patch, sends = _small_buckets(), list[int]()
    net = Net()
    strop.optimize(net, train=True)
    averaged = ranks.averaged(list(net.parameters()))
    found = []
    for step in range(3):
        with averaged.backward():
            _loss(net, _rows(ranks.rank, step, 4 + 2 * ranks.rank * (step == 2))).backward()
            sends.append(averaged.num_sent)
        written = [p.grad.data_ptr() for p in net.parameters() if p.grad is not None]
        averaged.finish()
        means = [p.grad.data_ptr() for p in net.parameters() if p.grad is not None]
        assert (written == means) == (step > 0), "kernels write into buckets from the second step"
        found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
        net.zero_grad()
    patch.undo()
    return found, sends, averaged.num_early


def test_buckets_are_sent_within_the_backward_pass(pair: Pair) -> None:
    first, second = pair.run(_trained)
    for (found, counts, early), other in zip((first, second), (second, first), strict=True):
        assert early == DEPTH // 2
        assert counts == [0, early, early], "the first pass is watched, in the others all are sent"
        for mine, theirs in zip(found, other[0], strict=True):
            assert all(map(torch.equal, mine, theirs))
    for step, grads in enumerate(first[0]):
        net = Net()
        rows = (4, 6 if step == 2 else 4)
        losses = [_loss(net, _rows(rank, step, rows[rank])) for rank in range(2)]
        expected = torch.autograd.grad(sum(losses) / 2, list(net.parameters()))  # type: ignore[arg-type]
        for grad, right in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad, right, rtol=1e-5, atol=1e-7)


def _narrow(ranks: Ranks, compiles: bool) -> tuple[list[list[Tensor]], list[int]]:
    """What two steps give where gradients travel in bf16, and how many buckets were sent early."""
    patch, sends, net = _small_buckets(), list[int](), Net()
    if compiles:
        strop.optimize(net, train=True)
    averaged, found = ranks.averaged(list(net.parameters()), torch.bfloat16), []
    for step in range(2):
        with averaged.backward():
            _loss(net, _rows(ranks.rank, step)).backward()
            sends.append(averaged.num_sent)
        averaged.finish()
        found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
        net.zero_grad()
    patch.undo()
    return found, sends


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_gradients_travel_in_bf16(pair: Pair, compiles: bool) -> None:
    """What comes is the mean of gradients that each rank has rounded, in fp32 and on both alike."""
    first, second = pair.run(partial(_narrow, compiles=compiles))
    assert first[1] == second[1] == [0, DEPTH // 2]
    for step, (mine, theirs) in enumerate(zip(first[0], second[0], strict=True)):
        net, parts = Net(), []
        for rank in range(2):
            grads = torch.autograd.grad(_loss(net, _rows(rank, step)), list(net.parameters()))
            parts.append([g.bfloat16() for g in grads])
        for a, b, one, other in zip(mine, theirs, *parts, strict=True):
            assert a.dtype == torch.float32
            assert torch.equal(a, b)
            assert torch.equal(a, a.bfloat16().float())
            mean = ((one + other) / 2).float()
            torch.testing.assert_close(a, mean, rtol=2**-7, atol=float(mean.abs().max()) * 2**-7)


def _shared_out(ranks: Ranks) -> tuple[list[list[Tensor | None]], list[int]]:
    """The same, where each rank gets the gradients that it steps alone."""
    patch, sends = _small_buckets(), list[int]()
    net = Net()
    strop.optimize(net, train=True)
    shards = ShardedParameters(list(net.parameters()), ranks.rank, ranks.count)
    averaged, found = ranks.averaged_sharded(shards), []
    for step in range(3):
        with averaged.backward():
            _loss(net, _rows(ranks.rank, step)).backward()
            sends.append(averaged.num_sent)
        averaged.finish()
        found.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
        net.zero_grad()
    patch.undo()
    assert len(shards.buckets) == averaged.num_early
    return found, sends


def test_shares_are_sent_within_the_backward_pass(pair: Pair) -> None:
    first, second = pair.run(_shared_out)
    assert first[1] == second[1] == [0, DEPTH // 2, DEPTH // 2]
    for step, (mine, theirs) in enumerate(zip(first[0], second[0], strict=True)):
        net = Net()
        losses = [_loss(net, _rows(rank, step)) for rank in range(2)]
        expected = torch.autograd.grad(sum(losses) / 2, list(net.parameters()))  # type: ignore[arg-type]
        for a, b, right in zip(mine, theirs, expected, strict=True):
            assert (a is None) != (b is None)
            torch.testing.assert_close(b if a is None else a, right, rtol=1e-5, atol=1e-7)


def _changing(ranks: Ranks) -> list[Any]:
    """What a step does beside the compiled pass: nothing, then a penalty of weights in eager."""
    patch = _small_buckets()
    net, found = Net(), list[Any]()
    strop.optimize(net, train=True)
    weight = net.layers[0].weight
    for penalties in ((False, False, True), (True, True)):
        averaged = ranks.averaged(list(net.parameters()))
        for step, has_penalty in enumerate(penalties):
            with averaged.backward():
                loss = _loss(net, _rows(ranks.rank, step))
                (
                    loss + weight.square().sum() * (1 + ranks.rank) if has_penalty else loss
                ).backward()
            try:
                averaged.finish()
                found.append(None if weight.grad is None else weight.grad.clone())
            except TrainingError as error:
                found.append(str(error))
            net.zero_grad()
    patch.undo()
    return found


def test_what_else_adds_to_a_gradient_is_seen(pair: Pair) -> None:
    """In the first step it is known for good; in a later one, behind the sum, it is an error."""
    first, second = pair.run(_changing)
    assert "1 gradient had already been averaged" in first[2]
    assert first[2] == second[2]
    for place in (0, 1, 3, 4):
        assert torch.equal(first[place], second[place])
    net = Net()
    weight = net.layers[0].weight
    for place, step in ((3, 0), (4, 1)):
        losses = [_loss(net, _rows(rank, step)) for rank in range(2)]
        whole = sum(losses) / 2 + weight.square().sum() * 1.5
        (expected,) = torch.autograd.grad(whole, [weight])  # type: ignore[arg-type]
        torch.testing.assert_close(first[place], expected, rtol=1e-5, atol=1e-6)


def _twice(ranks: Ranks) -> tuple[list[Tensor], list[int]]:
    """A module that is called twice in a step, and one whose gradients have hooks."""
    patch = _small_buckets()
    net = Net()
    strop.optimize(net, train=True)
    net.layers[1].weight.register_hook(lambda grad: grad * 2)
    averaged = ranks.averaged(list(net.parameters()))
    found, sends = list[Tensor](), list[int]()
    for step in range(3):
        with averaged.backward():
            (_loss(net, _rows(ranks.rank, step)) + _loss(net, _rows(ranks.rank, 7))).backward()
            sends.append(averaged.num_sent)
        averaged.finish()
        found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        net.zero_grad()
    patch.undo()
    return found, sends


def test_gradients_of_several_graphs_wait_for_all(pair: Pair) -> None:
    """torch tells of them when it has put them together."""
    (first, sends), (second, other) = pair.run(_twice)
    assert sends == other == [0, 4, 4], "in the order of torch, which makes four buckets"
    assert all(map(torch.equal, first, second))
    net = Net()
    net.layers[1].weight.register_hook(lambda grad: grad * 2)
    for step in range(3):
        net.zero_grad()
        for rank in range(2):
            ((_loss(net, _rows(rank, step)) + _loss(net, _rows(rank, 7))) / 2).backward()
        for mine, parameter in zip(first[2 * DEPTH * step :], net.parameters(), strict=False):
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-5, atol=1e-6)


def _in_eager(ranks: Ranks) -> tuple[list[Tensor], list[int]]:
    """Buckets that had been sent when the gradient of each layer was put together."""
    patch, sends = _small_buckets(), list[int]()
    net = Net()
    averaged = ranks.averaged(list(net.parameters()))
    for step in range(2):
        net.zero_grad()
        if step:
            net.layers[1].weight.register_post_accumulate_grad_hook(
                lambda weight: sends.append(averaged.num_sent)
            )
        with averaged.backward():
            _loss(net, _rows(ranks.rank, step)).backward()
            sends.append(averaged.num_sent)
        averaged.finish()
    patch.undo()
    return [p.grad for p in net.parameters() if p.grad is not None], sends


def test_in_eager_buckets_are_sent_within_the_pass_too(pair: Pair) -> None:
    (first, sends), (second, other) = pair.run(_in_eager)
    assert sends == other == [0, 2, 3], "the first two layers are last, and share a bucket"
    assert all(map(torch.equal, first, second))
    net = Net()
    losses = [_loss(net, _rows(rank, 1)) for rank in range(2)]
    expected = torch.autograd.grad(sum(losses) / 2, list(net.parameters()))  # type: ignore[arg-type]
    for grad, right in zip(first, expected, strict=True):
        torch.testing.assert_close(grad, right, rtol=1e-5, atol=1e-7)


def _idle(ranks: Ranks) -> list[Any]:
    """A weight that has no gradient any more, though its bucket was to be sent early."""
    patch = _small_buckets()
    net, found = Net(), list[Any]()
    strop.optimize(net, train=True)
    averaged = ranks.averaged(list(net.parameters()))
    for step in range(4):
        net.layers[2].requires_grad_(step < 2)
        with averaged.backward():
            _loss(net, _rows(ranks.rank, step)).backward()
        averaged.finish()
        found.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
        net.zero_grad()
    patch.undo()
    return found


def test_a_pass_with_other_gradients_is_averaged_anew(pair: Pair) -> None:
    first, second = pair.run(_idle)
    for step, (mine, theirs) in enumerate(zip(first, second, strict=True)):
        idle = {4, 5} if step >= 2 else set()
        assert {place for place, grad in enumerate(mine) if grad is None} == idle
        net = Net()
        losses = [_loss(net, _rows(rank, step)) for rank in range(2)]
        expected = torch.autograd.grad(sum(losses) / 2, list(net.parameters()))  # type: ignore[arg-type]
        for place, right in enumerate(expected):
            if place not in idle:
                assert torch.equal(mine[place], theirs[place])
                torch.testing.assert_close(mine[place], right, rtol=1e-5, atol=1e-7)


# ---- compile_step ------------------------------------------------------------------------------


def _stepped(ranks: Ranks, accumulate: int, grouped: bool = True) -> list[Tensor]:
    """Weights after four updates, of half of each batch, or of the whole by one process."""
    net = Net()
    strop.optimize(net, train=True)
    optimizer = FusedAdamW(net.parameters(), lr=1e-2, max_grad_norm=0.1)
    group = torch.distributed.group.WORLD if grouped else None
    step = compile_step(
        lambda x: _loss(net, x), optimizer, accumulate=accumulate, process_group=group
    )
    for number in range(4 * accumulate):
        rows = [_rows(rank, number) for rank in range(2)]
        step(rows[ranks.rank] if grouped else torch.cat(rows))
    return [p.detach().clone() for p in net.parameters()]


def _stepped_in_parts(ranks: Ranks) -> list[Tensor]:
    return _stepped(ranks, 2)


def _stepped_at_once(ranks: Ranks) -> list[Tensor]:
    return _stepped(ranks, 1)


@pytest.mark.parametrize(
    ("work", "accumulate"), [(_stepped_at_once, 1), (_stepped_in_parts, 2)], ids=["1", "2"]
)
def test_a_step_of_two_ranks_is_that_of_one(pair: Pair, work: Any, accumulate: int) -> None:
    first, second = pair.run(work)
    assert all(map(torch.equal, first, second))
    whole = _stepped(Ranks(), accumulate, grouped=False)
    for mine, right in zip(first, whole, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


def _uneven(ranks: Ranks) -> str:
    net = Net()
    with torch.no_grad():
        net.layers[3].bias[2] += ranks.rank
    optimizer = FusedAdamW(net.parameters(), lr=1e-2)
    step = compile_step(
        lambda x: _loss(net, x), optimizer, process_group=torch.distributed.group.WORLD
    )
    with pytest.raises(TrainingError) as caught:
        step(_rows(0, 0))
    return str(caught.value)


def test_other_weights_on_a_rank_are_refused(pair: Pair) -> None:
    first, second = pair.run(_uneven)
    assert first == second
    assert "ranks 0 and 1 of the process group do not begin with the same weights" in first


# ---- on two GPUs -------------------------------------------------------------------------------


def _in_a_graph(ranks: Ranks) -> dict[str, Any]:
    """Steps plain and from a graph, with the sums over ranks in it."""
    patch, device = _small_buckets(), torch.device("cuda", ranks.rank)
    found: dict[str, Any] = {}
    for graph in (False, True):
        net = Net().to(device)
        strop.optimize(net, train=True)
        optimizer = FusedAdamW(net.parameters(), lr=1e-2, max_grad_norm=0.1)
        step = compile_step(
            lambda x, net=net: _loss(net, x),
            optimizer,
            graph=graph,
            process_group=torch.distributed.group.WORLD,
        )
        losses = [step(_rows(ranks.rank, n).to(device)) for n in range(6)]
        found[f"losses {graph}"] = torch.stack(losses).tolist()
        found[f"weights {graph}"] = [p.detach().cpu().clone() for p in net.parameters()]
        assert step._averaged is not None
        found[f"early {graph}"] = step._averaged.num_early
        found[f"replays {graph}"] = step.report().replays
    torch.distributed.destroy_process_group()  # while a graph holds its sums
    patch.undo()
    return found


@pytest.mark.gpu
def test_a_graph_holds_the_sums_over_ranks(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pair = Pair(tmp_path, "cuda")
    try:
        first, second = pair.run(_in_a_graph)
    finally:
        pair.stop()
    assert first["replays True"] == 4
    assert first["early True"] == DEPTH // 2
    for one in (first, second):
        assert one["losses True"] == one["losses False"]
        assert all(map(torch.equal, one["weights True"], one["weights False"]))
    assert all(map(torch.equal, first["weights True"], second["weights True"]))


def test_alone_nothing_is_sent() -> None:
    net = Net()
    averaged = Ranks().averaged(list(net.parameters()))
    with averaged.backward():
        _loss(net, _rows(0, 0)).backward()
    before = [p.grad for p in net.parameters()]
    averaged.finish()
    assert all(a is b for a, b in zip(before, [p.grad for p in net.parameters()], strict=True))
    assert not averaged.num_early
