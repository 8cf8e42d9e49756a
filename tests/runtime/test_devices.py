"""The record of a device: what it says of known GPUs, and that a driver's numbers are sensible."""

from __future__ import annotations

import pytest
import torch

from strop.ir.device import CPU, Device
from strop.runtime.build.devices import gpu
from tests.gpus import A100, H100, RTX_5090


@pytest.mark.parametrize(
    ("device", "has_tma", "has_wgmma"),
    [(CPU, False, False), (A100, False, False), (H100, True, True), (RTX_5090, True, False)],
)
def test_what_comes_with_an_architecture(device: Device, has_tma: bool, has_wgmma: bool) -> None:
    assert (device.has_tma, device.has_wgmma) == (has_tma, has_wgmma)
    assert device.has_pdl == has_tma


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_described_by_its_driver() -> None:
    device, found = gpu(0), torch.cuda.get_device_properties(0)
    assert device.name == found.name
    assert device.sms == found.multi_processor_count
    assert device.arch == found.major * 10 + found.minor
    assert 1 << 20 <= device.l2_bytes <= 1 << 30
    assert 48 << 10 <= device.shared_bytes <= 1 << 20
    assert device.memory_bytes == found.total_memory
    source = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(source)
    start.record()
    for _ in range(8):
        target.copy_(source)
    end.record()
    end.synchronize()
    copied = 8 * 2 * source.numel() / (start.elapsed_time(end) / 1e3)
    assert 0.5 * device.memory_bandwidth < copied < device.memory_bandwidth
