# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call"
"""Functions that generated Triton kernels call. The printer copies the text of those that a kernel needs into it,
so that a kernel's source is complete, and equal sources are equal kernels.
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
def log_add_exp(a, b):
    # max + log1p(exp(-|a - b|)); equal infinities have no difference
    top = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    low = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    return tl.where((a == b) & (tl.abs(a) == float("inf")), a, top + libdevice.log1p(libdevice.exp(low - top)))


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
