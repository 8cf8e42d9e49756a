import triton
import triton.language as tl


@triton.jit
def rounded_to_bfloat16(x, SM_90: tl.constexpr):
    if SM_90:
        y = tl.inline_asm_elementwise(
            "{.reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; "
            "shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000;}",
            "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        y = x.to(tl.bfloat16).to(tl.float32)
    return y


@triton.jit
def casts(p0, p1, p2, p3, s0, COLS: tl.constexpr, SM_90: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        if tl.num_programs(0) <= 640:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    col = tile * COLS + tl.arange(0, COLS)
    col_mask = col < s0
    v0 = tl.load(p0 + col, mask=col_mask).to(tl.float32)
    v1 = tl.full([], 3.1, tl.float32)
    v2 = v0 * v1
    v3 = v2.to(tl.float16).to(tl.float32)
    v4 = tl.full([], 1.0, tl.float32)
    v5 = v3 + v4
    v6 = rounded_to_bfloat16(v5, SM_90)
    v7 = v6.to(tl.float32)
    tl.store(p1 + col, v7, mask=col_mask)
    v8 = v6.to(tl.int64)
    tl.store(p2 + col, v8, mask=col_mask)
    v9 = tl.full([], 0.0, tl.float32)
    v10 = v7 > v9
    tl.store(p3 + col, v10, mask=col_mask)

# grid ((s0 + 511)//512), 4 warps
# s0 = n, class 1
# COLS = 512
# SM_90 = 1
# EARLY = 1
