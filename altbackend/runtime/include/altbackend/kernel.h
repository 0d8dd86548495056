// Helpers of generated kernels besides scalar functions: rows per thread, scratch memory, checked indices.
#pragma once
#include "cpu.h"
#include "index.h"
#include "transpose.h"

// A long text is compiled as ALT_UNITS parallel units; unit ALT_UNIT contains every ALT_UNITS-th piece.
#ifndef ALT_UNITS
#define ALT_UNITS 1
#define ALT_UNIT 0
#endif
#define ALT_PIECE(n) ((n) % ALT_UNITS == ALT_UNIT)
#if ALT_UNITS == 1
#define ALT_KERNEL static void
#else
#define ALT_KERNEL __attribute__((visibility("hidden"))) void
#endif

extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);
extern "C" void* malloc(size_t) noexcept;
extern "C" void free(void*) noexcept;

namespace alt {

struct Share {
  int64_t begin, end;
};

// The contiguous part of [0, n) that thread t of `threads` processes.
ALT_FN Share share(int64_t n, int64_t t, int64_t threads) {
  const int64_t each = n / threads, more = n % threads;
  const int64_t begin = t * each + (t < more ? t : more);
  return {begin, begin + each + (t < more ? 1 : 0)};
}

// The same in multiples of `block`, so that two threads do not write one cache line.
ALT_FN Share share_blocks(int64_t n, int64_t block, int64_t t, int64_t threads) {
  const Share s = share((n + block - 1) / block, t, threads);
  const int64_t end = s.end * block;
  return {s.begin * block, end < n ? end : n};
}

// Return the first of `n` ascending numbers that exceeds `x`; `n` if none does.
inline int64_t first_after(const int64_t* numbers, int64_t n, int64_t x) {
  int64_t low = 0;
  while (low < n) {
    const int64_t middle = (low + n) / 2;
    if (numbers[middle] > x)
      n = middle;
    else
      low = middle + 1;
  }
  return low;
}

// Aligned heap memory that lives for one kernel.
template <class T> struct Heap {
  void* raw;
  T* data;
  explicit Heap(int64_t n) {
    raw = malloc(size_t(n > 0 ? n : 1) * sizeof(T) + 64);
    data = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(raw) + 63) & ~uintptr_t(63));
  }
  ~Heap() { free(raw); }
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;
};

// The first error of a kernel for which eager raises: {code, index, size}. Codes: runtime/host.py, check_error.
ALT_FN void report(int64_t* error, int64_t code, int64_t x, int64_t n) {
  int64_t none = 0;
  if (__atomic_compare_exchange_n(error, &none, code, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    error[1] = x;
    error[2] = n;
  }
}

// A boolean in memory, read as a byte: GCC 12 vectorises no loop that selects by, or converts, a loaded `bool`.
ALT_FN bool truth(const bool& x) { return reinterpret_cast<const uint8_t&>(x) != 0; }

// Maps -n <= x < n to 0 <= x < n; reports any other index and maps it to 0. Requires n > 0.
ALT_FN int64_t wrap_index(int64_t x, int64_t n, int64_t* error, int64_t code = 1) {
  const int64_t i = x < 0 ? x + n : x;
  if (__builtin_expect(uint64_t(i) >= uint64_t(n), 0)) {
    report(error, code, x, n);
    return 0;
  }
  return i;
}

// The same for indices that must not be negative.
ALT_FN int64_t index_from_zero(int64_t x, int64_t n, int64_t* error, int64_t code = 1) {
  if (__builtin_expect(uint64_t(x) >= uint64_t(n), 0)) {
    report(error, code, x, n);
    return 0;
  }
  return x;
}

// The same without a report, in loops that vectors run; `check_range` reports their least and largest positions.
ALT_FN int64_t clamp_index(int64_t x, int64_t n) {
  const int64_t i = x < 0 ? x + n : x;
  return uint64_t(i) < uint64_t(n) ? i : 0;
}
ALT_FN int64_t clamp_index_from_zero(int64_t x, int64_t n) { return uint64_t(x) < uint64_t(n) ? x : 0; }

// Reports positions that are not in [first, n). A loop without iterations leaves least > most.
ALT_FN int64_t check_range(int64_t least, int64_t most, int64_t first, int64_t n, int64_t* error, int64_t code) {
  if (__builtin_expect(least <= most && (least < first || most >= n), 0)) {
    report(error, code, least < first ? least : most, n);
  }
  return 0;
}

// An integer divisor; zero is reported and replaced by 1.
template <class T> ALT_FN T nonzero(T x, int64_t* error) {
  if (__builtin_expect(x == T(0), 0)) {
    report(error, 2, 0, 0);
    return T(1);
  }
  return x;
}

}  // namespace alt
