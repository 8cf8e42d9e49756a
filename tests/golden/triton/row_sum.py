import triton
import triton.language as tl


@triton.jit
def quotient(a, b):
    is_zero = a == 0
    result = tl.div_rn(tl.where(is_zero, 8.673617379884035e-19, a), b)
    return tl.where(is_zero, a * result, result)


@triton.jit
def row_sum(p0, p1, p2, s0, s1, ROWS: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        if tl.num_programs(0) <= 640:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
    first_row = tl.program_id(0) * ROWS
    row = first_row + tl.arange(0, ROWS)[:, None]
    v2 = s0.to(tl.float32)
    v1_sum = tl.full([ROWS, COLS], 0.0, tl.float32)
    v1_sum_lost = tl.full([ROWS, COLS], 0.0, tl.float32)
    for first in range(0, s0, COLS):
        col = first + tl.arange(0, COLS)[None, :]
        col_mask = col < s0
        v0 = tl.load(p0 + row.to(tl.int64) * s0 + col, mask=col_mask).to(tl.float32)
        v1_sum_next = tl.where(col_mask, tl.broadcast_to(v0, [ROWS, COLS]), 0.0) - v1_sum_lost
        v1_sum_new = v1_sum + v1_sum_next
        v1_sum_lost = (v1_sum_new - v1_sum) - v1_sum_next
        v1_sum_lost = tl.where(tl.abs(v1_sum_lost) < float("inf"), v1_sum_lost, 0.0)
        v1_sum = v1_sum_new
    v1_sum -= v1_sum_lost
    v1_sum = tl.sum(v1_sum, axis=1, keep_dims=True)
    tl.store(tl.broadcast_to(p1 + row.to(tl.int64), [ROWS, 1]), v1_sum)
    v3 = quotient(v1_sum, v2)
    tl.store(tl.broadcast_to(p2 + row.to(tl.int64), [ROWS, 1]), v3)

# grid s1, 4 warps
# s0 = k, class 1
# s1 = m, class 1
# ROWS = 1
# COLS = 2048
# EARLY = 1
