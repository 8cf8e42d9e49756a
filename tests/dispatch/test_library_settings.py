"""A program that was captured under other settings of torch's libraries is not replayed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import strop
from strop.dispatch import cpu_fast_path
from strop.runtime.run import attention_calls
from strop.runtime.run.library_calls import CUDA_ALLOCATING, CUDA_PLANNED_OUT
from strop.runtime.run.library_settings import convolves_in_tf32, library_settings
from strop.testing import assert_as_accurate_as_eager
from tests.badinput.nets import optimized

CUDA, CUDNN = torch.backends.cuda, torch.backends.cudnn
CHANGES: dict[str, Callable[[], Any]] = {
    "convolutions": lambda: setattr(CUDNN, "allow_tf32", False),
    "convolutions alone": lambda: setattr(CUDNN.conv, "fp32_precision", "ieee"),
    "products": lambda: setattr(CUDA.matmul, "allow_tf32", True),
    "precision": lambda: torch.set_float32_matmul_precision("high"),
    "sums in half": lambda: setattr(CUDA.matmul, "allow_bf16_reduced_precision_reduction", False),
    "attention": lambda: CUDA.enable_flash_sdp(False),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "benchmark": lambda: setattr(CUDNN, "benchmark", True),
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(precision)
    CUDA.enable_flash_sdp(True)
    CUDA.matmul.allow_bf16_reduced_precision_reduction = True
    CUDNN.conv.fp32_precision = "tf32"
    CUDNN.benchmark, CUDNN.allow_tf32 = False, True


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.conv(x).movedim(1, -1).relu())


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_another_entry_of_the_same_graph(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(cpu_fast_path, "takes", lambda *_: False)  # which captures nothing
    net, x = optimized(Net(), cache_dir=str(tmp_path)), torch.randn(2, 3, 8, 8)

    def entries() -> int:
        with torch.no_grad():
            for _ in range(3):
                net(x)
        return len(net.forward.shapes.entries)

    assert entries() == 1
    before = library_settings()
    CHANGES[name]()
    assert library_settings() != before
    assert entries() == 2
    assert entries() == 2
    assert net.forward.variants.num_captures == 1


def test_nothing_is_asked_before_there_is_work_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert library_settings() == ()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    before = library_settings()
    with sdpa_kernel(SDPBackend.MATH):
        assert library_settings() != before
    assert library_settings() == before


def test_convolutions_may_have_a_precision_of_their_own() -> None:
    assert convolves_in_tf32()
    CUDNN.allow_tf32 = False
    assert not convolves_in_tf32()
    CUDNN.allow_tf32 = True
    CUDNN.conv.fp32_precision = "ieee"
    with pytest.raises(RuntimeError, match="allow_tf32"):
        assert CUDNN.allow_tf32
    assert not convolves_in_tf32()


class Calls:
    """Stand in for cuDNN's convolution, and keep the settings that it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def out(self, x: Tensor, weight: Tensor, *rest: Any, out: Tensor) -> None:
        padding, stride, dilation, groups, *told = rest
        self.told.append(tuple(told))
        out.copy_(torch.conv2d(x, weight, None, stride, padding, dilation, groups))


def test_cudnn_is_told_what_torch_would_tell_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    monkeypatch.setattr(torch.ops.aten, "cudnn_convolution", calls)
    attrs = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    convolve = CUDA_PLANNED_OUT["conv2d"](attrs)
    x, weight, bias = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4)
    wanted, out = F.conv2d(x, weight, bias, padding=1), torch.empty(2, 4, 8, 8)
    for change in (lambda: None, CHANGES["deterministic"], CHANGES["convolutions"]):
        change()
        convolve([x, weight, bias], out.zero_())
        torch.testing.assert_close(out, wanted)
    assert calls.told == [(False, False, True), (False, True, True), (False, True, False)]
    with torch.backends.cudnn.flags(enabled=False):
        convolve([x, weight, bias], out.zero_())
    torch.testing.assert_close(out, wanted)
    assert len(calls.told) == 3


def test_attention_of_cudnn_is_not_called_where_it_is_turned_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called = list[Any]()

    def cudnn(q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float) -> tuple[Tensor]:
        called.append(rest)
        return (F.scaled_dot_product_attention(q, k, v, scale=scale),)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", cudnn)
    attend = CUDA_ALLOCATING["attention"]({"causal": False, "scale": 0.125})
    q, k, v = (torch.randn(1, 2, 16, 64).half() for _ in range(3))
    wanted = F.scaled_dot_product_attention(q, k, v, scale=0.125)
    torch.testing.assert_close(attend([q, k, v]), wanted)
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
        torch.testing.assert_close(attend([q, k, v]), wanted)
    assert len(called) == 1


@pytest.mark.parametrize("name", attention_calls.LIBRARIES)
def test_a_library_that_was_chosen_is_not_called_where_it_is_turned_off(name: str) -> None:
    otherwise = list[Any]()

    def usual(inputs: Any) -> Tensor:
        otherwise.append(inputs)
        return torch.zeros(())

    attrs = {"causal": False, "scale": 0.125}
    call = attention_calls.call_of(name, attrs, 128, usual)
    operands = [torch.randn(1, 2, 16, 64).half() for _ in range(3)]
    with sdpa_kernel(SDPBackend.MATH):
        call(operands)
    assert len(otherwise) == 1
    if name == "flash_attention":  # which torch has under this name on a GPU alone
        with pytest.raises(NotImplementedError):
            call(operands)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["convolutions", "convolutions alone"])
def test_tf32_ends_where_it_is_turned_off(name: str) -> None:
    eager = Net().cuda().eval()
    ours, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    strop.optimize(ours)
    x = torch.randn(2, 3, 32, 32, device="cuda")
    with torch.no_grad():
        for _ in range(4):
            ours(x)
        CHANGES[name]()
        for _ in range(4):
            assert_as_accurate_as_eager(ours(x), eager(x), exact(x.double()))
    assert strop.explain(ours).num_graphs == 1
