// The host program of a graph under torch.compile as a function for Python: handles in, handles and numbers out.
#pragma once
#include "definitions.h"

// Functions of Python's stable interface; a library for one graph needs no header of Python.
struct _object;
extern "C" {
using PyObject = _object;
extern PyObject *PyExc_IndexError, *PyExc_RuntimeError, *PyExc_MemoryError;
PyObject* PyList_New(intptr_t);
intptr_t PyList_Size(PyObject*);
PyObject* PyList_GetItem(PyObject*, intptr_t);  // borrowed
int PyList_SetItem(PyObject*, intptr_t, PyObject*);
PyObject* PyCapsule_New(void*, const char*, void (*)(PyObject*));
void* PyCapsule_GetPointer(PyObject*, const char*);
const char* PyCapsule_GetName(PyObject*);
long long PyLong_AsLongLong(PyObject*);
PyObject* PyLong_FromLongLong(long long);
PyObject* PyFloat_FromDouble(double);
PyObject* PyBool_FromLong(long);
PyObject* Py_BuildValue(const char*, ...);
PyObject* PyErr_Occurred();
void PyErr_SetString(PyObject*, const char*);
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

namespace alt::aot {

// A run of kernels of a graph on a CPU.
using Segment = void(void** p, const int64_t* s, int threads, int64_t* error);

// A host program, which graphs with other kernels may share. `segment_count`: its runs of kernels. `keep`: calls reuse
// intermediates.
struct Graph {
  const ProgramTable& program;
  int segment_count;
  bool keep;
};

union Number {
  int64_t integer;
  double real;
};

struct GraphFrame : Frame {
  std::vector<Handle>& owned;
  const std::vector<Handle>& fixed;  // constants
  Segment* const* segments;
  std::vector<int64_t> given;        // numbers among the inputs
  std::vector<Number> numbers;       // results that are numbers, by their place
  bool repeatable = true;            // no input was changed or dropped so far

  void drop(int k) {
    repeatable = false;
    aoti_torch_delete_tensor_object(std::exchange(owned[size_t(k)], nullptr));
  }
};

inline Tensor shared_or_none(Handle t) { return t ? share(t) : Tensor(); }

// Compares an input with the one that was traced, for the option `size_asserts`.
inline void check_traced(Handle t, const char* name, Dtype dtype, Ints sizes, Ints strides) {
  const int64_t rank = dim_of(t);
  bool same = dtype_of(t) == code(dtype) && rank == int64_t(sizes.size());
  int64_t last = storage_offset_of(t) + 1;
  bool none = false;
  for (int64_t k = 0; same && k < rank; ++k) {
    same = sizes_of(t)[k] == sizes.begin()[k];
    none |= sizes.begin()[k] == 0;
    last += (sizes.begin()[k] - 1) * strides_of(t)[k];
  }
  if (!same || !same_strides(sizes.begin(), strides_of(t), strides.begin(), rank)) fail("input %s of a compiled graph has changed", name);
  int64_t bytes = 0;
  check(aoti_torch_get_storage_size(t, &bytes), "storage_size");
  if (!none && last * row(dtype).bytes > bytes) fail("input %s of a compiled graph reaches beyond its storage", name);
}

// One loaded graph: its kernels, its constants, which it shares with Python, and its idle workspaces.
class LoadedGraph {
 public:
  // `kinds`: of results, a letter each. `threads`: 0 means torch's number.
  LoadedGraph(const Graph& graph, void** segments, const char* kinds, int threads)
      : graph_(graph), pool_(graph.program, graph.keep), kinds_(kinds), threads_(threads) {
    for (int k = 0; k < graph.segment_count; ++k) segments_.push_back(reinterpret_cast<Segment*>(segments[k]));
  }
  ~LoadedGraph() {
    for (Handle t : fixed_) aoti_torch_delete_tensor_object(t);
  }

  // `kernels`: function, threads and shared memory of each.
  void set_gpu(void* launch, const int64_t* kernels, int count, void* flag, int device) {
    gpu_.launch = reinterpret_cast<Launch>(launch);
    for (const int64_t* k = kernels; k < kernels + 3 * count; k += 3) gpu_.kernels.push_back({reinterpret_cast<void*>(k[0]), k[1], k[2]});
    gpu_.flag = static_cast<int32_t*>(flag);
    device_ = device;
  }

  void set_constants(PyObject* capsules) { fixed_ = handles_of(capsules); }

  // Returns a list of results. None: the call had no effect, its inputs are untouched, and Python is to run it.
  PyObject* call(PyObject* capsules, PyObject* numbers, void* stream) {
    std::vector<Handle> owned = handles_of(capsules);
    GraphFrame frame{{pool_, owned, {}, 1, &gpu_, device_, stream}, owned, fixed_, segments_.data(), {}, {}, true};
    frame.out.resize(size_t(graph_.program.outputs));
    frame.numbers.resize(size_t(graph_.program.outputs));
    for (intptr_t k = 0, n = PyList_Size(numbers); k < n; ++k) frame.given.push_back(PyLong_AsLongLong(PyList_GetItem(numbers, k)));
    if (PyErr_Occurred()) return nullptr;
    Error error;
    const bool succeeded = run(frame, error);
    if (!succeeded && frame.repeatable) return Py_BuildValue("");
    if (!succeeded) {
      PyErr_SetString(error.kind == Error::index ? PyExc_IndexError : PyExc_RuntimeError, error.text.c_str());
      return nullptr;
    }
    return results(frame);
  }

 private:
  // Runs the program without Python's lock, and frees the inputs unless the call is to be repeated.
  bool run(GraphFrame& frame, Error& error) {
    void* const python = PyEval_SaveThread();
    bool succeeded = false;
    try {
      frame.threads = threads_ ? threads_ : alt::aot::threads();
      graph_.program.run(frame);
      succeeded = true;
    } catch (const Error& e) {
      error = e;
      if (e.earlier) frame.repeatable = false;
    } catch (const std::exception& e) {
      error.text = e.what();
    } catch (...) {
      error.text = "an unknown exception";
    }
    if (!succeeded) frame.out.clear();
    if (succeeded || !frame.repeatable)
      for (Handle& t : frame.owned)
        if (t) aoti_torch_delete_tensor_object(std::exchange(t, nullptr));
    PyEval_RestoreThread(python);
    return succeeded;
  }

  PyObject* results(GraphFrame& frame) {
    PyObject* const list = PyList_New(graph_.program.outputs);
    for (size_t k = 0; list && k < frame.out.size(); ++k) {
      PyObject* item = nullptr;
      switch (kinds_[k]) {
        case 't': item = PyCapsule_New(defined(std::move(frame.out[k])), nullptr, nullptr); break;
        case 'i': item = PyLong_FromLongLong(frame.numbers[k].integer); break;
        case 'f': item = PyFloat_FromDouble(frame.numbers[k].real); break;
        case 'b': item = PyBool_FromLong(frame.numbers[k].integer != 0); break;
        default: item = Py_BuildValue("");
      }
      PyList_SetItem(list, intptr_t(k), item);
    }
    return list;
  }

  // An undefined tensor is None in Python.
  static Handle defined(Tensor t) {
    Handle empty = nullptr;
    if (!t.get()) aoti_torch_new_uninitialized_tensor(&empty);
    return t.get() ? t.release() : empty;
  }

  static std::vector<Handle> handles_of(PyObject* capsules) {
    std::vector<Handle> handles(size_t(PyList_Size(capsules)));
    for (size_t k = 0; k < handles.size(); ++k) {
      PyObject* const capsule = PyList_GetItem(capsules, intptr_t(k));
      handles[k] = static_cast<Handle>(PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule)));
    }
    return handles;
  }

  const Graph& graph_;
  Pool pool_;
  const std::string kinds_;
  const int threads_;
  std::vector<Handle> fixed_;
  std::vector<Segment*> segments_;
  Gpu gpu_;
  int device_ = 0;
};

}  // namespace alt::aot

// The functions that Python calls while it holds its lock.
#define ALT_GRAPH(graph)                                                                                              \
  extern "C" __attribute__((visibility("default"))) void* alt_graph_new(void** segments, const char* kinds, int threads) { \
    return new alt::aot::LoadedGraph(graph, segments, kinds, threads);                                                \
  }                                                                                                                   \
  extern "C" __attribute__((visibility("default"))) void alt_graph_constants(void* self, PyObject* capsules) {        \
    static_cast<alt::aot::LoadedGraph*>(self)->set_constants(capsules);                                               \
  }                                                                                                                   \
  extern "C" __attribute__((visibility("default"))) void alt_graph_delete(void* self) {                               \
    delete static_cast<alt::aot::LoadedGraph*>(self);                                                                 \
  }                                                                                                                   \
  extern "C" __attribute__((visibility("default"))) void alt_graph_gpu(void* self, void* launch, const int64_t* kernels, int count, void* flag, int device) { \
    static_cast<alt::aot::LoadedGraph*>(self)->set_gpu(launch, kernels, count, flag, device);                         \
  }                                                                                                                   \
  extern "C" __attribute__((visibility("default"))) PyObject* alt_graph_call(void* self, PyObject* capsules, PyObject* numbers, void* stream) { \
    return static_cast<alt::aot::LoadedGraph*>(self)->call(capsules, numbers, stream);                                \
  }
