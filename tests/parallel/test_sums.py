"""Sums tell whether tensors hold something else, and contexts belong to GPUs."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.dispatch import stored_variants
from strop.ir.tensor_spec import TensorSpec
from strop.runtime.build import driver
from strop.runtime.derived import known_sums
from strop.runtime.derived.known_sums import KnownSums

CPU = torch.device("cpu")


def tensors() -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(5, 7, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(300, 1000),
        torch.randn(9).to(torch.float8_e4m3fn),
        torch.tensor(True),
        torch.randn(4, 6, dtype=torch.complex64)[:, ::2],
        torch.empty(0),
        torch.randn(11, 3).half().t(),
    ]


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 6])
def test_one_changed_bit_is_seen(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(known_sums.SHARE_BYTES, "cpu", 1 << 14)
    held, known = tensors(), KnownSums(CPU)
    assert known.differs(held, None)  # nothing is known yet
    known.note(held)
    assert not known.differs(held, None)
    assert not known.differs(tensors(), None)  # wherever they lie
    one = held[number]
    flat = one.as_strided((1,), (1,), one.storage_offset()).view(torch.uint8)
    flat[0] ^= 1
    assert known.differs(held, None)
    flat[0] ^= 1
    assert not known.differs(held, None)
    assert known.differs(held[:-1], None)
    known.forget()
    assert known.differs(held, None)


def test_rows_that_change_places_are_seen() -> None:
    weight = torch.randn(512, 2048)
    known = KnownSums(CPU)
    known.note([weight])
    weight.copy_(weight.flip(0))
    assert known.differs([weight], None)


class OtherDriver:
    """It has a context for each GPU, and one that is current."""

    def __init__(self) -> None:
        self.current = 0

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = self.current or None
        return 0

    def cuCtxGetDevice(self, device: Any) -> int:
        device._obj.value = self.current - 100
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = index
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        context._obj.value = 100 + device.value
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.current = context.value
        return 0


def test_a_thread_launches_in_the_context_of_the_gpu_at_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch says which device is current; the driver may have another context in a new thread."""
    fake = OtherDriver()
    monkeypatch.setattr(driver, "_cuda", lambda: fake)
    monkeypatch.setattr(driver, "_OF_THREAD", type("Local", (), {})())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    driver.enter_thread(1)
    assert fake.current == 101
    driver.enter_thread(0)
    assert fake.current == 100
    fake.current = 0
    assert driver.current_context() == 100


def test_a_kernel_is_loaded_once_for_each_context(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, loaded = OtherDriver(), list[int]()
    monkeypatch.setattr(driver, "_cuda", lambda: fake)
    monkeypatch.setattr(driver, "_LOADED", {})

    def function(cubin: Any, context: int) -> tuple[Any, int]:
        loaded.append(context)
        return cubin, context

    monkeypatch.setattr(driver, "CudaFunction", function)
    cubin: Any = ctypes.c_int(7).value
    for context in (100, 101, 100, 101):
        fake.current = context
        assert driver.load(cubin) == (cubin, context)
    assert loaded == [100, 101]


def test_a_stored_plan_is_for_any_gpu_of_a_kind() -> None:
    specs = [TensorSpec(("b", "4"), torch.float16, torch.device("cuda", n)) for n in range(2)]
    assert stored_variants._of_any(specs[:1]) == stored_variants._of_any(specs[1:])
    placed = stored_variants.on_device(specs, lambda _: torch.device("cuda", 1))
    assert placed == (specs[1], specs[1])
