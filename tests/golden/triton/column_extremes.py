import triton
import triton.language as tl


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def column_extremes(p0, p1, p2, partials, arrivals, s0, s1, s2, splits, ROWS: tl.constexpr, COLS: tl.constexpr, KEPT: tl.constexpr, LANES: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        if tl.num_programs(0) <= 640:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    split = program % splits
    group = program // splits
    par = group
    col = tl.arange(0, COLS)[None, :]
    slab = (s0 + splits - 1) // splits
    begin = split * slab
    end = tl.minimum(begin + slab, s0)
    col_mask = col < 24
    v1_amax = tl.full([ROWS, COLS], float("-inf"), tl.float32)
    v3_amin = tl.full([ROWS, COLS], float("inf"), tl.float32)
    for first in tl.range(begin, end, ROWS, num_stages=3):
        row = first + tl.arange(0, ROWS)[:, None]
        row_mask = row < end
        v0 = tl.load(p0 + par.to(tl.int64) * (s1 * 8) + row.to(tl.int64) * 24 + col, mask=row_mask & col_mask).to(tl.float32)
        v1_amax = larger(v1_amax, tl.where(row_mask & col_mask, v0, float("-inf")))
        v2 = v0 * v0
        v3_amin = smaller(v3_amin, tl.where(row_mask & col_mask, v2, float("inf")))
    length = tl.maximum(end - begin, 0)
    v1_amax = tl.reduce(v1_amax, 0, larger, keep_dims=True)
    v3_amin = tl.reduce(v3_amin, 0, smaller, keep_dims=True)
    own = tl.arange(0, KEPT)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    is_lane = (own < 4) & (lane < 6)
    place = tl.where(is_lane, own * 6 + lane, 0)
    place = tl.reshape(place, [KEPT * LANES])
    v1_own_amax = tl.gather(tl.reshape(v1_amax, [COLS]), place, 0)
    v1_own_amax = tl.where(is_lane, tl.reshape(v1_own_amax, [KEPT, LANES]), float("-inf"))
    v1_own_amax = tl.reduce(v1_own_amax, 1, larger, keep_dims=True)
    v3_own_amin = tl.gather(tl.reshape(v3_amin, [COLS]), place, 0)
    v3_own_amin = tl.where(is_lane, tl.reshape(v3_own_amin, [KEPT, LANES]), float("inf"))
    v3_own_amin = tl.reduce(v3_own_amin, 1, smaller, keep_dims=True)
    own_partials = partials + (par * splits + split) * 8
    tl.store(own_partials + 0 + own, v1_own_amax)
    tl.store(own_partials + 4 + own, v3_own_amin)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + group, 1, sem="acq_rel", scope="gpu")
    if arrived == splits - 1:
        tl.store(arrivals + group, 0)
        kept = tl.arange(0, KEPT)[None, :]
        v1_total_amax = tl.full([1, KEPT], float("-inf"), tl.float32)
        v3_total_amin = tl.full([1, KEPT], float("inf"), tl.float32)
        for at in range(0, splits, SPLITS):
            part = at + tl.arange(0, SPLITS)[:, None]
            part_mask = part < splits
            every_partials = partials + (par * splits + part) * 8 + kept
            v1_part_amax = tl.load(every_partials + 0, mask=part_mask, other=float("-inf"), cache_modifier=".cg")
            v3_part_amin = tl.load(every_partials + 4, mask=part_mask, other=float("inf"), cache_modifier=".cg")
            v1_part_amax = tl.reduce(v1_part_amax, 0, larger, keep_dims=True)
            v1_total_amax = larger(v1_total_amax, v1_part_amax)
            v3_part_amin = tl.reduce(v3_part_amin, 0, smaller, keep_dims=True)
            v3_total_amin = smaller(v3_total_amin, v3_part_amin)
        tl.store(p1 + par.to(tl.int64) * 4 + kept, v1_total_amax)
        tl.store(p2 + par.to(tl.int64) * 4 + kept, v3_total_amin)

# grid s2*splits, 8 warps
# s0 = m, class 1
# s1 = 3*m, class 1
# s2 = n, class 1
# ROWS = 256
# COLS = 32
# KEPT = 4
# LANES = 8
# SPLITS = 256
# EARLY = 1
# scratch torch.float32 8*s2*splits
# scratch torch.int32 s2 zeroed
