"""What kernels in PTX have in common: sizes that their products ask for, declarations, waits.

Instructions are those of the ISA's manual
(https://docs.nvidia.com/cuda/parallel-thread-execution/), ``wgmma`` with its layouts among them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import torch

ROWS = 64  # of a product: four warps have 16 each
DEPTH = 16  # of a product
LINE = 64  # elements in a line of shared memory, which is mixed in units of 128 bytes
LINE_BYTES = 128
KINDS = {torch.float16: "f16", torch.bfloat16: "bf16"}
# Descriptors of operands count 16 bytes. Eight lines are 1024 bytes apart, lines are mixed by 128.
UNIT, HIGH = 16, 64 | 1 << 30

_HEAD = """\
.version 8.3
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 memory[];
.visible .entry {name}(
{params}
)
.reqntid {threads}
.minnctapersm {programs}
{cluster}{{
"""


def entry(name: str, maps: Mapping[str, int], pointers: Sequence[str], scalars: int, threads: int,
          *, programs: int = 1, cluster: int = 1) -> str:  # fmt: skip
    """Of an entry, up to its first brace. Params as Triton declares them: behind a map, by its
    rank, the tensor's sizes and strides; two pointers that are not used at the end. ``programs`` on
    a processor, at least; ``cluster``: so many are one."""
    params = []
    for tensor, rank in maps.items():
        params.append(f".param .align 64 .b8 {tensor}[128]")
        params += [f".param .u32 {tensor}_size{n}" for n in range(rank)]
        params += [f".param .u64 {tensor}_stride{n}" for n in range(rank)]
    params += [f".param .u64 {pointer}" for pointer in pointers]
    params += [f".param .u32 s{n}" for n in range(scalars)]
    params += [".param .u64 unused0", ".param .u64 unused1"]
    shared = f".explicitcluster\n.reqnctapercluster {cluster}\n" if cluster > 1 else ""
    return _HEAD.format(name=name, params=",\n".join(params), threads=threads, programs=programs,
                        cluster=shared)  # fmt: skip


def barriers(counts: Mapping[int, int]) -> str:
    """Made by one thread: how many arrive at each, by its place behind %base."""
    return "".join(f"    mbarrier.init.shared::cta.b64 [%base+{at}], {count};\n"
                   for at, count in counts.items())  # fmt: skip


def wait(label: str, barrier: str, phase: str) -> str:
    return f"""\
{label}:
    mbarrier.try_wait.parity.shared::cta.b64 %p, [{barrier}], {phase};
    @!%p bra {label};
"""


def f32(value: float) -> str:
    return f"0f{struct.unpack('>I', struct.pack('>f', value))[0]:08X}"
