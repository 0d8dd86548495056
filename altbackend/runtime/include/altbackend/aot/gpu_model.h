// Machine code for GPUs inside a library: which of it fits a GPU, and its loading by the CUDA driver.
#pragma once
#include "cuda.h"

#include <cstring>

namespace alt::aot {

// The machine code of a kernel for one architecture: its place in the embedded block, and its shared memory in bytes.
struct Image {
  int64_t offset, shared;
};

// A kernel: the name of its function, its threads per program, and an image for each architecture of the library.
struct KernelImages {
  const char* name;
  int threads;
  const Image* images;
};

struct GpuProgram {
  const KernelImages* kernels;
  int kernel_count;
};

// An architecture by its compute capability, 90 for 9.0. `ptx`: text that the driver compiles for newer GPUs, too.
struct Architecture {
  int capability;
  bool ptx;
};

struct GpuModel {
  const Architecture* architectures;
  int architecture_count;
  const char* shown;  // the architectures in words
  GpuProgram main, fold;
};

// Functions of the CUDA driver; CUresult and handles are plain integers and pointers.
struct Driver {
  int (*cuInit)(unsigned);
  int (*cuCtxGetCurrent)(void**);
  int (*cuCtxSetCurrent)(void*);
  int (*cuCtxSynchronize)();
  int (*cuDevicePrimaryCtxRetain)(void**, int);
  int (*cuDeviceGetAttribute)(int*, int, int);
  int (*cuDeviceGetName)(char*, int, int);
  int (*cuModuleLoadData)(void**, const void*);
  int (*cuModuleUnload)(void*);
  int (*cuModuleGetFunction)(void**, void*, const char*);
  int (*cuFuncSetAttribute)(void*, int, int);
  Launch cuLaunchKernel;
  int (*cuMemHostAlloc)(void**, size_t, unsigned);
  int (*cuMemFreeHost)(void*);
  int (*cuGetErrorString)(int, const char**);

  Driver() {
    void* const library = dlopen("libcuda.so.1", RTLD_LAZY);
    if (!library) fail("the library was compiled for a GPU, and this machine has no CUDA driver (libcuda.so.1)");
    const auto find = [&](auto& f, const char* name) {
      f = reinterpret_cast<std::decay_t<decltype(f)>>(dlsym(library, name));
      if (!f) fail("the CUDA driver has no %s: install a newer one", name);
    };
#define ALT_FIND(name) find(name, #name)
    ALT_FIND(cuInit), ALT_FIND(cuCtxGetCurrent), ALT_FIND(cuCtxSetCurrent), ALT_FIND(cuCtxSynchronize);
    ALT_FIND(cuDevicePrimaryCtxRetain), ALT_FIND(cuDeviceGetAttribute), ALT_FIND(cuDeviceGetName);
    ALT_FIND(cuModuleLoadData), ALT_FIND(cuModuleUnload), ALT_FIND(cuModuleGetFunction), ALT_FIND(cuFuncSetAttribute);
    ALT_FIND(cuLaunchKernel), ALT_FIND(cuMemHostAlloc), ALT_FIND(cuMemFreeHost), ALT_FIND(cuGetErrorString);
#undef ALT_FIND
    check(cuInit(0), "starting the driver");
  }

  static const Driver& get() {
    static const Driver driver;
    return driver;
  }

  void check(int status, const char* what) const {
    if (status == 0) return;
    const char* text = nullptr;
    cuGetErrorString(status, &text);
    fail("CUDA error %d in %s: %s", status, what, text ? text : "?");
  }

  // Gives this thread a context of the device; unlike torch's calls, the driver's make none.
  void bind_context(int device) const {
    void* context = nullptr;
    check(cuCtxGetCurrent(&context), "reading the context");
    if (context) return;
    check(cuDevicePrimaryCtxRetain(&context, device), "making a context");
    check(cuCtxSetCurrent(context), "binding a context");
  }

  int attribute(int which, int device) const {
    int value = 0;
    check(cuDeviceGetAttribute(&value, which, device), "reading the GPU's architecture");
    return value;
  }
};

// Makes a device and a stream the current ones of torch in this thread while it exists.
class OnGpu {
 public:
  OnGpu(int device, void* stream) {
#ifndef ALT_WITHOUT_STREAMS  // tests run programs for a GPU on the CPU
    using Create = AOTITorchError (*)(void*, int32_t, void**);
    static const auto create = gpu_function<Create>("aoti_torch_create_cuda_stream_guard");
    alt::aot::check(create(stream, device, &guard_), "stream guard");
#endif
    Driver::get().bind_context(device);
  }
  ~OnGpu() {
#ifndef ALT_WITHOUT_STREAMS
    static const auto end = gpu_function<AOTITorchError (*)(void*)>("aoti_torch_delete_cuda_stream_guard");
    end(guard_);
#endif
  }
  OnGpu(const OnGpu&) = delete;

 private:
  void* guard_ = nullptr;
};

inline void* current_stream(int device) {
  void* stream = nullptr;
#ifndef ALT_WITHOUT_STREAMS
  using Current = AOTITorchError (*)(int32_t, void**);
  static const auto current = gpu_function<Current>("aoti_torch_get_current_cuda_stream");
  check(current(device, &stream), "current stream");
#endif
  return stream;
}

inline int current_device() {
  int32_t device = 0;
#ifndef ALT_WITHOUT_STREAMS
  static const auto current = gpu_function<AOTITorchError (*)(int32_t*)>("aoti_torch_get_current_device_index");
  check(current(&device), "current device");
#endif
  return device;
}

// The number of the architecture whose code runs on a GPU; fails with both architectures if none does.
inline int architecture_for(const GpuModel& model, int device) {
  const Driver& driver = Driver::get();
  const int capability = 10 * driver.attribute(75, device) + driver.attribute(76, device);
  int best = -1;
  const auto rank = [&](int k) { return (model.architectures[k].ptx ? 0 : 1000) + model.architectures[k].capability; };
  for (int k = 0; k < model.architecture_count; ++k) {
    const Architecture& a = model.architectures[k];
    // from 9.0 on, Triton compiles for one architecture alone
    const bool fits = a.capability >= 90 ? a.capability == capability
                                         : a.capability <= capability && (a.ptx || a.capability / 10 == capability / 10);
    if (fits && (best < 0 || rank(k) > rank(best))) best = k;
  }
  if (best < 0) {
    char name[256] = "";
    driver.cuDeviceGetName(name, sizeof name, device);
    fail("the library was compiled for GPUs of architecture %s, and GPU %d (%s) is %d.%d: compile it with options={'aot_architectures': '%d.%d'}",
         model.shown, device, name, capability / 10, capability % 10, capability / 10, capability % 10);
  }
  return best;
}

// The kernels of one program, loaded on one device, with the number in host memory that they set for a wrong index.
class LoadedKernels {
 public:
  LoadedKernels(const GpuModel& model, const GpuProgram& program, const unsigned char* block, int device) {
    const Driver& driver = Driver::get();
    const int architecture = architecture_for(model, device);
    gpu_.launch = driver.cuLaunchKernel;
    void* flag = nullptr;
    driver.check(driver.cuMemHostAlloc(&flag, sizeof(int64_t), 1), "allocating memory of the host");
    std::memset(flag, 0, sizeof(int64_t));
    gpu_.flag = static_cast<int32_t*>(flag);
    for (const KernelImages* k = program.kernels; k < program.kernels + program.kernel_count; ++k) {
      const Image& image = k->images[architecture];
      void* function = nullptr;
      modules_.push_back(nullptr);
      driver.check(driver.cuModuleLoadData(&modules_.back(), block + image.offset), k->name);
      driver.check(driver.cuModuleGetFunction(&function, modules_.back(), k->name), k->name);
      if (image.shared > kSharedLimit) driver.check(driver.cuFuncSetAttribute(function, 8, int(image.shared)), k->name);
      gpu_.kernels.push_back({function, k->threads, image.shared});
    }
  }
  ~LoadedKernels() {
    const Driver& driver = Driver::get();
    driver.cuCtxSynchronize();
    for (void* module : modules_)
      if (module) driver.cuModuleUnload(module);
    driver.cuMemFreeHost(gpu_.flag);
  }
  LoadedKernels(const LoadedKernels&) = delete;
  const Gpu& gpu() const { return gpu_; }

 private:
  static constexpr int64_t kSharedLimit = 48 << 10;  // bytes that a kernel may use without setting an attribute
  Gpu gpu_;
  std::vector<void*> modules_;
};

}  // namespace alt::aot
