// Definitions of the functions that host programs call. The container compiles them once for a library; the host program
// of a graph is one unit with its own.
#pragma once
#include "checks.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>

namespace alt::aot {

// --- tensor.h ----------------------------------------------------------------------------------------------------

void fail(const char* format, ...) {
  char text[2048];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  throw Error{text};
}

void fail_call(const char* name) {
  const char* what = torch_exception_get_what_without_backtrace ? torch_exception_get_what_without_backtrace() : nullptr;
  if (what && *what) {
    const std::string text = what;  // without the frames of C++
    throw Error{std::string(name) + ": " + text.substr(0, text.find("\nException raised from"))};
  }
  throw Error{std::string(name) + " failed; torch has printed the reason to standard error"};
}

std::string text(const int64_t* values, int64_t count) {
  std::string s = "(";
  for (int64_t k = 0; k < count; ++k) s += (k ? ", " : "") + std::to_string(values[k]);
  return s + (count == 1 ? ",)" : ")");
}

Tensor empty_large(Dtype t, Ints sizes, Ints strides) {
  Tensor result = empty(t, sizes, strides);
  int64_t bytes = 0;
  check(aoti_torch_get_storage_size(result.get(), &bytes), "storage_size");
  advise_huge_pages(data_of(result.get()), bytes);
  return result;
}

Tensor strided_copy(Handle t, int64_t rank, const int64_t* strides) {
  Tensor result;
  int32_t type = 0, index = 0;
  check(aoti_torch_get_device_type(t, &type), "device_type");
  check(aoti_torch_get_device_index(t, &index), "device_index");
  check(aoti_torch_empty_strided(rank, sizes_of(t), strides, dtype_of(t), type, index, result.out()), "empty_strided");
  copy_into(result.get(), t);
  return result;
}

Tensor as_strided(Handle t, Ints sizes, Ints strides, int64_t offset) {
  const auto extent = [](const int64_t* n, const int64_t* s, int64_t rank) {
    int64_t last = 1;
    for (int64_t k = 0; k < rank; ++k) {
      if (n[k] == 0) return int64_t(0);
      last += (n[k] - 1) * s[k];
    }
    return last;
  };
  const int64_t whole = extent(sizes_of(t), strides_of(t), dim_of(t));
  const int64_t window = extent(sizes.begin(), strides.begin(), int64_t(sizes.size()));
  if (window && (offset < 0 || offset > whole - window))
    fail("as_strided of %s from %" PRId64 " on is out of bounds of %" PRId64 " elements", text(sizes.begin(), int64_t(sizes.size())).c_str(), offset, whole);
  return view(t, sizes, strides, offset);
}

Tensor with_strides(Tensor t, const char* name, Ints sizes, Ints strides) {
  const int64_t rank = dim_of(t.get());
  bool same = rank == int64_t(sizes.size());
  for (int64_t k = 0; same && k < rank; ++k) same = sizes_of(t.get())[k] == sizes.begin()[k];
  if (!same)
    fail("%s gave a tensor of size %s but its fake kernel returned %s; correct the fake kernel of that operator", name,
         text(sizes_of(t.get()), rank).c_str(), text(sizes.begin(), int64_t(sizes.size())).c_str());
  const bool zero = numel_of(t.get()) > 0 && data_of(t.get()) == nullptr;  // a zero tensor without memory
  if (same_strides(sizes.begin(), strides_of(t.get()), strides.begin(), rank) && !zero) return t;
  return strided_copy(t.get(), strides);
}

Tensor promised(Tensor t, const char* name, Dtype dtype, Ints sizes, Ints strides) {
  if (dtype_of(t.get()) != code(dtype))
    fail("%s gave a tensor of %s but its fake kernel returned %s; correct the fake kernel of that operator", name,
         dtype_name(dtype_of(t.get())), row(dtype).name);
  return with_strides(std::move(t), name, sizes, strides);
}

void check_kernel(int64_t* error, const char* lines) {
  const int64_t code = error[0];
  if (__builtin_expect(code == 0, 1)) return;
  error[0] = 0;
  if (code == 2) fail("ZeroDivisionError in %s", lines);
  try {
    fail("index %" PRId64 " is out of bounds for a dimension of size %" PRId64 " in %s", error[1], error[2], lines);
  } catch (Error& e) {
    e.kind = code == 1 ? Error::index : Error::runtime;
    throw;
  }
}

const char* dtype_name(int32_t number) {
  for (int k = 0; k <= int(Dtype::float8_e5m2fnuz); ++k)
    if (row(Dtype(k)).code() == number) return row(Dtype(k)).name;
  return "another dtype";
}

// --- dispatcher.h ------------------------------------------------------------------------------------------------

std::vector<Tensor> tensors_from(StableIValue v) {
  const auto h = from_stack<StableListHandle>(v);
  size_t n = 0;
  check(torch_list_size(h, &n), "list_size");
  std::vector<Tensor> result;
  for (size_t k = 0; k < n; ++k) {
    StableIValue item = 0;
    check(torch_list_get_item(h, k, &item), "list_get_item");
    result.push_back(tensor_from(item));
  }
  check(torch_delete_list(h), "delete_list");
  return result;
}

Tensor retyped(Handle t, Dtype dtype, Ints sizes, Ints strides, int64_t offset) {
  int64_t storage = 0;
  check(aoti_torch_get_storage_size(t, &storage), "storage_size");
  const int64_t old_bytes = int64_t(aoti_torch_dtype_element_size(dtype_of(t))), bytes = row(dtype).bytes;
  const int64_t available = storage - storage_offset_of(t) * old_bytes;
  const int64_t whole = available / bytes * bytes;
  const Tensor flat = view(t, {whole / old_bytes}, {1}, 0);
  StableIValue stack[] = {on_stack(flat.get()), code_on_stack(code(dtype))};
  call("aten::view", "dtype", stack);
  const Tensor other = tensor_from(stack[0]);
  int64_t last = offset + 1;
  bool none = false;
  for (size_t k = 0; k < sizes.size(); ++k) {
    none |= sizes.begin()[k] == 0;
    last += (sizes.begin()[k] - 1) * strides.begin()[k];
  }
  if (!none && last * bytes > whole) fail("a view as %s reaches beyond the tensor that it reinterprets", row(dtype).name);
  return view(other.get(), sizes, strides, offset);
}

StableIValue list(std::initializer_list<StableIValue> items) {
  StableListHandle h;
  check(torch_new_list_reserve_size(items.size(), &h), "new_list");
  for (StableIValue x : items) check(torch_list_push_back(h, x), "list_push_back");
  return plain(h);
}

// --- workspace.h -------------------------------------------------------------------------------------------------

void Layout::block(std::initializer_list<int> slots, int64_t bytes, int64_t first, int64_t last) {
  blocks.push_back({slots, (std::max<int64_t>(bytes, 0) + kAlign - 1) / kAlign * kAlign, first, last});
}

void Layout::window(int slot, Dtype t, Ints sizes, Ints strides, int64_t offset) {
  windows.push_back({slot, t, sizes, strides, offset});
}

// Greedy by size (Pisarchyk and Lee, 2020): largest first, each at the lowest gap between blocks that live with it.
int64_t Layout::place() {
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

Workspace::Workspace(const ProgramTable& p, std::vector<int64_t> symbols) : arena(nullptr), pointers(size_t(p.slots) + 1), scalars(size_t(p.symbols) + 1), key(std::move(symbols)) {
  std::copy(key.begin(), key.end(), scalars.begin());
  Layout layout;
  p.layout(scalars.data(), layout);
  const int64_t bytes = layout.place();
  std::unique_ptr<void, void (*)(void*)> memory{std::aligned_alloc(kAlign, size_t(bytes + kAlign)), std::free};
  if (!memory) fail("no memory for %" PRId64 " bytes of intermediates", bytes);
  advise_huge_pages(memory.get(), bytes + kAlign);
  for (const Block& b : layout.blocks)
    for (int slot : b.slots) pointers[size_t(slot)] = static_cast<char*>(memory.get()) + b.offset;
  for (const Window& w : layout.windows) {
    char* data = static_cast<char*>(pointers[size_t(w.slot)]) + w.offset * row(w.dtype).bytes;
    views.push_back(over(data, w.dtype, int64_t(w.sizes.size()), w.sizes.data(), w.strides.data()));
  }
  arena = memory.release();
}

Workspace::~Workspace() {
  views.clear();
  std::free(arena);
}

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

Lease::Lease(Pool& pool, Ints symbols) : pool_(pool), workspace_(pool.take(symbols).release()) {}

Lease::~Lease() {
  workspace_->error[0] = 0;
  pool_.give(std::unique_ptr<Workspace>(workspace_));
}

std::vector<Tensor> run(const ProgramTable& program, Pool& pool, const std::vector<Handle>& inputs, const Place& at) {
  Frame frame{pool, inputs, {}, threads(), at.gpu, at.device, at.stream};
  frame.out.resize(size_t(program.outputs));
  program.run(frame);
  return std::move(frame.out);
}

// --- checks.h ----------------------------------------------------------------------------------------------------

static void check_device(const Input& x, int gpu) {
  int32_t type = 0, index = 0;
  check(aoti_torch_get_device_type(x.handle, &type), "device");
  check(aoti_torch_get_device_index(x.handle, &index), "device");
  if (gpu < 0 && type != aoti_torch_device_type_cpu())
    fail("input %d (%s) is on another device; the library was compiled for the CPU: move the tensor there", x.number, x.name);
  if (gpu >= 0 && (type != gpu_type() || (index >= 0 && index != gpu)))
    fail("input %d (%s) is not on GPU %d, for which the library was loaded: move the tensor there", x.number, x.name, gpu);
}

void check_input(const Input& x, Dtype dtype, int64_t rank, int gpu) {
  bool defined = false;
  if (x.handle) check(aoti_torch_is_defined(x.handle, &defined), "is_defined");
  if (!defined) fail("input %d (%s) is no tensor", x.number, x.name);
  int32_t layout = 0;
  check_device(x, gpu);
  check(aoti_torch_get_layout(x.handle, &layout), "layout");
  if (layout != aoti_torch_layout_strided()) fail("input %d (%s) is no strided tensor", x.number, x.name);
  if (dtype_of(x.handle) != code(dtype))
    fail("input %d (%s) is %s; the library was compiled for %s", x.number, x.name, dtype_name(dtype_of(x.handle)), row(dtype).name);
  if (dim_of(x.handle) != rank)
    fail("input %d (%s) has %" PRId64 " dimensions; the library was compiled for %" PRId64, x.number, x.name, dim_of(x.handle), rank);
  if (data_of(x.handle) == nullptr && numel_of(x.handle) > 0) fail("input %d (%s) has no memory: pass x.clone()", x.number, x.name);
  StableIValue stack[] = {on_stack(x.handle)};
  call("aten::is_neg", "", stack);
  if (from_stack<bool>(stack[0])) fail("input %d (%s) has torch's negative bit: pass x.resolve_neg()", x.number, x.name);
}

int64_t size_in_range(const Input& x, int dim, int64_t least, int64_t greatest) {
  const int64_t n = sizes_of(x.handle)[dim];
  if (n < least || n > greatest) {
    const std::string end = greatest >= (int64_t(1) << 62) ? "any size" : std::to_string(greatest);
    fail("dimension %d of input %d (%s) is %" PRId64 "; the library was compiled for sizes from %" PRId64 " to %s", dim, x.number, x.name, n, least, end.c_str());
  }
  return n;
}

int64_t symbol_in_size(const Input& x, int dim, int64_t scale, int64_t shift, int64_t least, int64_t greatest) {
  const int64_t n = sizes_of(x.handle)[dim];
  if ((n - shift) % scale != 0)
    fail("dimension %d of input %d (%s) is %" PRId64 "; the library was compiled for multiples of %" PRId64 " plus %" PRId64, dim, x.number, x.name, n, scale, shift);
  const int64_t symbol = (n - shift) / scale;
  if (symbol < least || symbol > greatest)
    fail("dimension %d of input %d (%s) is %" PRId64 "; the library was compiled for sizes from %" PRId64 " to %" PRId64, dim, x.number, x.name, n, scale * least + shift, greatest >= (int64_t(1) << 62) ? greatest : scale * greatest + shift);
  return symbol;
}

void check_geometry(const Input& x, Ints sizes, Ints strides, std::initializer_list<const char*> meaning) {
  const int64_t* actual = sizes_of(x.handle);
  for (size_t d = 0; d < sizes.size(); ++d) {
    const char* why = meaning.begin()[d];
    if (actual[d] != sizes.begin()[d])
      fail("dimension %d of input %d (%s) is %" PRId64 "; the library was compiled for %" PRId64 "%s%s", int(d), x.number, x.name, actual[d], sizes.begin()[d], *why ? " = " : "", why);
  }
  const int64_t rank = int64_t(sizes.size());
  if (!same_strides(actual, strides_of(x.handle), strides.begin(), rank))
    fail("input %d (%s) has strides %s; the library was compiled for %s: pass a tensor of that layout, for example from contiguous()",
         x.number, x.name, text(strides_of(x.handle), rank).c_str(), text(strides.begin(), rank).c_str());
}

}  // namespace alt::aot
