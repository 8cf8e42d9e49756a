import triton
import triton.language as tl


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_range(p0, p1, s0, s1, ROWS: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        if tl.num_programs(0) <= 640:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
    first_row = tl.program_id(0) * ROWS
    row = first_row + tl.arange(0, ROWS)[:, None]
    v1_amax = tl.full([ROWS, COLS], float("-inf"), tl.float32)
    v2_amin = tl.full([ROWS, COLS], float("inf"), tl.float32)
    for first in range(0, (s0 * 4), COLS):
        col = first + tl.arange(0, COLS)[None, :]
        col_mask = col < (s0 * 4)
        v0 = tl.load(p0 + 2 + row.to(tl.int64) * (s0 * 8) + col, mask=col_mask).to(tl.float32)
        v1_amax = larger(v1_amax, tl.where(col_mask, tl.broadcast_to(v0, [ROWS, COLS]), float("-inf")))
        v2_amin = smaller(v2_amin, tl.where(col_mask, tl.broadcast_to(v0, [ROWS, COLS]), float("inf")))
    v1_amax = tl.reduce(v1_amax, 1, larger, keep_dims=True)
    v2_amin = tl.reduce(v2_amin, 1, smaller, keep_dims=True)
    v3 = v1_amax - v2_amin
    tl.store(tl.broadcast_to(p1 + row.to(tl.int64), [ROWS, 1]), v3)

# grid s1, 4 warps
# s0 = k, class 1
# s1 = m, class 1
# ROWS = 1
# COLS = 2048
# EARLY = 1
