"""A second build for kernels whose threads spill much into local memory.

The assembler of CUDA 13 gives some kernels 32 registers and spills the rest, thousands of bytes a thread: a kernel took
13.6 ms for 0.8. Where the limit of registers is stated, it does not.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from types import SimpleNamespace

MUCH = 256  # bytes of local memory of a thread from which a second build is worth its time
REGISTERS, MOST_OF_THREAD, WARP, UNIT = 65_536, 255, 32, 8  # of a multiprocessor; of a thread; threads; granularity
_NOTES = b".nv.info"
_FRAME_SIZE = 0x11  # attribute of `.nv.info`: symbol, then the bytes of a thread's stack frame
_HAS_PAYLOAD = 4  # format of an attribute that is followed by its payload


def least_spilled(build: Callable[[dict[str, int]], SimpleNamespace], warps: int) -> SimpleNamespace:
    """Return the kernel that `build` compiles, with a stated limit of registers if that spills less.

    `build` takes further options of Triton and returns its compiled kernel, whose `asm` has the machine code.
    """
    kernel = build({})
    spilled = frame_bytes(kernel.asm["cubin"])
    if spilled < MUCH:
        return kernel
    limit = min(MOST_OF_THREAD, REGISTERS // (WARP * warps) // UNIT * UNIT)
    try:
        second = build({"maxnreg": limit})
    except Exception:  # the first one runs
        return kernel
    return second if frame_bytes(second.asm["cubin"]) < spilled else kernel


def frame_bytes(cubin: bytes) -> int:
    """Return the bytes of local memory that a thread of a kernel uses. Raises ValueError if `cubin` is no ELF file."""
    if not cubin.startswith(b"\x7fELF"):
        raise ValueError("machine code of a GPU is an ELF file")
    sizes = [size for name, content in _sections(cubin) if name == _NOTES for size in _frame_sizes(content)]
    return max(sizes, default=0)


def _sections(cubin: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the name and the content of each section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    width, count, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + k * width) for k in range(count)]
    names = headers[names_at][4]
    for name, _, _, _, start, size in headers:
        end = cubin.index(b"\0", names + name)
        yield cubin[names + name : end], cubin[start : start + size]


def _frame_sizes(notes: bytes) -> Iterator[int]:
    """Yield the frame sizes among the attributes of a `.nv.info` section: format, attribute, 16 bits, payload."""
    at = 0
    while at + 4 <= len(notes):
        form, attribute, length = struct.unpack_from("<BBH", notes, at)
        at += 4
        if form == _HAS_PAYLOAD:
            if attribute == _FRAME_SIZE:
                yield struct.unpack_from("<I", notes, at + 4)[0]
            at += length
