import triton
import triton.language as tl


@triton.jit
def layer_norm(p0, p1, p2, p3, p4, p5, s0, ROWS: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        if tl.num_programs(0) <= 640:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
    first_row = tl.program_id(0) * ROWS
    row = first_row + tl.arange(0, ROWS)[:, None]
    row_mask = row < s0
    fills = (tl.num_programs(0) > 3686) & (tl.num_programs(0) < 6553)
    col0 = tl.arange(0, COLS)[None, :]
    col1 = 64 + tl.arange(0, COLS)[None, :]
    col2 = 128 + tl.arange(0, COLS)[None, :]
    col3 = 192 + tl.arange(0, COLS)[None, :]
    col4 = 256 + tl.arange(0, COLS)[None, :]
    if fills:
        v0 = tl.load(p0 + row.to(tl.int64) * 320 + col0, mask=row_mask, eviction_policy="evict_first").to(tl.float32)
    else:
        v0 = tl.load(p0 + row.to(tl.int64) * 320 + col0, mask=row_mask).to(tl.float32)
    if fills:
        at1_v0 = tl.load(p0 + row.to(tl.int64) * 320 + col1, mask=row_mask, eviction_policy="evict_first").to(tl.float32)
    else:
        at1_v0 = tl.load(p0 + row.to(tl.int64) * 320 + col1, mask=row_mask).to(tl.float32)
    if fills:
        at2_v0 = tl.load(p0 + row.to(tl.int64) * 320 + col2, mask=row_mask, eviction_policy="evict_first").to(tl.float32)
    else:
        at2_v0 = tl.load(p0 + row.to(tl.int64) * 320 + col2, mask=row_mask).to(tl.float32)
    if fills:
        at3_v0 = tl.load(p0 + row.to(tl.int64) * 320 + col3, mask=row_mask, eviction_policy="evict_first").to(tl.float32)
    else:
        at3_v0 = tl.load(p0 + row.to(tl.int64) * 320 + col3, mask=row_mask).to(tl.float32)
    if fills:
        at4_v0 = tl.load(p0 + row.to(tl.int64) * 320 + col4, mask=row_mask, eviction_policy="evict_first").to(tl.float32)
    else:
        at4_v0 = tl.load(p0 + row.to(tl.int64) * 320 + col4, mask=row_mask).to(tl.float32)
    if fills:
        v1 = tl.load(p1 + row.to(tl.int64) * 320 + col0, mask=row_mask, eviction_policy="evict_first").to(tl.float32)
    else:
        v1 = tl.load(p1 + row.to(tl.int64) * 320 + col0, mask=row_mask).to(tl.float32)
    if fills:
        at1_v1 = tl.load(p1 + row.to(tl.int64) * 320 + col1, mask=row_mask, eviction_policy="evict_first").to(tl.float32)
    else:
        at1_v1 = tl.load(p1 + row.to(tl.int64) * 320 + col1, mask=row_mask).to(tl.float32)
    if fills:
        at2_v1 = tl.load(p1 + row.to(tl.int64) * 320 + col2, mask=row_mask, eviction_policy="evict_first").to(tl.float32)
    else:
        at2_v1 = tl.load(p1 + row.to(tl.int64) * 320 + col2, mask=row_mask).to(tl.float32)
    if fills:
        at3_v1 = tl.load(p1 + row.to(tl.int64) * 320 + col3, mask=row_mask, eviction_policy="evict_first").to(tl.float32)
    else:
        at3_v1 = tl.load(p1 + row.to(tl.int64) * 320 + col3, mask=row_mask).to(tl.float32)
    if fills:
        at4_v1 = tl.load(p1 + row.to(tl.int64) * 320 + col4, mask=row_mask, eviction_policy="evict_first").to(tl.float32)
    else:
        at4_v1 = tl.load(p1 + row.to(tl.int64) * 320 + col4, mask=row_mask).to(tl.float32)
    v10 = tl.load(tl.broadcast_to(p2 + col0, [ROWS, COLS]), mask=row_mask).to(tl.float32)
    at1_v10 = tl.load(tl.broadcast_to(p2 + col1, [ROWS, COLS]), mask=row_mask).to(tl.float32)
    at2_v10 = tl.load(tl.broadcast_to(p2 + col2, [ROWS, COLS]), mask=row_mask).to(tl.float32)
    at3_v10 = tl.load(tl.broadcast_to(p2 + col3, [ROWS, COLS]), mask=row_mask).to(tl.float32)
    at4_v10 = tl.load(tl.broadcast_to(p2 + col4, [ROWS, COLS]), mask=row_mask).to(tl.float32)
    v12 = tl.load(tl.broadcast_to(p3 + col0, [ROWS, COLS]), mask=row_mask).to(tl.float32)
    at1_v12 = tl.load(tl.broadcast_to(p3 + col1, [ROWS, COLS]), mask=row_mask).to(tl.float32)
    at2_v12 = tl.load(tl.broadcast_to(p3 + col2, [ROWS, COLS]), mask=row_mask).to(tl.float32)
    at3_v12 = tl.load(tl.broadcast_to(p3 + col3, [ROWS, COLS]), mask=row_mask).to(tl.float32)
    at4_v12 = tl.load(tl.broadcast_to(p3 + col4, [ROWS, COLS]), mask=row_mask).to(tl.float32)
    v2 = v0 + v1
    at1_v2 = at1_v0 + at1_v1
    at2_v2 = at2_v0 + at2_v1
    at3_v2 = at3_v0 + at3_v1
    at4_v2 = at4_v0 + at4_v1
    tl.store(p4 + row.to(tl.int64) * 320 + col0, v2, mask=row_mask)
    tl.store(p4 + row.to(tl.int64) * 320 + col1, at1_v2, mask=row_mask)
    tl.store(p4 + row.to(tl.int64) * 320 + col2, at2_v2, mask=row_mask)
    tl.store(p4 + row.to(tl.int64) * 320 + col3, at3_v2, mask=row_mask)
    tl.store(p4 + row.to(tl.int64) * 320 + col4, at4_v2, mask=row_mask)
    v3_sum0 = v2 + at1_v2
    v3_sum1 = v3_sum0 + at2_v2
    v3_sum2 = v3_sum1 + at3_v2
    v3_sum = v3_sum2 + at4_v2
    v3 = tl.sum(v3_sum, axis=1, keep_dims=True) / 320
    v3_diff = v2 - v3
    v3_diff1 = at1_v2 - v3
    v3_diff2 = at2_v2 - v3
    v3_diff3 = at3_v2 - v3
    v3_diff4 = at4_v2 - v3
    v3_squares0 = v3_diff * v3_diff + v3_diff1 * v3_diff1
    v3_squares1 = v3_squares0 + v3_diff2 * v3_diff2
    v3_squares2 = v3_squares1 + v3_diff3 * v3_diff3
    v3_squares = v3_squares2 + v3_diff4 * v3_diff4
    v4 = tl.sum(v3_squares, axis=1, keep_dims=True) / 320
    v5 = tl.full([], 1e-05, tl.float32)
    v6 = v4 + v5
    v7 = tl.rsqrt(v6)
    v8 = v2 - v3
    at1_v8 = at1_v2 - v3
    at2_v8 = at2_v2 - v3
    at3_v8 = at3_v2 - v3
    at4_v8 = at4_v2 - v3
    v9 = v8 * v7
    at1_v9 = at1_v8 * v7
    at2_v9 = at2_v8 * v7
    at3_v9 = at3_v8 * v7
    at4_v9 = at4_v8 * v7
    v11 = v9 * v10
    at1_v11 = at1_v9 * at1_v10
    at2_v11 = at2_v9 * at2_v10
    at3_v11 = at3_v9 * at3_v10
    at4_v11 = at4_v9 * at4_v10
    v13 = v11 + v12
    at1_v13 = at1_v11 + at1_v12
    at2_v13 = at2_v11 + at2_v12
    at3_v13 = at3_v11 + at3_v12
    at4_v13 = at4_v11 + at4_v12
    tl.store(p5 + row.to(tl.int64) * 320 + col0, v13, mask=row_mask)
    tl.store(p5 + row.to(tl.int64) * 320 + col1, at1_v13, mask=row_mask)
    tl.store(p5 + row.to(tl.int64) * 320 + col2, at2_v13, mask=row_mask)
    tl.store(p5 + row.to(tl.int64) * 320 + col3, at3_v13, mask=row_mask)
    tl.store(p5 + row.to(tl.int64) * 320 + col4, at4_v13, mask=row_mask)

# grid ((s0 + 3)//4), 4 warps
# s0 = m, class 1
# ROWS = 4
# COLS = 64
# EARLY = 1
