"""The record of a GPU of this machine, as its driver describes it."""

from __future__ import annotations

from functools import lru_cache

import torch

from strop.ir.device import Device
from strop.runtime.build import driver

# CUdevice_attribute
_CLOCK_KHZ, _SMS, _MEMORY_KHZ, _BUS_BITS, _L2_BYTES, _MOST_SHARED = 13, 16, 36, 37, 38, 97


@lru_cache(maxsize=32)
def gpu(index: int) -> Device:
    """Read the record of GPU ``index``, counted as torch counts. Raises CodegenError without a
    driver."""
    found = torch.cuda.get_device_properties(index)
    clock_khz, sms, memory_khz, bus_bits, l2_bytes, shared_bytes = (
        driver.attribute(index, number)
        for number in (_CLOCK_KHZ, _SMS, _MEMORY_KHZ, _BUS_BITS, _L2_BYTES, _MOST_SHARED)
    )
    return Device(
        found.name,
        arch=found.major * 10 + found.minor,
        sms=sms,
        l2_bytes=l2_bytes,
        shared_bytes=shared_bytes,
        memory_bytes=found.total_memory,
        memory_bandwidth=2 * memory_khz * 1e3 * bus_bits / 8,  # on both edges of the clock
        clock_hz=clock_khz * 1e3,
    )
