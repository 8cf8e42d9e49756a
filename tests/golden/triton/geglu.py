import triton
import triton.language as tl


@triton.jit
def geglu(p0, p1, s0, COLS: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        if tl.num_programs(0) <= 640:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    col = tile * COLS + tl.arange(0, COLS)
    col_mask = col < s0
    col_r = col // 320
    col_c = col % 320
    v0 = tl.load(p0 + col_r.to(tl.int64) * 640 + col_c, mask=col_mask).to(tl.float32)
    v1 = tl.load(p0 + 320 + col_r.to(tl.int64) * 640 + col_c, mask=col_mask).to(tl.float32)
    v2 = 0.5 * v1 * (1.0 + tl.erf(v1 * 0.7071067811865476))
    v3 = v0 * v2
    tl.store(p1 + col, v3, mask=col_mask)

# grid ((s0 + 1023)//1024), 4 warps
# s0 = 320*m, class 16
# COLS = 1024
# EARLY = 1
