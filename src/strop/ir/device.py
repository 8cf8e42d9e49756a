"""Describe a device in the numbers by which kernels are chosen: one record, read once.

What comes with a compute capability is in NVIDIA's CUDA C++ programming guide, "Compute
capabilities": https://docs.nvidia.com/cuda/cuda-c-programming-guide. Rates are those of its white
papers on A100, GA102, AD102 and H100, and of the data sheets of B200 and RTX 5090.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# FLOPs of one multiprocessor in one clock, by architecture: dense products of fp16 or bf16 that are
# summed in fp32, of fp8, and fp32 without tensor cores.
RATES: Mapping[int, tuple[int, int, int]] = {
    80: (2048, 0, 128),
    86: (1024, 0, 256),
    87: (1024, 0, 256),
    89: (1024, 2048, 256),
    90: (4096, 8192, 256),
    100: (8192, 16384, 256),
    103: (8192, 16384, 256),
    120: (1024, 2048, 256),
    121: (1024, 2048, 256),
}


@dataclass(frozen=True, slots=True)
class Device:
    """Describe a GPU, or the CPU, whose numbers are all 0.

    ``arch`` is the compute capability as one number, 90 for 9.0. ``shared_bytes`` is the most
    shared memory that one block can ask for. ``memory_bandwidth`` is that of the memory's clock and
    bus, in bytes a second; a copy reaches nine tenths of it. ``clock_hz`` is the multiprocessors'
    highest.
    """

    name: str
    arch: int = 0
    sms: int = 0
    l2_bytes: int = 0
    shared_bytes: int = 0
    memory_bytes: int = 0
    memory_bandwidth: float = 0.0
    clock_hz: float = 0.0

    @property
    def half_flops(self) -> float:
        """Return the FLOPs per second of dense products in fp16 or bf16; 0 where the architecture
        is unknown."""
        return self._flops(0)

    @property
    def fp8_flops(self) -> float:
        """Return the FLOPs per second of dense products in fp8; 0 where there are none."""
        return self._flops(1)

    @property
    def single_flops(self) -> float:
        """Return the FLOPs per second in fp32 without tensor cores."""
        return self._flops(2)

    def _flops(self, kind: int) -> float:
        return RATES.get(self.arch, (0, 0, 0))[kind] * self.sms * self.clock_hz

    @property
    def has_tma(self) -> bool:
        """Tell whether a tensor memory accelerator copies tiles between global and shared
        memory."""
        return self.arch >= 90

    @property
    def has_wgmma(self) -> bool:
        """Tell whether groups of four warps multiply tiles in shared memory. Only sm_90 does it so:
        its successors have another instruction."""
        return self.arch == 90

    @property
    def has_pdl(self) -> bool:
        """Tell whether a kernel can start before the one before it has ended."""
        return self.arch >= 90


CPU = Device("CPU")
