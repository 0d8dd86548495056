// Kernels on a GPU through the CUDA driver, whose few functions are declared here, and functions of torch for GPUs.
#pragma once
#include <dlfcn.h>

#include "workspace.h"

#ifndef ALT_GPU  // tests run programs for a GPU on the CPU
#define ALT_GPU cuda
#endif
#define ALT_JOINED(a, b) a##b
#define ALT_JOIN(a, b) ALT_JOINED(a, b)
#define ALT_TEXT_OF(x) #x
#define ALT_TEXT(x) ALT_TEXT_OF(x)

namespace alt::aot {

constexpr uintptr_t kGpuAlignment = 16;  // bytes, which kernels assume of all pointers that no call writes

// A loaded kernel: the driver's function, its threads per program, and its shared memory in bytes.
struct Kernel {
  void* function;
  int64_t threads, shared;
};

// cuLaunchKernel.
using Launch = int (*)(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared, void* stream, void** arguments, void** extra);

// The kernels of one program on one device. `flag`: a number in host memory that kernels set for a wrong index.
struct Gpu {
  Launch launch = nullptr;
  std::vector<Kernel> kernels;
  int32_t* flag = nullptr;
};

inline int32_t gpu_type() { return ALT_JOIN(aoti_torch_device_type_, ALT_GPU)(); }

// A function of torch's library for GPUs, which a program that uses a GPU has loaded.
template <class F> F gpu_function(const char* name) {
  static void* const library = dlopen("libtorch_" ALT_TEXT(ALT_GPU) ".so", RTLD_LAZY | RTLD_NOLOAD);
  if (!library) fail("torch's library for GPUs is not loaded: this torch has none");
  void* const f = dlsym(library, name);
  if (!f) fail("this torch has no %s, which the program calls", name);
  return reinterpret_cast<F>(f);
}

inline Tensor empty_on_gpu(int device, Dtype t, int64_t rank, const int64_t* sizes, const int64_t* strides) {
  Tensor result;
  check(aoti_torch_empty_strided(rank, sizes, strides, code(t), gpu_type(), device, result.out()), "empty_strided");
  return result;
}
inline Tensor empty_on_gpu(int device, Dtype t, Ints sizes, Ints strides) {
  return empty_on_gpu(device, t, int64_t(sizes.size()), sizes.begin(), strides.begin());
}

inline void zero(Handle t) { check(aoti_torch_zero_(t), "zero_"); }

inline bool is_aligned(Handle t) { return reinterpret_cast<uintptr_t>(data_of(t)) % kGpuAlignment == 0; }

// Nothing, or a copy of a tensor whose address kernels would not expect.
inline Tensor aligned(Handle t) {
  if (is_aligned(t)) return Tensor();
  return strided_copy(t, dim_of(t), strides_of(t));
}

// A tensor of the CPU, often a single number, on the GPU.
inline Tensor brought(int device, Handle t, Dtype dtype, Ints sizes, Ints strides) {
  Tensor there = empty_on_gpu(device, dtype, sizes, strides);
  check(aoti_torch_copy_(there.get(), t, 1), "copy_");
  return there;
}

// The result of a library call for kernels of a GPU: see `with_strides`; it begins at an aligned address.
inline Tensor with_alignment(Tensor t, const char* name, Ints sizes, Ints strides) {
  t = with_strides(std::move(t), name, sizes, strides);
  return is_aligned(t.get()) ? std::move(t) : strided_copy(t.get(), strides);
}

// `arguments`: addresses of pointers and sizes, and at last of two null pointers, Triton's scratch memory.
inline void launch(const Frame& frame, int number, int64_t programs, std::initializer_list<void*> arguments) {
  if (programs == 0) return;
  const Kernel& k = frame.gpu->kernels[size_t(number)];
  const int status = frame.gpu->launch(k.function, unsigned(programs), 1, 1, unsigned(k.threads), 1, 1, unsigned(k.shared),
                                       frame.stream, const_cast<void**>(arguments.begin()), nullptr);
  if (status) fail("CUDA error %d in launching kernel %d", status, number);
}

// Throws the error that a kernel of an earlier call has noted; waiting for this call's would stop the GPU.
inline void check_flag(const Gpu& gpu, const char* lines) {
  volatile int32_t* const flag = gpu.flag;
  if (!*flag) return;
  *flag = 0;
  throw Error{std::string("an earlier call met an index out of range in ") + lines, Error::index, true};
}

}  // namespace alt::aot
