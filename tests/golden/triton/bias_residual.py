import triton
import triton.language as tl


@triton.jit
def bias_residual(p0, p1, p2, p3, s0, ROWS: tl.constexpr, COLS: tl.constexpr):
    tile = tl.program_id(0)
    first_row = tile // 5 * ROWS
    row = first_row + tl.arange(0, ROWS)[:, None]
    col = tile % 5 * COLS + tl.arange(0, COLS)[None, :]
    row_mask = row < s0
    v0 = tl.load(p0 + row.to(tl.int64) * 320 + col, mask=row_mask).to(tl.float32)
    v1 = tl.load(p1 + col).to(tl.float32)
    v2 = v0 + v1
    v3 = tl.load(p2 + row.to(tl.int64) * 320 + col, mask=row_mask).to(tl.float32)
    v4 = v3 + 0.7 * v2
    tl.store(p3 + row.to(tl.int64) * 320 + col, v4, mask=row_mask)

# grid 5*((s0 + 15)//16), 4 warps
# s0 = m, class 1
# ROWS = 16
# COLS = 64
