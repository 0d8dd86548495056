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

inline void check_device(const Input& x, int gpu) {
  int32_t type = 0, index = 0;
  check(aoti_torch_get_device_type(x.handle, &type), "device");
  check(aoti_torch_get_device_index(x.handle, &index), "device");
  if (gpu < 0 && type != aoti_torch_device_type_cpu())
    fail("input %d (%s) is on another device; the library was compiled for the CPU: move the tensor there", x.number, x.name);
  if (gpu >= 0 && (type != gpu_type() || (index >= 0 && index != gpu)))
    fail("input %d (%s) is not on GPU %d, for which the library was loaded: move the tensor there", x.number, x.name, gpu);
}

// `gpu`: the number of the GPU on which the input must be, or -1 for the CPU.
inline void check_input(const Input& x, Dtype dtype, int64_t rank, int gpu = -1) {
  bool defined = false;
  if (x.handle) check(aoti_torch_is_defined(x.handle, &defined), "is_defined");
  if (!defined) fail("input %d (%s) is no tensor", x.number, x.name);
  int32_t layout = 0;
  check_device(x, gpu);
  check(aoti_torch_get_layout(x.handle, &layout), "layout");
  if (layout != aoti_torch_layout_strided()) fail("input %d (%s) is no strided tensor", x.number, x.name);
  if (dtype_of(x.handle) != code(dtype))
    fail("input %d (%s) is %s; the library was compiled for %s", x.number, x.name, dtype_name(dtype_of(x.handle)), row(dtype).name);
  if (dim_of(x.handle) != rank)
    fail("input %d (%s) has %" PRId64 " dimensions; the library was compiled for %" PRId64, x.number, x.name, dim_of(x.handle), rank);
  if (data_of(x.handle) == nullptr && numel_of(x.handle) > 0) fail("input %d (%s) has no memory: pass x.clone()", x.number, x.name);
  StableIValue stack[] = {on_stack(x.handle)};
  call("aten::is_neg", "", stack);
  if (from_stack<bool>(stack[0])) fail("input %d (%s) has torch's negative bit: pass x.resolve_neg()", x.number, x.name);
}

// A dynamic size in its range.
inline int64_t size_in_range(const Input& x, int dim, int64_t least, int64_t greatest) {
  const int64_t n = sizes_of(x.handle)[dim];
  if (n < least || n > greatest) {
    const std::string end = greatest >= (int64_t(1) << 62) ? "any size" : std::to_string(greatest);
    fail("dimension %d of input %d (%s) is %" PRId64 "; the library was compiled for sizes from %" PRId64 " to %s", dim, x.number, x.name, n, least, end.c_str());
  }
  return n;
}

// The symbol in a size `scale * symbol + shift`.
inline int64_t symbol_in_size(const Input& x, int dim, int64_t scale, int64_t shift, int64_t least, int64_t greatest) {
  const int64_t n = sizes_of(x.handle)[dim];
  if ((n - shift) % scale != 0)
    fail("dimension %d of input %d (%s) is %" PRId64 "; the library was compiled for multiples of %" PRId64 " plus %" PRId64, dim, x.number, x.name, n, scale, shift);
  const int64_t symbol = (n - shift) / scale;
  if (symbol < least || symbol > greatest)
    fail("dimension %d of input %d (%s) is %" PRId64 "; the library was compiled for sizes from %" PRId64 " to %" PRId64, dim, x.number, x.name, n, scale * least + shift, greatest >= (int64_t(1) << 62) ? greatest : scale * greatest + shift);
  return symbol;
}

// `meaning`: how the expected sizes follow from those of other inputs, "" for a constant.
inline void check_geometry(const Input& x, Ints sizes, Ints strides, std::initializer_list<const char*> meaning) {
  const int64_t* actual = sizes_of(x.handle);
  for (size_t d = 0; d < sizes.size(); ++d) {
    const char* why = meaning.begin()[d];
    if (actual[d] != sizes.begin()[d])
      fail("dimension %d of input %d (%s) is %" PRId64 "; the library was compiled for %" PRId64 "%s%s", int(d), x.number, x.name, actual[d], sizes.begin()[d], *why ? " = " : "", why);
  }
  const int64_t rank = int64_t(sizes.size());
  if (!same_strides(actual, strides_of(x.handle), strides.begin(), rank))
    fail("input %d (%s) has strides %s; the library was compiled for %s: pass a tensor of that layout, for example from contiguous()",
         x.number, x.name, text(strides_of(x.handle), rank).c_str(), text(strides.begin(), rank).c_str());
}

// A size from which another one follows must give one value.
inline void check_condition(bool holds, const char* condition) {
  if (!holds) fail("the sizes of the inputs violate %s, which the program relies on", condition);
}

}  // namespace alt::aot
