// The memory of one call's intermediates: an arena, tables for kernels, and the views that library calls take.
#pragma once
#include "tensor.h"

namespace alt::aot {

constexpr int64_t kAlign = 64;  // bytes: one cache line, and the widest vector

// One block of the arena. `slots`: numbers in the table of pointers. `first`, `last`: the steps of its lifetime.
struct Block {
  std::vector<int> slots;
  int64_t bytes, first, last, offset = 0;
};

struct Window {
  int slot;
  Dtype dtype;
  std::vector<int64_t> sizes, strides;
  int64_t offset;
};

struct Layout {
  std::vector<Block> blocks;
  std::vector<Window> windows;
  bool reuse = true;

  void block(std::initializer_list<int> slots, int64_t bytes, int64_t first, int64_t last);
  void window(int slot, Dtype t, Ints sizes, Ints strides, int64_t offset);
  // Places the blocks and returns the bytes of the arena.
  int64_t place();
};

// A program as data: the sizes of its tables, and the functions that plan and run one call.
struct Frame;
struct ProgramTable {
  int slots, symbols, layout_symbols, inputs, outputs;
  void (*layout)(const int64_t* S, Layout& layout);
  void (*run)(Frame& frame);
};

struct Workspace {
  void* arena;
  std::vector<void*> pointers;
  std::vector<int64_t> scalars, key;
  std::vector<Tensor> views;
  int64_t error[3] = {0, 0, 0};

  Workspace(const ProgramTable& p, std::vector<int64_t> symbols);
  Workspace(const Workspace&) = delete;
  ~Workspace();
};

class Pool;

// Takes a workspace for one call and gives it back, also after an error.
class Lease {
 public:
  Lease(Pool& pool, Ints symbols);
  ~Lease();
  Lease(const Lease&) = delete;
  Workspace* operator->() { return workspace_; }

 private:
  Pool& pool_;
  Workspace* workspace_;
};

struct Gpu;

// One call: its inputs (owned by the caller of the program) and its results.
struct Frame {
  Pool& pool;
  const std::vector<Handle>& in;
  std::vector<Tensor> out;
  int threads;               // of kernels on the CPU
  const Gpu* gpu = nullptr;  // of a program for one
  int device = 0;
  void* stream = nullptr;
};

// Where a call runs: on the CPU, or with the kernels of a GPU on one of its streams.
struct Place {
  const Gpu* gpu = nullptr;
  int device = 0;
  void* stream = nullptr;
};

std::vector<Tensor> run(const ProgramTable& program, Pool& pool, const std::vector<Handle>& inputs, const Place& at);

}  // namespace alt::aot
