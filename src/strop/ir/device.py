"""Describe a device in the numbers by which kernels are chosen: one record, read once.

What comes with a compute capability is in NVIDIA's CUDA C++ programming guide, "Compute
capabilities": https://docs.nvidia.com/cuda/cuda-c-programming-guide. Rates are those of its white
papers on A100, GA102, AD102 and H100, and of the data sheets of B200 and RTX 5090.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from strop.errors import OptionError

LEAST_ARCH = 80  # the oldest architecture that Triton compiles for
# Formats of 8 bits, and the oldest architecture that multiplies them (``eight_bit``)
EIGHT_BIT: Mapping[str, int] = {"int8": 80, "fp8": 89}
WITH_BF16 = ("avx512_bf16", "neon_bf16")  # the CPUs that multiply pairs of bf16
_FIRST_SPECIFIC = 90  # from which on Triton's PTX is for one architecture alone: sm_90a

# The most shared memory in bytes that one block can ask for, by architecture: the programming
# guide's table "Technical specifications per compute capability".
SHARED_BYTES: Mapping[int, int] = {
    80: 163 << 10,
    86: 99 << 10,
    87: 163 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    103: 227 << 10,
    120: 99 << 10,
    121: 99 << 10,
}

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
class GpuTarget:
    """Say what kernels are compiled for: they use the features of ``arch`` alone, and their machine
    code is that of ``runs_on``, an architecture which is as new or newer; 0 stands for ``arch``."""

    arch: int
    runs_on: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "runs_on", self.runs_on or self.arch)

    @property
    def is_native(self) -> bool:
        """Tell whether the machine code is that of the architecture whose features it uses."""
        return self.runs_on == self.arch

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

    @property
    def rounds_to_e4m3(self) -> bool:
        """Tell whether Triton rounds fp32 to e4m3 at once: on sm_89 it goes through fp16, and
        rounds twice."""
        return self.arch >= 90


@dataclass(frozen=True, slots=True)
class Device:
    """Describe a GPU, or a CPU, whose numbers are all 0.

    ``arch`` is the compute capability as one number, 90 for 9.0. ``shared_bytes`` is the most
    shared memory that one block can ask for. ``memory_bandwidth`` is that of the memory's clock and
    bus, in bytes a second; a copy reaches nine tenths of it. ``clock_hz`` is the multiprocessors'
    highest. ``runs_on`` is the card's own architecture where ``arch`` is an older one, else 0.
    ``isa`` is the widest of the vector instructions of a CPU that kernels written by hand use:
    "avx2", "avx512", "avx512_bf16", "neon", "neon_bf16", or "" for another CPU and for a GPU.
    ``has_vnni`` says whether it multiplies four codes at once by AVX-512 VNNI.
    """

    name: str
    arch: int = 0
    sms: int = 0
    l2_bytes: int = 0
    shared_bytes: int = 0
    memory_bytes: int = 0
    memory_bandwidth: float = 0.0
    clock_hz: float = 0.0
    runs_on: int = 0
    isa: str = ""
    has_vnni: bool = False

    @property
    def has_bf16(self) -> bool:
        """Say whether a CPU multiplies pairs of bf16."""
        return self.isa in WITH_BF16

    @property
    def has_library(self) -> bool:
        """Tell whether the kernel library may have kernels for this device."""
        return bool(self.arch or self.isa)

    @property
    def target(self) -> GpuTarget:
        """Return what the kernels of this device are compiled for."""
        return GpuTarget(self.arch, self.runs_on)

    def as_arch(self, arch: int) -> Device:
        """Restrict the card to an older architecture: that one's features and no more shared memory
        than it has. 0 and the card's own architecture restrict nothing, and neither does any
        architecture a CPU.

        Multiprocessors, clock, cache and memory stay those of the card, and so do the FLOP rates:
        libraries run natively on it, which makes its own peak the one that no call can exceed. On
        sm_90, kernels for an older architecture get less, because they have no WGMMA.

        Raises OptionError for an architecture that is unknown, or that the card cannot stand in
        for: PTX runs on newer GPUs only, and from sm_90 on it is made for one architecture alone.
        """
        check_arch(arch)
        if arch in (0, self.arch) or not self.arch:
            return self
        able = [known for known in SHARED_BYTES if known < min(self.arch, _FIRST_SPECIFIC)]
        if arch not in able:
            others = f"arch={', '.join(map(str, able))}" if able else "no other architecture"
            raise OptionError(
                f"arch={arch}: {self.name} is sm_{self.arch}, which cannot run kernels for"
                f" sm_{arch}; it can stand in for {others}; without arch (STROP_ARCH), kernels are"
                " compiled for the GPU itself"
            )
        return replace(
            self,
            name=f"{self.name} as sm_{arch}",
            arch=arch,
            shared_bytes=min(self.shared_bytes, SHARED_BYTES[arch]),
            runs_on=self.target.runs_on,
        )

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
        return RATES.get(self.target.runs_on, (0, 0, 0))[kind] * self.sms * self.clock_hz

    @property
    def has_tma(self) -> bool:
        """Tell whether its kernels may use the tensor memory accelerator."""
        return self.target.has_tma

    @property
    def has_wgmma(self) -> bool:
        """Tell whether its kernels may multiply by groups of four warps."""
        return self.target.has_wgmma

    @property
    def has_pdl(self) -> bool:
        """Tell whether its kernels may start before the one before them has ended."""
        return self.target.has_pdl


CPU = Device("CPU")


def check_arch(arch: int) -> None:
    """Raise OptionError for what is neither 0 nor an architecture that kernels exist for."""
    if arch and arch not in SHARED_BYTES:
        why = (
            f"kernels need compute capability {LEAST_ARCH / 10} or newer"
            if 0 < arch < LEAST_ARCH
            else "there is no such GPU architecture, or none that Strop knows"
        )
        raise OptionError(
            f"arch={arch}: {why}; there are {', '.join(map(str, SHARED_BYTES))}, and 0 for that of"
            " the GPU itself"
        )
