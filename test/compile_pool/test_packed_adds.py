"""Packed 16-bit additions in PTX become 32-bit instructions of the same result."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest

from altbackend.compile_pool import cubin_worker
from altbackend.compile_pool.packed_adds import without_packed_adds

pytest.importorskip("triton")

ADD = "\tmov.b32 \t%r3, 65537;\n\tadd.s16x2 \t%r4, %r1, %r2;\n"
OPERATIONS = {"and": lambda a, b: a & b, "xor": lambda a, b: a ^ b, "add": lambda a, b: (a + b) & 0xFFFFFFFF}

# averages over 7 windows of 66 elements: LLVM computes the windows in 16 bits, two at once
WINDOWS = """
import triton
import triton.language as tl


@triton.jit
def kernel(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    window = (at % 66 * 7 + 6) // 66
    first = window * 66 // 7
    count = (window * 66 + 72) // 7 - first
    tl.store(y + at, tl.load(x + at // 66 * 7 + window) / count + first)
"""


def run(ptx: str, registers: dict[str, int]) -> dict[str, int]:
    """Return the registers after the 32-bit instructions of `ptx`."""
    for name, to, a, b in re.findall(r"(\w+)\.[bs]32\s+(%?\w+), (%?\w+), (%?\w+);", ptx):
        left, right = (registers[v] if v in registers else int(v, 0) for v in (a, b))
        registers[to] = OPERATIONS[name](left, right)
    return registers


@pytest.mark.parametrize("a", [0, 1, 0x0001FFFF, 0x7FFF8000, 0x80008000, 0xFFFFFFFF, 0x12345678])
@pytest.mark.parametrize("b", [0x00010001, 0xFFFFFFFF, 0x80008000, 0x7FFF7FFF, 0x9ABCDEF0])
def test_the_halves_are_added_apart(a: int, b: int) -> None:
    low, high = ((a & 0xFFFF) + (b & 0xFFFF)) & 0xFFFF, ((a >> 16) + (b >> 16)) & 0xFFFF
    assert run(without_packed_adds(ADD), {"%r1": a, "%r2": b})["%r4"] == high << 16 | low


def test_other_instructions_remain() -> None:
    text = "\tadd.s32 \t%r4, %r1, %r2;\n\tadd.s16 \t%rs1, %rs2, %rs3;\n"
    assert without_packed_adds(text) == text


def test_kernels_are_built_without_packed_additions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The text of this kernel has them as LLVM writes it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    signature = {"x": "*fp32", "y": "*fp32", "BLOCK": "constexpr"}
    job = {"source": WINDOWS, "signature": signature, "constexprs": {"BLOCK": 2048}, "aligned": [0, 1], "warps": 4}
    job |= {"stages": 1, "capability": 90, "contract": True, "ptx": True, "name": "windows", "key": "0"}
    seen = list[str]()

    def note(ptx: str) -> str:
        seen.append(ptx)
        return without_packed_adds(ptx)

    monkeypatch.setattr("altbackend.compile_pool.packed_adds.without_packed_adds", note)
    answer = cubin_worker.compile_job(job)
    assert "error" not in answer
    (text,) = seen
    assert "add.s16x2" in text
    assert b"add.s16x2" not in base64.b64decode(answer["cubin"])
