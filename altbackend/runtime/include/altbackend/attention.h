// Products of small tiles for attention kernels.
#pragma once
#include "kernel.h"

namespace alt {
namespace attention {

#if defined(__AVX512F__)
constexpr int LANES = 16, BAND = 8;
#elif defined(__AVX__)
constexpr int LANES = 8, BAND = 4;
#else
constexpr int LANES = 4, BAND = 4;
#endif
constexpr int64_t ROWS = 32, COLUMNS = 64;  // of a tile of scores; multiples of BAND and of 2 * LANES

// Loads and stores of vectors in memory of floats, aligned as floats.
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// A product may be rounded once with its sum: unlike in elementwise kernels, no eager kernel rounds it by itself.
#if defined(__clang__)
#define ALT_CONTRACT _Pragma("clang fp contract(fast)")
#define ALT_CONTRACTS
#else
#define ALT_CONTRACT
#define ALT_CONTRACTS __attribute__((optimize("fp-contract=fast")))
#endif

// c[i][j] = sum over d of a[i][d] * b[d][j], or plus that sum if `add`, for i < ROWS. `columns`: a multiple of
// 2 * LANES. Rows of a, b and c are `lda`, `columns` and `columns` floats apart.
template <bool add>
ALT_CONTRACTS __attribute__((noinline)) void product(const float* a, int64_t lda, const float* b, float* c,
                                                     int64_t columns, int64_t depth) {
  ALT_CONTRACT
  for (int64_t i = 0; i < ROWS; i += BAND) {
    for (int64_t j = 0; j < columns; j += 2 * LANES) {
      vec left[BAND], right[BAND];
      float* out = c + i * columns + j;
      for (int k = 0; k < BAND; ++k) {
        left[k] = add ? *(const vec*)(out + k * columns) : vec{};
        right[k] = add ? *(const vec*)(out + k * columns + LANES) : vec{};
      }
      const float* row = a + i * lda;
      const float* down = b + j;
      for (int64_t d = 0; d < depth; ++d, ++row, down += columns) {
        const vec x = *(const vec*)down, y = *(const vec*)(down + LANES);
        for (int k = 0; k < BAND; ++k) {
          left[k] += row[k * lda] * x;
          right[k] += row[k * lda] * y;
        }
      }
      for (int k = 0; k < BAND; ++k) {
        *(vec*)(out + k * columns) = left[k];
        *(vec*)(out + k * columns + LANES) = right[k];
      }
    }
  }
}

#undef ALT_CONTRACT
#undef ALT_CONTRACTS

}  // namespace attention
}  // namespace alt
