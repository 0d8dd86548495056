"""Print a horizontal kernel as one Triton kernel: each program selects the tensors of its part.

The pointers of all parts are arguments. A program compares its number with the first program of every part and so
selects the part's pointers; the work itself is printed once.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...schedule.tiling.gpu.tiled import TiledHorizontal
from ..cpp.ast import Param
from . import print_triton, tile, tile_ast
from .print_triton import TritonKernel


def emit(horizontal: TiledHorizontal) -> tuple[TritonKernel, tuple[str, ...]]:
    """Return the kernel, and the program buffers that its parameters stand for."""
    launch = horizontal.launch
    f = tile.emit(launch.body, horizontal.tiled)
    counts = [-(-n // f.blocks.xblock) for n in launch.points]
    starts = [sum(counts[:k]) for k in range(len(counts))]
    params = [Param(f"{q.name}_{k}", q.dtype, q.written) for q in f.params for k in range(len(counts))]
    header = _select_part(f, starts, launch.points)
    kernel = TritonKernel(
        source=print_triton.source(f, pointers=[q.name for q in params], header=header),
        params=tuple(params),
        symbols=(),
        constexprs=f.blocks.constexprs,
        grid=(sum(counts),),
        num_warps=f.blocks.warps,
        num_stages=1,
        label=print_triton.label("horizontal", launch.kernel.origins),
    )
    return kernel, tuple(name for role in f.buffers for name in launch.operands[role])


def _select_part(f: tile_ast.TileFunction, starts: Sequence[int], points: Sequence[int]) -> list[str]:
    """Return lines that define a program's pointers, its length `n`, and its number within its part."""
    names = [q.name for q in f.params]
    lines = [*(f"{x} = {x}_0" for x in names), "first = 0", f"n = {points[0]}"]
    for k in range(1, len(starts)):
        lines.append(f"here = program >= {starts[k]}")
        lines += [f"{x} = tl.where(here, {x}_{k}, {x})" for x in names]
        lines += [f"first = tl.where(here, {starts[k]}, first)", f"n = tl.where(here, {points[k]}, n)"]
    return [*lines, "program = program - first"]
