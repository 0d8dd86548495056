// Opens a library through include/altbackend.h and runs it: plain_server model.so ROWS COLUMNS
#include <altbackend.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

// Looks a function of the library up, with the type that altbackend.h declares.
template <class F> F* function(void* library, const char* name) {
  auto* found = reinterpret_cast<F*>(dlsym(library, name));
  if (!found) {
    std::fprintf(stderr, "the library has no %s: it was not made by altbackend\n", name);
    std::exit(1);
  }
  return found;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: plain_server LIBRARY ROWS COLUMNS\n");
    return 2;
  }
  void* library = dlopen(argv[1], RTLD_NOW);
  if (!library) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  const auto create = function<decltype(altbackend_create)>(library, "altbackend_create");
  const auto run = function<decltype(altbackend_run)>(library, "altbackend_run");
  const auto release = function<decltype(altbackend_release)>(library, "altbackend_release");
  const auto destroy = function<decltype(altbackend_destroy)>(library, "altbackend_destroy");
  const auto last_error = function<decltype(altbackend_last_error)>(library, "altbackend_last_error");
  std::printf("%s\n", function<decltype(altbackend_describe)>(library, "altbackend_describe")());

  altbackend_model* model = nullptr;
  if (create("cpu", &model)) {
    std::fprintf(stderr, "%s\n", last_error());
    return 1;
  }
  const int64_t sizes[] = {std::atol(argv[2]), std::atol(argv[3])};
  std::vector<float> values(size_t(sizes[0] * sizes[1]), 1.0f);
  const altbackend_tensor input{values.data(), ALTBACKEND_FLOAT32, 2, sizes, nullptr, nullptr};
  altbackend_tensor output{};
  const int failed = run(model, &input, 1, &output, 1);
  if (failed) {
    std::fprintf(stderr, "%s\n", last_error());
  } else {
    int64_t count = 1;
    for (int d = 0; d < output.rank; ++d) count *= output.sizes[d];
    double sum = 0;
    for (int64_t k = 0; k < count; ++k) sum += static_cast<const float*>(output.data)[k];
    std::printf("%d dimensions, %lld elements, sum %.6f\n", int(output.rank), static_cast<long long>(count), sum);
    release(&output);
  }
  destroy(model);
  return failed;
}
