"""The gradient of replication padding: every padded element adds to the input element that it copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...ir import expr as ex
from ...ir import value as va
from ..context import Ctx
from ..registry import lowers
from ..tensor import Tensor, points
from .scatter import Updates, scatter


def _replication_backward(rank: int) -> Callable[..., Tensor]:
    def lower(ctx: Ctx, grad: Tensor, x: Tensor, pad: Sequence[object]) -> Tensor:
        p = list(points(grad.sizes))
        lead = len(p) - rank
        for k in range(rank):
            n, before = x.sizes[lead + k], ctx.index(pad[2 * (rank - 1 - k)])
            i = va.index(ex.minimum(ex.maximum(ex.sub(p[lead + k], before), 0), ex.sub(n, 1)))
            # a lookup, because several points store to one element, so the loop must keep its order
            p[lead + k] = ex.lookup(i, 0, max(ex.bounds(n)[1] - 1, 0))
        zero = Tensor(x.sizes, grad.dtype, va.const(0, grad.dtype))
        return scatter(ctx, zero, "add", Updates(grad.sizes, p, grad.computed()))

    return lower


for _rank in (1, 2, 3):
    lowers(f"replication_pad{_rank}d_backward.default")(_replication_backward(_rank))
