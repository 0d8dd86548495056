"""Kernels that spill are built a second time, and the one that spills less is used."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from altbackend.compile_pool.cubin_worker import _function, _triton
from altbackend.compile_pool.spills import MUCH, frame_bytes, least_spilled

triton = pytest.importorskip("triton")

WARPS = 4
SOURCE = """
import triton
import triton.language as tl


@triton.jit
def kernel(in0, out0, BLOCK: tl.constexpr):
    x = tl.arange(0, BLOCK)
    t0 = tl.load(in0 + x)
    t1 = tl.load(in0 + x + BLOCK)
    tl.debug_barrier()
    total = tl.sum(t0 * t1, 0)
    tl.store(out0 + x, t0 / total)
    tl.store(out0 + x + BLOCK, t1 * total)
"""


@functools.cache
def compiled(limit: int) -> SimpleNamespace:
    """Return a kernel whose threads hold 64 numbers, with at most `limit` registers."""
    job = {"source": SOURCE, "name": "kernel", "key": f"spills{limit}"}
    _, source, target = _triton()
    kernel: SimpleNamespace = triton.compile(
        source(_function(job), {"in0": "*fp32", "out0": "*fp32", "BLOCK": "constexpr"}, {(2,): 4096}),
        target=target("cuda", 90, 32),
        options={"num_warps": WARPS, "maxnreg": limit},
    )
    return kernel


def assembler_says(cubin: bytes, folder: Path) -> int:
    """Return the stack of a kernel in bytes, as NVIDIA's tool reads it."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    run = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True)
    return max(map(int, re.findall(r"STACK:(\d+)", run.stdout)))


@pytest.mark.parametrize("limit", [32, 64, 255])
def test_local_memory_is_what_the_tool_of_the_assembler_says(limit: int, tmp_path: Path) -> None:
    cubin = compiled(limit).asm["cubin"]
    assert frame_bytes(cubin) == assembler_says(cubin, tmp_path)


def test_a_kernel_that_spills_is_built_again_with_more_registers() -> None:
    asked = []

    def build(more: dict[str, int]) -> SimpleNamespace:
        asked.append(more)
        return compiled(more.get("maxnreg", 32))

    assert frame_bytes(compiled(32).asm["cubin"]) >= MUCH
    assert least_spilled(build, WARPS) is compiled(255)
    assert asked == [{}, {"maxnreg": 255}]


def test_the_limit_fits_all_threads_of_a_program() -> None:
    asked = []

    def build(more: dict[str, int]) -> SimpleNamespace:
        asked.append(more)
        return compiled(32)

    least_spilled(build, 16)
    assert asked == [{}, {"maxnreg": 128}]


def test_a_second_build_that_spills_no_less_is_not_used() -> None:
    first = SimpleNamespace(asm=compiled(32).asm)
    assert least_spilled(lambda more: compiled(32) if more else first, WARPS) is first


def test_a_second_build_that_fails_leaves_the_first_one() -> None:
    def build(more: dict[str, int]) -> SimpleNamespace:
        if more:
            raise RuntimeError("no such option")
        return compiled(32)

    assert least_spilled(build, WARPS) is compiled(32)


def test_a_kernel_without_spills_is_built_once() -> None:
    builds = iter([compiled(255)])
    assert least_spilled(lambda _: next(builds), WARPS) is compiled(255)


def test_other_files_are_refused() -> None:
    with pytest.raises(ValueError, match="ELF"):
        frame_bytes(b"// PTX")
