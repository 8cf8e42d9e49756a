import triton
import triton.language as tl


@triton.jit
def upsample_nearest(p0, p1, s0, s1, s2, ROWS: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        if tl.num_programs(0) <= 640:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    first_row = tile * ROWS
    row = first_row + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    row_mask = row < (s0 * 4)
    col_mask = col < 36
    row_n_h = row // (s1 * 4)
    row_w = row // 2 % s1
    v0 = tl.load(p0 + row_n_h.to(tl.int64) * (s2 * 4) + row_w.to(tl.int64) * 36 + col, mask=row_mask & col_mask).to(tl.float32)
    tl.store(p1 + row.to(tl.int64) * 36 + col, v0, mask=row_mask & col_mask)

# grid ((4*s0 + 15)//16), 4 warps
# s0 = h*n*w, class 1
# s1 = w, class 1
# s2 = 9*w, class 1
# ROWS = 16
# COLS = 64
# EARLY = 1
