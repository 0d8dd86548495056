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
inline StableIValue list(std::initializer_list<StableIValue> items) {
  StableListHandle h;
  check(torch_new_list_reserve_size(items.size(), &h), "new_list");
  for (StableIValue x : items) check(torch_list_push_back(h, x), "list_push_back");
  return plain(h);
}

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
inline std::vector<Tensor> tensors_from(StableIValue v) {
  const auto h = from_stack<StableListHandle>(v);
  size_t n = 0;
  check(torch_list_size(h, &n), "list_size");
  std::vector<Tensor> result;
  for (size_t k = 0; k < n; ++k) {
    StableIValue item = 0;
    check(torch_list_get_item(h, k, &item), "list_get_item");
    result.push_back(tensor_from(item));
  }
  check(torch_delete_list(h), "delete_list");
  return result;
}

// Calls the operator; the results replace the arguments on the stack.
inline void call(const char* name, const char* overload, StableIValue* stack) {
  check(torch_call_dispatcher(name, overload, stack, TORCH_TARGET_VERSION), name);
}

// The bytes from the first element of `t` on as a tensor of another dtype; `offset` counts its elements.
inline Tensor retyped(Handle t, Dtype dtype, Ints sizes, Ints strides, int64_t offset) {
  int64_t storage = 0;
  check(aoti_torch_get_storage_size(t, &storage), "storage_size");
  const int64_t old_bytes = int64_t(aoti_torch_dtype_element_size(dtype_of(t))), bytes = row(dtype).bytes;
  const int64_t available = storage - storage_offset_of(t) * old_bytes;
  const int64_t whole = available / bytes * bytes;
  const Tensor flat = view(t, {whole / old_bytes}, {1}, 0);
  StableIValue stack[] = {on_stack(flat.get()), code_on_stack(code(dtype))};
  call("aten::view", "dtype", stack);
  const Tensor other = tensor_from(stack[0]);
  int64_t last = offset + 1;
  bool none = false;
  for (size_t k = 0; k < sizes.size(); ++k) {
    none |= sizes.begin()[k] == 0;
    last += (sizes.begin()[k] - 1) * strides.begin()[k];
  }
  if (!none && last * bytes > whole) fail("a view as %s reaches beyond the tensor that it reinterprets", row(dtype).name);
  return view(other.get(), sizes, strides, offset);
}

}  // namespace alt::aot
