import triton
import triton.language as tl


@triton.jit
def column_sum(p0, p1, partials, arrivals, s0, s1, s2, splits, ROWS: tl.constexpr, COLS: tl.constexpr, KEPT: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        if tl.num_programs(0) <= 640:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    split = program % splits
    group = program // splits
    par = group // s1
    col = group % s1 * COLS + tl.arange(0, COLS)[None, :]
    slab = (s0 + splits - 1) // splits
    begin = split * slab
    end = tl.minimum(begin + slab, s0)
    col_mask = col < s2
    v1_sum = tl.full([ROWS, COLS], 0.0, tl.float32)
    v1_sum_lost = tl.full([ROWS, COLS], 0.0, tl.float32)
    for first in tl.range(begin, end, ROWS, num_stages=3):
        row = first + tl.arange(0, ROWS)[:, None]
        row_mask = row < end
        v0 = tl.load(p0 + row.to(tl.int64) * s2 + col, mask=row_mask & col_mask).to(tl.float32)
        v1_sum_next = tl.where(row_mask & col_mask, v0, 0.0) - v1_sum_lost
        v1_sum_new = v1_sum + v1_sum_next
        v1_sum_lost = (v1_sum_new - v1_sum) - v1_sum_next
        v1_sum_lost = tl.where(tl.abs(v1_sum_lost) < float("inf"), v1_sum_lost, 0.0)
        v1_sum = v1_sum_new
    length = tl.maximum(end - begin, 0)
    v1_sum -= v1_sum_lost
    v1_sum = tl.sum(v1_sum, axis=0, keep_dims=True)
    if splits > 1:
        own_partials = partials + (par * splits + split) * 1 * s2
        tl.store(own_partials + 0 * s2 + col, v1_sum, mask=col_mask)
    is_last = splits == 1
    if splits > 1:
        tl.debug_barrier()
        is_last = tl.atomic_add(arrivals + group, 1, sem="acq_rel", scope="gpu") == splits - 1
    if is_last:
        tl.store(arrivals + group, 0)
        kept = col
        kept_mask = kept < s2
        v1_total_sum = tl.full([1, KEPT], 0.0, tl.float32)
        if splits > 1:
            for at in range(0, splits, SPLITS):
                part = at + tl.arange(0, SPLITS)[:, None]
                part_mask = (part < splits) & kept_mask
                every_partials = partials + (par * splits + part) * 1 * s2 + kept
                v1_part_sum = tl.load(every_partials + 0 * s2, mask=part_mask, other=0.0, cache_modifier=".cg")
                v1_part_sum = tl.sum(v1_part_sum, axis=0, keep_dims=True)
                v1_total_sum = v1_total_sum + v1_part_sum
        else:
            v1_total_sum = v1_sum
        tl.store(p1 + kept, v1_total_sum, mask=kept_mask)

# grid s1*splits, 4 warps
# s0 = m, class 1
# s1 = ((c + 255)//256), class 1
# s2 = c, class 1
# ROWS = 16
# COLS = 256
# KEPT = 256
# SPLITS = 16
# EARLY = 1
# scratch torch.float32 s2*splits
# scratch torch.int32 s1 zeroed
