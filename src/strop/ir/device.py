"""What a device is, in the numbers by which kernels are chosen: one record, read once.

Compute capabilities and what comes with them are those of NVIDIA's CUDA C++ programming guide,
"Compute capabilities": https://docs.nvidia.com/cuda/cuda-c-programming-guide
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or the CPU, whose numbers are all 0.

    ``arch`` is the compute capability as one number, 90 for 9.0. ``shared_bytes`` is the most
    shared memory that one block can ask for. ``memory_bandwidth`` is that of the memory's clock and
    bus, in bytes a second; a copy reaches nine tenths of it.
    """

    name: str
    arch: int = 0
    sms: int = 0
    l2_bytes: int = 0
    shared_bytes: int = 0
    memory_bytes: int = 0
    memory_bandwidth: float = 0.0

    @property
    def has_tma(self) -> bool:
        """Whether a tensor memory accelerator copies tiles between global and shared memory."""
        return self.arch >= 90

    @property
    def has_wgmma(self) -> bool:
        """Whether groups of four warps multiply tiles in shared memory. Only sm_90 does it so:
        its successors have another instruction."""
        return self.arch == 90

    @property
    def has_pdl(self) -> bool:
        """Whether a kernel can start before the one before it has ended."""
        return self.arch >= 90


CPU = Device("CPU")
