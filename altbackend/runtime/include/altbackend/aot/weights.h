// The weights of a model: where their memory comes from, and what is computed from them alone.
#pragma once
#include "model.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

namespace alt::aot {

constexpr int64_t kWeightsAlign = 1 << 16;  // bytes: the largest page of a supported system
constexpr int64_t kHeader = 64;  // bytes before the weights in a file: "ALTW0001" and the digest of the weights

// A private mapping of the weights at the end of a file: pages are read when they are used, and writes stay in this
// process. `after_code`: the file is the library, and the weights lie after its code.
class Mapping {
 public:
  Mapping(const std::string& path, int64_t bytes, const char* digest, bool after_code) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) fail("the weights of the library are missing: cannot open %s; %s", path.c_str(), after_code ? "keep the library there" : "keep that file beside the library");
    struct stat facts;
    const bool readable = fstat(file, &facts) == 0;
    const int64_t first = readable ? facts.st_size - bytes - kHeader : -1;
    const bool right_size = after_code ? first > 0 && first % kWeightsAlign == 0 : first == 0;
    if (right_size) data_ = mmap(nullptr, size_t(bytes + kHeader), PROT_READ | PROT_WRITE, MAP_PRIVATE, file, off_t(first));
    close(file);
    if (!right_size || data_ == MAP_FAILED) fail("%s does not hold the %" PRId64 " bytes of weights of the library", path.c_str(), bytes);
    bytes_ = bytes + kHeader;
    const char* head = static_cast<const char*>(data_);
    if (std::memcmp(head, "ALTW0001", 8) != 0 || std::strncmp(head + 8, digest, 40) != 0) {
      munmap(data_, size_t(bytes_));
      fail("%s holds the weights of another library", path.c_str());
    }
  }
  ~Mapping() { munmap(data_, size_t(bytes_)); }
  Mapping(const Mapping&) = delete;
  unsigned char* weights() const { return static_cast<unsigned char*>(data_) + kHeader; }

 private:
  void* data_ = MAP_FAILED;
  int64_t bytes_ = 0;
};

// One set of weights. Running calls hold it, so that an update or a swap never changes what they read.
struct Weights {
  std::vector<std::shared_ptr<Tensor>> tensors;  // null: not bound yet
  std::vector<std::shared_ptr<void>> memory;     // that the tensors do not own
  std::vector<Tensor> folded;
  std::mutex folding;
  std::atomic<bool> is_folded{false};
  int device = 0;

  explicit Weights(int on_device) : device(on_device) {}
  Weights(const Weights& other) : tensors(other.tensors), memory(other.memory), device(other.device) {}
  ~Weights() {
    if (model.gpu) Driver::get().cuCtxSynchronize();  // kernels of a finished call may still read it
  }

  Handle at(int number) const {
    if (!tensors[size_t(number)])
      fail("weight %s has no value: bind the weights first (update_constant_buffer, or altbackend.aot_load(path, weights=...))", model.constants[number].name);
    return tensors[size_t(number)]->get();
  }

  std::vector<Handle> handles(const ProgramTable& program, const Source* sources, const Handle* inputs) const {
    std::vector<Handle> result(size_t(program.inputs), nullptr);
    for (int k = 0; k < program.inputs; ++k) {
      const Source& s = sources[k];
      result[size_t(k)] = s.from == From::constant ? at(s.number) : s.from == From::input ? inputs[s.number] : folded[size_t(s.number)].get();
    }
    return result;
  }

  // Computes everything that depends on weights alone, once.
  void fold(Pool& pool, const Place& at) {
    if (is_folded.load(std::memory_order_acquire)) return;
    std::lock_guard<std::mutex> guard(folding);
    if (is_folded.load(std::memory_order_relaxed)) return;
    if (model.fold) folded = run(*model.fold, pool, handles(*model.fold, model.fold_sources, nullptr), at);
    if (model.gpu) Driver::get().check(Driver::get().cuCtxSynchronize(), "folding weights");  // other streams read them
    is_folded.store(true, std::memory_order_release);
  }

  bool is_bound() const {
    for (const auto& t : tensors)
      if (!t) return false;
    return true;
  }
};

inline std::string library_path() {
  Dl_info info;
  if (!dladdr(reinterpret_cast<const void*>(&model), &info) || !info.dli_fname) fail("the path of the library cannot be found");
  return info.dli_fname;
}

inline std::string library_folder() {
  const std::string path = library_path();
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

inline std::shared_ptr<Tensor> constant_over(const Constant& c, unsigned char* weights, int device) {
  Tensor t = over(weights + c.offset, c.dtype, c.rank, c.sizes, c.strides);
  if (c.on_gpu) {
    Tensor there = empty_on_gpu(device, c.dtype, c.rank, c.sizes, c.strides);
    copy_into(there.get(), t.get());
    return std::make_shared<Tensor>(std::move(there));
  }
  return std::make_shared<Tensor>(c.written ? clone(t.get()) : std::move(t));
}

// The weights as they were compiled; with external weights, only the literals have values.
inline std::shared_ptr<Weights> initial_weights(int device) {
  auto w = std::make_shared<Weights>(device);
  const int total = model.constant_count + model.literal_count;
  w->tensors.resize(size_t(total));
  auto* embedded = const_cast<unsigned char*>(model.embedded);
  std::shared_ptr<Mapping> mapping;
  const bool appended = model.storage == Storage::appended;
  if ((appended || model.storage == Storage::file) && model.constant_count) {
    const std::string path = appended ? library_path() : library_folder() + "/" + model.weights_file;
    mapping = std::make_shared<Mapping>(path, model.weights_bytes, model.weights_digest, appended);
    w->memory.push_back(mapping);
  }
  for (int k = 0; k < total; ++k) {
    const bool literal = k >= model.constant_count;
    if (literal || model.storage == Storage::embedded)
      w->tensors[size_t(k)] = constant_over(model.constants[k], embedded, device);
    else if (mapping)
      w->tensors[size_t(k)] = constant_over(model.constants[k], mapping->weights(), device);
  }
  return w;
}

// Checks a new value of a weight against the one that the library was compiled for.
inline void check_weight(const Constant& c, Handle t, bool shared) {
  bool defined = false;
  if (t) check(aoti_torch_is_defined(t, &defined), "is_defined");
  if (!defined) fail("the new value of weight %s is no tensor", c.name);
  int32_t device = 0;
  check(aoti_torch_get_device_type(t, &device), "device");
  if (!c.on_gpu && device != aoti_torch_device_type_cpu()) fail("the new value of weight %s is on another device than the CPU", c.name);
  if (c.on_gpu && shared && device != gpu_type()) fail("the new value of weight %s is not on the GPU: move it there, or copy it instead", c.name);
  if (dtype_of(t) != code(c.dtype))
    fail("the new value of weight %s is %s; the library was compiled for %s", c.name, dtype_name(dtype_of(t)), row(c.dtype).name);
  const int64_t rank = dim_of(t);
  bool same = rank == c.rank;
  for (int64_t k = 0; same && k < rank; ++k) same = sizes_of(t)[k] == c.sizes[k];
  if (!same)
    fail("the new value of weight %s has size %s; the library was compiled for %s", c.name, text(sizes_of(t), rank).c_str(), text(c.sizes, c.rank).c_str());
}

// Replaces one weight. `shared`: use the caller's memory, which then must have the compiled strides; else copy.
inline void bind(Weights& w, int number, Handle t, bool shared) {
  const Constant& c = model.constants[number];
  check_weight(c, t, shared);
  if (shared) {
    if (!same_strides(c.sizes, strides_of(t), c.strides, c.rank))
      fail("weight %s has strides %s; memory that is shared must have %s: copy it instead", c.name, text(strides_of(t), c.rank).c_str(), text(c.strides, c.rank).c_str());
    w.tensors[size_t(number)] = std::make_shared<Tensor>(share(t));
    return;
  }
  auto copy = std::make_shared<Tensor>(
      c.on_gpu ? empty_on_gpu(w.device, c.dtype, c.rank, c.sizes, c.strides) : empty(c.dtype, c.rank, c.sizes, c.strides));
  copy_into(copy->get(), t);
  w.tensors[size_t(number)] = std::move(copy);
}

}  // namespace alt::aot
