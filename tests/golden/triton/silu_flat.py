import triton
import triton.language as tl


@triton.jit
def silu_flat(p0, p1, s0, COLS: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        if tl.num_programs(0) <= 640:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    col = tile * COLS + tl.arange(0, COLS)
    col_mask = col < s0
    v0 = tl.load(p0 + col, mask=col_mask).to(tl.float32)
    v1 = v0 / (1.0 + tl.exp(-v0))
    tl.store(p1 + col, v1, mask=col_mask)

# grid ((s0 + 511)//512), 4 warps
# s0 = n, class 1
# COLS = 512
# EARLY = 1
