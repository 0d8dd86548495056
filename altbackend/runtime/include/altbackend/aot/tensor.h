// Tensor handles, errors and library calls of torch's stable C ABI, for generated host programs.
#pragma once
#include "torch_abi.h"

#include "../index.h"
#include "huge_pages.h"

#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

// Since torch 2.13; null in an older one.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace alt::aot {

// An error of one call; the exported functions catch it and keep its text for the caller.
struct Error {
  enum Kind { runtime, index };  // as Python raises it
  std::string text;
  Kind kind = runtime;
  bool earlier = false;  // of an earlier call, so that repeating this one does not give it
};

[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);

// Throws the error of a call of torch, with the name of the operator or function.
[[noreturn]] void fail_call(const char* name);
inline void check(int32_t status, const char* name) {
  if (__builtin_expect(status != 0, 0)) fail_call(name);
}

using Handle = AtenTensorHandle;
using Ints = std::initializer_list<int64_t>;

// One owned handle, or none.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(Handle h) : handle_(h) {}
  Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Tensor& operator=(Tensor&& other) noexcept {
    if (this != &other) {
      reset();
      handle_ = std::exchange(other.handle_, nullptr);
    }
    return *this;
  }
  ~Tensor() { reset(); }
  void reset() {
    if (handle_) aoti_torch_delete_tensor_object(std::exchange(handle_, nullptr));
  }
  Handle get() const { return handle_; }
  Handle release() { return std::exchange(handle_, nullptr); }
  Handle* out() {
    reset();
    return &handle_;
  }

 private:
  Handle handle_ = nullptr;
};

// A handle that somebody else owns.
class Borrowed {
 public:
  explicit Borrowed(Handle h) : handle_(h) {}
  Handle get() const { return handle_; }

 private:
  Handle handle_;
};

enum class Dtype : uint8_t {
  float32, float64, float16, bfloat16, int64, int32, int16, int8, uint8, uint16, uint32, uint64, bool_,
  complex32, complex64, complex128, float8_e4m3fn, float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz,
};

struct DtypeRow {
  const char* name;
  int32_t (*code)();
  int bytes;
};

inline const DtypeRow& row(Dtype t) {
  static const DtypeRow rows[] = {
      {"float32", aoti_torch_dtype_float32, 4},       {"float64", aoti_torch_dtype_float64, 8},
      {"float16", aoti_torch_dtype_float16, 2},       {"bfloat16", aoti_torch_dtype_bfloat16, 2},
      {"int64", aoti_torch_dtype_int64, 8},           {"int32", aoti_torch_dtype_int32, 4},
      {"int16", aoti_torch_dtype_int16, 2},           {"int8", aoti_torch_dtype_int8, 1},
      {"uint8", aoti_torch_dtype_uint8, 1},           {"uint16", aoti_torch_dtype_uint16, 2},
      {"uint32", aoti_torch_dtype_uint32, 4},         {"uint64", aoti_torch_dtype_uint64, 8},
      {"bool", aoti_torch_dtype_bool, 1},             {"complex32", aoti_torch_dtype_complex32, 4},
      {"complex64", aoti_torch_dtype_complex64, 8},   {"complex128", aoti_torch_dtype_complex128, 16},
      {"float8_e4m3fn", aoti_torch_dtype_float8_e4m3fn, 1}, {"float8_e5m2", aoti_torch_dtype_float8_e5m2, 1},
      {"float8_e4m3fnuz", aoti_torch_dtype_float8_e4m3fnuz, 1}, {"float8_e5m2fnuz", aoti_torch_dtype_float8_e5m2fnuz, 1},
  };
  return rows[int(t)];
}

inline int32_t code(Dtype t) { return row(t).code(); }

// The name of a code of torch, for messages.
const char* dtype_name(int32_t number);

// --- facts of a tensor -------------------------------------------------------------------------------------------

inline void* data_of(Handle t) {
  void* data = nullptr;
  check(aoti_torch_get_data_ptr(t, &data), "data_ptr");
  return data;
}
inline int64_t dim_of(Handle t) {
  int64_t n = 0;
  check(aoti_torch_get_dim(t, &n), "dim");
  return n;
}
inline const int64_t* sizes_of(Handle t) {
  int64_t* sizes = nullptr;
  check(aoti_torch_get_sizes(t, &sizes), "sizes");
  return sizes;
}
inline const int64_t* strides_of(Handle t) {
  int64_t* strides = nullptr;
  check(aoti_torch_get_strides(t, &strides), "strides");
  return strides;
}
inline int64_t size_of(Handle t, int64_t d) { return sizes_of(t)[d < 0 ? d + dim_of(t) : d]; }
inline int64_t stride_of(Handle t, int64_t d) { return strides_of(t)[d < 0 ? d + dim_of(t) : d]; }
inline int64_t storage_offset_of(Handle t) {
  int64_t n = 0;
  check(aoti_torch_get_storage_offset(t, &n), "storage_offset");
  return n;
}
inline int64_t numel_of(Handle t) {
  int64_t n = 0;
  check(aoti_torch_get_numel(t, &n), "numel");
  return n;
}
inline int32_t dtype_of(Handle t) {
  int32_t n = 0;
  check(aoti_torch_get_dtype(t, &n), "dtype");
  return n;
}

std::string text(const int64_t* values, int64_t count);

// Whether strides are equal in all dimensions that have several elements.
inline bool same_strides(const int64_t* sizes, const int64_t* a, const int64_t* b, int64_t rank) {
  for (int64_t k = 0; k < rank; ++k)
    if (sizes[k] == 0) return true;
  for (int64_t k = 0; k < rank; ++k)
    if (sizes[k] > 1 && a[k] != b[k]) return false;
  return true;
}

// --- new tensors -------------------------------------------------------------------------------------------------

inline Tensor empty(Dtype t, int64_t rank, const int64_t* sizes, const int64_t* strides) {
  Tensor result;
  check(aoti_torch_empty_strided(rank, sizes, strides, code(t), aoti_torch_device_type_cpu(), 0, result.out()), "empty_strided");
  return result;
}
inline Tensor empty(Dtype t, Ints sizes, Ints strides) {
  return empty(t, int64_t(sizes.size()), sizes.begin(), strides.begin());
}

// A tensor that may be large: huge pages then take fewer faults.
Tensor empty_large(Dtype t, Ints sizes, Ints strides);

// Another handle of the same tensor.
inline Tensor share(Handle t) {
  Tensor result;
  check(aoti_torch_new_tensor_handle(t, result.out()), "new_tensor_handle");
  return result;
}

// A view; the offset counts from the first element of `t`.
inline Tensor view(Handle t, Ints sizes, Ints strides, int64_t offset) {
  Tensor result;
  check(aoti_torch__reinterpret_tensor(t, int64_t(sizes.size()), sizes.begin(), strides.begin(), offset, result.out()), "view");
  return result;
}

// A tensor over memory that it does not own.
inline Tensor over(void* data, Dtype t, int64_t rank, const int64_t* sizes, const int64_t* strides) {
  Tensor result;
  check(aoti_torch_create_tensor_from_blob(data, rank, sizes, strides, 0, code(t), aoti_torch_device_type_cpu(), 0, result.out()), "from_blob");
  return result;
}

inline Tensor clone(Handle t) {
  Tensor result;
  check(aoti_torch_clone_preserve_strides(t, result.out()), "clone");
  return result;
}

inline void copy_into(Handle target, Handle source) { check(aoti_torch_copy_(target, source, 0), "copy_"); }

// A copy with the given strides, on the same device.
Tensor strided_copy(Handle t, int64_t rank, const int64_t* strides);
inline Tensor strided_copy(Handle t, Ints strides) { return strided_copy(t, dim_of(t), strides.begin()); }

// torch.as_strided; the offset counts from the first element of `t`, and the window must lie within its elements.
Tensor as_strided(Handle t, Ints sizes, Ints strides, int64_t offset);

// The result of a library call with the sizes that its fake kernel gave, and the strides that kernels were made for.
Tensor with_strides(Tensor t, const char* name, Ints sizes, Ints strides);

// The same for an operator that is not torch's own: its dtype is checked, too, and other strides are an error.
Tensor promised(Tensor t, const char* name, Dtype dtype, Ints sizes, Ints strides);

// The number in a tensor of one element.
template <class T> T item(Handle t, int32_t (*read)(Handle, T*)) {
  T value{};
  check(read(t, &value), "item");
  return value;
}

inline Tensor scalar(int64_t x) {
  Tensor result;
  check(aoti_torch_scalar_to_tensor_int64(x, result.out()), "scalar_to_tensor");
  return result;
}
inline Tensor scalar(double x) {
  Tensor result;
  check(aoti_torch_scalar_to_tensor_float64(x, result.out()), "scalar_to_tensor");
  return result;
}
inline Tensor scalar(bool x) {
  Tensor result;
  check(aoti_torch_scalar_to_tensor_bool(x, result.out()), "scalar_to_tensor");
  return result;
}

inline int threads() {
  uint32_t n = 1;
  check(torch_get_num_threads(&n), "get_num_threads");
  return int(n);
}

// Throws the error that a kernel has noted: {code, index, size}; `lines` are the user's lines.
void check_kernel(int64_t* error, const char* lines);

}  // namespace alt::aot
