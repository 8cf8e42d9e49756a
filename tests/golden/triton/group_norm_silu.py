import triton
import triton.language as tl


@triton.jit
def group_norm_silu(p0, p1, p2, p3, p4, p5, s0, s1, ROWS: tl.constexpr, COLS: tl.constexpr):
    tile = tl.program_id(0)
    first_row = tile // 5 * ROWS
    row = first_row + tl.arange(0, ROWS)[:, None]
    col = tile % 5 * COLS + tl.arange(0, COLS)[None, :]
    row_mask = row < s0
    row_n = row // s1
    col_g = col // 10
    v0 = tl.load(p0 + row.to(tl.int64) * 320 + col, mask=row_mask).to(tl.float32)
    v1 = tl.load(p1 + row_n.to(tl.int64) * 32 + col_g, mask=row_mask)
    v2 = v0 - v1
    v3 = tl.load(p2 + row_n.to(tl.int64) * 32 + col_g, mask=row_mask)
    v4 = v2 * v3
    v5 = tl.load(p3 + col).to(tl.float32)
    v6 = v4 * v5
    v7 = tl.load(p4 + col).to(tl.float32)
    v8 = v6 + v7
    v9 = v8 / (1.0 + tl.exp(-v8))
    tl.store(p5 + row.to(tl.int64) * 320 + col, v9, mask=row_mask)

# grid 5*((s0 + 15)//16), 4 warps
# s0 = h*n*w, class 1
# s1 = h*w, class 1
# ROWS = 16
# COLS = 64
