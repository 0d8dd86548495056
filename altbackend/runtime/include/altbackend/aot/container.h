// The container that loaders hold: two sets of weights, of which calls use the active one, and the pools of memory.
#pragma once
#include "definitions.h"
#include "weights.h"

namespace alt::aot {

class Container {
 public:
  explicit Container(const char* device) : main_pool_(*model.main), fold_pool_(model.fold ? *model.fold : *model.main) {
    choose_device(device ? device : "no device");
    check_cpu();
    on_device(current(), [&](const Place&) { active_ = initial_weights(device_); });
    brings_weights = active_->is_bound();
    if (brings_weights) fold(*active_);
  }

  bool brings_weights = false;  // whether creation took all weights from the library, not from the caller

  // Runs the model. The handles of `inputs` are taken over, whether the call succeeds or not.
  // On a GPU, the call is enqueued on `stream`, null for the default one.
  void run(Handle* inputs, size_t input_count, Handle* outputs, size_t output_count, void* stream) {
    std::vector<Tensor> owned;
    for (size_t k = 0; inputs && k < input_count; ++k) owned.emplace_back(std::exchange(inputs[k], nullptr));
    if (input_count != size_t(model.input_count) || (input_count && !inputs))
      fail("the call has %zu inputs; the library was compiled for %d (tensors only, without numbers and strings)", input_count, model.input_count);
    if (output_count != size_t(model.output_count) || (output_count && !outputs))
      fail("the call takes %zu outputs; the library returns %d", output_count, model.output_count);
    std::vector<Handle> handles;
    for (const Tensor& t : owned) handles.push_back(t.get());
    const auto weights = active();
    std::vector<Tensor> results;
    if (!weights->is_folded.load(std::memory_order_acquire)) fold(*weights);
    on_device(stream, [&](Place at) {
      at.gpu = main_gpu_ ? &main_gpu_->gpu() : nullptr;
      results = alt::aot::run(*model.main, main_pool_, weights->handles(*model.main, model.main_sources, handles.data()), at);
    });
    for (size_t k = 0; k < output_count; ++k) outputs[k] = results[k].release();
  }

  std::shared_ptr<Weights> active() {
    std::lock_guard<std::mutex> guard(mutex_);
    return active_;
  }
  std::shared_ptr<Weights> set(bool inactive) {
    std::lock_guard<std::mutex> guard(mutex_);
    return inactive ? inactive_ : active_;
  }

  // Replaces weights by name, in a copy of the set that then takes its place.
  template <class Pairs> void update(const Pairs& pairs, bool inactive, bool all, bool shared) {
    std::lock_guard<std::mutex> updating(updating_);
    const auto old = set(inactive);
    auto fresh = std::make_shared<Weights>(*(old ? old : active()));
    std::vector<bool> given(size_t(model.constant_count), false);
    for (const auto& [name, handle] : pairs) {
      const int number = find(name_of(name));
      if (number < 0) fail("the library has no weight %s", name_of(name).c_str());
      on_device(current(), [&, h = handle](const Place&) { bind(*fresh, number, h, shared); });
      given[size_t(number)] = true;
    }
    for (size_t k = 0; all && k < given.size(); ++k)
      if (!given[k]) fail("the update must hold all weights, and %s is missing", model.constants[k].name);
    publish(fresh, inactive);
  }

  void update_from_block(const unsigned char* weights) {
    if (!weights) fail("the block of weights is null");
    std::lock_guard<std::mutex> updating(updating_);
    auto copy = std::shared_ptr<void>(std::malloc(size_t(model.weights_bytes) + 1), std::free);
    if (!copy) fail("no memory for %" PRId64 " bytes of weights", model.weights_bytes);
    std::memcpy(copy.get(), weights, size_t(model.weights_bytes));
    auto fresh = std::make_shared<Weights>(*active());
    fresh->memory.push_back(copy);
    on_device(current(), [&](const Place&) {
      for (int k = 0; k < model.constant_count; ++k)
        fresh->tensors[size_t(k)] = constant_over(model.constants[k], static_cast<unsigned char*>(copy.get()), device_);
    });
    publish(fresh, false);
  }

  void fold(bool inactive) {
    const auto w = set(inactive);
    if (!w) fail("there is no inactive set of weights; update it first");
    fold(*w);
  }

  void swap() {
    std::lock_guard<std::mutex> updating(updating_);
    const auto next = set(true);
    if (!next) fail("there is no inactive set of weights to swap in; update it first");
    if (next->is_bound()) fold(*next);  // before calls wait for it
    std::lock_guard<std::mutex> guard(mutex_);
    std::swap(active_, inactive_);
  }

  void free_inactive() {
    std::lock_guard<std::mutex> updating(updating_);
    std::lock_guard<std::mutex> guard(mutex_);
    inactive_.reset();
  }

  static std::string name_of(const std::string& name) { return name; }
  static std::string name_of(const char* name) { return name ? name : ""; }

  static int find(const std::string& name) {
    for (int k = 0; k < model.constant_count; ++k)
      if (name == model.constants[k].name) return k;
    return -1;
  }

  static const Constant& constant(size_t number) {
    if (number >= size_t(model.constant_count)) fail("there is no weight %zu; the library has %d", number, model.constant_count);
    return model.constants[number];
  }

  // The stream on which torch works in this thread; null on the CPU.
  void* current() const { return model.gpu ? current_stream(device_) : nullptr; }

 private:
  void choose_device(const std::string& device) {
    const std::string name = model.gpu ? ALT_TEXT(ALT_GPU) : "cpu", shown = model.gpu ? "a GPU" : "the CPU";
    if (device.rfind(name, 0) != 0) fail("the library was compiled for %s, not for %s", shown.c_str(), device.c_str());
    if (!model.gpu) return;
    const size_t colon = device.find(':');
    device_ = colon == std::string::npos ? current_device() : std::atoi(device.c_str() + colon + 1);
    Driver::get().bind_context(device_);
    main_gpu_ = std::make_unique<LoadedKernels>(*model.gpu, model.gpu->main, model.embedded, device_);
    if (model.fold) fold_gpu_ = std::make_unique<LoadedKernels>(*model.gpu, model.gpu->fold, model.embedded, device_);
  }

  // Calls f with gradients disabled, and on a GPU with the stream as torch's current one.
  template <class F> void on_device(void* stream, F&& f) {
    without_gradients([&] {
      if (!model.gpu) return f(Place{});
      const OnGpu guard(device_, stream);
      f(Place{nullptr, device_, stream});
    });
  }

  void fold(Weights& w) {
    on_device(current(), [&](Place at) {
      at.gpu = fold_gpu_ ? &fold_gpu_->gpu() : nullptr;
      w.fold(fold_pool_, at);
    });
  }

  void publish(const std::shared_ptr<Weights>& fresh, bool inactive) {
    if (model.gpu) Driver::get().check(Driver::get().cuCtxSynchronize(), "copying weights");  // other streams read them
    std::lock_guard<std::mutex> guard(mutex_);
    (inactive ? inactive_ : active_) = fresh;
  }

  template <class F> static void without_gradients(F&& f) {
    struct Restore {
      bool before = aoti_torch_grad_mode_is_enabled();
      Restore() { aoti_torch_grad_mode_set_enabled(false); }
      ~Restore() { aoti_torch_grad_mode_set_enabled(before); }
    } restore;
    f();
  }

  static void check_cpu() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const std::pair<const char*, int> known[] = {
        {"avx2", __builtin_cpu_supports("avx2")},         {"fma", __builtin_cpu_supports("fma")},
        {"f16c", __builtin_cpu_supports("f16c")},         {"bmi2", __builtin_cpu_supports("bmi2")},
        {"avx512f", __builtin_cpu_supports("avx512f")},   {"avx512dq", __builtin_cpu_supports("avx512dq")},
        {"avx512bw", __builtin_cpu_supports("avx512bw")}, {"avx512vl", __builtin_cpu_supports("avx512vl")},
        {"avx512cd", __builtin_cpu_supports("avx512cd")},
    };
    for (const char* const* f = model.features; *f; ++f)
      for (const auto& [name, present] : known)
        if (!std::strcmp(name, *f) && !present)
          fail("the library was compiled for %s and this CPU has no %s: compile it with options={'aot_isa': 'generic'} or for this machine", model.isa, name);
#endif
  }

  Pool main_pool_, fold_pool_;
  std::unique_ptr<LoadedKernels> main_gpu_, fold_gpu_;
  int device_ = 0;
  std::mutex mutex_, updating_;
  std::shared_ptr<Weights> active_, inactive_;
};

}  // namespace alt::aot
