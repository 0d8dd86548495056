// Integer arithmetic as torch defines it: wraps around, divides as Python or C, shifts by any amount.
#pragma once
#include "arith.h"

#define ALT_INTEGERS(T) template <class T, typename detail::integer_of<T>::unsigned_type* = nullptr>

namespace alt {
namespace detail {

// `quotient` is a float type in which the truncated quotient of two T is exact, so that division vectorises:
// a/b lies at least 1/|b| from the next integer, more than the rounding error. 64 bits have none.
template <class T> struct integer_of;
#define ALT_INTEGER(T, U, W, Q, S)        \
  template <> struct integer_of<T> {      \
    using unsigned_type = U;              \
    using wide = W;                       \
    using quotient = Q;                   \
    static constexpr bool is_signed = S;  \
    static constexpr int bits = 8 * sizeof(T); \
    static constexpr T lowest = S ? T(W(1) << (bits - 1)) : T(0);                         \
    static constexpr T highest = S ? T((W(1) << (bits - 1)) - 1) : T(~W(0) >> (8 * sizeof(W) - bits)); \
  };
ALT_INTEGER(int8_t, uint8_t, uint32_t, float, true)
ALT_INTEGER(int16_t, uint16_t, uint32_t, float, true)
ALT_INTEGER(int32_t, uint32_t, uint32_t, double, true)
ALT_INTEGER(int64_t, uint64_t, uint64_t, int64_t, true)
ALT_INTEGER(uint8_t, uint8_t, uint32_t, float, false)
ALT_INTEGER(uint16_t, uint16_t, uint32_t, float, false)
ALT_INTEGER(uint32_t, uint32_t, uint32_t, double, false)
ALT_INTEGER(uint64_t, uint64_t, uint64_t, uint64_t, false)
#undef ALT_INTEGER
template <class T> using wide_of = typename integer_of<T>::wide;

}  // namespace detail

// Wrap around: in unsigned arithmetic of at least 32 bits, where nothing promotes to signed.
ALT_INTEGERS(T) ALT_FN T add(T a, T b) { return T(detail::wide_of<T>(a) + detail::wide_of<T>(b)); }
ALT_INTEGERS(T) ALT_FN T sub(T a, T b) { return T(detail::wide_of<T>(a) - detail::wide_of<T>(b)); }
ALT_INTEGERS(T) ALT_FN T mul(T a, T b) { return T(detail::wide_of<T>(a) * detail::wide_of<T>(b)); }
ALT_INTEGERS(T) ALT_FN T neg(T a) { return T(detail::wide_of<T>(0) - detail::wide_of<T>(a)); }
ALT_INTEGERS(T) ALT_FN T abs(T a) { return a < T(0) ? alt::neg(a) : a; }
ALT_INTEGERS(T) ALT_FN T sign(T a) { return T(T(T(0) < a) - T(a < T(0))); }
ALT_INTEGERS(T) ALT_FN T sgn(T a) { return alt::sign(a); }
ALT_INTEGERS(T) ALT_FN T relu(T a) { return a < T(0) ? T(0) : a; }
ALT_INTEGERS(T) ALT_FN T blend(bool c, T x, T y) {
  const auto mask = detail::wide_of<T>(0) - detail::wide_of<T>(c);
  return T((detail::wide_of<T>(x) & mask) | (detail::wide_of<T>(y) & ~mask));
}
ALT_FN bool blend(bool c, bool x, bool y) { return (c & x) | (!c & y); }

// The same names for floats and bool, so that the printer uses one name for every type.
ALT_FLOATS(T) ALT_FN T add(T a, T b) { return a + b; }
ALT_FLOATS(T) ALT_FN T sub(T a, T b) { return a - b; }
ALT_FLOATS(T) ALT_FN T mul(T a, T b) { return a * b; }
ALT_FN bool add(bool a, bool b) { return a | b; }
ALT_FN bool mul(bool a, bool b) { return a & b; }

ALT_INTEGERS(T) ALT_FN T maximum(T a, T b) { return a > b ? a : b; }
ALT_INTEGERS(T) ALT_FN T minimum(T a, T b) { return a < b ? a : b; }
ALT_INTEGERS(T) ALT_FN T fmax(T a, T b) { return alt::maximum(a, b); }
ALT_INTEGERS(T) ALT_FN T fmin(T a, T b) { return alt::minimum(a, b); }
ALT_INTEGERS(T) ALT_FN T clamp_min(T x, T low) { return alt::maximum(x, low); }
ALT_INTEGERS(T) ALT_FN T clamp_max(T x, T high) { return alt::minimum(x, high); }
ALT_INTEGERS(T) ALT_FN T clamp(T x, T low, T high) { return alt::clamp_max(alt::clamp_min(x, low), high); }
ALT_FN bool maximum(bool a, bool b) { return a | b; }
ALT_FN bool minimum(bool a, bool b) { return a & b; }
ALT_FN bool fmax(bool a, bool b) { return a | b; }
ALT_FN bool fmin(bool a, bool b) { return a & b; }
ALT_FN bool sign(bool a) { return a; }

// Division by zero gives 0 where torch raises ZeroDivisionError: a kernel must not die of SIGFPE, and kernels that
// report the error check the divisor. The lowest value divided by -1 wraps around.
ALT_INTEGERS(T) ALT_FN T trunc_divide(T a, T b) {
  using Q = typename detail::integer_of<T>::quotient;
  const bool minus_one = detail::integer_of<T>::is_signed && b == T(-1);
  const T safe = b == T(0) || minus_one ? T(1) : b;
  const T quotient = T(Q(a) / Q(safe));
  return b == T(0) ? T(0) : (minus_one ? alt::neg(a) : quotient);
}
// The sign of the dividend (C); 0 for a zero divisor.
ALT_INTEGERS(T) ALT_FN T fmod(T a, T b) {
  return b == T(0) ? T(0) : alt::sub(a, alt::mul(alt::trunc_divide(a, b), b));
}
// The sign of the divisor (Python).
ALT_INTEGERS(T) ALT_FN T remainder(T a, T b) {
  const T r = alt::fmod(a, b);
  return r != T(0) && ((r < T(0)) != (b < T(0))) ? alt::add(r, b) : r;
}
ALT_INTEGERS(T) ALT_FN T floor_divide(T a, T b) {
  const T quotient = alt::trunc_divide(a, b), r = alt::fmod(a, b);
  return r != T(0) && ((r < T(0)) != (b < T(0))) ? alt::sub(quotient, T(1)) : quotient;
}

// A shift amount outside [0, bits) shifts everything out.
ALT_INTEGERS(T) ALT_FN T left_shift(T a, T amount) {
  constexpr int bits = detail::integer_of<T>::bits;
  const bool inside = amount >= T(0) && amount < T(bits);
  return inside ? T(detail::wide_of<T>(a) << (detail::wide_of<T>(amount) & (bits - 1))) : T(0);
}
ALT_INTEGERS(T) ALT_FN T right_shift(T a, T amount) {
  constexpr int bits = detail::integer_of<T>::bits;
  const bool inside = amount >= T(0) && amount < T(bits);
  const T shifted = T(a >> (inside ? amount : T(bits - 1)));
  return inside || detail::integer_of<T>::is_signed ? shifted : T(0);
}

ALT_INTEGERS(T) ALT_FN T bitwise_and(T a, T b) { return T(a & b); }
ALT_INTEGERS(T) ALT_FN T bitwise_or(T a, T b) { return T(a | b); }
ALT_INTEGERS(T) ALT_FN T bitwise_xor(T a, T b) { return T(a ^ b); }
ALT_INTEGERS(T) ALT_FN T bitwise_not(T a) { return T(~a); }
ALT_FN bool bitwise_and(bool a, bool b) { return a & b; }
ALT_FN bool bitwise_or(bool a, bool b) { return a | b; }
ALT_FN bool bitwise_xor(bool a, bool b) { return a ^ b; }
ALT_FN bool bitwise_not(bool a) { return !a; }

// No integer is NaN or infinite, and only a negative one has its sign bit set.
ALT_INTEGERS(T) ALT_FN bool signbit(T a) { return a < T(0); }
ALT_FN bool signbit(bool) { return false; }

// Rounding returns an integer unchanged.
ALT_INTEGERS(T) ALT_FN T floor(T a) { return a; }
ALT_INTEGERS(T) ALT_FN T ceil(T a) { return a; }
ALT_INTEGERS(T) ALT_FN T trunc(T a) { return a; }
ALT_INTEGERS(T) ALT_FN T round(T a) { return a; }

// Wraps around; a negative exponent gives the truncated 1 / base^|exponent|. Scalar.
ALT_INTEGERS(T) ALT_FN T pow(T base, T exponent) {
  using W = detail::wide_of<T>;
  if (exponent < T(0)) {
    const bool odd = (exponent & 1) != 0;
    return base == T(1) ? T(1) : (base == T(-1) ? (odd ? T(-1) : T(1)) : T(0));
  }
  W result = 1, square = W(base);
  for (W n = W(exponent); n != 0; n >>= 1, square *= square)
    if (n & 1) result *= square;
  return T(result);
}

// Euclid's algorithm on abs(a), abs(b) with C's remainder. The lowest value keeps its sign under abs, and torch's
// result then has one too. Scalar.
ALT_INTEGERS(T) ALT_FN T gcd(T a, T b) {
  T x = alt::abs(a), y = alt::abs(b);
  while (x != T(0)) {
    const T r = alt::fmod(y, x);
    y = x;
    x = r;
  }
  return y;
}

}  // namespace alt
