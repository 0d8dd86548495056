// A CUDA driver without a GPU, for tests: code is only looked at, and launches go to a function of the test.
#include <cstddef>
#include <cstdlib>
#include <cstring>

using Launched = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void*);

static int capability = 90, functions = 0, ptx_loads = 0, cubin_loads = 0;
static Launched launched = nullptr;

extern "C" {

void fake_set(int c, Launched f) {
  capability = c, launched = f;
  functions = ptx_loads = cubin_loads = 0;
}
int fake_ptx_loads() { return ptx_loads; }
int fake_cubin_loads() { return cubin_loads; }

int cuInit(unsigned) { return 0; }
int cuCtxGetCurrent(void** context) { return *context = &capability, 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuCtxSynchronize() { return 0; }
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = &capability, 0; }
int cuDeviceGetAttribute(int* value, int which, int) { return *value = which == 75 ? capability / 10 : capability % 10, 0; }
int cuDeviceGetName(char* name, int size, int) { return strncpy(name, "Test GPU", size_t(size)), 0; }
int cuModuleLoadData(void** module, const void* code) {
  const bool is_cubin = !memcmp(code, "\x7f" "ELF", 4);
  if (!is_cubin && !strstr(static_cast<const char*>(code), ".visible .entry")) return 200;
  ++(is_cubin ? cubin_loads : ptx_loads);
  return *module = const_cast<void*>(code), 0;
}
int cuModuleUnload(void*) { return 0; }
int cuModuleGetFunction(void** function, void*, const char* name) {
  if (!*name) return 500;
  return *function = reinterpret_cast<void*>(size_t(++functions)), 0;
}
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void* stream, void** arguments, void* extra) {
  return launched(function, gx, gy, gz, bx, by, bz, shared, stream, arguments, extra);
}
int cuMemHostAlloc(void** memory, size_t bytes, unsigned) { return *memory = malloc(bytes), 0; }
int cuMemFreeHost(void* memory) { return free(memory), 0; }
int cuGetErrorString(int, const char** text) { return *text = "an error of the test's driver", 0; }
}
