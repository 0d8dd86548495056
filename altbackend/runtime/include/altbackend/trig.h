// Trigonometric and hyperbolic functions. float: branch-free, at most 2 ulp over the whole range. double: scalar, the
// C library's. Polynomials: tools/vecmath_coefficients.py.
#pragma once
#include "explog.h"

namespace alt {
namespace detail {

// x = (quadrant + turn) * pi/2 with |turn| <= 1/2, exact to about 2^-58 for every float: 2/pi enters as 27 + 28 + 53
// bits, so that the products with 24-bit x are exact; for large x, x*2^-b is an integer and multiples of 4 of
// 2^b * 2/pi only add whole turns, so the leading bits of 2/pi are dropped (M. Payne and R. Hanek, 1983).
struct Quadrant {
  double turn;
  int64_t quadrant;
};
ALT_FN Quadrant trig_reduce(float argument) {
  const double x = argument, size = magnitude(x);
  double unit = 1.0, c1 = 0x1.45f3068p-1, c2 = 0x1.727220ap-27, c3 = 0x1.29fc2757d1f53p-56;
#define ALT_BAND(from, b, high, middle, low) \
  unit = size >= from ? b : unit;            \
  c1 = size >= from ? high : c1;             \
  c2 = size >= from ? middle : c2;           \
  c3 = size >= from ? low : c3;
  ALT_BAND(0x1p48, 0x1p-24, 0x1.b72722p+1, 0x1.529fc24p-28, 0x1.abe8fa9a6ee07p-55)
  ALT_BAND(0x1p72, 0x1p-48, 0x1.529fcp-4, 0x1.3abe8fap-27, 0x1.34ddc0db6295ap-56)
  ALT_BAND(0x1p96, 0x1p-72, 0x1.3abe8ep-3, 0x1.a9a6eep-27, 0x1.b6c52b3278872p-57)
  ALT_BAND(0x1p120, 0x1p-96, 0x1.f534ddcp+0, 0x1.b6c528p-33, 0x1.993c439041fe5p-56)
#undef ALT_BAND
  const double scaled = x * unit, t1 = scaled * c1, t2 = scaled * c2, t3 = scaled * c3;
  const Rounded<double> n = round_to_int(t1 + t2);
  return {((t1 - n.value) + t2) + t3, n.integer};
}

// sin and cos on [-pi/4, pi/4].
ALT_FN float sin_reduced(float r) {
  const float z = r * r;
  return fma(r * z, poly(z, -0x1.555556p-3f, 0x1.111108p-7f, -0x1.a00f74p-13f, 0x1.6ccf5ep-19f), r);
}
ALT_FN float cos_reduced(float r) {
  const float z = r * r;
  return poly(z, 1.0f, -0.5f, 0x1.55554ap-5f, -0x1.6c0c28p-10f, 0x1.99e870p-16f);
}
ALT_FN double sin_reduced(double r) {
  const double z = r * r;
  const double p = poly(z, -0x1.55555555521b7p-3, 0x1.1111110c7dddbp-7, -0x1.a019f92c71110p-13, 0x1.71d766190df72p-19,
                        -0x1.a95f103f0fe24p-26);
  return fma(r * z, p, r);
}
ALT_FN double cos_reduced(double r) {
  const double z = r * r;
  return poly(z, 1.0, -0.5, 0x1.5555555552d74p-5, -0x1.6c16c16716c0ap-10, 0x1.a019fa54b2d89p-16, -0x1.27e006749784fp-22,
              0x1.1bbce9ae1d6a5p-29);
}

constexpr double pi_2 = 0x1.921fb54442d18p+0;

// sin((quadrant + turn) pi/2)
ALT_FN float sin_of(double turn, int quadrant) {
  const float r = float(turn * pi_2);
  const float y = (quadrant & 1) != 0 ? cos_reduced(r) : sin_reduced(r);
  return bit_cast<float>(as_uint(y) ^ (uint32_t(quadrant & 2) << 30));
}

// (asin(s) - s) / s for z = s^2, s <= 0.5625.
ALT_FN float asin_tail(float z) {
  return z * poly(z, 0x1.555526p-3f, 0x1.334966p-4f, 0x1.6a544ep-5f, 0x1.16bd9ap-5f, 0x1.b71b66p-8f, 0x1.855a7cp-5f);
}
ALT_FN float atan_reduced(float t) {
  const float z = t * t;
  const float p = poly(z, -0x1.55553ep-2f, 0x1.9991fep-3f, -0x1.2421b6p-3f, 0x1.c099fep-4f, -0x1.583490p-4f,
                       0x1.dac9e2p-5f, -0x1.fed15ep-6f, 0x1.65a65ap-7f, -0x1.d62feep-10f);
  return fma(t * z, p, t);
}
constexpr float pi_2_high = 0x1.921fb6p+0f, pi_2_low = -0x1.777a5cp-25f;

}  // namespace detail

ALT_FN float sin(float x) {
  const auto q = detail::trig_reduce(x);
  return x == 0.0f ? x : detail::sin_of(q.turn, int(q.quadrant));
}
ALT_FN float cos(float x) {
  const auto q = detail::trig_reduce(x);
  return detail::sin_of(q.turn, int(q.quadrant) + 1);
}
ALT_FN float tan(float x) {
  const auto q = detail::trig_reduce(x);
  const double r = q.turn * detail::pi_2, s = detail::sin_reduced(r), c = detail::cos_reduced(r);
  const bool odd = (int(q.quadrant) & 1) != 0;
  return x == 0.0f ? x : float((odd ? -c : s) / (odd ? s : c));
}

// Above 0.5625: asin x = pi/2 - 2 asin sqrt((1-x)/2); there the second asin stays below 1/2 and adds no error.
ALT_FN float asin(float x) {
  const float size = detail::magnitude(x);
  const bool large = size > 0.5625f;
  const float z = large ? 0.5f * (1.0f - size) : size * size, s = large ? alt::sqrt(z) : size;
  const float p = detail::fma(s, detail::asin_tail(z), s);
  return detail::with_sign_of(large ? (detail::pi_2_high - 2.0f * p) + detail::pi_2_low : p, x);
}
ALT_FN float acos(float x) {
  const float size = detail::magnitude(x);
  const bool large = size > 0.5625f;
  const float z = large ? 0.5f * (1.0f - size) : size * size, s = large ? alt::sqrt(z) : x;
  const float p = detail::fma(s, detail::asin_tail(z), s);
  const float near_minus_one = 2.0f * ((detail::pi_2_high - p) + detail::pi_2_low);
  return large ? (x > 0.0f ? 2.0f * p : near_minus_one) : (detail::pi_2_high - p) + detail::pi_2_low;
}
ALT_FN float atan(float x) {
  const float size = detail::magnitude(x);
  const bool large = size > 1.0f;
  const float p = detail::atan_reduced(large ? 1.0f / size : size);
  return detail::with_sign_of(large ? (detail::pi_2_high - p) + detail::pi_2_low : p, x);
}
ALT_FN float atan2(float y, float x) {
  const float ay = detail::magnitude(y), ax = detail::magnitude(x);
  const bool steep = ay > ax;
  const float small = steep ? ax : ay, large = steep ? ay : ax;
  const float quotient = large == 0.0f ? 0.0f : (alt::isinf(small) ? 1.0f : small / large);
  const float p = detail::atan_reduced(quotient);
  const float acute = steep ? (detail::pi_2_high - p) + detail::pi_2_low : p;
  const float left = 2.0f * detail::pi_2_high - (acute - 2.0f * detail::pi_2_low);
  const float angle = detail::with_sign_of(alt::signbit(x) ? left : acute, y);
  return x != x || y != y ? x + y : angle;
}

// The hyperbolic functions of float go through double, where the difference e - 1/e still has 40 good bits at 2^-12;
// below that two terms of the series suffice.
ALT_FN float sinh(float x) {
  const double d = x, e = alt::exp(detail::magnitude(d));
  const double small = detail::fma(d * d, d * 0x1.5555555555555p-3, d);
  const float y = detail::with_sign_of(float(0.5 * (e - 1.0 / e)), x);
  return detail::magnitude(x) < 0x1p-12f ? float(small) : y;
}
ALT_FN float cosh(float x) {
  const double e = alt::exp(detail::magnitude(double(x)));
  return float(0.5 * (e + 1.0 / e));
}
ALT_FN float asinh(float x) {
  const double d = detail::magnitude(double(x));
  const double small = detail::fma(d * d, d * -0x1.5555555555555p-3, d);
  const double y = alt::log(d + alt::sqrt(detail::fma(d, d, 1.0)));
  return detail::with_sign_of(float(d < 0x1p-12 ? small : y), x);
}
ALT_FN float acosh(float x) {
  const double d = x;
  const float y = float(alt::log(d + alt::sqrt((d - 1.0) * (d + 1.0))));
  return x < 1.0f ? detail::quiet_nan<float>() : y;
}
ALT_FN float atanh(float x) {
  const double d = x;
  const double small = detail::fma(d * d, d * 0x1.5555555555555p-2, d);
  return detail::magnitude(x) < 0x1p-12f ? float(small) : float(0.5 * alt::log((1.0 + d) / (1.0 - d)));
}

ALT_FN double sin(double x) { return __builtin_sin(x); }
ALT_FN double cos(double x) { return __builtin_cos(x); }
ALT_FN double tan(double x) { return __builtin_tan(x); }
ALT_FN double asin(double x) { return __builtin_asin(x); }
ALT_FN double acos(double x) { return __builtin_acos(x); }
ALT_FN double atan(double x) { return __builtin_atan(x); }
ALT_FN double atan2(double y, double x) { return __builtin_atan2(y, x); }
ALT_FN double sinh(double x) { return __builtin_sinh(x); }
ALT_FN double cosh(double x) { return __builtin_cosh(x); }
ALT_FN double asinh(double x) { return __builtin_asinh(x); }
ALT_FN double acosh(double x) { return __builtin_acosh(x); }
ALT_FN double atanh(double x) { return __builtin_atanh(x); }

}  // namespace alt
