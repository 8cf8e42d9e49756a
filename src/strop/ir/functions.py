"""Hold Triton text that generated kernels and those written by hand share."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from strop.ir.source import MOST_EARLY_PROGRAMS

HALVES = {torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16"}

# Programmatic dependent launch: programs start while those of the kernel before still run, wait
# here until it has ended and all its memory is visible, and let the next kernel's programs start.
# No access to memory may come before the wait: with it in every kernel that is launched so, what
# came earlier still has ended too. Saves 0.4 us of a gap of 1.1 (CUDA C++ Programming Guide,
# Programmatic Dependent Launch). Where there are many programs, letting others start slows their
# own start to one in 1.25 ns, whether anybody waits or not.
EARLY = f"""\
    if EARLY:
        if tl.num_programs(0) <= {MOST_EARLY_PROGRAMS}:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
"""

# half_gelu: gelu(x) = x * P(normal <= x), and log2(P(normal <= -|x|)) is nearly a polynomial. This
# one, of degree 7, is fitted to |x| in [0, 6] with weights that make the largest error of the
# product least, 0.0044 of half an ulp of fp16. Its leading coefficient is negative: further out the
# chance underflows to 0, and gelu(-inf) is NaN as in ATen. libdevice's erf takes twice the
# instructions, which holds a kernel of 4 bytes an element at 78 % of the memory's speed.
#
# gelu_slope: gelu'(x) = P(normal <= x) + x * density(x), of the same chance. It is at most 1.1e-6
# off, and to 1e-3 of itself where erf in fp32 loses all but two digits (x < -3).
_CHANCE = """    a = tl.abs(x)
    p = (5.14027517e-05 - 1.16784452e-06 * a) * a - 8.70034642e-04
    p = ((p * a + 8.33262074e-03) * a - 5.37043910e-02) * a - 4.58637588e-01
    chance = tl.exp2((p * a - 1.15120849) * a - 0.999996922)
"""
#
# of_even, of_odd: each lane gets what the even or the odd lane of its pair has. Both lie in one
# thread, so nothing moves. of_both: both get what half a tile has for the pair.
_PAIR = """    even, odd = tl.split(tl.reshape(x, [x.numel // 2, 2]))
"""
#
# e4m3_code: the byte of e4m3 that is nearest to an fp32, ties to even, as an int32; what is too
# large is 448, and NaN is 0x7F. An instruction rounds two numbers at once on sm_90 and newer, where
# SM_90 is 1 (``GpuTarget.rounds_to_e4m3``). By whole numbers it takes some twenty, and
# kernels that quantise rows wait for these: 4608 x 15360 numbers took 143 us of an H200, for bytes
# that take 53. Exponents of the two types differ by 120, and 20 bits of the mantissa are rounded
# off; the last bit of 2^14 is the least number of e4m3.
#
# half_gelu_tanh: x / (1 + 2^t), where 2^t has the constants of GELU's tanh form and log2(e) in it.
# On sm_90 and newer the exponential and the reciprocal are one instruction each, which take what
# is subnormal for 0: what comes of that is below 2^-126 of x. Those that keep it scale before and
# behind, in nine of 17 instructions for a number, which kernels that quantise rows wait for.
#
# quotient: a / b, rounded to the nearest. div.rn takes a zero numerator the slow way, with all
# lanes of the warp. 2^-60 is neither slow nor too large over the least of divisors, and zero times
# that is 0, or NaN over zero, with the right sign.
#
# quotient_by: x / divisor for a known number, whose reciprocal is rounded to the nearest: the
# product of both, and one step of Newton's method. The rest of what is infinite is NaN, and that of
# -0 would make it 0.
#
# rounded_to_bfloat16: fp32 to bf16 and back, two neighbours at once. A cast of one number takes
# F2F, of which there are 16 a clock, and a shift. Both make the same NaN of any (PTX ISA, cvt).
#
# widened: bf16 to fp32, two neighbours at once: PTX that takes halves of a register apart takes an
# instruction more for the upper one.
SM_90 = "SM_90"
FUNCTIONS: Mapping[str, str] = {
    "half_gelu_tanh": f"""def half_gelu_tanh(x, {SM_90}: tl.constexpr):
    t = x * (-2.302208198 - 0.1029432396 * (x * x))
    if {SM_90}:
        y = 1.0 + tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [t], dtype=tl.float32, is_pure=True, pack=1
        )
        y = x * tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = x / (1.0 + tl.exp2(t))
    return y""",
    "quotient": """def quotient(a, b):
    is_zero = a == 0
    result = tl.div_rn(tl.where(is_zero, 8.673617379884035e-19, a), b)
    return tl.where(is_zero, a * result, result)""",
    "quotient_by": """def quotient_by(x, divisor, reciprocal):
    near = x * reciprocal
    rest = tl.fma(-near, divisor, x)
    is_off = (tl.abs(rest) > 0) & (tl.abs(rest) < float("inf"))
    return tl.where(is_off, tl.fma(rest, reciprocal, near), near)""",
    "e4m3_code": f"""def e4m3_code(x, {SM_90}: tl.constexpr):
    if {SM_90}:
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = (size - 0x3BF80001 + ((size >> 20) & 1)) >> 20
        small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.minimum(tl.where(size < 0x3C800000, small, normal), 0x7E)
        code = tl.where(size <= 0x7F800000, code, 0x7F) | ((bits >> 24) & 0x80)
    return code""",
    "rounded_to_bfloat16": f"""def rounded_to_bfloat16(x, {SM_90}: tl.constexpr):
    if {SM_90}:
        y = tl.inline_asm_elementwise(
            "{{.reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; "
            "shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000;}}",
            "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        y = x.to(tl.bfloat16).to(tl.float32)
    return y""",
    "widened": f"""def widened(x, {SM_90}: tl.constexpr):
    if {SM_90}:
        y = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        y = x.to(tl.float32)
    return y""",
    "of_even": f"""def of_even(x):
{_PAIR}    return tl.reshape(tl.join(even, even), x.shape)""",
    "of_odd": f"""def of_odd(x):
{_PAIR}    return tl.reshape(tl.join(odd, odd), x.shape)""",
    "of_both": """def of_both(x):
    return tl.reshape(tl.join(x, x), [x.shape[0], x.shape[1] * 2])""",
    "half_gelu": f"""def half_gelu(x):
{_CHANCE}    return x * tl.where(x > 0, 1.0 - chance, chance)""",
    "gelu_slope": f"""def gelu_slope(x):
{_CHANCE}    rest = a * 0.39894228 * tl.exp2(-0.72134752 * a * a) - chance
    return tl.where(x > 0, 1.0 + rest, -rest)""",
}
