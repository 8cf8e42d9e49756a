import triton
import triton.language as tl


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def softmax(p0, p1, s0, s1, ROWS: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        if tl.num_programs(0) <= 640:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
    first_row = tl.program_id(0) * ROWS
    row = first_row + tl.arange(0, ROWS)[:, None]
    v1_amax = tl.full([ROWS, COLS], float("-inf"), tl.float32)
    for first in range(0, s0, COLS):
        col = first + tl.arange(0, COLS)[None, :]
        col_mask = col < s0
        v0 = tl.load(p0 + row.to(tl.int64) * s0 + col, mask=col_mask).to(tl.float32)
        v1_amax = larger(v1_amax, tl.where(col_mask, tl.broadcast_to(v0, [ROWS, COLS]), float("-inf")))
    v1_amax = tl.reduce(v1_amax, 1, larger, keep_dims=True)
    v4_sum = tl.full([ROWS, COLS], 0.0, tl.float32)
    v4_sum_lost = tl.full([ROWS, COLS], 0.0, tl.float32)
    for first in range(0, s0, COLS):
        col = first + tl.arange(0, COLS)[None, :]
        col_mask = col < s0
        v0 = tl.load(p0 + row.to(tl.int64) * s0 + col, mask=col_mask).to(tl.float32)
        v2 = v0 - v1_amax
        v3 = tl.exp(v2)
        v4_sum_next = tl.where(col_mask, v3, 0.0) - v4_sum_lost
        v4_sum_new = v4_sum + v4_sum_next
        v4_sum_lost = (v4_sum_new - v4_sum) - v4_sum_next
        v4_sum_lost = tl.where(tl.abs(v4_sum_lost) < float("inf"), v4_sum_lost, 0.0)
        v4_sum = v4_sum_new
    v4_sum -= v4_sum_lost
    v4_sum = tl.sum(v4_sum, axis=1, keep_dims=True)
    for first in range(0, s0, COLS):
        col = first + tl.arange(0, COLS)[None, :]
        col_mask = col < s0
        v0 = tl.load(p0 + row.to(tl.int64) * s0 + col, mask=col_mask).to(tl.float32)
        v2 = v0 - v1_amax
        v3 = tl.exp(v2)
        v5 = v3 / v4_sum
        tl.store(tl.broadcast_to(p1 + row.to(tl.int64) * s0 + col, [ROWS, COLS]), v5, mask=col_mask)

# grid s1, 4 warps
# s0 = k, class 1
# s1 = m, class 1
# ROWS = 1
# COLS = 2048
# EARLY = 1
