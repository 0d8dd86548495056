// Detects writes to memory since results were computed from it; see altbackend/runtime/page_guard.py.
// Declares the needed parts of the C library and the kernel itself, to compile in a few hundredths of a second.
#pragma once

using u64 = unsigned long long;
using i64 = long long;

extern "C" int ioctl(int, unsigned long, ...) noexcept;
extern "C" int getpid(void) noexcept;

namespace alt_guard {

struct Range {  // whole pages, write-protected
    u64 start, end;
};

struct Piece {  // bytes that share a page with other memory
    const void* at;
    const void* copy;
    u64 bytes;
};

struct Guard {
    i64 pid, pagemap, ranges, pieces;
    const Range* range;
    const Piece* piece;
};

struct Scan {  // struct pm_scan_arg of linux/fs.h
    u64 size, flags, start, end, walk_end, vec, vec_len, max_pages;
    u64 inverted, mask, any_of, returned;
};

struct Region {  // struct page_region
    u64 start, end, categories;
};

constexpr unsigned long PAGEMAP_SCAN = 0xC0606610;  // _IOWR('f', 16, struct pm_scan_arg)
constexpr u64 CHECK_WPASYNC = 2, WRITTEN = 2, PRESENT = 8;
constexpr i64 UNCHANGED = -1, UNKNOWN = -2;

// A page counts as changed if it was written since it was protected, or is no longer mapped.
inline i64 scan(int pagemap, u64 start, u64 end) {
    Region found;
    Scan s = {sizeof(Scan), CHECK_WPASYNC, start, end, 0, (u64)&found, 1, 1, PRESENT, 0, WRITTEN | PRESENT, WRITTEN | PRESENT};
    return ioctl(pagemap, PAGEMAP_SCAN, &s);
}

}  // namespace alt_guard

// Returns UNCHANGED, UNKNOWN (another process, or memory no longer protected), a range's index, or `ranges` + a piece's.
extern "C" __attribute__((visibility("default"))) i64 alt_guard_changed(const alt_guard::Guard* g) {
    using namespace alt_guard;
    if (getpid() != g->pid) return UNKNOWN;
    for (i64 k = 0; k < g->ranges; ++k) {
        i64 found = scan((int)g->pagemap, g->range[k].start, g->range[k].end);
        if (found) return found < 0 ? UNKNOWN : k;
    }
    for (i64 k = 0; k < g->pieces; ++k)
        if (__builtin_memcmp(g->piece[k].at, g->piece[k].copy, g->piece[k].bytes)) return g->ranges + k;
    return UNCHANGED;
}

// Reads a byte of every page, so that all pages are mapped when the range is protected.
extern "C" __attribute__((visibility("default"))) void alt_guard_touch(u64 start, u64 end, u64 page) {
    for (u64 at = start; at < end; at += page) (void)*(const volatile char*)at;
}
