import triton
import triton.language as tl


@triton.jit
def nchw_to_nhwc(p0, p1, s0, s1, s2, s3, s4, ROWS: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        if tl.num_programs(0) <= 640:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    first_row = tile // s0 * ROWS
    row = first_row + tl.arange(0, ROWS)[:, None]
    col = tile % s0 * COLS + tl.arange(0, COLS)[None, :]
    row_mask = row < s1
    col_mask = col < s2
    row_n = row // s3
    row_hw = row % s3
    v0 = tl.load(p0 + row_n.to(tl.int64) * s4 + row_hw.to(tl.int64) + col.to(tl.int64) * s3, mask=row_mask & col_mask).to(tl.float32)
    tl.store(p1 + row.to(tl.int64) * s2 + col, v0, mask=row_mask & col_mask)

# grid ((s1 + 63)//64)*((s2 + 63)//64), 8 warps
# s0 = ((c + 63)//64), class 1
# s1 = h*n*w, class 1
# s2 = c, class 1
# s3 = h*w, class 1
# s4 = c*h*w, class 1
# ROWS = 64
# COLS = 64
# EARLY = 1
