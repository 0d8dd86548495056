"""Finished kernels of a GPU: a kernel with its blocks, passes, cheap functions and second kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from altbackend.lazy_dataclass import dataclass

from ....ir import expr as ex
from ....ir import value as va
from ....ir.expr import Atom, Index
from ....ir.loops import Buffer, Extern, Loop, Origin, Program, Reduction
from ....ir.value import Value
from ...deps import Deps
from ...device import Gpu, ScheduleContext
from ...fusion.group import Decision
from ...horizontal_parts import HorizontalKernel, Step
from ...kernel import SCALAR, Kernel, Stage
from ...loop_mapping import Kind, MappedNode
from .blocks import Blocks, Form
from .choose import choose_blocks
from .expressible import expressible_kernels
from .fast_math import only_low_precision, with_fast_math
from .one_pass import Joined, joined_passes
from .separate_stages import separate_stages


@dataclass(frozen=True)
class PartialTotal:
    """A reduction over rows of which every program leaves `numel` partial results of `dtype` in a workspace.

    Number `slot` of the final results is `op` over the programs, stored at `index` of the buffer `out`.
    """

    out: str
    workspace: str
    dtype: torch.dtype
    numel: Index
    op: str
    slot: Atom
    index: Index


@dataclass(frozen=True)
class FinishKernel:
    """A second kernel, which reduces workspaces to results, with the program whose buffers it names."""

    program: Program
    tiled: TiledKernel


@dataclass(frozen=True)
class TiledKernel:
    """A kernel that only has to be printed.

    `passes`: the stages, or two of them as one pass.
    `low_precision`: all functions take their cheap form.
    `fast_values`: the values of nodes in which only some functions do.
    `fast_math`: results need not equal eager's to the last bit.
    `partials`: by buffer, reductions that programs leave unfinished; the `finish` kernels run afterwards.
    """

    kernel: Kernel
    blocks: Blocks
    passes: tuple[Stage | Joined, ...]
    low_precision: bool
    fast_values: dict[Loop, Value]
    fast_math: bool
    partials: dict[str, PartialTotal]
    finish: tuple[FinishKernel, ...]

    @property
    def long_stages(self) -> list[Stage]:
        """Return the stages that read their row in several blocks."""
        return _long_stages(self.kernel, self.blocks)


@dataclass(frozen=True)
class TiledHorizontal:
    """A horizontal kernel that only has to be printed; `tiled` is the work of one part."""

    launch: HorizontalKernel
    tiled: TiledKernel


TiledStep = tuple[Step, list[TiledKernel] | TiledHorizontal]


def tile_steps(
    p: Program, deps: Deps, steps: Sequence[Step], ctx: ScheduleContext, decide: Decision
) -> Iterator[TiledStep]:
    """Yield each step with its finished kernels, several where tiles cannot express a kernel as one.

    A library call has none. The kernels of a step are finished only when the step is asked for, so that the first ones
    compile meanwhile.
    """
    for step in steps:
        if isinstance(step, Extern):
            yield step, []
        elif isinstance(step, HorizontalKernel):
            yield step, TiledHorizontal(step, tile_kernel(step.body, step.kernel, ctx))
        else:
            stages = separate_stages(p, deps, step, ctx.device, decide)
            parts = [x for k in stages for x in expressible_kernels(p, deps, k, ctx.device, decide)]
            yield step, [tile_kernel(p, part, ctx) for part in parts]


def tile_kernel(p: Program, k: Kernel, ctx: ScheduleContext, blocks: Blocks | None = None) -> TiledKernel:
    """Finish a kernel for a GPU. `blocks`: use these instead of those that the rules choose."""
    assert isinstance(ctx.device, Gpu)
    blocks = blocks or choose_blocks(p, k, ctx.device)
    low_precision = ctx.fast_math and only_low_precision(p, k)
    partials = _partials(k, blocks)
    return TiledKernel(
        kernel=k,
        blocks=blocks,
        passes=tuple(joined_passes(k.stages, _long_stages(k, blocks), k.stored)),
        low_precision=low_precision,
        fast_values=with_fast_math(p, k) if ctx.fast_math and not low_precision else {},
        fast_math=ctx.fast_math,
        partials={t.out: t for t in partials},
        finish=tuple(_finish(p, blocks, same_size, ctx) for same_size in _by_size(partials)),
    )


def _long_stages(k: Kernel, blocks: Blocks) -> list[Stage]:
    if blocks.flat:
        return []
    return [s for s in k.stages if blocks.looped(ex.prod(ex.size_of(v) for v in s.inner))]


# --- totals of programs ----------------------------------------------------------------------------------------------


def _partials(k: Kernel, blocks: Blocks) -> list[PartialTotal]:
    """Return the reductions that a persistent program cannot finish, in the order of the nodes."""
    if blocks.form is not Form.PERSISTENT:
        return []
    across = [q for q in k.nodes if q.kind is Kind.CROSS_ROW or (blocks.flat and q.kind is Kind.IN_ROW)]
    return [_partial(n, q, blocks) for n, q in enumerate(across)]


def _partial(number: int, q: MappedNode, blocks: Blocks) -> PartialTotal:
    node = q.node
    assert isinstance(node, Reduction)
    single = blocks.flat or bool(q.reduced)
    numel: Index = 1 if single else q.points
    slot = ex.var("i0", numel)
    if single or numel == 1:
        env = {v: ex.ix(slot) for v in ex.vars_of(q.index)}
    else:
        env = dict(zip(q.inner, ex.unflatten(ex.ix(slot), q.sizes), strict=True))
    index = ex.substitute(q.index, env)
    return PartialTotal(node.out, f"partials{number}", q.value.dtype, numel, node.op, slot, index)


def _by_size(partials: Sequence[PartialTotal]) -> list[list[PartialTotal]]:
    """Group totals of equally many results, which share their second kernel."""
    groups: dict[Index, list[PartialTotal]] = {}
    for t in partials:
        groups.setdefault(t.numel, []).append(t)
    return list(groups.values())


def _finish(p: Program, blocks: Blocks, partials: Sequence[PartialTotal], ctx: ScheduleContext) -> FinishKernel:
    """Return the kernel that reduces the workspaces: its rows are results, the points of a row are the programs."""
    count, numel = blocks.programs, partials[0].numel
    buffers, mapped = dict(p.buffers), []
    row, point = ex.var("o", numel), ex.var("i0", count)
    for t in partials:
        device = p.buffers[t.out].device
        buffers[t.workspace] = Buffer(t.workspace, t.dtype, (count, numel), (numel, 1), device)
        value = va.load(t.workspace, ex.add(ex.mul(ex.ix(point), numel), ex.ix(row)), t.dtype)
        index = ex.substitute(t.index, {t.slot: ex.ix(row)})
        node = Reduction(t.out, (row,), (point,), index, t.op, value, (Origin("", "totals_of_programs"),))
        mapped.append(MappedNode(node, Kind.IN_ROW, row, (point,), frozenset((point,)), index, value))
    outs = frozenset(t.out for t in partials)
    kernel = Kernel(
        rows=numel,
        flat=False,
        stages=(Stage((point,), tuple(mapped)),),
        storage=dict.fromkeys(outs, SCALAR),
        stored=outs,
        scratch={},
        work=0,
        members=(),
        origins=(),
    )
    program = Program(buffers, (), (), ())
    return FinishKernel(program, tile_kernel(program, kernel, ctx))


def pairs_in_one_pass(t: TiledKernel) -> tuple[tuple[str, str], ...]:
    """Return the pairs of buffers that may share memory: those of a kernel that reads each element in a single pass.

    A second pass could read an element after another thread of the program has overwritten it.
    """
    single = len(t.passes) == 1 and isinstance(t.passes[0], Stage) and t.kernel.matmul is None
    return t.kernel.in_place if single else ()
