// Storage of the 16-bit and 8-bit floats, and conversion between all types as torch's `to` does it.
#pragma once
#include "integer.h"

namespace alt {

// Storage only. Enumerations rather than structs: g++ does not vectorise a loop with a struct declared in its body.
enum class bfloat16 : uint16_t {};
enum class half : uint16_t {};
enum class float8_e4m3fn : uint8_t {};
enum class float8_e5m2 : uint8_t {};

// 1: too large numbers become the largest finite float8_e4m3fn (torch 2.13). 0: they become NaN (torch 2.11).
#ifndef ALT_E4M3FN_SATURATE
#define ALT_E4M3FN_SATURATE 1
#endif

ALT_FN bfloat16 blend(bool c, bfloat16 x, bfloat16 y) { return bfloat16(alt::blend(c, uint16_t(x), uint16_t(y))); }
ALT_FN half blend(bool c, half x, half y) { return half(alt::blend(c, uint16_t(x), uint16_t(y))); }

namespace detail {

// An IEEE-like float of 1 sign, E exponent and M mantissa bits. `finite`: no infinities, one NaN, all ones.
template <int E, int M, bool finite> struct small_float {
  static constexpr int bias = (1 << (E - 1)) - 1, shift = 23 - M;
  static constexpr uint32_t sign = 1u << (E + M), code_nan = finite ? sign - 1 : sign - (1u << (M - 1));
  static constexpr uint32_t code_inf = sign - (1u << M), code_max = finite ? code_nan - 1 : code_inf - 1;
  static constexpr uint32_t code_overflow = !finite ? code_inf : (ALT_E4M3FN_SATURATE ? code_max : code_nan);
  static constexpr uint32_t rebias = uint32_t(127 - bias) << 23;
  static constexpr uint32_t smallest_normal = rebias + (1u << 23);
  // Infinity, or without infinities the step above the largest value.
  static constexpr uint32_t overflow = finite ? (code_nan << shift) + rebias : uint32_t(128 + bias) << 23;
  // Adding 2^23 units of the subnormal spacing rounds to that spacing.
  static constexpr uint32_t subnormal_magic = uint32_t(127 + 24 - bias - M) << 23;

  static inline __attribute__((always_inline)) uint32_t encode(float x) {
    const uint32_t u = as_uint(x), a = u & 0x7fffffffu;
    const uint32_t tiny = as_uint(bit_cast<float>(a) + bit_cast<float>(subnormal_magic)) - subnormal_magic;
    const uint32_t normal = (a - rebias + ((1u << (shift - 1)) - 1) + ((a >> shift) & 1)) >> shift;
    const uint32_t bounded = finite && ALT_E4M3FN_SATURATE && normal > code_max ? code_max : normal;
    const uint32_t finite_code = a < smallest_normal ? tiny : bounded;
    const uint32_t code = a < overflow ? finite_code : (a > 0x7f800000u ? code_nan : code_overflow);
    return code | ((u >> 31) << (E + M));
  }
  static inline __attribute__((always_inline)) float decode(uint32_t code) {
    const uint32_t a = code & (sign - 1);
    const uint32_t normal = (a << shift) + rebias;
    const uint32_t special = (finite ? a == code_nan : a >= code_inf) ? normal | 0x7f800000u : normal;
    const float tiny = float(int32_t(a)) * bit_cast<float>(uint32_t(128 - bias - M) << 23);
    const uint32_t value = a < (1u << M) ? as_uint(tiny) : special;
    return bit_cast<float>(value | ((code & sign) << (31 - E - M)));
  }
};
using half_bits = small_float<5, 10, false>;
using e4m3fn_bits = small_float<4, 3, true>;
using e5m2_bits = small_float<5, 2, false>;

// Round to nearest even; NaN stays a quiet NaN.
ALT_FN uint32_t bfloat16_encode(float x) {
  const uint32_t u = as_uint(x);
  return x != x ? (u >> 16) | 0x40u : (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
}

ALT_FN float widen(bfloat16 x) { return bit_cast<float>(uint32_t(x) << 16); }
// Avoids _Float16, whose conversions g++ 12 does not vectorise.
ALT_FN float widen(half x) { return half_bits::decode(uint32_t(x)); }
ALT_FN float widen(float8_e4m3fn x) { return e4m3fn_bits::decode(uint32_t(x)); }
ALT_FN float widen(float8_e5m2 x) { return e5m2_bits::decode(uint32_t(x)); }
ALT_FN int32_t widen(bool x) { return x ? 1 : 0; }  // g++ 12 vectorises no conversion of a bool to a float
template <class T> ALT_FN T widen(T x) { return x; }

// One conversion from a built-in type; `caster<To>::from`.
template <class To> struct caster {
  template <class From> static inline __attribute__((always_inline)) To from(From x) { return To(x); }
};
// float to a narrower integer goes through a wider one, as torch's conversion does: uint8 through int64 and the signed
// ones through int32, whose out-of-range value 0x80000000 has no low bits. (From float both agree for uint8, since a
// float beyond 2^31 has no low 8 bits, and int32 is the one with vector instructions everywhere.)
#define ALT_CAST_THROUGH(To, FromFloat, FromDouble)                                                      \
  template <> struct caster<To> {                                                                        \
    template <class From> static inline __attribute__((always_inline)) To from(From x) { return To(x); } \
    static inline __attribute__((always_inline)) To from(float x) { return To(FromFloat(x)); }           \
    static inline __attribute__((always_inline)) To from(double x) { return To(FromDouble(x)); }         \
  };
ALT_CAST_THROUGH(int8_t, int32_t, int32_t)
ALT_CAST_THROUGH(int16_t, int32_t, int32_t)
ALT_CAST_THROUGH(uint8_t, int32_t, int64_t)
ALT_CAST_THROUGH(uint16_t, int32_t, int64_t)
ALT_CAST_THROUGH(uint32_t, int64_t, int64_t)
#undef ALT_CAST_THROUGH
#if defined(__x86_64__)
// A float that is too large gives the least integer, as the processor does. Without the comparison, compilers fold the
// conversion of a constant that a clamp selects to the largest.
#define ALT_CAST_WHOLE(To, limit)                                                                        \
  template <> struct caster<To> {                                                                        \
    template <class From> static inline __attribute__((always_inline)) To from(From x) { return To(x); } \
    static inline __attribute__((always_inline)) To from(float x) {                                      \
      return x >= float(limit) ? To(-(limit)) : To(x);                                                   \
    }                                                                                                    \
    static inline __attribute__((always_inline)) To from(double x) {                                     \
      return x >= double(limit) ? To(-(limit)) : To(x);                                                  \
    }                                                                                                    \
  };
ALT_CAST_WHOLE(int32_t, 0x1p31)
ALT_CAST_WHOLE(int64_t, 0x1p63)
#undef ALT_CAST_WHOLE
#endif
template <> struct caster<bool> {
  template <class From> static inline __attribute__((always_inline)) bool from(From x) { return x != From(0); }
};
template <> struct caster<bfloat16> {
  template <class From> static inline __attribute__((always_inline)) bfloat16 from(From x) {
    return bfloat16(bfloat16_encode(float(x)));
  }
};
template <> struct caster<half> {
  template <class From> static inline __attribute__((always_inline)) half from(From x) {
    return half(half_bits::encode(float(x)));
  }
};
template <> struct caster<float8_e4m3fn> {
  template <class From> static inline __attribute__((always_inline)) float8_e4m3fn from(From x) {
    return float8_e4m3fn(e4m3fn_bits::encode(float(x)));
  }
};
template <> struct caster<float8_e5m2> {
  template <class From> static inline __attribute__((always_inline)) float8_e5m2 from(From x) {
    return float8_e5m2(e5m2_bits::encode(float(x)));
  }
};
template <class To, class From> struct cast_pair {
  static inline __attribute__((always_inline)) To run(From x) { return caster<To>::from(widen(x)); }
};
template <class T> struct cast_pair<T, T> {
  static inline __attribute__((always_inline)) T run(T x) { return x; }
};

}  // namespace detail

// torch's x.to(dtype): float to integer truncates, to bool compares with zero, to a narrower integer wraps around,
// to a narrower float rounds to nearest even (double to 16 or 8 bits by way of float).
template <class To, class From> ALT_FN To cast(From x) { return detail::cast_pair<To, From>::run(x); }

}  // namespace alt
