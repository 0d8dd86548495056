"""A bundle of alike kernels as one Triton kernel: each program finds out whose range it works on.

The pointers of all parts are arguments. A program's number decides, by comparisons with where each part's programs
start, which of them it takes; the work itself is printed once.
"""

from __future__ import annotations

from ...schedule.device import Target
from ...schedule.horizontal_fusion import Bundle
from ..cpp.ast import Param
from . import print_triton, tile, tile_ast
from .print_triton import TritonKernel


def emit(b: Bundle, target: Target) -> tuple[TritonKernel, tuple[str, ...]]:
    """The kernel, and the program buffers that its parameters stand for."""
    f = tile.emit(b.body, b.kernel, target)
    block = f.blocks.xblock
    counts = [-(-n // block) for n in b.points]
    starts = [sum(counts[:k]) for k in range(len(counts))]
    params = [Param(f"{q.name}_{k}", q.dtype, q.written) for q in f.params for k in range(len(counts))]
    source = print_triton.source(f, pointers=[q.name for q in params], header=_chosen(f, starts, b.points))
    kernel = TritonKernel(
        source=source,
        params=tuple(params),
        symbols=(),
        constexprs=f.blocks.constexprs,
        grid=(sum(counts),),
        num_warps=f.blocks.warps,
        num_stages=1,
        label=print_triton.label("bundle", b.kernel.origins),
    )
    return kernel, tuple(name for role in f.buffers for name in b.operands[role])


def _chosen(f: tile_ast.TileFunction, starts: list[int], points: tuple[int, ...]) -> list[str]:
    """Lines that leave a program with its part's pointers, length, and number within the part."""
    names = [q.name for q in f.params]
    lines = [*(f"{x} = {x}_0" for x in names), "first = 0", f"n = {points[0]}"]
    for k in range(1, len(starts)):
        lines.append(f"here = program >= {starts[k]}")
        lines += [f"{x} = tl.where(here, {x}_{k}, {x})" for x in names]
        lines += [f"first = tl.where(here, {starts[k]}, first)", f"n = tl.where(here, {points[k]}, n)"]
    return [*lines, "program = program - first"]
