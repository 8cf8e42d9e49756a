"""These numbers say what kernels and libraries take on an H100 SXM in fp16: every fitted number is
in this one place.

`benchmarks/fit_kernels.py` measures the shapes that these numbers are fitted to, and `strop bench
select` judges the choices that follow from them.
"""

from __future__ import annotations

from collections.abc import Mapping

from strop.ir.cards import H100
from strop.kernels.attention.cross import MASKED, CrossTile
from strop.kernels.attention.times import UNBOUNDED, AttentionTimes, Rounds, TileRule
from strop.kernels.attention.tma import TmaTile
from strop.kernels.attention.wgmma_tiles import WgmmaTile
from strop.kernels.gemm.tile import (
    ACTIVATED,
    CODE_CONV,
    CODES,
    GATED,
    GATED_CODES,
    NARROW,
    NORMED,
    PLAIN,
    SUM,
    GemmTile,
)
from strop.kernels.gemm.times import Cost, GemmTimes, LibraryTimes
from strop.kernels.tuned.attention_h100 import CASES
from strop.kernels.tuned.tuned import Tuned

DEVICE = H100

CONV_TILES: Mapping[GemmTile, Cost] = {
    GemmTile(2, 80, 6, keeps_on=True): Cost(0.0, 2.3, 0.293),
    GemmTile(2, 128, 5, keeps_on=True): Cost(0.0, 2.8, 0.368),
    GemmTile(2, 128, 6, split=2): Cost(3.0, 6.4, 0.446),
    GemmTile(2, 160, 5, keeps_on=True): Cost(2.6, 5.2, 0.42),
    GemmTile(2, 160, 5, split=2): Cost(5.6, 7.6, 0.475),
    GemmTile(2, 160, 5, split=3): Cost(5.5, 7.9, 0.429),
    GemmTile(2, 160, 5, split=4): Cost(0.7, 8.4, 0.496),
    GemmTile(2, 160, 5, split=6): Cost(7.4, 8.2, 0.425),
    GemmTile(2, 160, 5, split=8): Cost(3.2, 3.8, 0.68),
    GemmTile(2, 184, 4, split=4): Cost(5.4, 9.3, 0.518),
    GemmTile(2, 256, 3, keeps_on=True): Cost(2.4, 3.7, 0.703),
    GemmTile(3, 128, 5): Cost(2.4, 6.0, 0.539),
    GemmTile(3, 128, 5, split=2): Cost(3.1, 8.3, 0.574),
    GemmTile(3, 160, 3, keeps_on=True): Cost(2.4, 3.1, 0.678),
    GemmTile(3, 160, 4): Cost(3.4, 17.1, 0.607),
    GemmTile(3, 160, 4, split=2): Cost(5.2, 8.6, 0.682),
}
STRIDED_TILES: Mapping[GemmTile, Cost] = {
    GemmTile(1, 80, 8): Cost(0.9, 7.7, 0.191),
    GemmTile(1, 160, 7): Cost(2.6, 5.5, 0.29),
    GemmTile(2, 80, 6, keeps_on=True): Cost(0.3, 18.9, 0.304),
    GemmTile(2, 128, 5, keeps_on=True): Cost(0.2, 7.5, 0.399),
    GemmTile(2, 160, 5, keeps_on=True): Cost(3.4, 3.0, 0.436),
    GemmTile(2, 160, 5, split=6): Cost(6.6, 8.7, 0.466),
    GemmTile(2, 160, 5, split=8): Cost(3.4, 7.4, 0.642),
    GemmTile(2, 184, 4, split=4): Cost(5.7, 8.6, 0.529),
}
# Each of these has four windows.
UPSAMPLED_TILES: Mapping[GemmTile, Cost] = {
    GemmTile(2, 80, 6, keeps_on=True): Cost(0.0, 2.3, 0.293),
    GemmTile(2, 128, 5, keeps_on=True): Cost(1.5, 1.2, 0.39),
    GemmTile(2, 160, 5, keeps_on=True): Cost(1.8, 1.3, 0.478),
    GemmTile(2, 160, 4, keeps_on=True, apart=True): Cost(1.2, 1.2, 0.475),
    GemmTile(2, 256, 3, keeps_on=True): Cost(2.4, 1.5, 0.8),
    GemmTile(3, 128, 4, keeps_on=True): Cost(1.5, 1.9, 0.56),
    GemmTile(3, 160, 3, keeps_on=True): Cost(2.4, 3.1, 0.678),
}
LINEAR_TILES: Mapping[GemmTile, Cost] = {
    GemmTile(2, 160, 5, keeps_on=True): Cost(3.2, 1.0, 0.443),
    GemmTile(2, 80, 6, keeps_on=True): Cost(3.0, 7.6, 0.189),
    GemmTile(1, 160, 7): Cost(2.3, 9.8, 0.284),
    GemmTile(1, 80, 8): Cost(0.7, 9.0, 0.238),
    GemmTile(2, 128, 5, keeps_on=True): Cost(2.9, 1.1, 0.37),
    GemmTile(2, 256, 3, keeps_on=True): Cost(4.6, 1.6, 0.719),
    GemmTile(2, 192, 4, keeps_on=True): Cost(3.3, 1.4, 0.556),
    GemmTile(3, 160, 4): Cost(4.5, 4.4, 0.656),
}
# Of results with few columns, such as products with an adapter's A. These are the times of 128 and
# 512 rows, whose programs do not disturb each other (linear_paired). With more rows it counts how
# often these are read (LIBRARY.row_bytes); rows of 20 MB take up to 5 us more, in the same order.
NARROW_TILES: Mapping[GemmTile, Cost] = {
    GemmTile(1, 32, 8): Cost(1.6, 2.5, 0.1),
    GemmTile(1, 32, 8, split=2): Cost(2.9, 2.8, 0.111),
    GemmTile(1, 32, 8, split=3): Cost(3.1, 2.8, 0.115),
    GemmTile(2, 32, 8, split=6): Cost(3.8, 6.0, 0.122),
    GemmTile(2, 32, 8, keeps_on=True): Cost(1.9, 2.0, 0.14),
    GemmTile(1, 64, 8): Cost(1.7, 6.0, 0.099),
    GemmTile(1, 64, 8, split=2): Cost(3.1, 2.8, 0.119),
    GemmTile(1, 64, 8, split=3): Cost(3.2, 2.8, 0.119),
    GemmTile(2, 64, 8, split=6): Cost(4.2, 6.0, 0.145),
    GemmTile(1, 96, 8): Cost(1.8, 9.0, 0.108),
    GemmTile(1, 96, 8, split=3): Cost(3.5, 2.8, 0.154),
    GemmTile(1, 80, 8): Cost(1.8, 9.0, 0.1),
    GemmTile(2, 80, 6, keeps_on=True): Cost(3.0, 7.6, 0.189),
    GemmTile(2, 128, 5, keeps_on=True): Cost(2.9, 1.1, 0.37),
}
# These are the tiles of LINEAR_TILES, and those that small products want. Tiles of few rows or
# columns were measured with a tenth to all of the multiprocessors at work.
SUM_TILES: Mapping[GemmTile, Cost] = {
    GemmTile(2, 160, 5, keeps_on=True): Cost(5.0, 2.0, 0.44),
    GemmTile(1, 160, 7): Cost(2.7, 9.8, 0.27, spared=0.5),
    GemmTile(2, 80, 7): Cost(2.8, 7.6, 0.29, spared=0.5),
    GemmTile(1, 80, 8): Cost(1.9, 9.0, 0.196, spared=0.4),
    GemmTile(2, 128, 5, keeps_on=True): Cost(4.2, 1.4, 0.30),
    GemmTile(3, 160, 4): Cost(6.5, 4.4, 0.634),
    GemmTile(2, 160, 5, split=3): Cost(6.4, 7.9, 0.55, spared=0.3),
    GemmTile(2, 80, 7, split=2): Cost(4.9, 6.0, 0.39),
    GemmTile(2, 80, 7, split=4): Cost(3.5, 6.0, 0.41),
    GemmTile(1, 80, 8, split=2): Cost(3.0, 2.8, 0.253),
    GemmTile(1, 80, 8, split=4): Cost(2.6, 2.8, 0.374),
}
GATED_TILES: Mapping[GemmTile, Cost] = {
    GemmTile(2, 256, 4, keeps_on=True): Cost(2.8, 2.2, 0.761),
    GemmTile(2, 160, 4, keeps_on=True, apart=True): Cost(3.0, 0.4, 0.537),
    GemmTile(2, 128, 5, keeps_on=True, apart=True): Cost(0.3, 0.9, 0.437),
    GemmTile(2, 192, 4, keeps_on=True, apart=True): Cost(1.7, 0.0, 0.604),
}
# No sweep has fitted these. Groups that are apart hide GELU: as plain products of 4608 rows, 12288
# columns and a depth of 3072 in linear_wgmma-widths, beside those of LINEAR_TILES. Others compute
# it between rounds, by two operations a number of a unit that does 16 a clock.
ACTIVATED_TILES: Mapping[GemmTile, Cost] = {
    GemmTile(2, 160, 4, keeps_on=True, apart=True): Cost(3.2, 1.0, 0.444),
    GemmTile(2, 128, 5, keeps_on=True, apart=True): Cost(2.9, 1.1, 0.391),
    GemmTile(2, 192, 3, keeps_on=True, apart=True): Cost(3.3, 1.4, 0.578),
    GemmTile(2, 160, 5, keeps_on=True): Cost(3.2, 2.6, 0.443),
    GemmTile(2, 128, 5, keeps_on=True): Cost(2.9, 2.4, 0.37),
    GemmTile(2, 192, 4, keeps_on=True): Cost(3.3, 3.3, 0.556),
}

# Products that normalise their columns (linear_normed, on an H200: 1x1 convolutions of ResNet-50 at
# batches 1, 8 and 32). What a sum reads has no number of its own: products with one take 1.0 to 1.3
# times what this says, others 0.6 to 1.1 times. Tiles that are nowhere the fastest by 2 % are left
# out: of 160 and 256 columns, in two parts, and of 128 x 128 whose groups are not apart.
NORMED_TILES: Mapping[GemmTile, Cost] = {
    GemmTile(1, 32, 8): Cost(2.4, 0.73, 0.12, spared=0.4),
    GemmTile(1, 32, 8, split=3): Cost(2.6, 0.16, 0.23, spared=0.6),
    GemmTile(1, 64, 8): Cost(2.2, 2.5, 0.16, spared=0.55),
    GemmTile(1, 96, 8): Cost(2.9, 3.1, 0.13, spared=0.6),
    GemmTile(1, 128, 8): Cost(2.8, 3.6, 0.23, spared=0.6),
    GemmTile(2, 64, 6, keeps_on=True): Cost(3.0, 2.1, 0.24, spared=0.6),
    GemmTile(2, 128, 5, keeps_on=True, apart=True): Cost(4.2, 2.7, 0.35, spared=0.45),
}

# Products of e4m3 codes, whose steps are of 128 codes (codes_wgmma, on an H200: its multiprocessors
# and their clock are those of an H100).
CODES_TILES: Mapping[GemmTile, Cost] = {
    GemmTile(2, 160, 5, keeps_on=True): Cost(3.3, 1.0, 0.512, spared=0.4),
    GemmTile(2, 128, 5, keeps_on=True): Cost(3.0, 1.0, 0.42, spared=0.4),
    GemmTile(2, 176, 4, keeps_on=True): Cost(3.5, 1.5, 0.566, spared=0.4),
    GemmTile(2, 192, 4, keeps_on=True): Cost(3.3, 1.1, 0.616, spared=0.35),
    GemmTile(2, 80, 6, keeps_on=True): Cost(2.5, 0.8, 0.303, spared=0.5),
    GemmTile(1, 160, 6, keeps_on=True): Cost(2.5, 0.8, 0.293, spared=0.4),
    GemmTile(1, 80, 8): Cost(2.0, 1.9, 0.206, spared=0.5),
}

# Products of codes that end in gates (codes_gated, on an H200). Groups that are apart hide GELU.
GATED_CODES_TILES: Mapping[GemmTile, Cost] = {
    GemmTile(2, 160, 5, keeps_on=True): Cost(3.6, 1.4, 0.484, spared=0.1),
    GemmTile(2, 128, 5, keeps_on=True): Cost(3.5, 1.4, 0.389, spared=0.15),
    GemmTile(2, 96, 4, keeps_on=True, apart=True): Cost(3.7, 0.5, 0.385, spared=0.4),
    GemmTile(1, 160, 6, keeps_on=True): Cost(3.3, 1.0, 0.283, spared=0.5),
    GemmTile(1, 80, 8): Cost(2.8, 1.9, 0.238, spared=0.5),
}

# 3x3 convolutions of e4m3 codes (code_conv, on an H200).
CODE_CONV_TILES: Mapping[GemmTile, Cost] = {
    GemmTile(2, 160, 5, keeps_on=True): Cost(3.1, 2.1, 0.488, spared=0.3),
    GemmTile(2, 80, 6, keeps_on=True): Cost(3.0, 2.9, 0.275, spared=0.45),
    GemmTile(1, 80, 8): Cost(1.5, 3.9, 0.197),
}

# The driver of an H100 says how many clusters of so many programs run at a time, one program a
# multiprocessor.
CLUSTERS: Mapping[int, int] = {1: 132, 2: 66, 3: 39, 4: 30, 6: 17, 8: 15}
LIBRARY = LibraryTimes(
    # cuDNN takes the time of its operations, or of its weights, and a beginning. It is the faster
    # one where it is at its best, which most sizes do not see.
    conv_ops=637e6,
    conv_bytes=4.3e6,
    conv_begin_us=23.0,
    linear_ops=856e6,
    linear_bytes=3.1e6,
    linear_begin_us=2.8,
    linear_depth=1900.0,
    gap_us=1.5,
    weight_bytes=2.6e6,
    weight_begin_us=3.0,
    row_bytes=3.6e6,
    row_begin_us=0.9,
    behind_bytes=3.2e6,
    behind_begin_us=1.5,
    adding_us=4.0,
)
GEMM = GemmTimes(
    {
        "conv": CONV_TILES,
        "strided": STRIDED_TILES,
        "upsampled": UPSAMPLED_TILES,
        PLAIN: LINEAR_TILES,
        NARROW: NARROW_TILES,
        GATED: GATED_TILES,
        SUM: SUM_TILES,
        ACTIVATED: ACTIVATED_TILES,
        NORMED: NORMED_TILES,
        CODES: CODES_TILES,
        GATED_CODES: GATED_CODES_TILES,
        CODE_CONV: CODE_CONV_TILES,
    },
    CLUSTERS,
    LIBRARY,
)

# These measurements set the numbers of attention: batch, heads, queries, keys, head.
ATTENTION_SHAPES = (
    (2, 8, 1024, 77, 80),
    (2, 8, 4096, 77, 40),
    (2, 8, 256, 256, 160),
    (2, 20, 1024, 1024, 64),
    (2, 10, 4096, 4096, 64),
    (2, 8, 4096, 4096, 40),
    (2, 8, 16384, 16384, 40),
    (2, 8, 2304, 2304, 40),
    (2, 8, 1024, 1024, 40),
    (2, 8, 4096, 4096, 80),
    (8, 8, 1024, 1024, 80),
    (2, 8, 256, 77, 80),
    (2, 10, 4096, 77, 64),
    (1, 8, 4096, 4096, 40),
    (8, 8, 4096, 4096, 40),
    (2, 8, 9216, 9216, 40),
    (2, 8, 1024, 1024, 80),
    (2, 8, 2304, 2304, 80),
    (1, 10, 4096, 4096, 64),
    (4, 10, 4096, 4096, 64),
    (2, 10, 2304, 2304, 64),
    (2, 20, 576, 576, 64),
    (2, 10, 6144, 6144, 64),
    (1, 20, 1024, 1024, 64),
    (2, 20, 2304, 2304, 64),
    (2, 10, 9216, 9216, 64),
    (4, 20, 1024, 1024, 64),
    (8, 20, 1024, 1024, 64),
    (2, 8, 1024, 77, 40),
    (2, 20, 1024, 77, 64),
    (2, 8, 4096, 77, 80),
    (2, 8, 256, 77, 160),
)
_BOX = TmaTile(64, 64, 3, 4, blocks=0, with_queries=True)
WORDS = 80  # keys of a single step
LEAST_WORDS = WORDS - MASKED + 1  # and of a tile that takes no fewer
FEW: Mapping[int, tuple[TileRule, ...]] = {  # by the size of a head; the first that holds
    40: (
        TileRule(WgmmaTile(2, WORDS, 1, 2), 2 << 20, WORDS),
        TileRule(CrossTile(2, WORDS, 2), UNBOUNDED, WORDS, LEAST_WORDS),
        TileRule(TmaTile(128, 32, 4, 4, parts=1, blocks=0), 24 << 20),
    ),
    64: (
        TileRule(WgmmaTile(1, WORDS, 1, 5), UNBOUNDED, WORDS),
        TileRule(TmaTile(64, 32, 4, 4, blocks=0), 4 << 20),
    ),
    80: (
        TileRule(WgmmaTile(1, WORDS, 1, 2), 2 << 20, WORDS),
        TileRule(CrossTile(2, WORDS, 2), UNBOUNDED, WORDS, LEAST_WORDS),
        TileRule(_BOX, 4 << 20),
    ),
    160: (TileRule(WgmmaTile(1, WORDS, 1, 2), UNBOUNDED, WORDS), TileRule(_BOX, 1 << 20)),
}
MANY: Mapping[int, tuple[TileRule, ...]] = {
    64: (TileRule(TmaTile(64, 64, 3, 4), 12 << 20),),
    160: (TileRule(_BOX, 8 << 20),),
}
IN_ROUNDS: Mapping[int, tuple[Rounds, ...]] = {  # of many keys, where no rule holds
    40: (
        Rounds(WgmmaTile(4, 80, 4), 5.7, 0.95),
        Rounds(WgmmaTile(3, 80, 3), 4.4, 0.79),
        Rounds(WgmmaTile(2, 64, 4, 2), 4.8, 0.57),
    ),
    80: (
        Rounds(WgmmaTile(2, 128, 3), 6.3, 1.08),
        Rounds(WgmmaTile(2, 64, 3), 5.3, 0.65),
        Rounds(WgmmaTile(3, 64, 3, early=True), 6.0, 0.80),
    ),
    64: (
        Rounds(WgmmaTile(4, 64, 4, early=True), 4.1, 0.875),
        Rounds(WgmmaTile(3, 80, 3, early=True), 4.5, 0.83),
        Rounds(WgmmaTile(2, 128, 2), 3.4, 1.054),
        Rounds(None, 2.3, 1.15),
    ),
    72: (
        Rounds(WgmmaTile(3, 64, 3, early=True), 4.43, 0.836),
        Rounds(WgmmaTile(2, 128, 3), 6.82, 1.298),
        Rounds(None, 9.53, 1.46),
    ),
    96: (
        Rounds(WgmmaTile(3, 64, 3, early=True), 3.54, 0.844),
        Rounds(WgmmaTile(2, 64, 3), 4.08, 0.662),
        Rounds(None, 3.33, 1.636),
    ),
    128: (
        Rounds(WgmmaTile(2, 80, 3), 4.82, 0.873),
        Rounds(WgmmaTile(2, 64, 3), 4.98, 0.72),
        Rounds(None, 3.26, 1.655),
    ),
}
# By e4m3 codes, without what makes these (attn_codes, on an H200). With 1,024 to 2,304 keys the
# exact kernel was as fast or faster at all of eight shapes.
LEAST_CODE_KEYS = 4096
BY_CODES: Mapping[int, tuple[Rounds, ...]] = {
    40: (
        Rounds(WgmmaTile(groups=2, keys=128, stages=3), 6.21, 0.660),
        Rounds(WgmmaTile(groups=3, keys=128, stages=3), 5.58, 0.928),
    ),
    64: (
        Rounds(WgmmaTile(groups=2, keys=128, stages=3), 3.14, 0.818),
        Rounds(WgmmaTile(groups=1, keys=128, stages=2, programs=2), 1.43, 0.431),
    ),
    80: (Rounds(WgmmaTile(groups=2, keys=128, stages=3), 5.69, 0.840),),
    128: (Rounds(WgmmaTile(groups=2, keys=128, stages=3), 1.91, 1.315),),
}
LEAST_QUERIES = {
    40: 256,
    64: 192,
    72: 1024,
    80: 128,
    96: 1024,
    128: 512,
    160: 64,
}  # fewer have not been measured
ATTENTION = AttentionTimes(
    few_keys=128,  # a few blocks
    few=FEW,
    many=MANY,
    in_rounds=IN_ROUNDS,
    least_queries=LEAST_QUERIES,
    codes=BY_CODES,
    least_code_keys=LEAST_CODE_KEYS,
)
TUNED = Tuned(DEVICE, GEMM, ATTENTION, CASES)
