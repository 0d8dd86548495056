// Atomic addition for scatter kernels whose indices may collide. Relaxed: only the sum matters, not its order.
#pragma once
#include "types.h"

namespace alt {
namespace detail {

template <int bytes> struct word;
template <> struct word<2> { using type = uint16_t; };
template <> struct word<4> { using type = uint32_t; };
template <> struct word<8> { using type = uint64_t; };

template <class T> ALT_FN T rounded_sum(T a, T b) { return cast<T>(widen(a) + widen(b)); }

}  // namespace detail

ALT_INTEGERS(T) ALT_FN void atomic_add(T* target, T x) { __atomic_fetch_add(target, x, __ATOMIC_RELAXED); }

// float, double, bfloat16, half: compare and swap until no other thread has written. 16-bit sums round each time.
namespace detail {
template <class T> ALT_FN void compare_and_add(T* target, T x) {
  using W = typename word<sizeof(T)>::type;
  W* const place = reinterpret_cast<W*>(target);
  W seen = __atomic_load_n(place, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(place, &seen,
                                      bit_cast<W>(rounded_sum(bit_cast<T>(seen), x)), true,
                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}
}  // namespace detail
ALT_FN void atomic_add(float* target, float x) { detail::compare_and_add(target, x); }
ALT_FN void atomic_add(double* target, double x) { detail::compare_and_add(target, x); }
ALT_FN void atomic_add(bfloat16* target, bfloat16 x) { detail::compare_and_add(target, x); }
ALT_FN void atomic_add(half* target, half x) { detail::compare_and_add(target, x); }

}  // namespace alt
