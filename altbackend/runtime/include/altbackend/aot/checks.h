// Checks of the inputs of a call. Each error names the input, the dimension, the expected and the actual value.
#pragma once
#include "cuda.h"
#include "dispatcher.h"

namespace alt::aot {

struct Input {
  Handle handle;
  int number;
  const char* name;
};

// `gpu`: the number of the GPU on which the input must be, or -1 for the CPU.
void check_input(const Input& x, Dtype dtype, int64_t rank, int gpu = -1);

// A dynamic size in its range.
int64_t size_in_range(const Input& x, int dim, int64_t least, int64_t greatest);

// The symbol in a size `scale * symbol + shift`.
int64_t symbol_in_size(const Input& x, int dim, int64_t scale, int64_t shift, int64_t least, int64_t greatest);

// `meaning`: how the expected sizes follow from those of other inputs, "" for a constant.
void check_geometry(const Input& x, Ints sizes, Ints strides, std::initializer_list<const char*> meaning);

// A size from which another one follows must give one value.
inline void check_condition(bool holds, const char* condition) {
  if (!holds) fail("the sizes of the inputs violate %s, which the program relies on", condition);
}

}  // namespace alt::aot
