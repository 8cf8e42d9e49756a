"""How pictures lie in the graphs of a training step, and what its forward leaves."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.ir.program import Buffer, CallStep, KernelStep, Program
from tests.train.compiled import assert_gradients_as_accurate, options

pytestmark = pytest.mark.usefixtures("fresh")
CHANNELS = 16


class Net(nn.Module):
    """It begins and ends as a ResNet does: a pool behind a norm, and a mean of each picture."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.second = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS)])
        for norm in self.norms:
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.norms[0](self.first(x))), 3, 2, 1)
        return F.relu(self.norms[1](self.second(y)) + y).mean((2, 3))


@pytest.fixture(scope="module")
def programs() -> dict[str, Program]:
    torch.manual_seed(0)
    plain = Net().eval()
    ours = strop.optimize(copy.deepcopy(plain), train=True, options=options())
    x = torch.randn(2, 3, 12, 12)
    assert_gradients_as_accurate(ours, plain, [(x,), (torch.randn(3, 3, 14, 10),)])
    assert ours.forward.traced_by_torch == {}
    return {record.role: record.compiled.program for record in ours.forward.log.records}


def pictures(program: Program) -> Iterator[Buffer]:
    """Yield what a program makes of pictures itself: arguments and results lie as they were asked
    for."""
    for buffer in program.buffers:
        if len(buffer.shape) == 4 and buffer.kind in ("arena", "call"):
            sizes = [size.eval(dict(program.hints)) for size in buffer.shape]
            if sizes[:2] == [2, CHANNELS] and sizes[2] > 1:
                yield buffer


@pytest.mark.parametrize("role", ["forward", "backward"])
def test_pictures_lie_as_convolutions_want_them(role: str, programs: dict[str, Program]) -> None:
    """The gradient of a mean is one number for each picture and channel, so that it has no order,
    and a pool gives back what lies like the picture that it got."""
    found = list(pictures(programs[role]))
    assert len(found) >= 3
    assert {str(buffer.strides[1]) for buffer in found} == {"1"}


def test_no_kernel_only_copies_a_picture(programs: dict[str, Program]) -> None:
    """The caller's lies as it likes, and gradients of weights as the weights."""
    copied = [
        program.buffers[step.buffers[0]]
        for program in programs.values()
        for step in program.steps
        if isinstance(step, KernelStep) and program.sources[step.kernel].name == "pointwise_copy"
    ]
    made = [buffer.shape for buffer in copied if buffer.kind != "input"]
    assert all(str(shape[0]) == str(CHANNELS) for shape in made), made
    assert any(
        isinstance(step, CallStep) and "max_pool2d" in str(dict(step.attrs).get("target"))
        for step in programs["backward"].steps
    )


def test_a_forward_gives_back_no_argument_and_no_statistics(programs: dict[str, Program]) -> None:
    """Whoever calls it has the weights, and a norm in evaluation has no statistics of its batch."""
    forward = programs["forward"]
    refs = [item.tensor for item in forward.returned if item.tensor is not None]
    assert all(forward.buffers[ref.buffer].kind != "input" for ref in refs)
    assert all(len(ref.shape) > 1 for ref in refs)


def test_gradients_of_a_norm_are_one_kernel_however_large_pictures_are() -> None:
    torch.manual_seed(0)
    plain = Net().eval()
    ours = strop.optimize(copy.deepcopy(plain), train=True, options=options())
    assert_gradients_as_accurate(ours, plain, [(torch.randn(2, 3, 96, 96),)])
    (program,) = (r.compiled.program for r in ours.forward.log.records if r.role == "backward")
    sums = [
        step
        for step in program.steps
        if isinstance(step, KernelStep) and "sum" in program.sources[step.kernel].name
    ]
    # of each norm: what is behind it with a sum that a convolution's bias has, and its own two
    assert [len(step.writes) for step in sums] == [3, 2, 3, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_on_a_gpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # cuDNN takes TF32 for pictures in one order of memory, and fp32 for those in another
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    plain = Net().eval().to("cuda", dtype)
    ours = strop.optimize(copy.deepcopy(plain), train=True, options=options())
    sizes = ((2, 3, 64, 64), (3, 3, 96, 48))
    inputs = [(torch.randn(size, device="cuda", dtype=dtype),) for size in sizes]
    assert_gradients_as_accurate(ours, plain, inputs)
    assert ours.forward.traced_by_torch == {}
