// Rounding, comparison and division of floats, with torch's rules for NaN, infinities and signed zero.
#pragma once
#include "bits.h"

#define ALT_FLOATS(T) template <class T, typename detail::bits_of<T>::signed_type* = nullptr>

namespace alt {

ALT_FLOATS(T) ALT_FN T abs(T x) { return detail::magnitude(x); }
ALT_FLOATS(T) ALT_FN T neg(T x) { return -x; }
ALT_FLOATS(T) ALT_FN T copysign(T x, T sign) { return detail::with_sign_of(x, sign); }
ALT_FLOATS(T) ALT_FN bool signbit(T x) { return detail::as_int(x) < 0; }
ALT_FLOATS(T) ALT_FN bool isnan(T x) { return x != x; }
ALT_FLOATS(T) ALT_FN bool isinf(T x) { return detail::magnitude(x) == detail::infinity<T>(); }
ALT_FLOATS(T) ALT_FN bool isfinite(T x) { return detail::magnitude(x) < detail::infinity<T>(); }

ALT_FN float sqrt(float x) { return __builtin_sqrtf(x); }
ALT_FN double sqrt(double x) { return __builtin_sqrt(x); }
ALT_FLOATS(T) ALT_FN T rsqrt(T x) { return T(1) / alt::sqrt(x); }
ALT_FLOATS(T) ALT_FN T reciprocal(T x) { return T(1) / x; }

// a / d for many a: the caller keeps d*s, with s = divisor_scale(d), and its reciprocal y. The quotient is corrected by
// its exact residual, which rounds it as a division does unless the residual is subnormal (P. Markstein, "Computation of
// elementary functions on the IBM RISC System/6000 processor", 1990). Where d or a is 0, infinite or NaN the residual is
// 0 or NaN, where the quotient overflows it is infinite, and the product already the result. A vector of it costs a
// third of a vector division.
ALT_FN float divisor_scale(float d) { return detail::magnitude(d) < 0x1p-100f ? 0x1p64f : 1.0f; }
ALT_FN float divide_by(float a, float scale, float d, float y) {
#if ALT_HAS_FMA
  const float b = a * scale, q = b * y, residual = detail::fma(-q, d, b);
  const bool correctable = __builtin_islessgreater(residual, 0.0f) & (detail::magnitude(residual) < __builtin_inff());
  return correctable ? detail::fma(residual, y, q) : q;
#else
  (void)y;
  return a * scale / d;
#endif
}

// Rounded to the 11 bits of TF32, ties away from zero.
ALT_FN float to_tf32(float x) {
  const float rounded = detail::bit_cast<float>((detail::as_uint(x) + 0x1000u) & 0xffffe000u);
  return detail::magnitude(x) < __builtin_inff() ? rounded : x;
}

// sign(NaN) is 0, as in torch.sign.
ALT_FLOATS(T) ALT_FN T sign(T x) { return T(T(0) < x ? 1 : 0) - T(x < T(0) ? 1 : 0); }
ALT_FLOATS(T) ALT_FN T sgn(T x) { return alt::sign(x); }

// x if c holds, else 0; x if c holds, else y: without a branch, whatever the compiler knows of c.
ALT_FN int64_t or_zero(bool c, int64_t x) { return x & -int64_t(c); }
ALT_FLOATS(T) ALT_FN T blend(bool c, T x, T y) {
  const auto mask = detail::uint_of<T>(0) - detail::uint_of<T>(c);
  return detail::bit_cast<T>((detail::as_uint(x) & mask) | (detail::as_uint(y) & ~mask));
}

// Two selections each, one after the other: GCC makes branches of `x || y` where one result is the operand of the next,
// and a loop with branches is not vectorised. Windows of maxima ran 5 to 30 times slower.
// NaN if either is NaN; of two equal values the second (as torch.maximum on zeros of either sign).
ALT_FLOATS(T) ALT_FN T maximum(T a, T b) {
  const T larger = a > b ? a : b;
  return a != a ? a : larger;
}
ALT_FLOATS(T) ALT_FN T minimum(T a, T b) {
  const T smaller = a < b ? a : b;
  return a != a ? a : smaller;
}
// The other operand if one is NaN; of two equal values the first.
ALT_FLOATS(T) ALT_FN T fmax(T a, T b) {
  const T larger = b > a ? b : a;
  return a != a ? b : larger;
}
ALT_FLOATS(T) ALT_FN T fmin(T a, T b) {
  const T smaller = b < a ? b : a;
  return a != a ? b : smaller;
}

// NaN in x or in the bound gives NaN; a value equal to the bound is returned unchanged.
ALT_FLOATS(T) ALT_FN T clamp_min(T x, T low) {
  const T bounded = low > x ? low : x;
  return low != low ? low : bounded;
}
ALT_FLOATS(T) ALT_FN T clamp_max(T x, T high) {
  const T bounded = high < x ? high : x;
  return high != high ? high : bounded;
}
ALT_FLOATS(T) ALT_FN T clamp(T x, T low, T high) { return alt::clamp_max(alt::clamp_min(x, low), high); }
ALT_FLOATS(T) ALT_FN T relu(T x) { return T(0) > x ? T(0) : x; }

#if defined(__SSE4_1__) || defined(__aarch64__)
ALT_FN float floor(float x) { return __builtin_floorf(x); }
ALT_FN double floor(double x) { return __builtin_floor(x); }
ALT_FN float ceil(float x) { return __builtin_ceilf(x); }
ALT_FN double ceil(double x) { return __builtin_ceil(x); }
ALT_FN float trunc(float x) { return __builtin_truncf(x); }
ALT_FN double trunc(double x) { return __builtin_trunc(x); }
ALT_FN float round(float x) { return __builtin_rintf(x); }
ALT_FN double round(double x) { return __builtin_rint(x); }
#else
// Rounds half to even by adding and subtracting 2^mantissa, since no rounding instruction is assumed.
ALT_FLOATS(T) ALT_FN T round(T x) {
  constexpr T magic = sizeof(T) == 4 ? T(0x1p23) : T(0x1p52);
  const T size = detail::magnitude(x);
  return detail::with_sign_of(size < magic ? (size + magic) - magic : size, x);
}
ALT_FLOATS(T) ALT_FN T floor(T x) {
  const T r = alt::round(x);
  return r > x ? r - T(1) : r;
}
ALT_FLOATS(T) ALT_FN T ceil(T x) { return -alt::floor(-x); }
ALT_FLOATS(T) ALT_FN T trunc(T x) { return detail::with_sign_of(alt::floor(detail::magnitude(x)), x); }
#endif

// The remainder of C's fmod, exact over the whole range: the quotient is taken off 28 bits at a time, which in
// double keeps each product exact (24 + 28 <= 53 bits) and each difference representable.
ALT_FN float fmod(float a, float b) {
  const double divisor = detail::magnitude(double(b)), inverse = 1.0 / divisor;
  double r = detail::magnitude(double(a));
#define ALT_FMOD_STEP(k)                                                                    \
  {                                                                                         \
    const double q = detail::round_to_int(r * (inverse * 0x1p-##k)).value;                  \
    r = detail::fma(-q, divisor * 0x1p##k, r);                                              \
  }
  ALT_FMOD_STEP(252)
  ALT_FMOD_STEP(224)
  ALT_FMOD_STEP(196)
  ALT_FMOD_STEP(168)
  ALT_FMOD_STEP(140)
  ALT_FMOD_STEP(112)
  ALT_FMOD_STEP(84)
  ALT_FMOD_STEP(56)
  ALT_FMOD_STEP(28)
  ALT_FMOD_STEP(0)
#undef ALT_FMOD_STEP
  r += r < 0.0 ? divisor : 0.0;
  const float exact = alt::isinf(b) && alt::isfinite(a) ? detail::magnitude(a) : float(r);
  return detail::with_sign_of(exact, a);
}
ALT_FN double fmod(double a, double b) { return __builtin_fmod(a, b); }

// torch.remainder: the sign of the result is the divisor's.
ALT_FLOATS(T) ALT_FN T remainder(T a, T b) {
  const T r = alt::fmod(a, b);
  return r != T(0) && ((b < T(0)) != (r < T(0))) ? r + b : r;
}

// torch.div(a, b, rounding_mode="floor"): floor of the exact quotient (a - r) / b, where r is the remainder.
ALT_FLOATS(T) ALT_FN T floor_divide(T a, T b) {
  const T r = alt::fmod(a, b), plain = a / b;
  const T exact = (a - r) / b - (r != T(0) && ((b < T(0)) != (r < T(0))) ? T(1) : T(0));
  const T below = alt::floor(exact);
  const T nearest = exact - below > T(0.5) ? below + T(1) : below;
  const T quotient = exact != T(0) ? nearest : detail::with_sign_of(T(0), plain);
  return b == T(0) ? plain : quotient;
}
ALT_FLOATS(T) ALT_FN T trunc_divide(T a, T b) { return alt::trunc(a / b); }

// The next float after a towards b: integers order the floats of one sign.
ALT_FLOATS(T) ALT_FN T nextafter(T a, T b) {
  using U = detail::uint_of<T>;
  const bool away_from_zero = (a < b) == (a > T(0));
  const U stepped = detail::as_uint(a) + (away_from_zero ? U(1) : ~U(0));
  const T smallest = detail::with_sign_of(detail::bit_cast<T>(U(1)), b);
  const T moved = a == T(0) ? smallest : detail::bit_cast<T>(stepped);
  return a != a || b != b ? a + b : (a == b ? b : moved);
}

}  // namespace alt
