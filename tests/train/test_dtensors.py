"""FusedAdamW steps the DTensors of ``fully_shard`` (FSDP2) on two ranks, and clips by the norm of
all."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import strop.train
from strop.errors import OptionError, UnsupportedError
from strop.train import FusedAdamW, FusedSGD, GradScaler
from strop.train.ranks import Ranks
from strop.train.scaler import update
from tests.train import interpreted
from tests.train.pair import Pair

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="needs gloo",
)
STEPS, LR = 4, 0.01
EXTRAS: dict[str, Any] = {"lr": LR, "max_grad_norm": 0.05, "ema_decay": 0.9}


class Net(nn.Module):
    """Some weights have an odd number of rows, and one has a row, which the second rank lacks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 17), nn.Linear(9, 1)
        self.blocks = nn.ModuleList([nn.Linear(17, 12), nn.Linear(12, 9)])
        self.idle = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(F.silu(x))
        y: Tensor = self.last(x)
        return y


def batch(step: int, rank: int, device: Any = "cpu") -> Tensor:
    source = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(5, 6, generator=source).to(device)


def cut(net: Net, placed: Any = None, device: str = "cpu", shape: tuple[int, ...] = (2,)) -> Net:
    """The last dim of the mesh is cut along; along one before it weights are repeated."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("repeated", "cut")[-len(shape) :]
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    for part in (*net.blocks, net):
        fully_shard(part, mesh=mesh, shard_placement_fn=placed)
    return net


def by_columns(parameter: nn.Parameter) -> Any:
    """Cut matrices whose columns are even by them."""
    from torch.distributed.tensor import Shard

    return Shard(1) if parameter.ndim > 1 and parameter.shape[1] % 2 == 0 else None


def whole(tensor: Any) -> Tensor:
    found: Tensor = getattr(tensor, "full_tensor", lambda: tensor)()
    return found.detach().clone()


def trained(net: Net, optimizer: Any, ranks: list[int], first: int = 0) -> list[Tensor]:
    norms = []
    for step in range(first, first + STEPS):
        for rank in ranks:
            x = batch(step, rank, next(net.parameters()).device)
            (net(x).square().mean() / len(ranks)).backward()
        if not hasattr(optimizer, "grad_norm"):
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()
        if hasattr(optimizer, "grad_norm"):
            norms.append(optimizer.grad_norm.clone())
    return norms


def _stepped(ranks: Ranks, kind: str, by: str) -> dict[str, Any]:
    device = "cuda" if by == "rows on GPUs" else "cpu"
    shape = (2, 2) if by == "rows, repeated" else (2,)
    net = cut(Net().to(device), by_columns if by == "columns" else None, device, shape)
    with pytest.MonkeyPatch.context() as patch:
        if by == "kernels":
            interpreted.use(patch)
        optimizer = getattr(strop.train, kind)(net.parameters(), **EXTRAS)
        norms = trained(net, optimizer, [ranks.rank])
    states = [v for state in optimizer.state.values() for k, v in state.items() if k != "step"]
    return {
        "weights": {name: whole(p).cpu() for name, p in net.named_parameters()},
        "averages": [whole(average).cpu() for average in optimizer.ema.shadow_params],
        "norms": [norm.cpu() for norm in norms],
        "states": {type(value).__name__ for value in states},
        "held": sum(value.to_local().numel() for value in states),
    }


@pytest.mark.parametrize(
    ("kind", "by"),
    [
        ("FusedAdamW", "rows"),
        ("FusedAdamW", "columns"),
        ("FusedAdamW", "kernels"),
        ("FusedSGD", "rows"),
    ],
)
def test_steps_are_those_of_one_process(kind: str, by: str, pair: Pair) -> None:
    """Weights, averages and norms; a parameter without a gradient is averaged alone. Also by the
    kernels of a GPU, in Triton's interpreter."""
    if by == "kernels":
        pytest.importorskip("triton")
    _check(pair.run(partial(_stepped, kind=kind, by=by)), kind)


def test_repeated_shares_are_stepped_alike(tmp_path: Path) -> None:
    """HSDP: four ranks, each of which has the share of one other, too."""
    four = Pair(tmp_path, count=4)
    try:
        found = four.run(partial(_stepped, kind="FusedAdamW", by="rows, repeated"))
    finally:
        four.stop()
    _check(found, "FusedAdamW")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_steps_on_two_gpus(tmp_path: Path) -> None:
    pair = Pair(tmp_path, device="cuda")
    try:
        _check(pair.run(partial(_stepped, kind="FusedAdamW", by="rows on GPUs")), "FusedAdamW")
    finally:
        pair.stop()


def _check(found: list[dict[str, Any]], kind: str) -> None:
    net, start = Net(), Net().state_dict()
    optimizer = getattr(strop.train, kind)(net.parameters(), **EXTRAS)
    norms = trained(net, optimizer, [*range(len(found))])
    assert max(norms) > 0.05, "it is clipped"
    for one in found:
        torch.testing.assert_close(one["norms"], norms, rtol=1e-5, atol=0)
        for name, weight in net.named_parameters():
            gap = (one["weights"][name] - weight).norm()
            assert gap <= 1e-4 * (weight - start[name]).norm(), name
        torch.testing.assert_close(one["averages"], optimizer.ema.shadow_params, rtol=0, atol=1e-5)
        assert one["states"] == {"DTensor"}
    every = sum(v.numel() for s in optimizer.state.values() for k, v in s.items() if k != "step")
    assert sum(one["held"] for one in found) == every * len(found) // 2, "halves"
    assert max(one["held"] for one in found) < 0.56 * every


def _beside_torch(ranks: Ranks) -> list[list[Tensor]]:
    """Ours, and torch's AdamW with torch's clip, both on DTensors."""
    found = []
    for make in (partial(FusedAdamW, max_grad_norm=0.05), torch.optim.AdamW):
        net = cut(Net())
        norms = trained(net, make(net.parameters(), lr=LR), [ranks.rank])
        found.append([*map(whole, net.parameters()), *map(whole, norms)])
    return found


def test_steps_are_those_of_torch(pair: Pair) -> None:
    for ours, theirs in pair.run(_beside_torch):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def _resumed(ranks: Ranks) -> list[list[Tensor]]:
    """Through the state dicts of torch.distributed.checkpoint, which carry whole tensors here."""
    from torch.distributed.checkpoint import state_dict as states

    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
    found = []
    net = cut(Net())
    optimizer = FusedAdamW(net.parameters(), **EXTRAS)
    trained(net, optimizer, [ranks.rank])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about its own state dicts
        kept = copy.deepcopy(states.get_state_dict(net, optimizer, options=options))
        counts = optimizer.counts
        trained(net, optimizer, [ranks.rank], STEPS)
        found.append([*map(whole, net.parameters()), *map(whole, optimizer.ema.shadow_params)])
        other = cut(Net())
        again = FusedAdamW(other.parameters(), **EXTRAS)
        states.set_state_dict(
            other,
            again,
            model_state_dict=kept[0],
            optim_state_dict=kept[1],
            options=options,
        )
    again.counts = counts
    trained(other, again, [ranks.rank], STEPS)
    found.append([*map(whole, other.parameters()), *map(whole, again.ema.shadow_params)])
    return found


def test_a_resume_is_exact(pair: Pair) -> None:
    for straight, resumed in pair.run(_resumed):
        assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


def _scaled(ranks: Ranks) -> list[Any]:
    """A gradient of one rank's part is not finite: nobody steps."""
    net = cut(Net())
    optimizer, scaler = FusedAdamW(net.parameters(), lr=LR), GradScaler("cpu", init_scale=4.0)
    found = []
    for is_bad in (False, True):
        before = [whole(p) for p in net.parameters()]
        scaler.scale(net(batch(0, ranks.rank)).square().mean()).backward()
        if is_bad and ranks.rank == 1:
            net.blocks[0].weight.grad.to_local()[0, 0] = float("inf")
        update(optimizer, scaler)
        found.append(
            any(not torch.equal(a, whole(p)) for a, p in zip(before, net.parameters(), strict=True))
        )
    return [*found, scaler.get_scale()]


def test_a_part_that_is_not_finite_stops_all(pair: Pair) -> None:
    assert pair.run(_scaled) == [[True, False, 2.0]] * 2


def _refused(ranks: Ranks) -> list[str]:
    said = []

    def note(optimizer: Any, net: nn.Module, scaler: Any = None) -> None:
        loss = net(batch(0, ranks.rank)).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        for _ in range(2):  # it says so again
            try:
                if scaler is None:
                    optimizer.step()
                else:
                    optimizer.found_inf = torch.zeros(())  # as torch's scaler leaves it
                    optimizer.step()
                said.append("nothing was said")
            except (UnsupportedError, OptionError) as error:
                said.append(str(error))
        net.zero_grad()

    net = cut(Net())
    for more in ({"states": "8bit"}, {"shadow_dtype": torch.bfloat16}):
        note(FusedAdamW(net.parameters(), lr=LR, **more), net)
    note(FusedAdamW([*net.parameters(), nn.Parameter(torch.ones(2))], lr=LR), net)
    note(FusedSGD(net.parameters(), lr=LR), net, torch.amp.GradScaler("cpu", enabled=False))
    plain, optimizer = Net(), FusedAdamW(net.parameters(), lr=LR)
    single = FusedAdamW(plain.parameters(), lr=LR, max_grad_norm=1.0)
    trained(plain, single, [0])
    optimizer.load_state_dict(single.state_dict())
    note(optimizer, net)
    return said


def test_what_is_not_built_is_refused(pair: Pair) -> None:
    expected = [
        "states='8bit' is not built for parameters that are DTensors",
        "shadow_dtype (fully_shard has a MixedPrecisionPolicy) is not built",
        "of 10 parameters are DTensors: call fully_shard on the whole model",
        "take strop.train.GradScaler, which asks all",
        "load states by torch.distributed.checkpoint",
    ]
    for said in pair.run(_refused):
        assert len(said) == 2 * len(expected)
        for place, text in enumerate(said):
            assert expected[place // 2] in text, text
