// Powers, error functions, gamma functions and modified Bessel functions. float is branch-free unless
// it says "scalar"; double is so where no C library function is called. Polynomials: tools/vecmath_coefficients.py.
#pragma once
#include "trig.h"

extern "C" double lgamma_r(double, int*) noexcept;

namespace alt {
namespace detail {

// (-log(erfc x) / x - 2 / sqrt(pi)) / x for 0 <= x <= 4.
ALT_FN float erf_exponent(float x) {
  return poly(x, 0x1.45f308p-1f, 0x1.a4f37ep-4f, -0x1.39396cp-6f, -0x1.095a4ep-12f, 0x1.d7b07ep-10f,
              -0x1.845500p-11f, 0x1.5f3b4cp-13f, -0x1.664488p-16f, 0x1.405194p-20f);
}
// -log(erfc x) / x for 0 <= x <= 4, such that erfc keeps an absolute error of 2^-25.9.
ALT_FN float erfc_exponent(float x) {
  return poly(x, 0x1.20dd88p+0f, 0x1.45f024p-1f, 0x1.a58f0ap-4f, -0x1.40dd2p-6f, 0x1.198374p-11f, 0x1.0ea2d8p-10f,
              -0x1.43cce0p-12f, 0x1.07bca8p-15f);
}
// exp(x^2) erfc(x) in t = (x - 3.75) / (x + 3.75) for 0 <= x <= 10.4.
ALT_FN double erfcx_reduced(double t) {
  return poly(t, 0x1.2a2af19c0efddp-3, -0x1.17fbeb3a3f298p-2, 0x1.cedd514e2f63dp-3, -0x1.4efec69e980f2p-3,
              0x1.a444679861b2dp-4, -0x1.c0f143fe0588ep-5, 0x1.8b9056ee7b056p-6, -0x1.0d50d28df5674p-7,
              0x1.d8cfbaa7051a7p-10, -0x1.0b6acc7e587a6p-15, -0x1.4d821a87d83f9p-13, 0x1.cc609d5d9e5ddp-15,
              0x1.2a738ffa4b191p-16);
}

// exp(-x) I(x) / x^0 in x/4 - 1
ALT_FN double i0e_near(double t) {
  return poly(t, 0x1.a7f09f8eedf5ap-3, -0x1.cedda00486206p-4, 0x1.8322d1d8a3bf6p-4, -0x1.6cb8d0c915beep-4,
              0x1.65c235bfe9ab2p-4, -0x1.5c028fe63e5acp-4, 0x1.44b6196a926b2p-4, -0x1.1cd73a8f26510p-4,
              0x1.d11e10f32e3cfp-5, -0x1.602411d229619p-5, 0x1.ee6f567cbfda4p-6, -0x1.427b0a7e4b60ap-6,
              0x1.87e865b9636e6p-7, -0x1.bd257d4e003ddp-8, 0x1.da1abccf16e1fp-9, -0x1.dafa97a9b13b5p-10,
              0x1.c0f389f531576p-11, -0x1.9177da85e7c97p-12, 0x1.549eeb1ce6f36p-13, -0x1.12fca11f26858p-14,
              0x1.a681fca9319ffp-16, -0x1.345691672593bp-17, 0x1.b3980b5a3fe9bp-19, -0x1.31b75021f0845p-20,
              0x1.8117953677f24p-22, -0x1.759cb99e67f34p-24, 0x1.f5679933c1babp-26, -0x1.1586a5867c853p-26,
              0x1.15fc1bb615966p-28);
}
// sqrt(x) exp(-x) I(x) in 16/x - 1
ALT_FN double i0e_far(double t) {
  return poly(t, 0x1.9bd428ad249a5p-2, 0x1.b87969bb93b61p-9, 0x1.1daa72b5d2f23p-13, 0x1.75e5ee7264a28p-17,
              0x1.8e513bf4598a9p-20, 0x1.3f49a527b3a1ep-22, 0x1.7d0d469ab2407p-24, 0x1.51cf75ba45cadp-25,
              0x1.727a242fe3762p-26, 0x1.03786fe338af4p-27, -0x1.d627c6a826350p-28, -0x1.cc49d884b241cp-27,
              -0x1.5bc02d281a09dp-28, 0x1.0259840779329p-27, 0x1.c5ad15fd39f1ep-28, -0x1.d9e21a0d6b488p-29,
              -0x1.3ddea58fe943bp-28, 0x1.8fe86769442acp-30, 0x1.3310989ea1c7ep-29, -0x1.20ee788bbfbb0p-31,
              -0x1.754d69495f467p-31, 0x1.274ff397e755fp-33, 0x1.a8704a8873e8cp-34, -0x1.2b9295afd2dc9p-36);
}
// exp(-x) I(x) / x^1 in x/4 - 1
ALT_FN double i1e_near(double t) {
  return poly(t, 0x1.6e14eb8e5d319p-5, -0x1.f4bb071a7752bp-5, 0x1.16c390ddb08f3p-4, -0x1.1881379ffb5ddp-4,
              0x1.0530f817ff83ap-4, -0x1.c4daa5134118ap-5, 0x1.6df95e8be6e1bp-5, -0x1.13d5f358b4b6ap-5,
              0x1.84125b0c6389dp-6, -0x1.fe3d9bfe805a2p-7, 0x1.3a0c1a0de2816p-7, -0x1.6ab6a3b8db765p-8,
              0x1.89f8a57009744p-9, -0x1.93682295b907fp-10, 0x1.8656d24e22311p-11, -0x1.65bf9e067014dp-12,
              0x1.37425eea7c089p-13, -0x1.01a20cee2c798p-14, 0x1.969ce9f93fbe6p-16, -0x1.32882c0a6a681p-17,
              0x1.b9b7aaa6e08fcp-19, -0x1.3057f35e7d721p-20, 0x1.9649deb9e1ab6p-22, -0x1.097e1ff5a841cp-23,
              0x1.3ae010ce25637p-25, -0x1.3beee7c3e58ccp-27, 0x1.a3facc24cfb44p-29, -0x1.7cbefe9965c2dp-30,
              0x1.50e95b4f37178p-32);
}
// sqrt(x) exp(-x) I(x) in 16/x - 1
ALT_FN double i1e_far(double t) {
  return poly(t, 0x1.8ebe783a84030p-2, -0x1.3f796198ee626p-7, -0x1.cbc54df1d8abfp-13, -0x1.f89c2306a6415p-17,
              -0x1.ec8e1202d1e37p-20, -0x1.76137da2d50d8p-22, -0x1.ad8b6ffb56951p-24,
              -0x1.727ac1e987e3ap-25, -0x1.91da089746abcp-26, -0x1.2180dc1fd25d1p-27, 0x1.d585063e3976bp-28,
              0x1.e1eaaa973ac6ep-27, 0x1.81eb16ec1c91cp-28, -0x1.05d05c0794a6bp-27, -0x1.e2cfb19cc8351p-28,
              0x1.d18e75fb4ea8cp-29, 0x1.4e0b380b579edp-28, -0x1.7f806b4325c48p-30, -0x1.40db3adfd80dcp-29,
              0x1.1248dc2c43160p-31, 0x1.84f5421fdb9fap-31, -0x1.191a268150f58p-33, -0x1.b98ca323fd027p-34,
              0x1.200c9f8d06953p-36);
}

}  // namespace detail

// |x|^y = 2^(y log2|x|) in double, which leaves 20 spare bits; then the sign and the cases IEEE 754 lists for pow.
ALT_FN float pow(float x, float y) {
  const double size = detail::magnitude(double(x));
  const float half = 0.5f * y, plain = float(alt::exp2(double(y) * alt::log2(size)));
  const bool integral = alt::trunc(y) == y, odd = integral && alt::trunc(half) != half;
  const float value = y == 0.0f || (size == 1.0 && (y == y)) ? 1.0f : plain;
  const float with_sign = odd && alt::signbit(x) ? -value : value;
  const bool invalid = x < 0.0f && alt::isfinite(x) && !integral && alt::isfinite(y);
  return x == 1.0f ? 1.0f : (invalid ? detail::quiet_nan<float>() : with_sign);
}
ALT_FN double pow(double x, double y) { return __builtin_pow(x, y); }

ALT_FN float hypot(float x, float y) {
  const double a = x, b = y;
  const float length = float(alt::sqrt(a * a + b * b));
  return alt::isinf(x) || alt::isinf(y) ? detail::infinity<float>() : length;
}
ALT_FN double hypot(double x, double y) { return __builtin_hypot(x, y); }

// erf x = 1 - exp(-x Q(x)), x >= 0, with the polynomial Q = -log(erfc x) / x, whose leading term 2/sqrt(pi) is taken
// in two parts. One polynomial and one exponential serve the whole range.
ALT_FN float erf(float x) {
  constexpr float high = 0x1.20dd76p+0f, low = -0x1.f7ac92p-25f;
  const float size = detail::magnitude(x);
  const float y = size * high, y_low = detail::fma(size, low, detail::fma(size, high, -y));
  const float rest = detail::fma(size * size, detail::erf_exponent(size), y_low);
  const float value = -detail::expm1_bounded(-y, -rest);
  return detail::with_sign_of(size > 4.0f ? 1.0f : value, x);
}
ALT_FN double erf(double x) { return __builtin_erf(x); }

// 1 + erf x, the factor of GELU. The sum loses the digits of erf at small x, so erfc |x| = exp(-|x| Q) to an absolute
// error of 2^-25.9 is enough: it takes less work than erf, and the sum is as accurate as eager's.
ALT_FN float one_plus_erf(float x) {
  constexpr float magic = detail::bits_of<float>::round_magic + 127.0f;
  const float size = detail::magnitude(x), y = size * detail::erfc_exponent(size);
  const float shifted = detail::fma(y, -0x1.715476p+0f, magic), n = shifted - magic;
  const float r = detail::fma(n, -0x1.62e43p-1f, -y), power = detail::bit_cast<float>(detail::as_uint(shifted) << 23);
  const float tail = detail::fma(detail::expm1_reduced(r), power, power), bounded = size > 4.0f ? 0.0f : tail;
  return x < 0.0f ? bounded : 2.0f - bounded;
}
ALT_FN double one_plus_erf(double x) { return 1.0 + __builtin_erf(x); }

ALT_FN float erfc(float x) {
  const double size = detail::magnitude(double(x)), t = (size - 3.75) / (size + 3.75);
  const double y = detail::exp_below_limit(-size * size) * detail::erfcx_reduced(t);
  const double bounded = size > 10.4 ? 0.0 : y;
  return float(x < 0.0f ? 2.0 - bounded : bounded);
}
ALT_FN double erfc(double x) { return __builtin_erfc(x); }

// Start: S. Winitzki, "A handy approximation for the error function and its inverse" (2008), relative error 2e-3;
// then Halley's iteration, on erfc in the tails, where 1 - |y| is exact. Scalar: the C library's erf.
ALT_FN double erfinv(double y) {
  constexpr double a = 0.147, two_over_pi_a = 4.3307467508016;
  const double size = detail::magnitude(y), tail = 1.0 - size;
  const double l = alt::log1p(-size * size), t = two_over_pi_a + 0.5 * l;
  double x = alt::sqrt((-l / a) / (alt::sqrt(t * t - l / a) + t));
  for (int i = 0; i < 3; ++i) {
    const double error = size > 0.5 ? tail - __builtin_erfc(x) : __builtin_erf(x) - size;
    const double step = error * alt::exp(x * x) * 0x1.c5bf891b4ef6ap-1;
    x -= step / (1.0 + x * step);
  }
  x = size < 0x1p-30 ? size * 0x1.c5bf891b4ef6ap-1 : x;
  x = size == 1.0 ? detail::infinity<double>() : x;
  return size <= 1.0 ? detail::with_sign_of(x, y) : detail::quiet_nan<double>();
}
ALT_FN float erfinv(float y) { return float(alt::erfinv(double(y))); }

// Scalar: the C library's.
ALT_FN double lgamma(double x) {
  int sign;
  return lgamma_r(x, &sign);
}
ALT_FN float lgamma(float x) { return float(alt::lgamma(double(x))); }

// psi(x) = psi(x + 1) - 1/x up to 12, then the asymptotic series in Bernoulli numbers; for x < 0 the reflection
// psi(x) = psi(1 - x) - pi / tan(pi x) (Abramowitz and Stegun 6.3.5, 6.3.18, 6.3.7). Scalar.
ALT_FN double digamma(double x) {
  if (x == 0.0) return -detail::with_sign_of(detail::infinity<double>(), x);
  const double fraction = x - alt::round(x);
  if (x < 0.0 && !(fraction != 0.0 && alt::isfinite(x))) return detail::quiet_nan<double>();
  double result = x < 0.0 ? -2.0 * detail::pi_2 / __builtin_tan(2.0 * detail::pi_2 * fraction) : 0.0;
  double u = x < 0.0 ? 1.0 - x : x;
  for (; u < 12.0; u += 1.0) result -= 1.0 / u;
  const double z = 1.0 / (u * u);
  const double bernoulli =
      detail::poly(z, 1.0 / 12, -1.0 / 120, 1.0 / 252, -1.0 / 240, 1.0 / 132, -691.0 / 32760, 1.0 / 12);
  return result + alt::log(u) - 0.5 / u - z * bernoulli;
}
ALT_FN float digamma(float x) { return float(alt::digamma(double(x))); }

// exp(-|x|) I_n(x)
ALT_FN double i0e(double x) {
  const double size = detail::magnitude(x), root = alt::sqrt(size);
  return size <= 8.0 ? detail::i0e_near(size / 4.0 - 1.0) : detail::i0e_far(16.0 / size - 1.0) / root;
}
ALT_FN double i1e(double x) {
  const double size = detail::magnitude(x), root = alt::sqrt(size);
  const double near = size * detail::i1e_near(size / 4.0 - 1.0), far = detail::i1e_far(16.0 / size - 1.0) / root;
  const double y = size <= 8.0 ? near : far;
  return x < 0.0 ? -y : y;  // +0 at -0, as torch
}
ALT_FN double i0(double x) { return alt::exp(detail::magnitude(x)) * alt::i0e(x); }
ALT_FN double i1(double x) { return alt::exp(detail::magnitude(x)) * alt::i1e(x); }
ALT_FN float i0e(float x) { return float(alt::i0e(double(x))); }
ALT_FN float i1e(float x) { return float(alt::i1e(double(x))); }
ALT_FN float i0(float x) { return float(alt::i0(double(x))); }
ALT_FN float i1(float x) { return float(alt::i1(double(x))); }

}  // namespace alt
