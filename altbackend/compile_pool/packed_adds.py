"""Replace additions of packed 16-bit integers in PTX, which NVIDIA's assembler translates wrongly.

Two `add.s16x2` may share an operand that is a constant. ptxas (12.8 to 13.1 at least) then drops the constant of one
of them in one half: triton-lang/triton#11581. LLVM makes such additions of indices that fit into 16 bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

# The halves are added without their top bits, so that no carry crosses; the top bits are added by exclusive or:
#     sum = ((a & 0x7fff7fff) + (b & 0x7fff7fff)) ^ ((a ^ b) & 0x80008000)
_WITHOUT_PACKING = r"""\1{
\1	.reg .b32 low, other, top;
\1	and.b32 low, \3, 0x7fff7fff;
\1	and.b32 other, \4, 0x7fff7fff;
\1	xor.b32 top, \3, \4;
\1	and.b32 top, top, 0x80008000;
\1	add.s32 low, low, other;
\1	xor.b32 \2, low, top;
\1}"""
_PACKED_ADD = re.compile(r"^([ \t]*)add\.s16x2[ \t]+(%\w+),[ \t]*(%\w+),[ \t]*(%\w+);", re.MULTILINE)


def without_packed_adds(ptx: str) -> str:
    """Return the text with each packed 16-bit addition as 32-bit instructions of the same result."""
    return _PACKED_ADD.sub(_WITHOUT_PACKING, ptx)


class _Compiler(Protocol):
    """The methods of Triton's compiler class that are replaced."""

    make_ptx: Callable[..., str]
    hash: Callable[..., str]


def replace_packed_adds(backend: _Compiler) -> None:
    """Make Triton's compiler class `backend` pass the text of every kernel through `without_packed_adds`.

    The class's identity changes with it, so that Triton's cache keeps such kernels apart.
    """
    make_ptx: Callable[..., str] = backend.make_ptx
    identity: Callable[..., str] = backend.hash

    def make(self: object, *arguments: object) -> str:
        return without_packed_adds(make_ptx(self, *arguments))

    backend.make_ptx = make
    backend.hash = lambda self: f"{identity(self)}-32-bit-additions"
