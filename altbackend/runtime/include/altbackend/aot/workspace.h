// The memory of one call's intermediates: an arena, tables for kernels, and the views that library calls take.
#pragma once
#include "tensor.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>

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

  void block(std::initializer_list<int> slots, int64_t bytes, int64_t first, int64_t last) {
    blocks.push_back({slots, (std::max<int64_t>(bytes, 0) + kAlign - 1) / kAlign * kAlign, first, last});
  }
  void window(int slot, Dtype t, Ints sizes, Ints strides, int64_t offset) {
    windows.push_back({slot, t, sizes, strides, offset});
  }

  // Greedy by size (Pisarchyk and Lee, 2020): largest first, each at the lowest gap between blocks that live with it.
  int64_t place() {
    std::vector<size_t> order(blocks.size()), placed;
    for (size_t k = 0; k < order.size(); ++k) order[k] = k;
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return blocks[a].bytes > blocks[b].bytes; });
    int64_t top = 0;
    for (size_t k : order) {
      Block& b = blocks[k];
      int64_t at = reuse ? 0 : top;
      for (size_t j : placed) {  // in the order of their offsets
        const Block& other = blocks[j];
        if (!reuse || other.last < b.first || b.last < other.first) continue;
        if (other.offset - at >= b.bytes) break;
        at = std::max(at, other.offset + other.bytes);
      }
      b.offset = at;
      top = std::max(top, at + b.bytes);
      placed.insert(std::upper_bound(placed.begin(), placed.end(), k, [&](size_t x, size_t y) { return blocks[x].offset < blocks[y].offset; }), k);
    }
    return top;
  }
};

// A program as data: the sizes of its tables, and the functions that plan and run one call.
struct Frame;
struct ProgramTable {
  int slots, symbols, layout_symbols, inputs, outputs;
  void (*layout)(const int64_t* S, Layout& layout);
  void (*run)(Frame& frame);
};

struct Workspace {
  std::unique_ptr<void, void (*)(void*)> arena{nullptr, std::free};
  std::vector<void*> pointers;
  std::vector<int64_t> scalars, key;
  std::vector<Tensor> views;
  int64_t error[3] = {0, 0, 0};

  Workspace(const ProgramTable& p, std::vector<int64_t> symbols) : pointers(size_t(p.slots) + 1), scalars(size_t(p.symbols) + 1), key(std::move(symbols)) {
    std::copy(key.begin(), key.end(), scalars.begin());
    Layout layout;
    p.layout(scalars.data(), layout);
    const int64_t bytes = layout.place();
    arena.reset(std::aligned_alloc(kAlign, size_t(bytes + kAlign)));
    if (!arena) fail("no memory for %" PRId64 " bytes of intermediates", bytes);
    advise_huge_pages(arena.get(), bytes + kAlign);
    for (const Block& b : layout.blocks)
      for (int slot : b.slots) pointers[size_t(slot)] = static_cast<char*>(arena.get()) + b.offset;
    for (const Window& w : layout.windows) {
      char* data = static_cast<char*>(pointers[size_t(w.slot)]) + w.offset * row(w.dtype).bytes;
      views.push_back(over(data, w.dtype, int64_t(w.sizes.size()), w.sizes.data(), w.strides.data()));
    }
  }
};

// The idle workspaces of a program, by the sizes that decide their layout. Every running call takes its own.
class Pool {
 public:
  explicit Pool(const ProgramTable& program, bool keep = true) : program_(program), keep_(keep) {}

  std::unique_ptr<Workspace> take(Ints symbols) {
    std::vector<int64_t> key(symbols);
    {
      std::lock_guard<std::mutex> guard(mutex_);
      auto found = idle_.find(key);
      if (found != idle_.end() && !found->second.empty()) {
        auto ws = std::move(found->second.back());
        found->second.pop_back();
        return ws;
      }
    }
    return std::make_unique<Workspace>(program_, std::move(key));
  }

  void give(std::unique_ptr<Workspace> ws) {
    if (!keep_) return;
    std::lock_guard<std::mutex> guard(mutex_);
    if (idle_.size() >= kMostSizes && !idle_.count(ws->key)) idle_.erase(idle_.begin());
    auto& waiting = idle_[ws->key];
    if (waiting.size() < kMostIdle) waiting.push_back(std::move(ws));
  }

 private:
  static constexpr size_t kMostSizes = 8, kMostIdle = 16;
  const ProgramTable& program_;
  const bool keep_;
  std::mutex mutex_;
  std::map<std::vector<int64_t>, std::vector<std::unique_ptr<Workspace>>> idle_;
};

// Takes a workspace for one call and gives it back, also after an error.
class Lease {
 public:
  Lease(Pool& pool, Ints symbols) : pool_(pool), workspace_(pool.take(symbols)) {}
  ~Lease() {
    workspace_->error[0] = 0;
    pool_.give(std::move(workspace_));
  }
  Lease(const Lease&) = delete;
  Workspace* operator->() { return workspace_.get(); }

 private:
  Pool& pool_;
  std::unique_ptr<Workspace> workspace_;
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

inline std::vector<Tensor> run(const ProgramTable& program, Pool& pool, const std::vector<Handle>& inputs, const Place& at) {
  Frame frame{pool, inputs, {}, threads(), at.gpu, at.device, at.stream};
  frame.out.resize(size_t(program.outputs));
  program.run(frame);
  return std::move(frame.out);
}

}  // namespace alt::aot
