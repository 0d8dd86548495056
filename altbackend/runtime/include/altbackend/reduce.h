// Combining functions of reductions, and OpenMP reductions with torch's rules:
// `#pragma omp simd reduction(alt_max: m)`.
#pragma once
#include "integer.h"

namespace alt {

// Identity of maximum and minimum.
ALT_FLOATS(T) ALT_FN T lowest_of() { return -detail::infinity<T>(); }
ALT_FLOATS(T) ALT_FN T highest_of() { return detail::infinity<T>(); }
ALT_INTEGERS(T) ALT_FN T lowest_of() { return detail::integer_of<T>::lowest; }
ALT_INTEGERS(T) ALT_FN T highest_of() { return detail::integer_of<T>::highest; }

// A value and its index. NaN precedes any number; of equal values (or NaNs) the first index wins.
template <class T> struct Indexed {
  T value;
  int64_t index;
};
template <class T> ALT_FN Indexed<T> argmax_combine(Indexed<T> a, Indexed<T> b) {
  const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
  const bool tie = a.value == b.value || (a_nan && b_nan);
  const bool take_b = tie ? b.index < a.index : b_nan || (!a_nan && b.value > a.value);
  return {take_b ? b.value : a.value, take_b ? b.index : a.index};
}
template <class T> ALT_FN Indexed<T> argmin_combine(Indexed<T> a, Indexed<T> b) {
  const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
  const bool tie = a.value == b.value || (a_nan && b_nan);
  const bool take_b = tie ? b.index < a.index : b_nan || (!a_nan && b.value < a.value);
  return {take_b ? b.value : a.value, take_b ? b.index : a.index};
}

// Totals of the first n elements of a row in memory, in four vectors and a tree. Vectors of 32 bytes read what wider
// or narrower vectors have just stored without waiting for the cache.
namespace detail {
struct Sum {
  template <class V> ALT_FN V combined(V a, V b) { return a + b; }
};
struct Larger {
  template <class V> ALT_FN V combined(V a, V b) { return a > b ? a : b; }
};
struct Smaller {
  template <class V> ALT_FN V combined(V a, V b) { return a < b ? a : b; }
};
template <class F, class T> ALT_FN T row_total(const T* row, int64_t n, T identity) {
  constexpr int width = 32 / sizeof(T);
  typedef T Vector __attribute__((vector_size(32), aligned(sizeof(T)), may_alias));
  const Vector start = Vector{} + identity;
  Vector total[4] = {start, start, start, start};
  const auto at = [&](int64_t k) { return *reinterpret_cast<const Vector*>(row + k); };
  int64_t k = 0;
  for (; k + 4 * width <= n; k += 4 * width)
    for (int j = 0; j < 4; ++j) total[j] = F::combined(total[j], at(k + j * width));
  for (; k + width <= n; k += width) total[0] = F::combined(total[0], at(k));
  const Vector all = F::combined(F::combined(total[0], total[1]), F::combined(total[2], total[3]));
  T lanes[width];
  for (int j = 0; j < width; ++j) lanes[j] = all[j];
  for (int half = width / 2; half > 0; half /= 2)
    for (int j = 0; j < half; ++j) lanes[j] = F::combined(lanes[j], lanes[j + half]);
  T rest = identity;  // elements behind the last vector: added one by one to the total, each would round as the total does
  for (; k < n; ++k) rest = F::combined(rest, row[k]);
  return F::combined(lanes[0], rest);
}
// A pass of its own: an extreme that keeps NaN takes three operations, each of which waits for the one before.
template <class T> ALT_FN bool has_nan(const T* row, int64_t n) {
  constexpr int width = 32 / sizeof(T);
  typedef T Vector __attribute__((vector_size(32), aligned(sizeof(T)), may_alias));
  auto unordered = Vector{} != Vector{};
  int64_t k = 0;
  for (; k + width <= n; k += width) {
    const Vector x = *reinterpret_cast<const Vector*>(row + k);
    unordered |= x != x;
  }
  bool found = false;
  for (int j = 0; j < width; ++j) found |= unordered[j] != 0;
  for (; k < n; ++k) found |= row[k] != row[k];
  return found;
}
template <class F, class T> ALT_FN T row_extreme(const T* row, int64_t n, T identity) {
  return has_nan(row, n) ? T(__builtin_nanf("")) : row_total<F>(row, n, identity);
}
}  // namespace detail
template <class T> ALT_FN T row_sum(const T* row, int64_t n) { return detail::row_total<detail::Sum>(row, n, T(0)); }
ALT_INTEGERS(T) ALT_FN T row_max(const T* row, int64_t n) { return detail::row_total<detail::Larger>(row, n, alt::lowest_of<T>()); }
ALT_INTEGERS(T) ALT_FN T row_min(const T* row, int64_t n) { return detail::row_total<detail::Smaller>(row, n, alt::highest_of<T>()); }
ALT_FLOATS(T) ALT_FN T row_max(const T* row, int64_t n) { return detail::row_extreme<detail::Larger>(row, n, alt::lowest_of<T>()); }
ALT_FLOATS(T) ALT_FN T row_min(const T* row, int64_t n) { return detail::row_extreme<detail::Smaller>(row, n, alt::highest_of<T>()); }

// Count, mean and sum of squared deviations (B. Welford, 1962; combined as in T. Chan, G. Golub, R. LeVeque, 1979).
template <class T> struct Welford {
  T mean = T(0), m2 = T(0), weight = T(0);
};
template <class T> ALT_FN Welford<T> welford_update(Welford<T> w, T x) {
  const T weight = w.weight + T(1), delta = x - w.mean, mean = w.mean + delta / weight;
  return {mean, w.m2 + delta * (x - mean), weight};
}
template <class T> ALT_FN Welford<T> welford_combine(Welford<T> a, Welford<T> b) {
  const T weight = a.weight + b.weight, delta = b.mean - a.mean;
  const T share = weight == T(0) ? T(0) : b.weight / weight;
  return {a.mean + delta * share, a.m2 + b.m2 + delta * delta * a.weight * share, weight};
}

}  // namespace alt

#define ALT_PRAGMA(text) _Pragma(#text)
#define ALT_REDUCTION(name, T, combine, identity) \
  ALT_PRAGMA(omp declare reduction(name : T : omp_out = alt::combine(omp_out, omp_in)) initializer(omp_priv = identity))
#define ALT_REDUCTIONS(T)                                                                         \
  ALT_REDUCTION(alt_max, T, maximum, alt::lowest_of<T>())                                         \
  ALT_REDUCTION(alt_min, T, minimum, alt::highest_of<T>())                                        \
  ALT_REDUCTION(alt_sum, T, add, T(0))                                                            \
  ALT_REDUCTION(alt_prod, T, mul, T(1))                                                           \
  ALT_REDUCTION(alt_argmax, alt::Indexed<T>, argmax_combine, (alt::Indexed<T>{alt::lowest_of<T>(), INT64_MAX}))  \
  ALT_REDUCTION(alt_argmin, alt::Indexed<T>, argmin_combine, (alt::Indexed<T>{alt::highest_of<T>(), INT64_MAX}))

ALT_REDUCTIONS(float)
ALT_REDUCTIONS(double)
ALT_REDUCTIONS(int8_t)
ALT_REDUCTIONS(int16_t)
ALT_REDUCTIONS(int32_t)
ALT_REDUCTIONS(int64_t)
ALT_REDUCTIONS(uint8_t)
#pragma omp declare reduction(alt_max : bool : omp_out = omp_out | omp_in) initializer(omp_priv = false)
#pragma omp declare reduction(alt_min : bool : omp_out = omp_out & omp_in) initializer(omp_priv = true)
#pragma omp declare reduction(alt_any : bool : omp_out = omp_out | omp_in) initializer(omp_priv = false)
#pragma omp declare reduction(alt_all : bool : omp_out = omp_out & omp_in) initializer(omp_priv = true)
#undef ALT_REDUCTIONS
#undef ALT_REDUCTION
#undef ALT_PRAGMA
