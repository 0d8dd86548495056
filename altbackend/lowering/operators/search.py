"""Positions in sorted data: a bisection of fixed depth, unrolled into one scalar tree per element."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.ops import compute_dtype
from ...ir.value import Value
from .. import scalar as s
from ..context import Ctx
from ..registry import FallBack, lowers
from ..tensor import Tensor, points

MOST_ELEMENTS = 1 << 12


def insertion_point(edges: Tensor, lead: Sequence[Index], v: Value, right: bool) -> Value:
    """Return the number of elements that go before `v` in the last dimension of `edges`, at the point `lead` of others.

    `right`: elements equal to `v` go before it. A NaN goes after all numbers, as in eager. Raises FallBack for more
    than MOST_ELEMENTS elements.
    """
    n = edges.sizes[-1]
    if not isinstance(n, int) or n > MOST_ELEMENTS:
        raise FallBack("more than 4096 sorted elements, or a symbolic number")
    dtype = compute_dtype(torch.promote_types(edges.dtype, v.dtype))
    v = va.cast(v, dtype)
    low = va.const(0, torch.int64)
    step = 1 << max(n.bit_length() - 1, 0)
    while step and n:
        # the first low + step elements go before v if element low + step - 1 does
        last = s.add(low, step - 1)
        inside = s.binary("lt", last, n)
        at = ex.lookup(s.binary("minimum", last, n - 1), 0, n - 1)
        edge = va.cast(edges.at([*lead, at]), dtype)
        before = s.binary("gt", edge, v) if right else s.binary("ge", edge, v)
        before = va.apply("logical_not", before)
        low = s.where(va.apply("logical_and", inside, before), s.add(low, step), low)
        step //= 2
    return low


@lowers("searchsorted.Tensor")
def searchsorted(
    ctx: Ctx,
    edges: Tensor,
    x: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    if sorter is not None:
        raise FallBack("a sorter")
    edges = edges if edges.value.op == "load" else ctx.realize(edges)
    lead = points(x.sizes)[:-1] if len(edges.sizes) > 1 else ()
    low = insertion_point(edges, lead, va.cast(x.value, x.dtype), right or side == "right")
    dtype = torch.int32 if out_int32 else torch.int64
    return Tensor(x.sizes, dtype, va.cast(low, dtype))


@lowers("bucketize.Tensor")
def bucketize(ctx: Ctx, x: Tensor, edges: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    if len(edges.sizes) != 1:
        raise FallBack("edges of other than one dimension, which the library refuses")
    return searchsorted(ctx, edges, x, out_int32=out_int32, right=right)
