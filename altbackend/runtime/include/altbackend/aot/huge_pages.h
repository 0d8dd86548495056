// Advice to Linux: back large new memory with huge pages. `runtime/huge_pages.py` says why, and does it from Python.
#pragma once
#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#endif

namespace alt::aot {

constexpr int64_t kLeastAdvised = int64_t(4) << 20;  // bytes: twice a huge page

#ifdef __linux__

// Whether Linux gives huge pages to advised memory alone; read once.
inline bool on_advice() {
  static const bool on = [] {
    char text[64] = "";
    if (std::FILE* file = std::fopen("/sys/kernel/mm/transparent_hugepage/enabled", "r")) {
      if (!std::fgets(text, sizeof text, file)) text[0] = 0;
      std::fclose(file);
    }
    return std::strstr(text, "[madvise]") != nullptr;
  }();
  return on;
}

// Advises the pages of some memory, if that is large. An error leaves small pages and the same results.
inline void advise_huge_pages(void* data, int64_t bytes) {
  if (bytes < kLeastAdvised || !on_advice()) return;
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE)), begin = uintptr_t(data);
  const uintptr_t first = begin / page * page, end = (begin + uintptr_t(bytes) + page - 1) / page * page;
  (void)madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
}

#else

inline void advise_huge_pages(void*, int64_t) {}

#endif

}  // namespace alt::aot
