// Exponentials, logarithms, and functions made of these alone. All are branch-free, so that loops vectorise.
// Polynomials: tools/vecmath_coefficients.py.
#pragma once
#include "arith.h"

namespace alt {
namespace detail {

// Leading parts of ln 2 with enough trailing zeros that n * ln2_high is exact for every exponent n.
template <class T> struct ln2;
template <> struct ln2<float> {
  static constexpr float high = 0x1.62e4p-1f, low = 0x1.7f7d1cp-20f;
};
template <> struct ln2<double> {
  static constexpr double high = 0x1.62e42feep-1, low = 0x1.a39ef35793c76p-33;
};

// (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2.
ALT_FN float exp_tail(float r) {
  return poly(r, 0x1.fffffcp-2f, 0x1.55549p-3f, 0x1.5558f4p-5f, 0x1.123a6cp-7f, 0x1.6a2350p-10f);
}
ALT_FN double exp_tail(double r) {
  return poly(r, 0x1.000000000000ap-1, 0x1.55555555554f9p-3, 0x1.55555555507f2p-5, 0x1.1111111127ecdp-7,
              0x1.6c16c1844ab9bp-10, 0x1.a01a01299ba58p-13, 0x1.a01999ae61116p-16, 0x1.71df2662a938bp-19,
              0x1.28adce050b66dp-22, 0x1.ad7eae44b541dp-26);
}
// e^r - 1
template <class T> ALT_FN T expm1_reduced(T r) { return fma(r * r, exp_tail(r), r); }

// x = n ln 2 + r
template <class T> struct ExpReduced {
  T r;
  int_of<T> n;
};
template <class T> ALT_FN T minus_multiple_of_ln2(T x, T n) { return fma(-n, ln2<T>::low, fma(-n, ln2<T>::high, x)); }
template <class T> ALT_FN ExpReduced<T> exp_reduce(T x) {
  const Rounded<T> n = round_to_int(x * T(0x1.71547652b82fep+0));
  return {minus_multiple_of_ln2(x, n.value), n.integer};
}
// y * 2^n in two exact steps, since 2^n alone overflows or underflows before the product does.
template <class T> ALT_FN T scale(T y, int_of<T> n) {
  const int_of<T> half = n >> 1;
  return y * pow2<T>(half) * pow2<T>(n - half);
}

// Beyond these limits the result is 0 or -1, and infinity. They are tested after the computation, whose result is then
// dropped: a clamp before it makes g++ specialise the polynomial for the bounds and mask every instruction.
template <class T> struct exp_limits;
template <> struct exp_limits<float> {
  static constexpr float low = -104.0f, high = 89.0f, low2 = -151.0f, high2 = 128.0f, low_m1 = -20.0f;
};
template <> struct exp_limits<double> {
  static constexpr double low = -746.0, high = 710.0, low2 = -1076.0, high2 = 1024.0, low_m1 = -40.0;
};

// x = m * 2^exponent with m in [sqrt(1/2), sqrt(2)), for positive finite x.
template <class T> struct LogReduced {
  T m;
  int_of<T> e;
};
template <class T> ALT_FN LogReduced<T> log_reduce_normal(T x) {
  using U = uint_of<T>;
  constexpr int bits = bits_of<T>::mantissa;
  // The biased exponent keeps the shift logical; AVX2 has no arithmetic one for 64 bits.
  constexpr U bias = U(bits_of<T>::bias) << bits;
  const U e = U(as_uint(x) - as_uint(T(0x1.6a09e667f3bcdp-1)) + bias) >> bits;
  return {bit_cast<T>(U(as_uint(x) - (e << bits) + bias)), int_of<T>(e) - bits_of<T>::bias};
}
template <class T> ALT_FN LogReduced<T> log_reduce(T x) {
  constexpr int shift = bits_of<T>::mantissa + 1;
  const bool subnormal = x < smallest_normal<T>();
  const LogReduced<T> p = log_reduce_normal(subnormal ? x * pow2<T>(shift) : x);
  return {p.m, p.e - (subnormal ? shift : 0)};
}

// log(1 + r) - r for 1 + r in [sqrt(1/2), sqrt(2)).
ALT_FN float log1p_tail(float r) {
  const float p = poly(r, 0x1.555554p-2f, -0x1.000228p-2f, 0x1.99a00ap-3f, -0x1.547244p-3f, 0x1.22da12p-3f,
                       -0x1.0d8540p-3f, 0x1.055ba8p-3f, -0x1.38b60cp-4f);
  return r * r * fma(r, p, -0.5f);
}
ALT_FN double log1p_tail(double r) {
  const double s = r / (2.0 + r), z = s * s, half_square = 0.5 * r * r;
  const double p = poly(z, 0x1.5555555555592p-1, 0x1.999999997fdb9p-2, 0x1.24924941f1142p-2, 0x1.c71c52096839ap-3,
                        0x1.74663ee691742p-3, 0x1.39a1badeb5f25p-3, 0x1.2f05623d8df97p-3);
  return s * fma(z, p, half_square) - half_square;
}

// The values of a logarithm outside (0, inf).
template <class T> ALT_FN T log_special(T y, T x, T argument) {
  y = argument < infinity<T>() ? y : x;
  return argument > T(0) ? y : (argument == T(0) ? -infinity<T>() : quiet_nan<T>());
}
template <class T> ALT_FN T log_finish(T r, T e) {
  return fma(e, ln2<T>::high, r + fma(e, ln2<T>::low, log1p_tail(r)));
}

// 1/d for normal d with normal reciprocal: Newton's iteration from a linear guess on the bits. A vector of it costs a
// fraction of a vector division. Relative error below 2^-22, so a quotient needs the residual step of divide().
ALT_FN float approximate_reciprocal(float d) {
  float y = bit_cast<float>(0x7ef311c7u - as_uint(d));
  y = fma(y, fma(-d, y, 1.0f), y);
  y = fma(y, fma(-d, y, 1.0f), y);
  return fma(y, fma(-d, y, 1.0f), y);
}
// a / (d + d_low), d_low the rounding error of d.
ALT_FN float divide(float a, float d, float d_low) {
#if ALT_HAS_FMA
  const float y = approximate_reciprocal(d), q = a * y;
  return fma(fma(-q, d_low, fma(-q, d, a)), y, q);
#else
  const float q = a / d, reciprocal_guess = bit_cast<float>(0x7ef311c7u - as_uint(d));  // 12 % is enough here
  return q - q * d_low * reciprocal_guess;
#endif
}
ALT_FN double divide(double a, double d, double) { return a / d; }

// e^x for x below the upper limit.
template <class T> ALT_FN T exp_below_limit(T x) {
  const ExpReduced<T> p = exp_reduce(x);
  const T y = scale(T(1) + expm1_reduced(p.r), p.n);
  return x < exp_limits<T>::low ? T(0) : y;
}

// e^x for x <= 0. float: 2^(n + 64) is normal for every n that matters, and the last product rounds below the normals.
ALT_FN float exp_nonpositive(float x) {
  constexpr float magic = bits_of<float>::round_magic + 127.0f + 64.0f;
  const float shifted = fma(x, 0x1.715476p+0f, magic), n = shifted - magic;
  const float r = minus_multiple_of_ln2(x, n), power = bit_cast<float>(as_uint(shifted) << 23);
  const float y = fma(expm1_reduced(r), power, power) * 0x1p-64f;
  return x < exp_limits<float>::low ? 0.0f : y;
}
ALT_FN double exp_nonpositive(double x) { return exp_below_limit(x); }

// 1/(1+e) for 0 <= e <= 1: a parabola in d = 1+e (2^-6.6), then Newton's iteration twice. The last residual is
// (1-y) - e*y, where 1-y is exact, so that the rounding of d is not in it.
ALT_FN float reciprocal_of_one_plus(float e) {
  const float d = 1.0f + e;
  float y = poly(d, 0x1.0f851ep+1f, -0x1.745f9p+0f, 0x1.4aff9cp-2f);
  y = fma(y, fma(-d, y, 1.0f), y);
  return fma(y, fma(-e, y, 1.0f - y), y);
}
ALT_FN double reciprocal_of_one_plus(double e) { return 1.0 / (1.0 + e); }

// e^(x + tail) - 1 for x + tail <= 60, where a small x + tail keeps more digits than T has:
// e^(r + tail) - 1 = r + (tail + (r + tail)^2 P).
template <class T> ALT_FN T expm1_bounded(T x, T tail) {
  const Rounded<T> n = round_to_int((x + tail) * T(0x1.71547652b82fep+0));
  const T power = pow2<T>(n.integer), high = minus_multiple_of_ln2(x, n.value), r = high + tail;
  return fma(high + fma(r * r, exp_tail(r), tail), power, power - T(1));
}
// e^x - 1 for x <= 60.
template <class T> ALT_FN T expm1_bounded(T x) {
  const ExpReduced<T> p = exp_reduce(x);
  const T power = pow2<T>(p.n);
  return fma(expm1_reduced(p.r), power, power - T(1));
}

}  // namespace detail

// float: 2^n in two factors, since 2^n alone overflows or underflows before the product does. Their biases are part of
// the rounding constant: its low bits, halved and shifted up, are the float 2^(n/2).
ALT_FN float exp(float x) {
  constexpr float magic = detail::bits_of<float>::round_magic + 254.0f;
  const float shifted = detail::fma(x, 0x1.715476p+0f, magic), n = shifted - magic;
  const uint32_t bits = detail::as_uint(shifted), half = bits >> 1;
  const float p = detail::bit_cast<float>(half << 23), q = detail::bit_cast<float>((bits - half) << 23);
  const float y = detail::fma(detail::expm1_reduced(detail::minus_multiple_of_ln2(x, n)), p, p) * q;
  const float above = x < detail::exp_limits<float>::low ? 0.0f : y;
  return x > detail::exp_limits<float>::high ? detail::infinity<float>() : above;
}
ALT_FN double exp(double x) {
  const double y = detail::exp_below_limit(x);
  return x > detail::exp_limits<double>::high ? detail::infinity<double>() : y;
}

ALT_FLOATS(T) ALT_FN T exp2(T x) {
  using L = detail::exp_limits<T>;
  const auto n = detail::round_to_int(x);
  const T r = (x - n.value) * T(0x1.62e42fefa39efp-1);
  const T y = detail::scale(T(1) + detail::expm1_reduced(r), n.integer);
  return x < L::low2 ? T(0) : (x >= L::high2 ? detail::infinity<T>() : y);
}

// Uses half the power of two, since 2^128 may be a factor of a finite result.
ALT_FLOATS(T) ALT_FN T expm1(T x) {
  using L = detail::exp_limits<T>;
  constexpr T tiny = sizeof(T) == 4 ? T(0x1p-26f) : T(0x1p-55);
  const auto p = detail::exp_reduce(x);
  const T half_power = detail::pow2<T>(p.n - 1);
  const T y = detail::fma(detail::expm1_reduced(p.r), half_power, half_power - T(0.5)) * T(2);
  const T bounded = x < L::low_m1 ? T(-1) : (x > L::high ? detail::infinity<T>() : y);
  return detail::magnitude(x) < tiny ? x : bounded;
}

ALT_FLOATS(T) ALT_FN T log(T x) {
  const auto p = detail::log_reduce(x);
  return detail::log_special(detail::log_finish(p.m - T(1), detail::to_float(p.e)), x, x);
}

// log(1+x) = log(u) + log1p(c/u) with u = fl(1+x) and c = x - (u-1); c/u joins the reduced argument.
ALT_FLOATS(T) ALT_FN T log1p(T x) {
  const T u = T(1) + x;
  const auto p = detail::log_reduce_normal(u);
  const detail::int_of<T> bounded = p.e < 100 ? p.e : 100;
  const T r = detail::fma(x - (u - T(1)), detail::pow2<T>(-bounded), p.m - T(1));
  const T y = detail::log_special(detail::log_finish(r, detail::to_float(p.e)), x, u);
  return x == T(0) ? x : y;
}

// log2(m) = r*log2(e) + tail*log2(e), the first product in two parts.
ALT_FLOATS(T) ALT_FN T log2(T x) {
  constexpr T high = sizeof(T) == 4 ? T(0x1.715p+0) : T(0x1.71547654p+0);
  constexpr T low = T(0x1.71547652b82fe1777d0ffda0d24p+0L - (long double)high);
  const auto p = detail::log_reduce(x);
  const T r = p.m - T(1), tail = detail::log1p_tail(r);
  const T y = detail::fma(r, high, detail::fma(r, low, tail * (high + low)));
  return detail::log_special(detail::to_float(p.e) + y, x, x);
}

ALT_FLOATS(T) ALT_FN T log10(T x) {
  constexpr T high = sizeof(T) == 4 ? T(0x1.bccp-2) : T(0x1.bcb7b152p-2);
  constexpr T low = T(0x1.bcb7b1526e50e32a6ab7555f5a8p-2L - (long double)high);
  constexpr T two_high = sizeof(T) == 4 ? T(0x1.344p-2) : T(0x1.3441350ap-2);
  constexpr T two_low = T(0x1.34413509f79fef311f12b35816fp-2L - (long double)two_high);
  const auto p = detail::log_reduce(x);
  const T e = detail::to_float(p.e), r = p.m - T(1), tail = detail::log1p_tail(r);
  const T y = detail::fma(r, high, detail::fma(r, low, detail::fma(e, two_low, tail * (high + low))));
  return detail::log_special(detail::fma(e, two_high, y), x, x);
}

// tanh x = t / (t + 2) with t = e^(2|x|) - 1; beyond the bound the quotient rounds to 1.
ALT_FLOATS(T) ALT_FN T tanh(T x) {
  constexpr T bound = sizeof(T) == 4 ? T(10) : T(20);
  const T size = detail::magnitude(x), t = detail::expm1_bounded(T(2) * size), d = t + T(2);
  const T y = detail::divide(t, d, t - (d - T(2)));
  return detail::with_sign_of(size > bound ? T(1) : y, x);
}

// 1/(1+e) or e/(1+e) with e = exp(-|x|), accurate in both tails.
ALT_FLOATS(T) ALT_FN T sigmoid(T x) {
  const T e = detail::exp_nonpositive(-detail::magnitude(x));
  return (x < T(0) ? e : T(1)) * detail::reciprocal_of_one_plus(e);
}

// max + log1p(exp(-|a - b|)); equal infinities stay.
ALT_FLOATS(T) ALT_FN T logaddexp(T a, T b) {
  const T larger = alt::maximum(a, b);
  const T sum = larger + alt::log1p(detail::exp_nonpositive(-detail::magnitude(a - b)));
  return a == b && alt::isinf(a) ? a : sum;
}
ALT_FLOATS(T) ALT_FN T xlogy(T x, T y) { return y != y ? y : (x == T(0) ? T(0) : x * alt::log(y)); }
ALT_FLOATS(T) ALT_FN T ldexp(T x, T exponent) { return x * alt::exp2(exponent); }

}  // namespace alt
