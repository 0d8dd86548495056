# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"
"""Functions that generated Triton kernels call.

The printer copies the text of the functions that a kernel needs into the kernel's source. A source is complete then,
and equal sources are equal kernels.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def largest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smallest(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def product(a, b):
    return a * b


@triton.jit
def parity(a, b):
    return a ^ b


@triton.jit
def add_exactly(total, lost, x):
    # s = total + x rounds off (total - (s - part)) + (x - part), part = s - total: Knuth's sum of two numbers
    s = total + x
    part = s - total
    return s, lost + ((total - (s - part)) + (x - part))


@triton.jit
def add_sums(a, a_lost, b, b_lost):
    return add_exactly(a, a_lost + b_lost, b)


@triton.jit
def with_lost(total, lost):
    # what is lost beside an infinity is NaN
    return tl.where(lost == lost, total + lost, total)


@triton.jit
def sum_exactly(x, axis: tl.constexpr, keep: tl.constexpr):
    total, rest = tl.reduce((x, tl.zeros_like(x)), axis, add_sums, keep_dims=keep)
    return with_lost(total, rest)


@triton.jit
def halves_of_row(x):
    return tl.sum(tl.reshape(x, [2, x.shape[0] // 2]), 0)


@triton.jit
def halves_of_rows(x):
    return tl.sum(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), 1)


@triton.jit
def scan_exactly(x, axis: tl.constexpr):
    total, rest = tl.associative_scan((x, tl.zeros_like(x)), axis, add_sums)
    return with_lost(total, rest)


@triton.jit
def scan_exactly_backwards(x, axis: tl.constexpr):
    total, rest = tl.associative_scan((x, tl.zeros_like(x)), axis, add_sums, reverse=True)
    return with_lost(total, rest)


@triton.jit
def log_add_exp(a, b):
    # max + log1p(exp(-|a - b|)); equal infinities have no difference
    top = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    low = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    return tl.where((a == b) & (tl.abs(a) == float("inf")), a, top + libdevice.log1p(libdevice.exp(low - top)))


@triton.jit
def to_tf32(x):
    # tensor cores drop the last 13 bits of a float32; rounded to nearest first (ties away), the error is half as large
    bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


@triton.jit
def floor_divide(a, b):
    # // of the language rounds towards zero
    q = a // b
    return tl.where((a - q * b != 0) & ((a < 0) != (b < 0)), q - 1, q)


@triton.jit
def remainder(a, b):
    m = a % b
    return tl.where((m != 0) & ((m < 0) != (b < 0)), m + b, m)


@triton.jit
def floor_divide_float(a, b):
    m = libdevice.fmod(a, b)
    q = libdevice.div_rn(a - m, b)
    q = tl.where((m != 0) & ((b < 0) != (m < 0)), q - 1, q)
    whole = tl.floor(q)
    whole = tl.where(q - whole > 0.5, whole + 1, whole)
    exact = libdevice.div_rn(a, b)
    return tl.where(b == 0, exact, tl.where(q != 0, whole, libdevice.copysign(q * 0, exact)))


@triton.jit
def remainder_float(a, b):
    m = libdevice.fmod(a, b)
    return tl.where((m != 0) & ((m < 0) != (b < 0)), m + b, m)


@triton.jit
def sigmoid(x):
    one = tl.full([], 1, x.dtype)
    return libdevice.div_rn(one, one + libdevice.exp(-x))


@triton.jit
def reciprocal(x):
    return libdevice.div_rn(tl.full([], 1, x.dtype), x)


@triton.jit
def sigmoid_fast(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def power_of_two(x):
    # 2^x, 0 where that is below 2^-126: one instruction, where tl.exp2 spends three more on such results
    asm: tl.constexpr = "ex2.approx.ftz.f32 $0, $1;"
    return tl.inline_asm_elementwise(asm, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def quotient(a, b):
    # a / b for many `a` of one `b`. The division of a GPU leaves its short path for a = 0, which takes three times as
    # long. With y = 1 / b rounded, q + (a - q b) y for q = a y is the rounded quotient (Markstein, IBM J. Res. Dev. 34,
    # 1990). Multiplied by 2^64 or 2^-64, b has a normal inverse. An infinite q, or a NaN, has no rest.
    size = tl.abs(b)
    scale = tl.where(size > 18446744073709551616.0, 5.421010862427522e-20, 1.0)
    scale = tl.where(size < 5.421010862427522e-20, 18446744073709551616.0, scale)
    b = b * scale
    y = libdevice.div_rn(tl.full([], 1, b.dtype), b)
    a = a * scale
    q = a * y
    rest = tl.fma(-q, b, a)
    return tl.where(tl.abs(rest) < float("inf"), tl.fma(rest, y, q), q)


@triton.jit
def approximate_reciprocal(x):
    # of numbers from 1 on; 0 of those beyond 2^126
    asm: tl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
    return tl.inline_asm_elementwise(asm, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def tanh_fast(x):
    # 1 - 2 / (exp(2 |x|) + 1), and near 0, where that cancels, x (1 - x^2/3 + 2 x^4/15 - 17 x^6/315)
    size = tl.abs(x)
    far = 1.0 - 2.0 * approximate_reciprocal(power_of_two(size * 2.8853900817779268) + 1.0)
    square = x * x
    near = (-0.053968254 * square + 0.13333334) * square - 0.33333334
    return tl.where(size < 0.3, x * (near * square + 1.0), tl.where(x < 0, -far, far))


@triton.jit
def exp_below(x):
    # exp(x) of x <= 0, for sums that have a term 1. t is x log2(e) rounded, and 2^(d) = 1 + d ln 2 of the rest d
    x = tl.maximum(x, -104.0, propagate_nan=tl.PropagateNan.ALL)
    t = x * 1.4426950408889634
    rest = tl.fma(x, 1.4426950408889634, -t)
    power = power_of_two(t)
    return tl.fma(power, rest * 0.6931471805599453, power)


@triton.jit
def exp_below_fast(x):
    return power_of_two(x * 1.4426950408889634)


@triton.jit
def float8_bits(x, GONE: tl.constexpr, BIAS: tl.constexpr, LARGE: tl.constexpr, NAN: tl.constexpr):
    # of a float32, rounded to nearest even. Adding 2^23 units of the subnormals' spacing rounds to that spacing
    BASE: tl.constexpr = (127 - BIAS) << 23
    MAGIC: tl.constexpr = (127 + 24 - BIAS - (23 - GONE)) << 23
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    magic = tl.full([], MAGIC, tl.int32).to(tl.float32, bitcast=True)
    tiny = (tl.abs(x) + magic).to(tl.int32, bitcast=True) - MAGIC
    normal = (size - BASE + ((1 << (GONE - 1)) - 1) + ((size >> GONE) & 1)) >> GONE
    code = tl.minimum(tl.where(size < BASE + (1 << 23), tiny, normal), LARGE)
    if LARGE != NAN:
        code = tl.where(size > 0x7F800000, NAN, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def float_of_e4m3fn(x):
    # as a float16 whose exponent is 8 too small
    bits = x.to(tl.int16)
    half = (((bits & 0x7F) << 7) | ((bits & 0x80) << 8)).to(tl.float16, bitcast=True)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def float_of_e5m2(x):
    return (x.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def one_plus_erf_fast(x):
    # erfc |x| = exp(-|x| Q(|x|)); Q as in the C++ header, where the error of the sum is 2^-25.9
    s = tl.abs(x)
    q = 3.14398931e-05 * s - 0.000308800023
    q = q * s + 0.00103239482
    q = q * s + 0.000536944368
    q = q * s - 0.0195839703
    q = q * s + 0.102919616
    q = q * s + 0.636597753
    q = q * s + 1.1283803
    tail = tl.where(s > 4.0, 0.0, tl.exp(-s * q))
    return tl.where(x < 0, tail, 2.0 - tail)


@triton.jit
def philox(seed, counter):
    # Philox4x32-10. One instruction multiplies to 64 bits.
    key_x = seed.to(tl.uint32)
    key_y = (seed >> 32).to(tl.uint32)
    x = counter.to(tl.uint32)
    y = (counter >> 32).to(tl.uint32)
    z = x ^ x
    w = z
    for _ in tl.static_range(10):
        a = x.to(tl.uint64) * 0xD2511F53
        b = z.to(tl.uint64) * 0xCD9E8D57
        x = (b >> 32).to(tl.uint32) ^ y ^ key_x
        y = b.to(tl.uint32)
        z = (a >> 32).to(tl.uint32) ^ w ^ key_y
        w = a.to(tl.uint32)
        key_x += 0x9E3779B9
        key_y += 0xBB67AE85
    return x, y, z, w


@triton.jit
def philox_fraction(word):
    # of [0, 1), 24 bits
    return (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def philox_uniform(seed, counter):
    x, y, z, w = philox(seed, counter >> 2)
    odd = (counter & 1) != 0
    return philox_fraction(tl.where((counter & 2) != 0, tl.where(odd, w, z), tl.where(odd, y, x)))


@triton.jit
def philox_uniform_quads(seed, block):
    # a tile of four times as many columns as `block`, whose words are neighbours there
    x, y, z, w = philox(seed, block)
    words = tl.join(tl.join(x, z), tl.join(y, w))
    if len(block.shape) == 1:
        words = tl.reshape(words, [4 * block.shape[0]])
    else:
        words = tl.reshape(words, [block.shape[0], 4 * block.shape[1]])
    return philox_fraction(words)


@triton.jit
def philox_radius(seed, counter):
    return philox_fraction(philox(seed, counter)[0])


@triton.jit
def philox_turn(seed, counter):
    return philox_fraction(philox(seed, counter)[1])


@triton.jit
def philox_bits(seed, counter):
    x, y, _, _ = philox(seed, counter)
    return x.to(tl.int64) | (y.to(tl.int64) << 32)
