// Functions of index expressions, which kernels and host programs compute alike.
#pragma once
#include "bits.h"

namespace alt {

ALT_FN int64_t floor_div(int64_t a, int64_t b) { return a / b - ((a % b != 0) & ((a < 0) != (b < 0))); }
ALT_FN int64_t floor_mod(int64_t a, int64_t b) { return a - floor_div(a, b) * b; }
ALT_FN int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
ALT_FN int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace alt
