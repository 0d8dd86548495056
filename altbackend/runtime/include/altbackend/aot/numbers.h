// Arithmetic of Python on the numbers of a host program: integers of 64 bits, floats and bools.
#pragma once
#include "tensor.h"

#include <cmath>
#include <type_traits>

namespace alt::aot::py {

template <class A, class B> using Common = std::conditional_t<std::is_floating_point_v<A> || std::is_floating_point_v<B>, double, int64_t>;

inline void nonzero(bool holds) {
  if (!holds) fail("division by zero");
}
template <class A, class B> double truediv(A a, B b) {
  nonzero(b != 0);
  return double(a) / double(b);
}
template <class A, class B> Common<A, B> mod(A a, B b) {
  nonzero(b != 0);
  if constexpr (std::is_same_v<Common<A, B>, double>) {
    const double r = std::fmod(double(a), double(b));
    return r != 0 && (r < 0) != (b < 0) ? r + double(b) : r == 0 ? std::copysign(0.0, double(b)) : r;
  } else {
    const int64_t r = int64_t(a) % int64_t(b);
    return r != 0 && (r < 0) != (b < 0) ? r + int64_t(b) : r;
  }
}
template <class A, class B> Common<A, B> floordiv(A a, B b) {
  nonzero(b != 0);
  if constexpr (std::is_same_v<Common<A, B>, double>) {
    const double m = std::fmod(double(a), double(b)), q = (double(a) - m) / double(b);
    const double down = m != 0 && (b < 0) != (m < 0) ? q - 1 : q;
    return down == 0 ? std::copysign(0.0, double(a) / double(b)) : std::floor(down) + (down - std::floor(down) > 0.5);
  } else {
    const int64_t q = int64_t(a) / int64_t(b);
    return int64_t(a) % int64_t(b) != 0 && (a < 0) != (b < 0) ? q - 1 : q;
  }
}
// An integer to a power that is a constant of the program; the printer takes no other power of integers.
template <class A> A power(A a, int n) {
  A result = 1;
  for (; n > 0; --n) result *= a;
  return result;
}
inline double round(double x) { return std::nearbyint(x); }
template <class A, class B> Common<A, B> maximum(A a, B b) { return b > a ? Common<A, B>(b) : Common<A, B>(a); }
template <class A, class B> Common<A, B> minimum(A a, B b) { return b < a ? Common<A, B>(b) : Common<A, B>(a); }
inline int64_t to_int(double x) {
  if (!(x >= -9223372036854775808.0 && x < 9223372036854775808.0)) fail("%g is no integer of 64 bits", x);
  return int64_t(x);
}
inline int64_t to_int(int64_t x) { return x; }
inline int64_t to_int(bool x) { return x; }

inline int64_t position(int64_t at, int64_t size, int64_t dim) {
  if (-size <= at && at < size) return at < 0 ? at + size : at;
  fail("index %" PRId64 " is out of bounds for dimension %" PRId64 " with size %" PRId64, at, dim, size);
}
inline int64_t slice_begin(int64_t at, int64_t size) { return at < 0 ? (at + size > 0 ? at + size : 0) : (at < size ? at : size); }
inline int64_t indexed_size(int64_t size, int64_t count) {
  if (size == 0 && count) fail("index is out of bounds for dimension with size 0");
  return size > 1 ? size : 1;
}
inline int64_t bits_of(double x) {
  int64_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline void require(bool holds, const char* message) {
  if (!holds) fail("%s", message);
}

inline void require_index(bool holds, const char* message) {
  if (!holds) throw Error{message, Error::index};
}

}  // namespace alt::aot::py
