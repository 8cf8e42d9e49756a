"""Small kernels in PTX for the tests of the machine that runs it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from strop.ir.dims import const
from strop.ir.source import KernelSource
from tests.kernels.ptx_machine import PtxError, launch

F16, BF16, F32, I32 = torch.float16, torch.bfloat16, torch.float32, torch.int32
REGISTERS = """
    .reg .pred %p, %q, %r;
    .reg .b16 %h<8>;
    .reg .b32 %t, %lane, %warp, %base, %x<16>, %low<2>, %high;
    .reg .b64 %out, %in, %wide, %map<2>, %a, %b, %d<4>;
    .reg .f32 %f<16>, %o<128>;
    mov.u32 %t, %tid.x;
    and.b32 %lane, %t, 31;
    shr.u32 %warp, %t, 5;
    mov.u32 %base, memory;
    ld.param.u64 %out, [out];
    mul.wide.u32 %wide, %t, 4;
"""


def kernel(
    body: str,
    *,
    threads: int = 32,
    cluster: int = 1,
    shared: int = 0,
    programs: int = 1,
    params: Sequence[torch.dtype] = (),
    boxes: Sequence[tuple[int, ...]] = (),
    out: torch.dtype = I32,
) -> KernelSource:
    """Params: p0, p1, ..., each with a box or none, then ``out``. %wide: a word for each thread."""
    listed, boxes = list[str](), (*boxes, *[()] * (len(params) + 1 - len(boxes)))
    for n, box in enumerate(boxes[:-1]):
        listed.append(f".param .align 64 .b8 p{n}[128]" if box else f".param .u64 p{n}")
        listed += [f".param .u32 p{n}_size{i}" for i in range(len(box))]
        listed += [f".param .u64 p{n}_stride{i}" for i in range(len(box))]
    listed += [".param .u64 out", ".param .u64 unused0", ".param .u64 unused1"]
    text = f"""\
.version 8.3
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 memory[];
.visible .entry kernel({", ".join(listed)})
.reqntid {threads}
.reqnctapercluster {cluster}
{{{REGISTERS}{body}
    ret;
}}
"""
    return KernelSource(
        "kernel",
        "ptx",
        text,
        (*params, out),
        (),
        (const(programs),),
        constants=(("SHARED", shared),),
        num_warps=threads // 32,
        boxes=boxes,
    )


def run(source: KernelSource, out: Tensor, *tensors: Tensor, seed: int = 0) -> Tensor:
    launch(source, (*tensors, out), (), seed=seed)
    return out


def words(count: int = 32) -> Tensor:
    return torch.full((count,), -1, dtype=I32)


STORED = "add.u64 %out, %out, %wide;\nst.global.b32 [%out], %x0;\n"


# One thread brings a box of p0 to the beginning of memory; all wait for it.
FETCH = """
    mov.b64 %a, p0;
    cvta.param.u64 %map0, %a;
    add.u32 %x9, %base, {at};
    setp.ne.u32 %p, %t, 0;
    @%p bra begun;
    mbarrier.init.shared::cta.b64 [%x9], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%x9], {bytes};
    mov.u32 %x0, {col};
    mov.u32 %x1, {row};
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes \
[%base], [%map0, {{%x0, %x1}}], [%x9];
begun:
    bar.sync 0;
come:
    mbarrier.try_wait.parity.shared::cta.b64 %p, [%x9], 0;
    @!%p bra come;
"""


def refused(source: KernelSource, out: Tensor, *tensors: Tensor, match: str) -> None:
    for seed in range(4):
        with pytest.raises(PtxError, match=match):
            run(source, out, *tensors, seed=seed)


def caught(source: KernelSource, out: Tensor, seed: int) -> str:
    try:
        run(source, out, seed=seed)
    except PtxError as error:
        return str(error)
    return ""
