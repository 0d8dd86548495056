// Everything that a generated CPU kernel needs, without large headers: a kernel of five operations compiles in under
// half a second. Every function is branch-free scalar code (unless it says "scalar"), so that a loop under
// `#pragma omp simd` vectorises.
// Compile with -fno-math-errno -fno-trapping-math and without -ffast-math: NaN, infinities and signed zero count.
#pragma once
#include "atomic.h"
#include "random.h"
#include "reduce.h"
#include "special.h"
#include "types.h"
