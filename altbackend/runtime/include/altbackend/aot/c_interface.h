// The C interface of include/altbackend.h.
#pragma once
#include <torch/csrc/stable/c/shim.h>

#include "interface.h"

namespace alt::aot {

static_assert(int(ALTBACKEND_FLOAT8_E5M2FNUZ) == int(Dtype::float8_e5m2fnuz) && int(ALTBACKEND_BOOL) == int(Dtype::bool_));

// A tensor over the memory of the caller.
inline Tensor over(const altbackend_tensor& t) {
  if (t.dtype < 0 || t.dtype > int(Dtype::float8_e5m2fnuz)) fail("%d is no dtype of altbackend.h", int(t.dtype));
  if (t.rank < 0 || t.rank > 64) fail("%d is no number of dimensions", int(t.rank));
  if (t.rank && !t.sizes) fail("a tensor of %d dimensions has no sizes", int(t.rank));
  std::vector<int64_t> strides(size_t(t.rank), 1);
  bool empty = false;
  for (int k = t.rank - 2; k >= 0; --k) strides[size_t(k)] = strides[size_t(k) + 1] * std::max<int64_t>(t.sizes[k + 1], 1);
  for (int k = 0; k < t.rank; ++k) {
    if (t.sizes[k] < 0) fail("size %" PRId64 " of dimension %d is negative", t.sizes[k], k);
    if (t.strides && t.strides[k] < 0) fail("stride %" PRId64 " of dimension %d is negative", t.strides[k], k);
    empty |= t.sizes[k] == 0;
  }
  if (!t.data && !empty) fail("a tensor with elements has no data");
  return over(t.data, Dtype(t.dtype), t.rank, t.sizes, t.strides ? t.strides : strides.data());
}

inline altbackend_tensor described(Tensor t) {
  altbackend_tensor result{};
  if (!t.get()) return result;
  result.rank = int32_t(dim_of(t.get()));
  result.sizes = sizes_of(t.get());
  result.strides = strides_of(t.get());
  result.data = data_of(t.get());
  const int32_t number = dtype_of(t.get());
  for (int k = 0; k <= int(Dtype::float8_e5m2fnuz); ++k)
    if (code(Dtype(k)) == number) result.dtype = k;
  result.owner = t.release();
  return result;
}

}  // namespace alt::aot

extern "C" {

__attribute__((visibility("default"))) const char* ALTBACKEND_NAME(altbackend_describe)(void) { return model.description; }

__attribute__((visibility("default"))) const char* ALTBACKEND_NAME(altbackend_last_error)(void) { return alt::aot::last_error().c_str(); }

__attribute__((visibility("default"))) int32_t ALTBACKEND_NAME(altbackend_create)(const char* device, altbackend_model** result) {
  return guarded([&] {
    given(result) = nullptr;
    *result = reinterpret_cast<altbackend_model*>(new Container(device));
  });
}

__attribute__((visibility("default"))) void ALTBACKEND_NAME(altbackend_destroy)(altbackend_model* m) {
  guarded([&] { delete reinterpret_cast<Container*>(m); });
}

__attribute__((visibility("default"))) int32_t ALTBACKEND_NAME(altbackend_run)(altbackend_model* m, const altbackend_tensor* inputs, size_t input_count, altbackend_tensor* outputs, size_t output_count) {
  return guarded([&] {
    given(m);
    if (input_count && !inputs) alt::aot::fail("the inputs are null");
    if (output_count && !outputs) alt::aot::fail("the outputs are null");
    std::vector<Handle> in, out(output_count, nullptr);
    struct Owned {
      std::vector<Handle>& handles;
      ~Owned() {
        for (Handle h : handles)
          if (h) aoti_torch_delete_tensor_object(h);
      }
    } owned_in{in}, owned_out{out};
    for (size_t k = 0; k < input_count; ++k) in.push_back(alt::aot::over(inputs[k]).release());
    auto& container = *reinterpret_cast<Container*>(m);
    container.run(in.data(), in.size(), out.data(), out.size(), container.current());
    for (size_t k = 0; k < output_count; ++k) outputs[k] = alt::aot::described(alt::aot::Tensor(std::exchange(out[k], nullptr)));
  });
}

__attribute__((visibility("default"))) void ALTBACKEND_NAME(altbackend_release)(altbackend_tensor* t) {
  if (!t || !t->owner) return;
  aoti_torch_delete_tensor_object(static_cast<Handle>(std::exchange(t->owner, nullptr)));
  t->data = nullptr;
}

__attribute__((visibility("default"))) int32_t ALTBACKEND_NAME(altbackend_update)(altbackend_model* m, const char* const* names, const altbackend_tensor* values, size_t count, int32_t inactive, int32_t shared) {
  return guarded([&] {
    given(m);
    if (count && (!names || !values)) alt::aot::fail("the names or the values are null");
    std::vector<alt::aot::Tensor> tensors;
    std::vector<alt::aot::Pair> pairs;
    for (size_t k = 0; k < count; ++k) {
      tensors.push_back(alt::aot::over(values[k]));
      pairs.push_back({names[k] ? names[k] : "", tensors.back().get()});
    }
    reinterpret_cast<Container*>(m)->update(alt::aot::Pairs{pairs.data(), count}, inactive != 0, false, shared != 0);
  });
}

__attribute__((visibility("default"))) int32_t ALTBACKEND_NAME(altbackend_swap)(altbackend_model* m) {
  return guarded([&] { reinterpret_cast<Container*>(&given(m))->swap(); });
}

}  // extern "C"
