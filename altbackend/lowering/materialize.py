"""Decide which values of a graph are stored, and which each reader computes."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator

import torch

from ..aten.comparison import is_compared_exactly, is_searched
from ..aten.name import operator_name, words
from ..aten.pointwise import is_pointwise
from ..aten.view import passes_storage_on
from ..compat import torch_api
from ..ir import expr as ex
from ..ir import value as va
from . import padded_copies
from .context import Ctx, target_name
from .parts import Part, most_of_an_element, part_taken
from .repeated_terms import stored_statistic
from .temporary_layout import are_kernels, operand_strides, readers
from .tensor import Tensor, axes

_SHAPE_ONLY = frozenset(
    [f"{n}.default" for n in ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros")]
    + ["philox_uniform", "philox_normal", "philox_integers"]
)


def materialize_if_shared(ctx: Ctx, node: torch.fx.Node, result: object, buffers_before: int) -> object:
    """Store a value that several users would recompute, or that has grown too large to inline.

    `buffers_before`: the number of buffers before the node was lowered.
    """
    if isinstance(result, tuple):
        return tuple(_materialize_one(ctx, node, t, k, buffers_before) for k, t in enumerate(result))
    return _materialize_one(ctx, node, result, None, buffers_before)


def _materialize_one(ctx: Ctx, node: torch.fx.Node, t: object, k: int | None, buffers_before: int) -> object:
    if not isinstance(t, Tensor):
        return t
    fake = node.meta["val"] if k is None else node.meta["val"][k]
    if not passes_storage_on(node) and _returned(ctx, node, k) > 1:
        # results that are views of one value share its memory, as in eager, and share none with other values
        own = _has_own_buffer(ctx, t, buffers_before) or _shares_storage(node, fake)
        return ctx.realize(t, fake, fresh=not own)
    if t.value.op in ("load", "const"):
        return t
    users = _readers(node, k)
    cost = va.flops(t.value)
    reads = len(va.loads(t.value))
    large = reads > MOST_LOADS or cost > ctx.cfg.inline_limit or t.value.depth > DEEPEST
    compared = is_compared_exactly(node) or (_returned(ctx, node, k) and is_searched(node))
    compared = compared and not _is_selected(t)
    most_large = 2 if ctx.gpu and k is None and _meets_in_one_reader(node) else 1
    if not large and (users <= 1 or (not compared and _is_cheap(ctx, t, cost, most_large))):
        return stored_statistic(ctx, node, t) or t
    strides = operand_strides(ctx, node, k, t, fake)
    if ctx.gpu and k is None and not large and padded_copies.leads_to_one_padding(ctx, node):
        return t
    narrow = va.before_widening(t.value)
    if ctx.gpu and narrow is not t.value and not _returned(ctx, node, k) and are_kernels(readers(node, k)):
        stored = ctx.realize(Tensor(t.sizes, narrow.dtype, narrow), fake, strides=strides)
        return Tensor(t.sizes, t.dtype, va.cast(stored.value, t.dtype))
    if ctx.gpu and k is None and strides is None:
        if not large and padded_copies.is_padded_behind_views(ctx, node):
            return t  # the view is stored
        if padding := padded_copies.padding_of(ctx, node):
            return padded_copies.store(ctx, t, padding)
    return ctx.realize(t, fake, strides=strides)


def _has_own_buffer(ctx: Ctx, t: Tensor, buffers_before: int) -> bool:
    """Return whether `t` is in a buffer that was added after the first `buffers_before`, by the node being lowered."""
    new_buffers = itertools.islice(reversed(ctx.buffers), len(ctx.buffers) - buffers_before)
    return t.value.op == "load" and t.value.attr[0] in new_buffers


def _shares_storage(node: torch.fx.Node, fake: torch.Tensor) -> bool:
    """Return whether tracing saw the result of a node in the storage of an argument."""
    storage = torch_api.storage_of(fake)
    return any(torch_api.storage_of(n.meta.get("val")) == storage for n in node.all_input_nodes)


MOST_LOADS = 24
DEEPEST = 120  # functions that walk a value recurse once per level, on top of the user's call stack
# The operations and loads of a value that is recomputed by each reader: about as long as one load of the stored value.
RECOMPUTE_FLOPS, RECOMPUTE_FLOPS_ON_GPU, RECOMPUTE_LOADS = 1, 16, 6


def _meets_in_one_reader(node: torch.fx.Node) -> bool:
    """Return whether one pointwise operator reads a value in two orders, and nothing else reads it, as `x + x.flip(0)`.

    Recomputing both places reads the operands twice, the second time mostly from the cache. Storing the value would
    write it and read it as well.
    """
    readers = set(_readers_of_orders(node))
    return len(readers) == 1 and all(is_pointwise(n.target) for n in readers)


def _readers_of_orders(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Yield the readers of a node, and those of its views, flips and rolls in their place."""
    for user in node.users:
        moves = user.op == "call_function" and (passes_storage_on(user) or operator_name(user.target) in _ORDERS)
        yield from _readers_of_orders(user) if moves else (user,)


_ORDERS = words("flip roll")


def _is_cheap(ctx: Ctx, t: Tensor, cost: int, most_large: int) -> bool:
    """Return whether recomputing a value costs its readers less than loading it: few operations, few large loads.

    A load that lacks a loop variable, such as the mean of a row, comes from a register or the cache. `most_large`: the
    loads of the value's size that readers may repeat.
    """
    loads = va.loads(t.value)
    if not loads:
        return cost <= 8
    if cost <= 1 and len(loads) <= 1:
        return True
    every = {a for a, n in zip(axes(t.sizes), t.sizes, strict=True) if n != 1}
    if ctx.gpu:
        cost = va.flops(t.value, every)  # a tile computes the values of a row once
    large = [b for b, i in loads if every <= set(ex.vars_of(i))]
    most = RECOMPUTE_FLOPS_ON_GPU if ctx.gpu else RECOMPUTE_FLOPS
    if cost > most or len(loads) > RECOMPUTE_LOADS or len(large) > most_large:
        return False
    return cost <= RECOMPUTE_FLOPS or all(ctx.buffers[b].dtype.itemsize <= t.dtype.itemsize for b in large)


# Operators without rounding: no contraction of a product and a sum changes the bits of their results.
_SELECTS = words("load const index masked where eq ne lt le gt ge logical_and logical_or logical_not")


def _is_selected(t: Tensor) -> bool:
    """Return whether every element is a constant or an element in memory, so that all readers compute equal bits."""
    return all(v.op in _SELECTS for v in va.walk(t.value))


def _returned(ctx: Ctx, node: torch.fx.Node, k: int | None = None) -> int:
    """Return the number of the graph's results that are the node, its result number `k`, or a view of it."""
    total = ctx.returned[node]
    for user in node.users:
        if k is not None and user.target is operator.getitem and user.args[1] != k:
            continue
        if user.op == "call_function" and passes_storage_on(user):
            total += _returned(ctx, user)
    return total


def _readers(node: torch.fx.Node, k: int | None) -> int:
    """Return the number of users that read an element of a node, the most of any; a view's users count in its place.

    The two halves of a gate have one reader each, and each element has one.
    """
    total, parts = 0, list[tuple[Part, int]]()
    for user in node.users:
        if k is not None and user.target is operator.getitem and user.args[1] != k:
            continue
        if user.op == "call_function" and target_name(user.target) in _SHAPE_ONLY:
            continue
        count = _readers(user, None) if user.op == "call_function" and passes_storage_on(user) else 1
        if k is None and (part := part_taken(user)) is not None:
            parts.append((part, count))
        else:
            total += count
    return total + most_of_an_element(parts)
