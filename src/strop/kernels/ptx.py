"""Print what kernels in PTX have in common: sizes that their products ask for, declarations, waits.

Instructions are those of the ISA's manual
(https://docs.nvidia.com/cuda/parallel-thread-execution/), ``wgmma`` with its layouts among them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import torch

ROWS = 64  # of a product: four warps have 16 each
DEPTH = 16  # of a product
CODES_DEPTH = 32  # of one of e4m3 codes: as many bytes
LINE = 64  # elements in a line of shared memory, which is mixed in units of 128 bytes
LINE_BYTES = 128
KINDS = {torch.float16: "f16", torch.bfloat16: "bf16"}
# Descriptors of operands count 16 bytes. Eight lines are 1024 bytes apart, lines are mixed by 128.
UNIT, HIGH = 16, 64 | 1 << 30
HALF = 32  # elements in a line of half the bytes, mixed in units of 64: eight are 512 bytes apart
HALF_HIGH = 32 | 2 << 30

# where all threads of a program meet, or of the programs of a cluster
BEGUN = "    bar.sync 0;\n"
MEETING = "    barrier.cluster.arrive;\n    barrier.cluster.wait;\n"
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


def entry(
    name: str,
    maps: Mapping[str, int],
    pointers: Sequence[str],
    scalars: int,
    threads: int,
    *,
    programs: int = 1,
    cluster: int = 1,
) -> str:
    """Print an entry, up to its first brace. Params are as Triton declares them: behind a map, by
    its rank, the tensor's sizes and strides; two pointers that are not used at the end.
    ``programs`` on a processor, at least; ``cluster``: so many are one."""
    params = []
    for tensor, rank in maps.items():
        params.append(f".param .align 64 .b8 {tensor}[128]")
        params += [f".param .u32 {tensor}_size{n}" for n in range(rank)]
        params += [f".param .u64 {tensor}_stride{n}" for n in range(rank)]
    params += [f".param .u64 {pointer}" for pointer in pointers]
    params += [f".param .u32 s{n}" for n in range(scalars)]
    params += [".param .u64 unused0", ".param .u64 unused1"]
    shared = f".explicitcluster\n.reqnctapercluster {cluster}\n" if cluster > 1 else ""
    return _HEAD.format(
        name=name, params=",\n".join(params), threads=threads, programs=programs, cluster=shared
    )


def barriers(counts: Mapping[int, int | str]) -> str:
    """Make barriers by one thread, for all: how many arrive at each, by its place behind %base."""
    made = "".join(
        f"    mbarrier.init.shared::cta.b64 [%base+{at}], {count};\n"
        for at, count in counts.items()
    )
    return f"""\
    setp.ne.u32 %p, %thread, 0;
    @%p bra begun;
{made}    fence.mbarrier_init.release.cluster;
begun:
{BEGUN}"""


def wait(label: str, barrier: str, phase: str) -> str:
    """Wait until all have arrived that the barrier counts."""
    return f"""\
{label}:
    mbarrier.try_wait.parity.shared::cta.b64 %p, [{barrier}], {phase};
    @!%p bra {label};
"""


def release(first: int, stage: str, scratch: str) -> str:
    """This warp has read a stage; ``first``: where the first stage's pair of barriers is."""
    return f"""\
    mad.lo.u32 {scratch}, {stage}, 16, %base;
    @%is_first mbarrier.arrive.shared::cta.b64 _, [{scratch}+{first + 8}];
"""


def advance(stages: int, stage: str, phase: str) -> str:
    """Advance to the next stage; behind the last one comes the first, in the other phase."""
    return f"""\
    add.u32 {stage}, {stage}, 1;
    setp.eq.u32 %p, {stage}, {stages};
    @%p mov.u32 {stage}, 0;
    @%p xor.b32 {phase}, {phase}, 1;
"""


def listed(name: str, count: int, first: int = 0) -> str:
    return "{" + ", ".join(f"%{name}{n}" for n in range(first, first + count)) + "}"


def product(columns: int, kind: str, into: str, a: str, is_added: bool) -> str:
    """a @ b, added to what is there or not. Operands in shared memory have their lines along the
    sum, values across it."""
    op = f"wgmma.mma_async.sync.aligned.m64n{columns}k{DEPTH}.f32.{kind}.{kind}"
    flags = "1, 1, 0, 0" if a == "%a" else "1, 1, 1"
    return f"    {op} {into}, {a}, %b, {'%yes' if is_added else '%no'}, {flags};\n"


def product_of_codes(columns: int, into: str, added: str, a: str = "%a") -> str:
    """a @ %b of e4m3 codes, ``added`` to what is there if this predicate holds. Lines of %b are
    along the sum."""
    op = f"wgmma.mma_async.sync.aligned.m64n{columns}k{CODES_DEPTH}.f32.e4m3.e4m3"
    return f"    {op} {into}, {a}, %b, {added}, 1, 1;\n"


def unpacked(kind: str, into: int, word: str = "%n0", name: str = "f") -> str:
    """Print two numbers of a word as %f<into> and the next."""
    return (
        f"    mov.b32 {{%h0, %h1}}, {word};\n    cvt.f32.{kind} %{name}{into}, %h0;\n"
        f"    cvt.f32.{kind} %{name}{into + 1}, %h1;\n"
    )


def f32(value: float) -> str:
    return f"0f{struct.unpack('>I', struct.pack('>f', value))[0]:08X}"
