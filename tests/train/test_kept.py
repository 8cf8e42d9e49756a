"""What a training step keeps for its backward pass, and for how long."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.bench import timer
from strop.ir.affine import base_of
from strop.ir.graph import Graph, Node
from strop.ir.program import CallStep, Program
from tests.train.compiled import gradients, options

pytestmark = pytest.mark.usefixtures("fresh")
PICTURES = torch.Size((2, 16, 8, 8))


class Widened(nn.Module):
    """A norm of fp32 between convolutions in bf16, as autocast makes it on a GPU; the shortcut's
    convolution gets a copy, as diffusers has one made contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after, self.short = (
            nn.Conv2d(16, 16, k, padding=k // 2) for k in (3, 3, 1)
        )
        self.norm = nn.GroupNorm(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        middle = torch.cat([self.before(x)[:, :8], x[:, 8:].bfloat16()], 1)
        narrow = F.silu(self.norm(middle.float())).bfloat16()
        return self.after(narrow) + self.short(middle.clone())


def step_of(module: nn.Module) -> dict[str, Any]:
    """The two records of a step in bf16."""
    ours = strop.optimize(module.train(), train=True, options=options())
    gradients(ours, (torch.randn(PICTURES),), torch.bfloat16)
    assert ours.forward.traced_by_torch == {}
    return {record.role: record.compiled for record in ours.forward.log.records}


def kept(graph: Graph) -> list[Node]:
    """Pictures among what the forward leaves for the backward."""
    saved = graph.outputs[len(graph.outputs) - graph.num_saved :]
    return [node for node in saved if len(node.shape) == 4 and node.shape[2:] != (1, 1)]


def test_nothing_is_kept_twice_or_wider_than_it_came() -> None:
    (forward,) = (c for role, c in step_of(Widened()).items() if role == "forward")
    found = [node for node in kept(forward.graph) if str(node.shape[0]) == "b"]
    assert all(node.dtype == torch.bfloat16 for node in found), found
    bases = [base_of(node) for node in found]
    assert len(bases) == len(set(bases)) == 3, "x, what is normed, and what it becomes"


def position_of_call(program: Program, operator: str) -> list[int]:
    return [
        n
        for n, step in enumerate(program.steps)
        if isinstance(step, CallStep) and operator in str(dict(step.attrs).get("target"))
    ]


def test_gradients_are_laid_out_as_they_come() -> None:
    """At the end all of them, in the type of the products, would be there at once."""
    module = Widened().to(memory_format=torch.channels_last)  # results are laid out so
    program = step_of(module)["backward"].program
    calls = position_of_call(program, "convolution_backward")
    weights = [program.steps[call].outputs[1] for call in calls]
    laid = [
        next(n for n, step in enumerate(program.steps) if number in _reads(step))
        for number in weights
    ]
    assert len(calls) == 3
    assert max(laid[:-1]) < max(calls)


def _reads(step: Any) -> list[int]:
    return [r.buffer for r in step.inputs] if isinstance(step, CallStep) else list(step.buffers)


def test_gradients_of_biases_keep_their_digits() -> None:
    """Eager's are rounded to bf16, as autocast computes them, and then widened."""
    eager = Widened().train()
    ours = strop.optimize(copy.deepcopy(eager), train=True, options=options())
    x = torch.randn(PICTURES)
    mine, theirs = (gradients(m, (x,), torch.bfloat16)["after.bias"] for m in (ours, eager))
    assert torch.equal(theirs, theirs.bfloat16().float())
    assert not torch.equal(mine, mine.bfloat16().float())
    torch.testing.assert_close(mine, theirs, rtol=0.02, atol=1e-4)


def test_a_backward_leaves_nothing_behind() -> None:
    module = Widened().train()
    ours = strop.optimize(module, train=True, options=options())
    held: list[weakref.ref[Tensor]] = []

    class Watch(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self) -> None:
            super().__init__(self.pack, lambda t: t)

        def pack(self, t: Tensor) -> Tensor:
            copy = t.clone()
            held.append(weakref.ref(copy))
            return copy

    x = torch.randn(PICTURES)
    with Watch(), torch.autocast("cpu", torch.bfloat16):
        loss = ours(x).float().square().mean()
    loss.backward()
    del loss
    gc.collect()
    assert len(held) > 5
    assert not [ref for ref in held if ref() is not None]


def test_nothing_of_a_step_waits_for_the_garbage_collector() -> None:
    """It would on a GPU, in gigabytes: the collector counts objects, not what they hold."""
    ours = strop.optimize(Widened().train(), train=True, options=options())
    x = torch.randn(PICTURES)

    def tensors_after_a_step() -> int:
        gradients(ours, (x,), torch.bfloat16)
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    tensors_after_a_step()
    gc.collect()
    gc.disable()
    try:
        assert len({tensors_after_a_step() for _ in range(3)}) == 1
    finally:
        gc.enable()


@pytest.mark.parametrize("compiled", [False, True], ids=["optimize", "torch.compile"])
def test_a_call_leaves_no_argument_behind(compiled: bool) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.SiLU()).eval()
    fast = (
        torch.compile(module, backend="strop", dynamic=False, options={"strict": True})
        if compiled
        else strop.optimize(module, options=options())
    )
    x = torch.randn(3, 8)
    alive = weakref.ref(x)
    with torch.no_grad():
        for _ in range(3):
            fast(x)
    del x
    gc.collect()
    assert alive() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_memory_does_not_grow_on_a_gpu() -> None:
    """Between steps there are weights, gradients and working memory, whatever the size of the last
    step; and the peak is that of the first time a size came."""
    gc.collect()  # what earlier tests left in cycles would go meanwhile
    device = torch.device("cuda")
    module = Widened().to(device, memory_format=torch.channels_last).train()
    ours = strop.optimize(module, train=True, options=options())
    sizes = [(2, 16, 64, 64), (4, 16, 32, 48), (1, 16, 96, 96)]

    def step(size: tuple[int, ...]) -> None:
        gradients(ours, (torch.randn(size, device=device),), torch.bfloat16)

    for size in sizes * 2:
        step(size)
    after = timer.allocated(device)
    timer.forget_peak(device)
    for size in sizes:
        step(size)
    peak = timer.peak(device)
    for _ in range(100):
        for size in sizes:
            step(size)
            assert timer.allocated(device) == after
    assert timer.peak(device) == peak
