import triton
import triton.language as tl


@triton.jit
def gather_wrapped(p0, p1, p2, faults, s0, s1, s2, ROWS: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr):
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
    v0 = tl.load(p1 + row.to(tl.int64) * s2 + col, mask=row_mask & col_mask)
    v1 = tl.full([], 1, tl.int64)
    v2 = v0 & v1
    v3 = tl.full([], 0, tl.int64)
    v4 = v2 == v3
    v5 = tl.full([], 3, tl.int64)
    v6 = v0 * v5
    v7 = tl.full([], 6, tl.int64)
    v8 = v6 - v7
    v9_wrapped = tl.where(v8 < 0, v8 + 6, v8)
    v9_inside = (v9_wrapped >= 0) & (v9_wrapped < 6)
    v9_fault = (v9_inside == 0) & v4 & row_mask & col_mask
    tl.store(faults + v9_fault.to(tl.int32) * 0, 1, mask=v9_fault)
    v9 = tl.where(v9_inside, v9_wrapped, 0)
    v10 = tl.full([], 2, tl.int64)
    v11 = v10 - v0
    v12_wrapped = tl.where(v11 < 0, v11 + 6, v11)
    v12_inside = (v12_wrapped >= 0) & (v12_wrapped < 6)
    v12_fault = (v12_inside == 0) & row_mask & col_mask
    tl.store(faults + v12_fault.to(tl.int32) * 0, 1, mask=v12_fault)
    v12 = tl.where(v12_inside, v12_wrapped, 0)
    v13 = tl.load(p0 + row.to(tl.int64) * 6 + v9, mask=row_mask & col_mask & v4, other=0).to(tl.float32)
    v14 = tl.load(p0 + row.to(tl.int64) * 6 + v12, mask=row_mask & col_mask).to(tl.float32)
    v15 = v13 + v14
    tl.store(p2 + row.to(tl.int64) * s2 + col, v15, mask=row_mask & col_mask)

# grid ((s1 + 15)//16)*((s2 + 63)//64), 4 warps
# s0 = ((c + 63)//64), class 1
# s1 = n, class 1
# s2 = c, class 1
# ROWS = 16
# COLS = 64
# EARLY = 1
# scratch torch.int64 1 zeroed
