# mypy: ignore-errors
"""Hold the Triton kernels of the parameter step. Strop reads this file as text and never imports
it.

Every kernel works on a list of tensors: ``blocks[i]`` says which tensor program ``i`` works on and
which block of it, ``grads`` and ``arrays`` hold addresses (of parameters, two states, averages,
shadows and the scales of 8-bit states, one row each), ``rows`` the numbers that a tensor's update
needs, worked out by ``settle``.
"""

import triton
import triton.language as tl


@triton.jit
def typed(address, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Make a pointer from an address. ``KIND``: see ``sources.KINDS``."""
    if KIND == 1:
        array = address.to(tl.pointer_type(tl.float32))
    elif KIND == 2:
        array = address.to(tl.pointer_type(tl.float16))
    elif KIND == 3:
        array = address.to(tl.pointer_type(tl.bfloat16))
    elif KIND == 5:
        array = address.to(tl.pointer_type(tl.uint8))
    else:
        array = address.to(tl.pointer_type(tl.float64))
    return tl.multiple_of(array, 16) if ALIGNED else array


@triton.jit
def read(array, at, left, FULL: tl.constexpr, WIDE: tl.constexpr):
    values = tl.load(array + at) if FULL else tl.load(array + at, mask=at < left, other=0.0)
    return values.to(tl.float64) if WIDE else values.to(tl.float32)


@triton.jit
def write(array, at, values, left, FULL: tl.constexpr):
    if FULL:
        tl.store(array + at, values)
    else:
        tl.store(array + at, values, mask=at < left)


@triton.jit
def add_squares(total, worst, grad, at, inverse, left, FULL: tl.constexpr, WIDE: tl.constexpr):
    raw = read(grad, at, left, FULL, WIDE)
    worst = worst | (raw - raw != 0.0).to(tl.int32)  # NaN and infinities
    value = raw * inverse
    return total + value * value, worst


@triton.jit
def gradient_sweep(
    blocks,
    grads,
    numels,
    scale,
    partials,
    flags,
    s0,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GRAD: tl.constexpr,
    WIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Run the first sweep: the sum of squares of every block, and whether all of it is finite."""
    program = tl.program_id(0)
    item = tl.load(blocks + program)
    which = item >> 32
    first = (item & 0xFFFFFFFF) * BLOCK
    left = tl.load(numels + which) - first
    grad = typed(tl.load(grads + which), GRAD, ALIGNED) + first
    inverse = 1.0 / tl.load(scale).to(tl.float64)
    if not WIDE:
        inverse = inverse.to(tl.float32)
    at = tl.arange(0, TILE)
    total = tl.full([TILE], 0.0, tl.float64 if WIDE else tl.float32)
    worst = tl.full([TILE], 0, tl.int32)
    if left >= BLOCK:
        for k in range(0, BLOCK, TILE):
            total, worst = add_squares(total, worst, grad, at + k, inverse, left, True, WIDE)
    else:
        rest = left.to(tl.int32)
        for k in range(0, rest, TILE):
            total, worst = add_squares(total, worst, grad, at + k, inverse, rest, False, WIDE)
    tl.store(partials + program, tl.sum(total).to(tl.float64))
    tl.store(flags + program, tl.sum(worst))


@triton.jit
def ema_weight(settings, counters):
    """Compute 1 - decay of this step, by the schedule of diffusers' EMAModel."""
    count = tl.load(counters) + 1
    tl.store(counters, count)
    age = count.to(tl.float64) - tl.load(settings + 3) - 1.0
    since = tl.where(age > 0.0, age, 0.0)
    growth = tl.log(1.0 + since / tl.load(settings + 5)) * tl.load(settings + 6)
    warm = 1.0 - tl.exp(-growth)
    decay = tl.where(tl.load(settings + 4) > 0.0, warm, (1.0 + since) / (10.0 + since))
    decay = tl.minimum(decay, tl.load(settings + 1))
    decay = tl.maximum(decay, tl.load(settings + 2))
    return 1.0 - tl.where(age > 0.0, decay, 0.0)


@triton.jit
def settle_adam(group, row, step, mask):
    """Compute from lr, beta1, beta2, eps, weight decay, decoupled?, sign what ``adam`` reads."""
    lr = tl.load(group, mask=mask, other=0.0)
    beta1 = tl.load(group + 1, mask=mask, other=0.0)
    beta2 = tl.load(group + 2, mask=mask, other=0.0)
    decay = tl.load(group + 4, mask=mask, other=0.0)
    decoupled = tl.load(group + 5, mask=mask, other=0.0)
    correction1 = 1.0 - tl.exp(step * tl.log(beta1))
    correction2 = 1.0 - tl.exp(step * tl.log(beta2))
    tl.store(row, lr * decay * decoupled, mask=mask)
    tl.store(row + 1, decay * (1.0 - decoupled), mask=mask)
    tl.store(row + 2, 1.0 - beta1, mask=mask)
    tl.store(row + 3, 1.0 - beta2, mask=mask)
    tl.store(row + 4, lr / correction1, mask=mask)
    tl.store(row + 5, 1.0 / tl.sqrt(correction2), mask=mask)
    tl.store(row + 6, tl.load(group + 3, mask=mask, other=0.0), mask=mask)


@triton.jit
def settle_sgd(group, row, step, mask):
    """Compute from lr, momentum, dampening, nesterov?, weight decay, -, sign what ``sgd`` reads."""
    momentum = tl.load(group + 1, mask=mask, other=0.0)
    gain = 1.0 - tl.load(group + 2, mask=mask, other=0.0)
    nesterov = tl.load(group + 3, mask=mask, other=0.0)
    is_first = step <= 1.0
    tl.store(row, tl.load(group, mask=mask, other=0.0), mask=mask)
    tl.store(row + 1, tl.load(group + 4, mask=mask, other=0.0), mask=mask)
    tl.store(row + 2, tl.where(is_first, 0.0, momentum), mask=mask)
    tl.store(row + 3, tl.where(is_first, 1.0, gain), mask=mask)
    tl.store(row + 4, nesterov, mask=mask)
    tl.store(row + 5, tl.where(nesterov > 0.0, momentum, 1.0), mask=mask)


@triton.jit
def settle_rows(
    settings, groups, slots, steps, rows, s1, skip, ADAM: tl.constexpr, ROWS: tl.constexpr
):
    """Count the step of every tensor, and write what the second sweep reads of it."""
    at = tl.arange(0, ROWS)
    for k in range(0, s1, ROWS):
        mask = at + k < s1
        slot = tl.load(slots + k + at, mask=mask, other=0)
        step = tl.load(steps + slot, mask=mask, other=0.0)
        step = tl.where(skip, step, step + 1.0)
        tl.store(steps + slot, step, mask=mask)
        group = settings + 8 + 8 * tl.load(groups + k + at, mask=mask, other=0)
        row = rows + 8 * (k + at)
        tl.store(row + 7, tl.load(group + 6, mask=mask, other=0.0), mask=mask)
        if ADAM:
            settle_adam(group, row, step.to(tl.float64), mask)
        else:
            settle_sgd(group, row, step.to(tl.float64), mask)


@triton.jit
def measured(partials, flags, s0, TILE: tl.constexpr):
    """The norm of all gradients, and whether one of their elements is not finite."""
    at = tl.arange(0, TILE)
    total = tl.full([TILE], 0.0, tl.float64)
    worst = tl.full([TILE], 0, tl.int32)
    for k in range(0, s0, TILE):
        mask = at + k < s0
        total += tl.load(partials + k + at, mask=mask, other=0.0)
        worst += tl.load(flags + k + at, mask=mask, other=0)
    return tl.sqrt(tl.sum(total)), tl.sum(worst) > 0


@triton.jit
def settle(
    partials,
    flags,
    scale,
    found,
    settings,
    groups,
    slots,
    steps,
    counters,
    keys,
    scalars,
    rows,
    norm,
    nonfinite,
    s0,
    s1,
    MEASURED: tl.constexpr,
    CLIP: tl.constexpr,
    AMP: tl.constexpr,
    EMA: tl.constexpr,
    ADAM: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute in one program, between the sweeps, every number that is not a tensor's element."""
    factor = 1.0 / tl.load(scale).to(tl.float64)
    bad = tl.load(found) > 0.0
    if MEASURED:
        length, is_odd = measured(partials, flags, s0, TILE)
        bad = bad | is_odd
        tl.store(norm, length.to(tl.float32))
        if CLIP:
            ratio = tl.load(settings) / (length + 1e-6)
            factor = factor * tl.where(ratio > 1.0, 1.0, ratio)  # NaN stays
    skip = (bad.to(tl.int32) * AMP) > 0
    tl.store(nonfinite, tl.where(bad, 1.0, 0.0))
    tl.store(scalars, factor)
    tl.store(scalars + 1, tl.where(skip, 1.0, 0.0))
    if EMA:
        tl.store(scalars + 2, ema_weight(settings, counters))
    draws = tl.load(counters + 1) + 1
    tl.store(counters + 1, draws)
    tl.store(keys + 1, tl.load(keys) + draws * 0x1E3779B97F4A7C15)
    settle_rows(settings, groups, slots, steps, rows, s1, skip, ADAM, ROWS)


@triton.jit
def adam(p, g, m, v, a0, a1, a2, a3, a4, a5, a6, PLAIN: tl.constexpr):
    """Update moments by linear interpolation: with beta rounded to fp32, beta * v would drift."""
    g = g + a1 * p
    m = m + a2 * (g - m)
    v = v + a3 * (g * g - v)
    # Plain fp32 roots and quotients are two ulps off: for fp64, and beside the errors of codes.
    root = tl.sqrt(v) if PLAIN else tl.sqrt_rn(v)
    ratio = m / (root * a5 + a6) if PLAIN else tl.div_rn(m, root * a5 + a6)
    return p - (a0 * p + a4 * ratio), m, v


@triton.jit
def round_at_random(values, key, position):
    """Round fp32 to bf16, up or down in proportion to the distance."""
    bits = values.to(tl.uint32, bitcast=True)
    noise = (tl.rand(key, position) * 65536.0).to(tl.uint32)
    is_finite = (bits & 0x7F800000) != 0x7F800000
    bits = tl.where(is_finite, bits + noise, tl.where(values != values, 0x7FC00000, bits))
    bits = (bits & 0xFFFF0000).to(tl.uint32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def dequantize(codes, scale, SIGNED: tl.constexpr):
    """Decode what codes stand for, with the bits of ``quantized.book``.

    A piece is one of 2^n, from number 2^n on, and its middle an integer times 5^n. A table would be
    read lane by lane, and its layout be that of all the rest.
    """
    LAST: tl.constexpr = 128 if SIGNED else 256
    ZERO: tl.constexpr = 127 if SIGNED else 0
    number = codes.to(tl.int32)
    piece = tl.abs(number - 127) if SIGNED else number + 1
    real = piece.to(tl.float32)
    bits = real.to(tl.int32, bitcast=True)
    start = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    place = (real * 18.0 + 9.0) - start * 16.0
    n = (bits >> 23) + 1  # in the last three bits
    power = tl.where((n & 1) != 0, 5.0, 1.0) * tl.where((n & 2) != 0, 25.0, 1.0)
    power = power * tl.where((n & 4) != 0, 625.0, 1.0)
    share = place * power * (0.5e-7 if SIGNED else 0.5e-8)
    share = tl.where(piece == LAST, 1.0, share)
    share = tl.where(number == ZERO, 0.0, share)
    if SIGNED:
        share = tl.where(number < ZERO, -share, share)
    return share * scale[:, None]


@triton.jit
def quantize(values, SIGNED: tl.constexpr):
    """Encode rows of 256 values as codes and scales, as ``quantized.quantize`` defines them.

    The number of a piece grows linearly in each decade, the slower the higher it is: it is the
    least of seven lines.
    """
    TOP: tl.constexpr = 64 if SIGNED else 128
    bits = values.to(tl.uint32, bitcast=True)
    largest = tl.reduce((bits << 1) | (bits >> 31), 1, larger)  # by size, NaN above all; then sign
    has_inverse = largest >= 0x01000000
    scale = (largest >> 1) | (largest << 31)
    scale = tl.where(has_inverse, scale, 0).to(tl.uint32).to(tl.float32, bitcast=True)
    inverse = tl.where(has_inverse, tl.div_rn(1.0, scale), 0.0)
    share = values * inverse[:, None]
    size = tl.abs(share)
    place = size * (TOP * 10 / 9) + TOP * 8 / 9
    for decade in tl.static_range(1, 7):
        slope = (TOP >> decade) * (10 ** (decade + 1)) / 9
        place = tl.minimum(place, size * slope + (TOP >> decade) * 8 / 9)
    piece = tl.where(place >= 2 * TOP - 0.25, 2.0 * TOP, place).to(tl.int32)
    if SIGNED:
        code = tl.where(share < 0.0, 127 - tl.minimum(piece, 127), 127 + piece)
    else:
        code = tl.where(share > 0.0, tl.maximum(piece, 2) - 1, 0)
    return code.to(tl.uint8), scale


@triton.jit
def load_moment(codes, scales, at, row, left, FULL: tl.constexpr, SIGNED: tl.constexpr):
    """Load codes and scales as they lie in memory, and what they stand for."""
    if FULL:
        code = tl.load(codes + at)
        scale = tl.load(scales + row)
    else:
        code = tl.load(codes + at, mask=at < left, other=0)
        scale = tl.load(scales + row, mask=row * 256 < left, other=0.0)
    return code, scale, dequantize(code, scale, SIGNED)


@triton.jit
def store_moment(
    codes,
    scales,
    code,
    scale,
    values,
    at,
    row,
    left,
    skip,
    FULL: tl.constexpr,
    SIGNED: tl.constexpr,
):
    """Store a moment; ``code`` and ``scale`` are what stays in a step that is skipped."""
    new_code, new_scale = quantize(values, SIGNED)
    write(codes, at, tl.where(skip, code, new_code), left, FULL)
    write(scales, row, tl.where(skip, scale, new_scale), tl.cdiv(left, 256), FULL)


@triton.jit
def update_quantized(first, second, coded, p, g, numbers, at, left, skip, FULL: tl.constexpr):
    """Run Adam on moments in 8 bits. The parameter changes by what they are before they are
    coded."""
    scales, row = coded
    first_scales, second_scales = scales
    a0, a1, a2, a3, a4, a5, a6, _ = numbers
    code1, scale1, m = load_moment(first, first_scales, at, row, left, FULL, True)
    code2, scale2, v = load_moment(second, second_scales, at, row, left, FULL, False)
    if not FULL:  # behind the end nothing is to count
        m = tl.where(at < left, m, 0.0)
        v = tl.where(at < left, v, 0.0)
    new, m, v = adam(p, g, m, v, a0, a1, a2, a3, a4, a5, a6, True)
    store_moment(first, first_scales, code1, scale1, m, at, row, left, skip, FULL, True)
    store_moment(second, second_scales, code2, scale2, v, at, row, left, skip, FULL, False)
    return new


@triton.jit
def update_adam(
    first, second, p, g, numbers, at, left, skip, FULL: tl.constexpr, WIDE: tl.constexpr
):
    a0, a1, a2, a3, a4, a5, a6, _ = numbers
    m = read(first, at, left, FULL, WIDE)
    v = read(second, at, left, FULL, WIDE)
    new, new_m, new_v = adam(p, g, m, v, a0, a1, a2, a3, a4, a5, a6, WIDE)
    write(first, at, tl.where(skip, m, new_m), left, FULL)
    write(second, at, tl.where(skip, v, new_v), left, FULL)
    return new


@triton.jit
def update_sgd(
    first,
    p,
    g,
    numbers,
    at,
    left,
    skip,
    FULL: tl.constexpr,
    STATES: tl.constexpr,
    WIDE: tl.constexpr,
):
    a0, a1, a2, a3, a4, a5, _, _ = numbers
    g = g + a1 * p
    step = g
    if STATES == 1:
        m = read(first, at, left, FULL, WIDE)
        new_m = a2 * m + a3 * g
        step = a4 * g + a5 * new_m
        write(first, at, tl.where(skip, m, new_m), left, FULL)
    return p - a0 * step


@triton.jit
def update(arrays, coded, step, at, left, FULL: tl.constexpr, FORM: tl.constexpr):
    """Update one tile of a tensor. ``step`` holds for all of it, ``FORM`` has the flags of the
    sweep."""
    grad, param, first, second, average, shadow = arrays
    numbers, skip, weight, key, position = step
    PARAM: tl.constexpr = FORM[0]
    STATES: tl.constexpr = FORM[1]
    QUANTIZED: tl.constexpr = FORM[2]
    EMA: tl.constexpr = FORM[3]
    SHADOW: tl.constexpr = FORM[4]
    WIDE: tl.constexpr = FORM[5]
    RANDOM: tl.constexpr = FORM[6]
    g = read(grad, at, left, FULL, WIDE) * numbers[7]
    p = read(param, at, left, FULL, WIDE)
    if QUANTIZED:
        new = update_quantized(first, second, coded, p, g, numbers, at, left, skip, FULL)
    elif STATES == 2:
        new = update_adam(first, second, p, g, numbers, at, left, skip, FULL, WIDE)
    else:
        new = update_sgd(first, p, g, numbers, at, left, skip, FULL, STATES, WIDE)
    p = tl.where(skip, p, new)
    if RANDOM:
        p = round_at_random(p, key, position + at)
    elif PARAM == 2:
        p = p.to(tl.float16).to(tl.float32)
    elif PARAM == 3:
        p = p.to(tl.bfloat16).to(tl.float32)
    write(param, at, p, left, FULL)
    if EMA:
        s = read(average, at, left, FULL, WIDE)
        write(average, at, s - weight * (s - p), left, FULL)
    if SHADOW:
        write(shadow, at, p, left, FULL)


@triton.jit
def numbers_of(row, scalars, WIDE: tl.constexpr):
    """Load what ``settle`` has worked out for a tensor, and the factor of its gradient."""
    TYPE: tl.constexpr = tl.float64 if WIDE else tl.float32
    a0 = tl.load(row).to(TYPE)
    a1 = tl.load(row + 1).to(TYPE)
    a2 = tl.load(row + 2).to(TYPE)
    a3 = tl.load(row + 3).to(TYPE)
    a4 = tl.load(row + 4).to(TYPE)
    a5 = tl.load(row + 5).to(TYPE)
    a6 = tl.load(row + 6).to(TYPE)
    factor = (tl.load(scalars) * tl.load(row + 7)).to(TYPE)
    return a0, a1, a2, a3, a4, a5, a6, factor


@triton.jit
def arrays_of(
    here,
    grad,
    s1,
    start,
    PARAM: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SHADOW: tl.constexpr,
    WIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Pointers to a block of a tensor's arrays, and to the scales of its 8-bit states."""
    WORD: tl.constexpr = 4 if WIDE else 1
    STATE: tl.constexpr = 5 if QUANTIZED else WORD
    param = typed(tl.load(here), PARAM, ALIGNED) + start
    first = typed(tl.load(here + s1), STATE, ALIGNED) + start
    second = typed(tl.load(here + 2 * s1), STATE, ALIGNED) + start
    average = typed(tl.load(here + 3 * s1), WORD, ALIGNED) + start
    shadow = typed(tl.load(here + 4 * s1), SHADOW, ALIGNED) + start
    first_scales = typed(tl.load(here + 5 * s1), 1, ALIGNED) + start // 256
    second_scales = typed(tl.load(here + 6 * s1), 1, ALIGNED) + start // 256
    return (grad, param, first, second, average, shadow), (first_scales, second_scales)


@triton.jit
def update_sweep(
    blocks,
    grads,
    arrays,
    numels,
    slots,
    scalars,
    keys,
    rows,
    s0,
    s1,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GRAD: tl.constexpr,
    PARAM: tl.constexpr,
    STATES: tl.constexpr,
    QUANTIZED: tl.constexpr,
    EMA: tl.constexpr,
    SHADOW: tl.constexpr,
    WIDE: tl.constexpr,
    RANDOM: tl.constexpr,
    ALIGNED: tl.constexpr,
    GRAD_ALIGNED: tl.constexpr,
):
    """Run the second sweep: it reads gradient, parameter, states and average, and writes all but
    the gradient.

    A step that is skipped writes back what it read. The average goes on all the same, as it does
    in scripts that call ``EMAModel.step`` after every optimizer step.
    """
    item = tl.load(blocks + tl.program_id(0))
    which = item >> 32
    start = (item & 0xFFFFFFFF) * BLOCK
    left = tl.load(numels + which) - start
    grad = typed(tl.load(grads + which), GRAD, GRAD_ALIGNED) + start
    pointers, scales = arrays_of(
        arrays + which, grad, s1, start, PARAM, QUANTIZED, SHADOW, WIDE, ALIGNED
    )
    numbers = numbers_of(rows + which * 8, scalars, WIDE)
    skip = tl.load(scalars + 1) > 0.0
    weight = tl.load(scalars + 2).to(tl.float64 if WIDE else tl.float32)
    key = tl.load(keys + 1)
    position = (tl.load(slots + which) << 40) + start
    if QUANTIZED:
        row = tl.arange(0, TILE // 256)
        at = row[:, None] * 256 + tl.arange(0, 256)[None, :]
    else:
        row = tl.arange(0, 1)
        at = tl.arange(0, TILE)
    step = (numbers, skip, weight, key, position)
    FORM: tl.constexpr = (PARAM, STATES, QUANTIZED, EMA, SHADOW, WIDE, RANDOM)
    if left >= BLOCK:
        for k in range(0, BLOCK, TILE):
            update(pointers, (scales, row + k // 256), step, at + k, left, True, FORM)
    else:
        rest = left.to(tl.int32)
        for k in range(0, rest, TILE):
            update(pointers, (scales, row + k // 256), step, at + k, rest, False, FORM)
