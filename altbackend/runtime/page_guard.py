"""Guards of memory against writes, with the kernel's help, so that results computed from it are never stale.

Linux can note that a page of private memory was written since it was last write-protected (`userfaultfd` with
UFFD_FEATURE_WP_ASYNC, and the ioctl PAGEMAP_SCAN; Linux 6.7). The page tables hold the note, so no kind of access
avoids it. No signal is raised, and the writer continues after one page fault.

A `Guard` covers some tensors. Large tensors are protected by whole pages; small ones are compared with a copy. A page
that a large tensor shares with other memory is protected until a neighbour writes it. From then on, the tensor's part
of that page is compared.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from altbackend.lazy_dataclass import dataclass

from .boxed import Function

SMALL_PAGES = 2  # smaller tensors are compared: as fast as asking the kernel, and no neighbour pays a page fault

Span = tuple[int, int]  # first address, and one past the last

_SYS_USERFAULTFD = {"x86_64": 323, "aarch64": 282}
_USER_MODE_ONLY = 1
_WP_UNPOPULATED, _WP_ASYNC = 1 << 13, 1 << 15
_API_VERSION = 0xAA
_REGISTER_WP = 2
_PAGEMAP_SCAN = 0xC0606610
_UFFDIO_API, _UFFDIO_REGISTER, _UFFDIO_UNREGISTER = 0xC018AA3F, 0xC020AA00, 0x8010AA01
_PROTECT_MATCHING, _CHECK_WP_ASYNC = 1, 2
_WRITTEN, _PRESENT = 2, 8
_REGIONS = 256  # the most regions that one scan returns
_UNCHANGED = -1


class NotGuardable(Exception):
    """Raised for memory that cannot be guarded; the message says why."""


class _Api(ctypes.Structure):
    _fields_ = (("api", ctypes.c_uint64), ("features", ctypes.c_uint64), ("ioctls", ctypes.c_uint64))


class _Register(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("start", "bytes", "mode", "ioctls"))


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_uint64), ("end", ctypes.c_uint64))


class _Piece(ctypes.Structure):
    _fields_ = (("at", ctypes.c_uint64), ("copy", ctypes.c_void_p), ("bytes", ctypes.c_uint64))


class _Scan(ctypes.Structure):
    """The struct pm_scan_arg of linux/fs.h."""

    _fields_ = (
        ("size", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("start", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("walk_end", ctypes.c_uint64),
        ("vec", ctypes.c_uint64),
        ("vec_len", ctypes.c_uint64),
        ("max_pages", ctypes.c_uint64),
        ("inverted", ctypes.c_uint64),
        ("mask", ctypes.c_uint64),
        ("any_of", ctypes.c_uint64),
        ("returned", ctypes.c_uint64),
    )


class _Region(ctypes.Structure):
    _fields_ = (("start", ctypes.c_uint64), ("end", ctypes.c_uint64), ("categories", ctypes.c_uint64))


class _Checked(ctypes.Structure):
    """The input of the compiled check; `alt_guard::Guard` of page_guard.h."""

    _fields_ = (
        ("pid", ctypes.c_int64),
        ("pagemap", ctypes.c_int64),
        ("ranges", ctypes.c_int64),
        ("pieces", ctypes.c_int64),
        ("range", ctypes.POINTER(_Range)),
        ("piece", ctypes.POINTER(_Piece)),
    )


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ioctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)
    return libc


def _ioctl(fd: int, request: int, argument: ctypes.Structure) -> int:
    """Return the result of an ioctl. Raise OSError."""
    result = int(_libc().ioctl(fd, request, ctypes.addressof(argument)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


@dataclass(frozen=True)
class Piece:
    """Bytes that are compared: their address, and a copy of them."""

    at: int
    copy: ctypes.Array[ctypes.c_char]

    def same(self) -> bool:
        return ctypes.string_at(self.at, len(self.copy)) == self.copy.raw


class Pages:
    """Write protection of this process's memory. Raise OSError if the kernel does not offer or allow it."""

    def __init__(self) -> None:
        self.pid, self.page = os.getpid(), os.sysconf("SC_PAGE_SIZE")
        number = _SYS_USERFAULTFD.get(os.uname().machine) if sys.platform == "linux" else None
        if number is None:
            raise OSError("this system has no userfaultfd")
        fd = int(_libc().syscall(number, os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY))
        if fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self._uffd = fd
        weakref.finalize(self, os.close, fd).atexit = False
        _ioctl(fd, _UFFDIO_API, _Api(_API_VERSION, _WP_UNPOPULATED | _WP_ASYNC))
        self.pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.pagemap).atexit = False
        self.lock = threading.RLock()  # garbage collection may release a guard while another is renewed
        self.changes = 0  # odd while pages are being protected
        self.guards: weakref.WeakSet[Guard] = weakref.WeakSet()

    def register(self, span: Span) -> None:
        """Have the kernel note writes to whole pages from now on. Raise OSError."""
        _ioctl(self._uffd, _UFFDIO_REGISTER, _Register(span[0], span[1] - span[0], _REGISTER_WP))

    def unregister(self, span: Span) -> None:
        """Undo `register` for memory that still exists."""
        try:
            _ioctl(self._uffd, _UFFDIO_UNREGISTER, _Register(span[0], span[1] - span[0]))
        except OSError:
            return

    def changed(self, span: Span, protect: bool = False) -> Iterator[Span]:
        """Yield the pages of a span that were written since they were protected, or are missing.

        With `protect`, protect them again in the same step. Raise OSError if the kernel does not note writes.
        """
        regions = (_Region * _REGIONS)()
        flags = _CHECK_WP_ASYNC | (_PROTECT_MATCHING if protect else 0)
        reported = _WRITTEN | _PRESENT
        at, end = span
        while at < end:
            vec = ctypes.addressof(regions)
            scan = _Scan(ctypes.sizeof(_Scan), flags, at, end, 0, vec, _REGIONS, 0, _PRESENT, 0, reported, reported)
            for k in range(_ioctl(self.pagemap, _PAGEMAP_SCAN, scan)):
                yield regions[k].start, regions[k].end
            at = scan.walk_end

    def protect(self, ranges: Sequence[Span], owner: Guard) -> None:
        """Protect whole pages, and tell every other guard of them which ones were written. Raise OSError."""
        with self.lock:
            self.changes += 1
            try:
                written = [region for span in ranges for region in self.changed(span, protect=True)]
                for other in self.guards:
                    if other is not owner:
                        other.pages_written(written)
            finally:
                self.changes += 1


@functools.lru_cache(maxsize=2)
def _pages_of(pid: int) -> Pages | str:
    try:
        return Pages()
    except OSError as cause:
        return f"the kernel does not guard memory here: {cause}"


def pages() -> Pages | str:
    """Return the write protection of this process, or why there is none. A fork makes its own."""
    return _pages_of(os.getpid())


class Guard:
    """Detects writes to some tensors' memory since the guard was made or renewed.

    `library` holds the compiled check. The memory must exist. Raise NotGuardable.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], library: ctypes.CDLL) -> None:
        protection = pages()
        if isinstance(protection, str):
            raise NotGuardable(protection)
        self.pages = protection
        self._check: Callable[[object], int] = library.alt_guard_changed
        self._touch: Function = library.alt_guard_touch
        spans = spans_of(tensors)
        if reason := why_not_private(spans):
            raise NotGuardable(reason)
        limit = SMALL_PAGES * protection.page
        self._small = [s for s in spans if s[1] - s[0] < limit]
        self._large = [s for s in spans if s[1] - s[0] >= limit]
        self.ranges = merged((_down(s[0], protection.page), -_down(-s[1], protection.page)) for s in self._large)
        self._shared: dict[int, list[Span]] = {}  # page -> the parts of tensors that do not fill it
        for first, last in self._large:
            for page in {_down(first, protection.page), _down(last - 1, protection.page)}:
                part = max(first, page), min(last, page + protection.page)
                if part != (page, page + protection.page):
                    self._shared.setdefault(page, []).append(part)
        self._noisy: set[int] = set()
        self._parts: dict[int, list[Piece]] = {}
        self.stale = False
        try:
            for span in self.ranges:
                protection.register(span)
        except OSError as cause:  # for example the limit on mappings, or locked memory
            raise NotGuardable(f"the kernel refuses to guard some memory: {cause}") from None
        with protection.lock:
            protection.guards.add(self)
        weakref.finalize(self, _release, protection, tuple(self.ranges)).atexit = False
        self.renew()

    def renew(self, sources: object = None) -> None:
        """Take the present content of the memory as unchanged. Raise NotGuardable."""
        if self.pages.pid != os.getpid():  # its notes are the parent's, who needs them
            raise NotGuardable("the guard is another process's")
        quiet = list(_without(self.ranges, self._noisy, self.pages.page))
        self.stale = False  # before protecting: from then on, another guard may protect these pages
        try:
            for first, last in quiet:
                self._touch(ctypes.c_uint64(first), ctypes.c_uint64(last), ctypes.c_uint64(self.pages.page))
            self.pages.protect(quiet, self)
        except OSError as cause:
            raise NotGuardable(f"memory is no longer guarded: {cause}") from None
        self._parts = {page: [_copy(p) for p in parts] for page, parts in self._shared.items()}
        self._compared = [_copy(s) for s in self._small]
        self._describe(quiet)

    def _describe(self, quiet: Sequence[Span]) -> None:
        """Write the protected ranges and the compared pieces into the structure of the compiled check."""
        compared_pieces = [*self._compared, *(p for page in sorted(self._noisy) for p in self._parts[page])]
        ranges = (_Range * len(quiet))(*(_Range(*span) for span in quiet))
        piece_array = (_Piece * len(compared_pieces))(
            *(_Piece(p.at, ctypes.addressof(p.copy), len(p.copy)) for p in compared_pieces)
        )
        self._checked = _Checked(
            self.pages.pid, self.pages.pagemap, len(quiet), len(compared_pieces), ranges, piece_array
        )
        self._argument = ctypes.byref(self._checked)

    def unchanged(self, sources: object = None) -> bool:
        """Return whether nothing was written since; False also where that is unknown, as in a forked child."""
        while True:
            before = self.pages.changes
            changed_range = self._check(self._argument)
            if changed_range != _UNCHANGED:
                if self._only_neighbours(changed_range):
                    continue
                return False
            if before == self.pages.changes and not before & 1:
                return not self.stale
            with self.pages.lock:  # another guard was being renewed
                pass

    def _only_neighbours(self, changed_range: int) -> bool:
        """Return whether all written bytes lie beside the tensors. Such pages are compared from now on."""
        if not 0 <= changed_range < self._checked.ranges or self.pages.pid != os.getpid():
            return False
        quiet = list(_without(self.ranges, self._noisy, self.pages.page))
        try:
            written = [r for span in quiet for r in self.pages.changed(span)]
        except OSError:
            return False
        if not self._beside(written):
            return False
        self._noisy |= {page for first, last in written for page in range(first, last, self.pages.page)}
        self._describe(list(_without(self.ranges, self._noisy, self.pages.page)))
        return True

    def _beside(self, written: Iterable[Span]) -> bool:
        """Return whether the tensors' parts of written pages are unchanged."""
        pages = (page for first, last in written for page in range(first, last, self.pages.page))
        return all(page in self._parts and all(p.same() for p in self._parts[page]) for page in pages)

    def pages_written(self, written: Sequence[Span]) -> None:
        """Note pages that were written before another guard protected them again."""
        if not self._beside(self.covered(written)):
            self.stale = True

    def covered(self, spans: Iterable[Span]) -> Iterator[Span]:
        """Yield the pages of this guard among spans of whole pages."""
        ends = [r[1] for r in self.ranges]
        for first, last in spans:
            k = bisect.bisect_right(ends, first)
            while k < len(ends) and self.ranges[k][0] < last:
                yield max(first, self.ranges[k][0]), min(last, ends[k])
                k += 1


def _release(protection: Pages, ranges: Sequence[Span]) -> None:
    """Stop noting writes to pages that no other guard covers."""
    if protection.pid != os.getpid():
        return
    with protection.lock:
        alive = list(protection.guards)
        for span in ranges:
            if not any(True for g in alive for _ in g.covered([span])):
                protection.unregister(span)


def _down(address: int, page: int) -> int:
    return address // page * page


def spans_of(tensors: Iterable[torch.Tensor]) -> list[Span]:
    """Return the addresses of strided tensors' elements as sorted, disjoint spans."""
    return merged(filter(None, map(_span, tensors)))


def _span(t: torch.Tensor) -> Span | None:
    """Return the addresses of a strided tensor's elements, gaps included; None if it has no elements."""
    if t.numel() == 0:
        return None
    last = sum((n - 1) * step for n, step in zip(t.size(), t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def _copy(span: Span) -> Piece:
    return Piece(span[0], ctypes.create_string_buffer(ctypes.string_at(span[0], span[1] - span[0]), span[1] - span[0]))


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the same addresses as the fewest spans, in order."""
    out: list[Span] = []
    for first, last in sorted(spans):
        if out and first <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], last)
        else:
            out.append((first, last))
    return out


def _without(ranges: Iterable[Span], left_out: set[int], page: int) -> Iterator[Span]:
    """Yield ranges of whole pages without the pages in `left_out`."""
    for first, last in ranges:
        for gone in sorted(p for p in left_out if first <= p < last):
            if first < gone:
                yield first, gone
            first = gone + page
        if first < last:
            yield first, last


def why_not_private(spans: Sequence[Span]) -> str:
    """Return why memory may be written without this process's page tables, or "". `spans` are sorted and disjoint."""
    try:
        with open("/proc/self/maps", "rb") as table:
            lines = table.read().splitlines()
    except OSError as cause:
        return f"/proc/self/maps: {cause}"
    next_span = 0
    for line in lines:
        if next_span == len(spans):
            return ""
        first, _, rest = line.partition(b"-")
        end, access = rest.split(b" ", 2)[:2]
        start, stop = int(first, 16), int(end, 16)
        while next_span < len(spans) and spans[next_span][0] < stop:
            if spans[next_span][1] <= start:
                return "memory that is not mapped"
            if reason := _refusal(access, line):
                return reason
            if spans[next_span][1] > stop:
                break  # the span continues in the next mapping
            next_span += 1
    return "" if next_span == len(spans) else "memory that is not mapped"


def _refusal(access: bytes, line: bytes) -> str:
    named = line.split(maxsplit=5)[5:]
    if access[3:4] != b"p":
        return "memory that processes share"
    if named and not named[0].startswith((b"[heap]", b"[anon", b"[stack")):
        return "memory that a file is mapped to"
    return ""
