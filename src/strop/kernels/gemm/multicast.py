"""Let two programs of a cluster share the operand that both of them read.

Neighbours multiply other rows by the same columns of a linear's weights, or the same pixels by
other columns. Each fetches what they share for every second stage, to the memory of both
(``cp.async.bulk`` with ``.multicast::cluster``,
https://docs.nvidia.com/cuda/parallel-thread-execution/). So a tile of 128 rows and 160 columns
reads 208 lines from the cache in a step of the sum, where one that shares nothing reads 288. A
stage is free when both programs have read it, as one of them writes to the memory of both.
"""

from __future__ import annotations

from strop.kernels.gemm.tile import Product
from strop.kernels.ptx import MEETING


def registers(of: Product) -> str:
    """Declare whether this program %brings the stage at hand, for whom, its number in the cluster,
    and the memory of its %neighbour."""
    if not of.tile.multicast:
        return ""
    return """\
    .reg .pred %brings;
    .reg .b16 %both;
    .reg .b32 %own, %neighbour, %turn;
"""


def begun(of: Product) -> str:
    """Find the neighbour."""
    if not of.tile.multicast:
        return ""
    return f"""\
    mov.b16 %both, {(1 << of.readers) - 1};
    and.b32 %own, %id, 1;
    xor.b32 %n0, %own, 1;
    mapa.shared::cluster.u32 %neighbour, %base, %n0;
"""


def turn(of: Product) -> str:
    """Find out whether this program brings what is shared of %stage."""
    if not of.tile.multicast:
        return ""
    return "    and.b32 %turn, %stage, 1;\n    setp.eq.u32 %brings, %turn, %own;\n"


def load(of: Product, rank: int, to: str, place: str, *, is_shared: bool) -> str:
    """Fetch a box by a map and coordinates, for this program or, if it brings it, for both."""
    both = of.tile.multicast and is_shared
    op = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes"
    if not both:
        return f"    {op} [{to}], [{place}], [%bar];\n"
    return f"    @%brings {op}.multicast::cluster [{to}], [{place}], [%bar], %both;\n"


def release(of: Product, stage: str, scratch: str) -> str:
    """This warp has read a stage, which the neighbour writes to as well.

    The arrival has no scope of a cluster: there are no writes to be seen, and the products have
    read the stage before. A release of that scope waits for all memory (MEMBAR.ALL.GPU), and an
    acquire empties the first cache: each step took 0.5 us more.
    """
    if not of.tile.multicast:
        return ""
    return f"""\
    mad.lo.u32 {scratch}, {stage}, 16, %neighbour;
    @%is_first mbarrier.arrive.shared::cluster.b64 _, [{scratch}+{of.barriers + 8}];
"""


def ended(of: Product) -> str:
    """End when the neighbour, too, needs nothing of this program's memory any more."""
    return MEETING if of.tile.multicast else ""
