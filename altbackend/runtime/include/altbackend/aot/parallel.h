// Kernels of a library run on torch's own threads.
#pragma once
#include "../kernel.h"

extern "C" int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*f)(int64_t, int64_t, void*), void* context);

namespace alt {

// Calls f(t) for t in [0, threads), each once. The number of parts does not depend on how many threads run them.
template <class F> ALT_FN void on_threads(int threads, const F& f) {
  if (threads <= 1) return f(0);
  const auto part = [](int64_t begin, int64_t end, void* context) {
    for (int64_t t = begin; t < end; ++t) (*static_cast<const F*>(context))(int(t));
  };
  torch_parallel_for(0, threads, 1, part, const_cast<F*>(&f));
}

}  // namespace alt
