import triton
import triton.language as tl


@triton.jit
def timestep_embedding(p0, p1, s0, COLS: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        if tl.num_programs(0) <= 640:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    col = tile * COLS + tl.arange(0, COLS)
    col_mask = col < s0
    col_n = col // 320
    col_i = col % 160
    col_p = col // 160 % 2
    v0 = tl.load(p0 + col_n, mask=col_mask)
    v1 = v0.to(tl.float32)
    v2 = col_i.to(tl.int64)
    v3 = v2.to(tl.float32)
    v4 = tl.full([], -0.057564627324851146, tl.float32)
    v5 = v3 * v4
    v6 = tl.exp(v5)
    v7 = v1 * v6
    v8 = col_p.to(tl.int64)
    v9 = tl.full([], 0, tl.int64)
    v10 = v8 == v9
    v11 = tl.cos(v7)
    v12 = tl.sin(v7)
    v13 = tl.where(v10, v11, v12)
    tl.store(p1 + col, v13, mask=col_mask)

# grid ((s0 + 1023)//1024), 4 warps
# s0 = 320*n, class 16
# COLS = 1024
# EARLY = 1
