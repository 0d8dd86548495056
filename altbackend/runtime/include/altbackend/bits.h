// Basics for the other headers of the runtime: bit views, fused multiply-add, polynomials, powers of two.
#pragma once
#include <cstddef>
#include <cstdint>

#define ALT_FN static inline __attribute__((always_inline))

namespace alt {
namespace detail {

template <class T> struct bits_of;
template <> struct bits_of<float> {
  using signed_type = int32_t;
  using unsigned_type = uint32_t;
  static constexpr int mantissa = 23;
  static constexpr int bias = 127;
  static constexpr float round_magic = 0x1.8p23f;  // adding 1.5 * 2^23 leaves the nearest integer in the low bits
};
template <> struct bits_of<double> {
  using signed_type = int64_t;
  using unsigned_type = uint64_t;
  static constexpr int mantissa = 52;
  static constexpr int bias = 1023;
  static constexpr double round_magic = 0x1.8p52;
};
template <class T> using int_of = typename bits_of<T>::signed_type;
template <class T> using uint_of = typename bits_of<T>::unsigned_type;

template <class To, class From> ALT_FN To bit_cast(From x) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
#if defined(__has_builtin)
#if __has_builtin(__builtin_bit_cast)
#define ALT_HAS_BIT_CAST 1
#endif
#endif
#ifdef ALT_HAS_BIT_CAST
  return __builtin_bit_cast(To, x);
#else
  To y;
  __builtin_memcpy(&y, &x, sizeof y);
  return y;
#endif
}
template <class T> ALT_FN int_of<T> as_int(T x) { return bit_cast<int_of<T>>(x); }
template <class T> ALT_FN uint_of<T> as_uint(T x) { return bit_cast<uint_of<T>>(x); }

// a*b + c. Fused if the instruction exists; every caller is accurate enough without it.
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define ALT_HAS_FMA 1
ALT_FN float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
ALT_FN double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
#define ALT_HAS_FMA 0
ALT_FN float fma(float a, float b, float c) { return a * b + c; }
ALT_FN double fma(double a, double b, double c) { return a * b + c; }
#endif

// c0 + x*(c1 + x*(...)), lowest power first.
template <class T> ALT_FN T poly(T, T c0) { return c0; }
template <class T, class... Rest> ALT_FN T poly(T x, T c0, Rest... rest) { return fma(x, poly(x, rest...), c0); }

// 2^n for -bias < n <= bias.
template <class T> ALT_FN T pow2(int_of<T> n) {
  return bit_cast<T>(uint_of<T>(n + bits_of<T>::bias) << bits_of<T>::mantissa);
}

// The nearest integer to x, ties to even, as a float and as an integer; |x| < 2^(mantissa - 1).
template <class T> struct Rounded {
  T value;
  int_of<T> integer;
};
template <class T> ALT_FN Rounded<T> round_to_int(T x) {
  const T shifted = x + bits_of<T>::round_magic;
  return {shifted - bits_of<T>::round_magic, int_of<T>(as_int(shifted) - as_int(bits_of<T>::round_magic))};
}

// A small integer as a float; for double without the int64 conversion that only AVX-512 has in vector form.
ALT_FN float to_float(int32_t n) { return float(n); }
ALT_FN double to_float(int64_t n) { return bit_cast<double>(int64_t(as_int(0x1.8p52) + n)) - 0x1.8p52; }

template <class T> ALT_FN T infinity() { return T(__builtin_inff()); }
template <class T> ALT_FN T quiet_nan() { return T(__builtin_nanf("")); }
template <class T> ALT_FN T smallest_normal() { return sizeof(T) == 4 ? T(0x1p-126f) : T(0x1p-1022); }

template <class T> ALT_FN T magnitude(T x) { return bit_cast<T>(uint_of<T>(as_uint(x) & (~uint_of<T>(0) >> 1))); }
template <class T> ALT_FN T with_sign_of(T x, T sign) {
  constexpr uint_of<T> mask = ~(~uint_of<T>(0) >> 1);
  return bit_cast<T>(uint_of<T>((as_uint(x) & ~mask) | (as_uint(sign) & mask)));
}

}  // namespace detail
}  // namespace alt
