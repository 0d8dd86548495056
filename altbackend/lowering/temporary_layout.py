"""The layout of temporaries: the order in which their operands lie in memory.

A tracing tensor has the strides that eager would give it, which broadcast operands decide too. The gradient of a mean,
an expanded number, times a one-hot mask that a `permute` turned has the layout of the mask, which no kernel reads from
memory. Kernels that then combine it with plain tensors would read or write at a stride.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence

import torch

from ..aten.name import operator_name, words
from ..aten.pointwise import is_pointwise
from ..aten.reduction import is_normalisation, is_reduction
from ..aten.view import is_view
from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Index
from ..ir.loops import Reduction
from .context import Ctx, dense_strides, memory_order
from .tensor import Tensor, axes


def operand_strides(
    ctx: Ctx, node: torch.fx.Node, k: int | None, t: Tensor, fake: torch.Tensor
) -> tuple[Index, ...] | None:
    """Return dense strides in the order of the operands of `t`; None where the traced order `fake` is to stay.

    `t` is the value of `node`, or its result number `k`. The traced order stays where an operand has it, and where
    others than kernels read the value.
    """
    if not (is_pointwise(node.target) or is_normalisation(node.target) or _converts(node)):
        return None
    if not are_kernels(readers(node, k)):
        return None
    return order_of_operands(ctx, [t], t.sizes, fake)


def order_of_operands(
    ctx: Ctx, parts: Sequence[Tensor], sizes: Sequence[Index], fake: torch.Tensor
) -> tuple[Index, ...] | None:
    """Return dense strides of `sizes` in the order of the operands of `parts`; None where one has that of `fake`.

    Where operands lie in several orders, the order of rows whose statistics a GPU has computed comes first: the kernel
    of the statistics then computes the parts, too.
    """
    orders = [order for t in parts for _, order in _orders(t)]
    traced = memory_order(ctx.shape(fake.stride()), sizes)
    if traced not in orders:
        return dense_strides(orders[0], sizes) if orders else None
    if not ctx.gpu or all(order == traced for order in orders):
        return None
    along = next((order for t in parts if (order := _order_of_rows(ctx, t)) is not None), traced)
    return dense_strides(along, sizes) if along != traced else None


def _order_of_rows(ctx: Ctx, t: Tensor) -> list[int] | None:
    """Return the order of an operand whose rows lie in memory and have statistics that `t` reads; None without one."""
    axis_of: dict[str, int] = {}
    live = [k for k, n in enumerate(t.sizes) if n != 1]
    for b, index in va.loads(t.value):
        missing = [k for k in live if ex.coefficient(index, axes(t.sizes)[k]) == 0]
        if len(missing) == 1 and len(live) > 1:
            axis_of[b] = missing[0]
    statistics = [n for n in ctx.nodes if isinstance(n, Reduction) and n.out in axis_of] if axis_of else []
    reduced = {b for n in statistics for b, _ in va.loads(n.value)}
    axes_of_rows = {axis_of[n.out] for n in statistics}
    return next((order for b, order in _orders(t) if b in reduced and order[-1] in axes_of_rows), None)


def readers(node: torch.fx.Node, k: int | None) -> Iterator[torch.fx.Node]:
    """Yield the readers of a node, or of its result number `k`; those of its parts and of detached values too."""
    for u in node.users:
        if u.target is operator.getitem:
            yield from readers(u, None) if k in (None, u.args[1]) else ()
        elif operator_name(u.target) in _PARTS:
            yield from readers(u, None)
        else:
            yield u


_PARTS = words("detach slice split split_with_sizes")  # views in the order of memory of the whole


def are_kernels(nodes: Iterable[torch.fx.Node]) -> bool:
    """Return whether kernels compute all nodes from their operands, whatever the layouts of these."""
    return all(is_computed(n) or _converts(n) for n in nodes)


def _converts(n: torch.fx.Node) -> bool:
    """Return whether a node converts its operand to another dtype, on the same device and in the same layout."""
    same_layout = n.kwargs.get("memory_format") in (None, torch.preserve_format) and not n.kwargs.get("layout")
    return operator_name(n.target) == "_to_copy" and same_layout and "device" not in n.kwargs


def reduced_strides(ctx: Ctx, order: Sequence[int], sizes: Sequence[Index]) -> tuple[Index, ...]:
    """Return the strides of the results of a reduction, which are `sizes`, of an operand that lies in `order`.

    The results lie in the order of the operand, so that the loops over both are the same. They are row-major where
    others than kernels read the results of the node. On a GPU, whose tiles are turned over in registers, they are
    row-major, too, unless the fastest dimension of the operand remains, as of means over a batch of channels-last
    images. A kernel that reads both would read each of them from a sector of its own.
    """
    fake = ctx.node.meta["val"]
    is_result = isinstance(fake, torch.Tensor) and ex.prod(ctx.shape(fake.shape)) == ex.prod(sizes)
    if ctx.gpu:
        follows = is_result and sizes[order[-1]] != 1 and is_temporary(ctx, ctx.node)
    else:
        follows = not is_result or all(is_computed(u) for u in ctx.node.users)
    return dense_strides(order, sizes) if follows else ex.strides_for(tuple(sizes))


def is_computed(n: torch.fx.Node) -> bool:
    """Return whether a kernel computes a node from its operands element by element, whatever their layouts."""
    by_statistics = operator_name(n.target) == "_native_batch_norm_legit_no_training"  # whose statistics are inputs
    return by_statistics or is_pointwise(n.target) or is_reduction(n.target) or is_normalisation(n.target)


def is_temporary(ctx: Ctx, n: torch.fx.Node) -> bool:
    """Return whether kernels alone read a node, perhaps through views, so that its value may lie in any layout."""
    readers_take_any = all(are_kernels([u]) or (is_view(u) and is_temporary(ctx, u)) for u in n.users)
    return readers_take_any and not ctx.returned[n]


def _orders(t: Tensor) -> Iterator[tuple[str, list[int]]]:
    """Yield each operand that has as many elements as `t`, and its order of memory."""
    for b, index in va.loads(t.value):
        strides = [ex.stride(index, a) for a in axes(t.sizes)]
        full = all(n == 1 or (isinstance(c, int) and c > 0) for c, n in zip(strides, t.sizes, strict=True))
        if full:
            yield b, memory_order([1 if c is None else c for c in strides], t.sizes)
