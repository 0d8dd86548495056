// The names that torch's loaders look up in a library, with the signatures of aoti_runtime/interface.h.
#pragma once
#include "../../../../include/altbackend.h"
#include "container.h"

#include <unordered_map>

#define ALT_EXPORT extern "C" __attribute__((visibility("default"))) int32_t

namespace alt::aot {

inline std::string& last_error() {
  thread_local std::string text;
  return text;
}

// Runs one exported function: 0 if it succeeded, else 1, and the text of the error stays with this thread.
template <class F> int32_t guarded(F&& f) noexcept {
  try {
    last_error().clear();
    f();
    return 0;
  } catch (const Error& e) {
    last_error() = e.text;
  } catch (const std::exception& e) {
    last_error() = e.what();
  } catch (...) {
    last_error() = "an unknown exception";
  }
  // loaders before torch 2.13 do not ask for the text
  if (!torch_exception_get_what_without_backtrace) std::fprintf(stderr, "altbackend: %s\n", last_error().c_str());
  return 1;
}

template <class T> T& given(T* pointer) {
  if (!pointer) fail("an argument of the call is null");
  return *pointer;
}

using ConstantMap = std::unordered_map<std::string, Handle>;
struct Pair {
  const char* name;
  Handle handle;
};
struct Pairs {
  const Pair* first;
  size_t count;
  const Pair* begin() const { return first; }
  const Pair* end() const { return first + count; }
};

}  // namespace alt::aot

using alt::aot::Container;
using alt::aot::given;
using alt::aot::guarded;
using alt::aot::Handle;
using alt::aot::model;

// One container runs any number of calls at once, so `models` has no effect.
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerCreateWithDevice)(Container** result, size_t models, const char* device, const char*) {
  return guarded([&] {
    (void)models;
    given(result) = nullptr;
    *result = new Container(device);
  });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerCreate)(Container** result, size_t, bool is_cpu, const char*) {
  return guarded([&] {
    given(result) = nullptr;
    *result = new Container(is_cpu ? "cpu" : "cuda");
  });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerCreateWithExternalConstants)(Container** result, size_t, const char* device, const char*, const alt::aot::Pair* pairs, size_t count) {
  return guarded([&] {
    given(result) = nullptr;
    auto container = std::make_unique<Container>(device);
    container->update(alt::aot::Pairs{pairs, count}, false, false, true);
    container->brings_weights = false;
    *result = container.release();
  });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerDelete)(Container* c) {
  return guarded([&] { delete c; });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerRun)(Container* c, Handle* in, size_t inputs, Handle* out, size_t outputs, void* stream, void*) {
  return guarded([&] { given(c).run(in, inputs, out, outputs, stream); });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerRunSingleThreaded)(Container* c, Handle* in, size_t inputs, Handle* out, size_t outputs, void* stream, void*) {
  return guarded([&] { given(c).run(in, inputs, out, outputs, stream); });
}

// --- inputs and outputs ------------------------------------------------------------------------------------------

ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerGetNumInputs)(Container*, size_t* n) {
  return guarded([&] { given(n) = size_t(model.input_count); });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerGetNumOutputs)(Container*, size_t* n) {
  return guarded([&] { given(n) = size_t(model.output_count); });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerGetInputName)(Container*, size_t k, const char** name) {
  return guarded([&] {
    if (k >= size_t(model.input_count)) alt::aot::fail("there is no input %zu; the library has %d", k, model.input_count);
    given(name) = model.inputs[k];
  });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerGetOutputName)(Container*, size_t k, const char** name) {
  return guarded([&] {
    if (k >= size_t(model.output_count)) alt::aot::fail("there is no output %zu; the library has %d", k, model.output_count);
    given(name) = model.outputs[k];
  });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerGetCallSpec)(Container*, const char** in_spec, const char** out_spec) {
  return guarded([&] {
    given(in_spec) = model.in_spec;
    given(out_spec) = model.out_spec;
  });
}

// --- facts of weights --------------------------------------------------------------------------------------------

ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerGetNumConstants)(Container*, size_t* n) {
  return guarded([&] { given(n) = size_t(model.constant_count); });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerGetConstantName)(Container*, size_t k, const char** name) {
  return guarded([&] { given(name) = Container::constant(k).name; });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerGetConstantOriginalFQN)(Container*, size_t k, const char** name) {
  return guarded([&] { given(name) = Container::constant(k).name; });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerGetConstantDtype)(Container*, size_t k, int32_t* dtype) {
  return guarded([&] { given(dtype) = alt::aot::code(Container::constant(k).dtype); });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerGetConstantFromFolded)(Container*, size_t k, bool* folded) {
  return guarded([&] {
    Container::constant(k);
    given(folded) = false;  // folded values are no constants of the interface
  });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerGetConstantType)(Container*, size_t k, int32_t* type) {
  return guarded([&] { given(type) = Container::constant(k).type; });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerGetConstantDataSize)(Container*, size_t k, size_t* bytes) {
  return guarded([&] { given(bytes) = size_t(Container::constant(k).bytes); });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerGetConstantsBlobSize)(Container*, uint64_t* bytes) {
  return guarded([&] { given(bytes) = uint64_t(model.weights_bytes); });
}

// --- values of weights -------------------------------------------------------------------------------------------

// The handles stay the container's.
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerExtractConstantsMap)(Container* c, alt::aot::ConstantMap* map, bool inactive) {
  return guarded([&] {
    const auto w = given(c).set(inactive);
    for (int k = 0; w && k < model.constant_count; ++k)
      if (w->tensors[size_t(k)]) given(map).emplace(model.constants[k].name, w->tensors[size_t(k)]->get());
  });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerUpdateConstantBuffer)(Container* c, alt::aot::ConstantMap* map, bool inactive, bool all) {
  return guarded([&] { given(c).update(given(map), inactive, all, false); });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerUpdateConstantBufferFromCpu)(Container* c, alt::aot::ConstantMap* map, bool inactive, bool all) {
  return guarded([&] { given(c).update(given(map), inactive, all, false); });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerUpdateInactiveConstantBuffer)(Container* c, alt::aot::ConstantMap* map) {
  return guarded([&] { given(c).update(given(map), true, true, false); });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerUpdateUserManagedConstantBuffer)(Container* c, alt::aot::ConstantMap* map, bool inactive, bool all) {
  return guarded([&] { given(c).update(given(map), inactive, all, true); });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerUpdateConstantBufferPairs)(Container* c, const alt::aot::Pair* pairs, size_t n, bool inactive, bool all) {
  return guarded([&] { given(c).update(alt::aot::Pairs{pairs, n}, inactive, all, false); });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerUpdateConstantBufferFromCpuPairs)(Container* c, const alt::aot::Pair* pairs, size_t n, bool inactive, bool all) {
  return guarded([&] { given(c).update(alt::aot::Pairs{pairs, n}, inactive, all, false); });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerUpdateInactiveConstantBufferPairs)(Container* c, const alt::aot::Pair* pairs, size_t n) {
  return guarded([&] { given(c).update(alt::aot::Pairs{pairs, n}, true, true, false); });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerUpdateUserManagedConstantBufferPairs)(Container* c, const alt::aot::Pair* pairs, size_t n, bool inactive, bool all) {
  return guarded([&] { given(c).update(alt::aot::Pairs{pairs, n}, inactive, all, true); });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelUpdateConstantsFromBlob)(Container* c, const uint8_t* weights) {
  return guarded([&] { given(c).update_from_block(weights); });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerRunConstantFolding)(Container* c, bool inactive, void*, void*) {
  return guarded([&] { given(c).fold(inactive); });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerSwapConstantBuffer)(Container* c) {
  return guarded([&] { given(c).swap(); });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerFreeInactiveConstantBuffer)(Container* c) {
  return guarded([&] { given(c).free_inactive(); });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerDidCallLoadConstants)(Container* c, bool* result) {
  return guarded([&] { given(result) = given(c).brings_weights; });
}
// A container has no model instances between which streams could be shared out.
ALT_EXPORT ALTBACKEND_NAME(AOTInductorModelContainerSetUseStreamAffinity)(Container*, bool use) {
  return guarded([&] {
    if (use) alt::aot::fail("the library runs any number of calls at once on any streams: stream affinity has no meaning for it");
  });
}
ALT_EXPORT ALTBACKEND_NAME(AOTInductorGetLastError)(const char** text) {
  if (!text) return 1;
  *text = alt::aot::last_error().c_str();
  return 0;
}
