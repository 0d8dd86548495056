"""Operands of an attention with four dimensions: (batch, heads, positions, features)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.fx import Node

from ..simplify import same_sizes
from .builder import Builder
from .form import Form
from .operators import Lead as Lead
from .operators import Operand, aten, read, shape_of, value_of


def lead_of(form: Form) -> Lead | None:
    """Return the batch and the number of heads that the fused operator gets; None if they are not known.

    They are the leading sizes at a mask, if there are two, so that the mask is read as it is.
    """
    first = shape_of(form.scores)[:-2]
    for lead in (first, *(step.lead for step in form.steps if step.mask is not None)):
        if len(lead) == 2:
            return lead
    if len(first) < 2:
        return (1,) * (2 - len(first)) + first
    return (math.prod(first[:-1]), first[-1]) if all(isinstance(s, int) for s in first) else None


def with_lead(build: Builder, n: Node, own: Lead, lead: Lead) -> Node | None:
    """Return a node of leading sizes `own` as a view of the leading sizes `lead`; None if sizes are not known."""
    if same_sizes(own, lead):
        return n
    missing = len(lead) - len(own)
    if missing > 0 and same_sizes(((1,) * missing) + own, lead):
        for _ in range(missing):
            n = build.call(aten.unsqueeze.default, n, 0)
        return n
    sizes = (*lead, *shape_of(n)[-2:])
    if not all(isinstance(s, int) for s in (*sizes, *own)) or math.prod(own) != math.prod(lead):
        return None
    return build.call(aten.reshape.default, n, list(sizes))


def operand(build: Builder, x: Operand, expected: Lead, lead: Lead) -> Node | None:
    """Return an operand of a product with the leading sizes `lead`.

    `expected`: the leading sizes of the product, to which its operands are broadcast.
    """
    n = x.node if x.order is None else _in_order(build, x.node, x.order)
    own = shape_of(n)[:-2]
    if not same_sizes(own, expected):
        padded = (None,) * (len(expected) - len(own)) + own
        sizes = [-1 if _same(a, b) else b for a, b in zip(padded, expected, strict=True)]
        if not all(isinstance(s, int) for s in sizes):
            return None
        n = build.call(aten.expand.default, n, [*sizes, -1, -1])
    return with_lead(build, n, expected, lead)


def _in_order(build: Builder, n: Node, order: tuple[int | None, ...]) -> Node:
    n = build.call(aten.permute.default, n, [k for k in order if k is not None])
    for place, k in enumerate(order):
        if k is None:
            n = build.call(aten.unsqueeze.default, n, place)
    return n


def before_order(sizes: Lead, order: tuple[int, ...] | None) -> Lead:
    """Return the sizes before a permutation to `order` gave `sizes`."""
    return sizes if order is None else tuple(sizes[order.index(k)] for k in range(len(order)))


def _same(a: object, b: object) -> bool:
    return a is not None and same_sizes((a,), (b,))


def row_major(build: Builder, n: Node) -> Node:
    """Return a node whose features lie side by side in memory, as the fused kernels need: itself or a copy."""
    stride = value_of(n).stride(-1)
    return n if isinstance(stride, int) and stride == 1 else build.call(aten.clone.default, n, **CONTIGUOUS)


CONTIGUOUS = {"memory_format": torch.contiguous_format}


def ungrouped(build: Builder, n: Node) -> Node | None:
    """Return keys or values before each head was repeated for a group of queries, or None.

    `n`: (batch, heads, positions, features), made by `expand` along a new dimension behind the heads and a reshape,
    or by `repeat_interleave`.
    """
    call = read(n)
    source = call.get("input")
    if call.name == "repeat" and call.get("dim") == 1 and isinstance(call.get("repeats"), int):
        return source if isinstance(source, Node) else None
    if call.name != "view" or read(source).name != "expand" or value_of(source).dim() != 5 or value_of(n).dim() != 4:
        return None
    wide, flat = shape_of(source), shape_of(n)
    numbers = all(isinstance(s, int) for s in (*wide[1:3], flat[1]))
    other_sizes: Sequence[object] = (wide[0], *wide[3:])
    if not numbers or value_of(source).stride(2) != 0 or flat[1] != wide[1] * wide[2] or wide[2] == 1:
        return None
    return build.call(aten.select.int, source, 2, 0) if same_sizes(other_sizes, (flat[0], *flat[2:])) else None
