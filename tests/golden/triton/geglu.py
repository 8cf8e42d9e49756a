import triton
import triton.language as tl


@triton.jit
def geglu(p0, p1, s0, ROWS: tl.constexpr, COLS: tl.constexpr):
    tile = tl.program_id(0)
    first_row = tile // 5 * ROWS
    row = first_row + tl.arange(0, ROWS)[:, None]
    col = tile % 5 * COLS + tl.arange(0, COLS)[None, :]
    row_mask = row < s0
    v0 = tl.load(p0 + row.to(tl.int64) * 640 + col, mask=row_mask).to(tl.float32)
    v1 = tl.load(p0 + 320 + row.to(tl.int64) * 640 + col, mask=row_mask).to(tl.float32)
    v2 = 0.5 * v1 * (1.0 + tl.erf(v1 * 0.7071067811865476))
    v3 = v0 * v2
    tl.store(p1 + row.to(tl.int64) * 320 + col, v3, mask=row_mask)

# grid 5*((s0 + 15)//16), 4 warps
# s0 = m, class 1
# ROWS = 16
# COLS = 64
