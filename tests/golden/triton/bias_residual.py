import triton
import triton.language as tl


@triton.jit
def bias_residual(p0, p1, p2, p3, s0, COLS: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        if tl.num_programs(0) <= 640:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    col = tile * COLS + tl.arange(0, COLS)
    col_mask = col < s0
    col_c = col % 320
    v0 = tl.load(p0 + col, mask=col_mask).to(tl.float32)
    v1 = tl.load(p1 + col_c, mask=col_mask).to(tl.float32)
    v2 = v0 + v1
    v3 = tl.load(p2 + col, mask=col_mask).to(tl.float32)
    v4 = v3 + 0.7 * v2
    tl.store(p3 + col, v4, mask=col_mask)

# grid ((s0 + 1023)//1024), 4 warps
# s0 = 320*m, class 16
# COLS = 1024
# EARLY = 1
