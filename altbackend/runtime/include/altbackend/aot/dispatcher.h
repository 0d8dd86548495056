// Calls of any operator by name: values on the stack of torch's dispatcher (torch_call_dispatcher).
#pragma once
#include "tensor.h"

#include <cstring>

namespace alt::aot {

template <class T> StableIValue plain(T x) {
  static_assert(sizeof(T) <= sizeof(StableIValue));
  StableIValue v = 0;
  std::memcpy(&v, &x, sizeof x);
  return v;
}
inline StableIValue on_stack(int64_t x) { return plain(x); }
inline StableIValue on_stack(double x) { return plain(x); }
inline StableIValue on_stack(bool x) { return plain(x); }
// The dispatcher takes over the handle, so it is given one of its own.
inline StableIValue on_stack(Handle t) { return plain(share(t).release()); }
inline StableIValue code_on_stack(int32_t x) { return plain(x); }
inline StableIValue nothing() { return 0; }
inline StableIValue some(StableIValue x) { return plain(new StableIValue(x)); }
inline StableIValue device_on_stack(int32_t type, int32_t index) {
  return (uint64_t(uint32_t(type)) << 32) | uint32_t(index);
}
inline StableIValue on_stack(const char* s) {
  StringHandle h;
  check(torch_new_string_handle(s, std::strlen(s), &h), "new_string_handle");
  return plain(h);
}
StableIValue list(std::initializer_list<StableIValue> items);

template <class T> T from_stack(StableIValue v) {
  T x;
  std::memcpy(&x, &v, sizeof x);
  return x;
}
inline Tensor tensor_from(StableIValue v) { return Tensor(from_stack<Handle>(v)); }
inline Tensor optional_tensor_from(StableIValue v) {
  if (v == 0) return Tensor();
  auto* p = from_stack<StableIValue*>(v);
  Tensor t = tensor_from(*p);
  delete p;
  return t;
}
std::vector<Tensor> tensors_from(StableIValue v);

// Calls the operator; the results replace the arguments on the stack.
inline void call(const char* name, const char* overload, StableIValue* stack) {
  check(torch_call_dispatcher(name, overload, stack, TORCH_TARGET_VERSION), name);
}

// The bytes from the first element of `t` on as a tensor of another dtype; `offset` counts its elements.
Tensor retyped(Handle t, Dtype dtype, Ints sizes, Ints strides, int64_t offset);

}  // namespace alt::aot
