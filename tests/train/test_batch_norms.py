"""Training steps that write whole buffers: batch norms count what they see."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.dispatch.dynamo import AOT_LOG
from strop.testing import assert_as_accurate_together
from tests.train.compiled import options, roles
from tests.train.graphed import replayed_steps

pytestmark = pytest.mark.usefixtures("fresh")
GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    ],
)


class Net(nn.Module):
    def __init__(self, dims: int = 2, **how: Any) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
        self.first, self.second = conv(3, 8, 3, padding=1), conv(8, 4, 3)
        self.norms = nn.ModuleList([norm(8, **how), norm(4, **how)])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return y.sin()


def optimised(module: nn.Module, **changes: Any) -> nn.Module:
    return strop.optimize(copy.deepcopy(module), train=True, options=options(**changes))


def stepped(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a step, and what its buffers hold behind it."""
    module.zero_grad()
    y = module(x)
    weights = torch.arange(y.numel(), device=y.device).cos().view_as(y)
    (y.double() * weights).sum().backward()
    grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return grads | {name: b.clone() for name, b in module.named_buffers() if b.is_floating_point()}


def assert_steps_as_accurate(plain: nn.Module, ours: nn.Module, inputs: list[Tensor]) -> None:
    """The bias of a convolution before a norm has no gradient but noise."""
    exact = copy.deepcopy(plain).double()
    triples: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for x in inputs:
        mine, theirs, wide = stepped(ours, x), stepped(plain, x), stepped(exact, x.double())
        assert mine.keys() == theirs.keys() == wide.keys()
        for name in wide:
            triples.setdefault(name, []).append((mine[name], theirs[name], wide[name]))
    names = [name for name in triples if name not in ("first.bias", "second.bias")]
    for kind in (
        [n for n in names if "running" in n] or names,
        [n for n in names if "running" not in n],
    ):
        assert_as_accurate_together([each for name in kind for each in triples[name]])
    counts = [[int(b) for b in m.buffers() if not b.dim()] for m in (ours, plain)]
    assert counts[0] == counts[1]


def pictures(dims: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    sizes = [(2, 3, 9, 8, 7), (3, 3, 6, 11, 5), (2, 3, 9, 8, 7), (2, 3, 9, 8, 7)]
    return [torch.randn(size[: dims + 2], device=device, dtype=dtype) for size in sizes]


HOWS: dict[str, dict[str, Any]] = {
    "usual": {},
    "momentum": {"momentum": 0.3, "eps": 1e-2},
    "no weights": {"affine": False},
    "no statistics": {"track_running_stats": False},
}


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("how", HOWS)
def test_steps_are_as_accurate_as_those_of_eager(how: str, dims: int) -> None:
    torch.manual_seed(0)
    plain = Net(dims, **HOWS[how])
    ours = optimised(plain)
    assert_steps_as_accurate(plain, ours, pictures(dims))
    assert ours.forward.traced_by_torch == {}
    assert roles(ours.forward.log) == ["backward", "forward"]
    assert not any(
        "batch_norm" in str(dict(step.attrs).get("target"))
        for record in ours.forward.log.records
        for step in record.compiled.program.call_steps
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_in_half_precision(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = Net().to(device, dtype)
    ours = optimised(plain)
    assert_steps_as_accurate(plain, ours, pictures(2, device, dtype))
    assert ours.forward.traced_by_torch == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("under", [None, torch.float16, torch.bfloat16])
def test_on_a_gpu(under: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    plain = Net().cuda()
    ours = optimised(plain)
    with torch.autocast("cuda", under, enabled=under is not None):
        assert_steps_as_accurate(plain, ours, pictures(2, "cuda"))
    log = ours.forward.log
    assert (ours.forward.traced_by_torch, log.step_captures, log.step_replays) == ({}, 1, 2)


def test_replays_count_as_well() -> None:
    """What a capture rehearses is none of the steps."""
    torch.manual_seed(0)
    plain = Net()
    ours = optimised(plain)
    with replayed_steps():
        assert_steps_as_accurate(plain, ours, pictures(2))
    assert ours.forward.log.step_replays == 2


def test_evaluation_sees_what_training_has_counted() -> None:
    """Programs of evaluation may keep values that they have computed of the statistics."""
    torch.manual_seed(0)
    plain = Net()
    ours = optimised(plain)
    for n in range(3):
        x = pictures(2)[n]
        for module in (plain, ours):
            module.train()
            stepped(module, x)
            module.eval()
        with torch.no_grad():
            torch.testing.assert_close(ours(x), plain(x), rtol=1e-4, atol=1e-5)


def test_writes_are_seen_by_who_keeps_a_buffer() -> None:
    """Autograd compares versions: a value that was saved before the step is no longer there."""
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    ours = optimised(module)
    scale = torch.ones(8, requires_grad=True)
    kept = (ours[1].running_mean * scale).sum()
    ours(torch.randn(3, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


def test_one_value_for_each_channel_raises_what_eager_raises() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    ours = optimised(module)
    for each in (ours, module):
        each(torch.randn(3, 4)).sum().backward()
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            each(torch.randn(1, 4))
    assert ours[1].num_batches_tracked == module[1].num_batches_tracked


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.up(self.norm(x)).sin())
        return y.cos()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.norm(self.up(x))))


class Counter(nn.Module):
    """Writes the whole of buffers of its own, of which one scales what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(x)
        self.seen += 1
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        self.mean.clamp_(min=-1)
        return (y - self.mean).sin() / self.seen


class CountingBlock(Counter):
    """Has as many parts as a block that is traced once for all."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Identity(), nn.Identity()])


class Reading(Counter):
    """Its gradient depends on what the buffer held before."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(x) * self.mean.exp()
        self.mean.add_(1)
        return y.sin()


class Part(Counter):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(x)
        self.mean[:3] = y.detach().mean(0)[:3]
        return (y - self.mean).sin()


OWN: dict[str, tuple[Callable[[], nn.Module], bool]] = {  # whether Strop's trace has them
    "a norm twice": (Twice, True),
    "blocks": (lambda: nn.Sequential(*(Block() for _ in range(4))), True),
    "buffers": (Counter, True),
    "blocks that count": (lambda: nn.Sequential(*(CountingBlock() for _ in range(3))), False),
    "a buffer that the backward reads": (Reading, False),
    "a part of a buffer": (Part, False),
    "a mean of all": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None)),
        False,
    ),
}


@pytest.mark.parametrize("through_compile", [False, True])
@pytest.mark.parametrize("name", OWN)
def test_whole_buffers_are_written(name: str, through_compile: bool) -> None:
    torch.manual_seed(0)
    make, is_own = OWN[name]
    plain = make()
    if through_compile:
        torch._dynamo.reset()
        ours: Any = torch.compile(copy.deepcopy(plain), backend="strop")
        before = sum(AOT_LOG.through_aot.values())
    else:
        ours = optimised(plain, strict=False)
    for n in range(4):
        x = torch.randn(5 + n % 2, 6)
        mine, theirs = stepped(ours, x), stepped(plain, x)
        for key, value in theirs.items():
            own = mine[f"_orig_mod.{key}" if through_compile else key]
            torch.testing.assert_close(own, value, rtol=1e-3, atol=1e-4, msg=f"{n} {key}")
    if not through_compile:
        assert (ours.forward.traced_by_torch == {}) is is_own, ours.forward.traced_by_torch
    elif name in ("a norm twice", "blocks"):
        assert sum(AOT_LOG.through_aot.values()) == before, AOT_LOG.through_aot
