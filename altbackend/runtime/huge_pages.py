"""Advice to Linux: back the large new tensors and workspaces of a CPU graph with huge pages.

The first access to each page of new memory is a page fault, in which the kernel clears that page. Huge pages of
2 MiB instead of 4 KiB make 512 faults into one. Linux gives them only to memory that was advised, if its switch is on
`madvise`. The C++ host programs do the same in `include/altbackend/aot/huge_pages.h`.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable

LEAST_BYTES = 4 << 20  # twice a huge page: wherever such memory begins, it contains an aligned one

_SWITCH = "/sys/kernel/mm/transparent_hugepage/enabled"
_MADV_HUGEPAGE = 14

Madvise = Callable[[int, int, int], int]


def is_on_advice(switch: str) -> bool:
    """Return whether Linux gives huge pages to advised memory alone, as the file `switch` says.

    With `always`, all memory gets them without advice; with `never`, none does.
    """
    try:
        with open(switch, encoding="ascii") as file:
            return "[madvise]" in file.read()
    except OSError:  # a kernel without huge pages, or a container that hides the file
        return False


def _find_madvise() -> Madvise | None:
    """Return libc's `madvise`, or None where advice has no effect."""
    if sys.platform != "linux" or not is_on_advice(_SWITCH):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


_madvise = _find_madvise()


def advise(address: int, nbytes: int) -> None:
    """Advise the pages of the `nbytes` bytes at `address`, if they are at least `LEAST_BYTES`.

    The first and the last page may be shared with other memory, such as malloc's header: advice changes no contents.
    Without them, two neighbours would be mappings of their own, and no huge page could span both. An error of the
    kernel is ignored: the memory keeps its small pages, and every result is the same.
    """
    if nbytes >= LEAST_BYTES and _madvise is not None:
        first = address // mmap.PAGESIZE * mmap.PAGESIZE
        end = -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        _madvise(first, end - first, _MADV_HUGEPAGE)
